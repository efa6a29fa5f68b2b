"""The wheel alone, in an empty folder: the demo, and the documented commands, those of MIMIC-CXR by their parsers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.test_notebooks import ETA, OBJECTIVES, cells
from tests.wheel import ROOT, Environment, build_wheel, install

pytestmark = pytest.mark.slow

SHORT = "--trainer.max_epochs 1 --trainer.limit_train_batches 2"
SMALL_IMAGES = "--data.init_args.image_size 64 --data.init_args.crop_size 48"
SMALL = {
    "--studies 2600": "--studies 160",
    "--size 256": "--size 64",
    "(--run_folder runs/demo)$": rf"\1 {SMALL_IMAGES}",
    "^(fit .*)": rf"\1 {SHORT}",
}
"""Patterns of the demo's commands, and what makes them small."""
DEMO = f"""
import re
from medclip_dcl.__main__ import main
from medclip_dcl.command import demo

def small(words):
    for long, short in {SMALL}.items():
        words = re.sub(long, short, words)
    return words

# So few validate patients calibrate no finding.
stages = [[step for step in stage if step.words != "calibrate runs/demo"] for stage in demo.STAGES]
demo.STAGES = tuple(tuple(step._replace(words=small(step.words)) for step in stage) for stage in stages)
main(["demo"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(folder), folder / "environment")


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory) -> Path:
    """The folder in which the demo has run; it was empty."""
    folder = tmp_path_factory.mktemp("empty")
    said = wheel.run(["-c", DEMO], folder)
    assert "8 of 8 steps" in said and said.endswith("open runs/demo/report.html\n")
    return folder


def test_demo_writes_its_report_and_then_skips_each_step(wheel, place):
    assert (place / "runs/demo/report.html").is_file()
    assert wheel.run(["-c", DEMO], place) == "open runs/demo/report.html\n"


def test_other_verbs_use_the_demo(wheel, place):
    """Several in one process, which imports torch once."""
    image = next((place / "data/phantom/images").rglob("*.jpg")).relative_to(place)
    commands = [
        "check data/phantom",
        "export runs/demo --output exported",
        f"ask exported {image} --classify --prompts chexpert14 --output scores.csv",
        f"fit --config unimodal/digits --config unimodal/objective/dcl_true {SHORT} --run_folder runs/digits",
        "test --config runs/digits/config.yaml",
    ]
    script = f"from medclip_dcl.__main__ import main\nfor words in {commands}: main(words.split())"
    wheel.run(["-c", script], place)
    assert (place / "scores.csv").read_text().count("\n") == 2
    assert (place / "runs/digits/results.json").is_file()
    said = wheel.run(["-m", "medclip_dcl", "calibrate", "runs/demo"], place, status=1)
    assert "calibrates no finding" in said


def test_notebooks_run_in_the_folder_of_the_demo(wheel, place):
    """Two of them: the data alone, and a training by packaged configurations."""
    parameters = f"OBJECTIVES, SETTINGS = ['infonce'], {[*SHORT.split(), *SMALL_IMAGES.split()]}"
    code = {file: [cell["source"] for cell in cells(file, "code")] for file in (ETA, OBJECTIVES)}
    code[OBJECTIVES].insert(1, parameters)  # after the first cell, which sets them
    wheel.run(["-c", "\n".join([*code[ETA], "assert len(correlations) == 3"])], place)
    said = wheel.run(["-c", "\n".join([*code[OBJECTIVES], "print(*rows, sep='\\n')"])], place)
    assert "start − infonce\n" in said
    config = (place / "runs/notebook_objectives/infonce/config.yaml").read_text(encoding="utf-8")
    assert "# objective/infonce: packaged with medclip_dcl" in config


def test_documented_commands_parse_from_the_wheel(wheel, tmp_path):
    """By the test of the documentation, which sees the wheel in place of the checkout."""
    for name in (
        "tests",
        "docs",
        "configs",
    ):  # the folder configs is that of files which the tests themselves read
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_docs.py",
        "-k",
        "documented_commands",
    ]
    said = wheel.run(words, tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) > 50, said
