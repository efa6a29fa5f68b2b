"""Checks that need a process of their own: imports without Lightning, and the terminal of commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from medclip_dcl.report import compare, report
from tests.command.small_runs import CLASSIFICATION, small
from tests.program import shell
from tests.report.conftest import _tested_run as make_tested_run
from tests.test_house import MODULES, floors

pytestmark = pytest.mark.slow
STAGE = "=" * 9
WITH_LIGHTNING = ("medclip_dcl.data", "medclip_dcl.runs.loggers")
SCRIPT = """
import importlib, sys
lower, stage, folder, compared, questions, commands = {arguments!r}
from medclip_dcl.__main__ import main
main(["compare", *compared])
assert not {{"pytorch_lightning", "transformers"}} & set(sys.modules)
main(["report", *compared[:1]])
assert "pytorch_lightning" not in sys.modules, "report"
print(stage)
for name in lower:
    importlib.import_module(name)
    assert "pytorch_lightning" not in sys.modules, name
from medclip_dcl import load
load(folder)
assert "pytorch_lightning" not in sys.modules, "load"
for one in questions:
    main(["ask", *one])
assert "pytorch_lightning" not in sys.modules, "ask"
print(stage)
for one in commands:
    main(one)
    print(stage)
"""


def lower() -> list[str]:
    """Modules up to the floor of `use`; all files are parsed for it."""
    names = [name for name in sorted(MODULES) if name.startswith("medclip_dcl")]
    of_name = {name: floors()[f"{name}.__init__".split(".")[1]] for name in names}
    return [x for x in names if of_name[x] <= floors()["use"] and not x.startswith(WITH_LIGHTNING)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fresh") / "run"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a comparison of two runs."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [make_tested_run(folder / name, seed=seed) for seed, name in enumerate(("infonce", "dcl_lm"))]
    options = ["--baseline", "infonce", "--untrained", "--output", str(folder / "out")]
    return [*map(str, runs), *options]


@pytest.fixture(scope="module")
def stages(small_set: Path, small_bert: Path, exported: Path, run: Path, compared: list[str]) -> list[str]:
    """Output of one process, stage by stage: importing costs more than all that it does."""
    image, out = run.parent / "a.png", run.parent / "out"
    Image.effect_noise((40, 30), 9).save(image)
    to_model = [str(exported), str(image)]
    questions = [
        [*to_model, "--text", "x", "--output", str(out)],
        [*to_model, "--classify", "--output", str(out / "scores.parquet")],
    ]
    arguments = small(run, small_set, small_bert, "--trainer.limit_val_batches", "2", "--untrained", "false")
    arguments += ["--data.init_args.batch_size", "7", "--trainer.log_every_n_steps", "50", *CLASSIFICATION]
    commands = [["fit", *arguments], ["test", "--config", str(run / "config.yaml")]]
    script = SCRIPT.format(arguments=(lower(), STAGE, str(exported), compared, questions, commands))
    done = subprocess.run(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split(STAGE)


def test_lower_floors_work_without_lightning(stages):
    """The process has ended well: it looks for Lightning after each import and each answer."""
    assert {"medclip_dcl.scoring", "medclip_dcl.networks.initial_weights"} < set(lower())
    assert len(stages) == 5


def test_comparison_and_report_are_those_of_any_process(stages, compared, tmp_path):
    run, out = Path(compared[0]), Path(compared[-1])
    shell("compare")([*compared[:-1], str(tmp_path)])
    for name in compare.FILES:
        assert (out / name).read_bytes() == (tmp_path / name).read_bytes(), name
    assert (run / "report.html").read_text(encoding="utf-8") == report.render(run)
    said = (tmp_path / "comparison.md").read_text(encoding="utf-8") + f"{run / 'report.html'}\n"
    written, *lines = sorted(stages[0].splitlines(keepends=True), key=lambda line: "written: " not in line)
    assert written.startswith(f"written: {out}") and "".join(lines) == said


def test_fit_and_test_say_each_warning_once(stages, run):
    *_, fit, test, _ = stages
    advertisements = ("litlogger", "💡", "GPU available", "TPU available", "LeafSpec", "does not have many")
    for text in (fit, test):
        assert not [words for words in advertisements if words in text]
        lines = [line for line in text.splitlines() if "warning" in line.lower()]
        assert lines and len(lines) == len(set(lines)), "each once"
    assert "3 of 24 training images do not fill a batch of 7 and are left out of each epoch" in fit
    assert f"results: {run / 'results.json'}" in test
