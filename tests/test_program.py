"""The table of verbs: help, positional arguments and wrong options of each, and two processes of one."""

from __future__ import annotations

import configparser
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.options import PUBLIC
from data_prep.public.command import READERS
from medclip_dcl import __version__
from medclip_dcl.__main__ import GROUPS, VERBS, main

ROOT = Path(__file__).resolve().parents[1]
POSITIONAL = {
    "configs": ["NAME"],
    "prepare public": ["NAME"],
    "check": ["SET"],
    "shard": ["SET"],
    "score": ["SET|FILE"],
    "embed": ["SET"],
    "similar": ["SET"],
    "rank": ["SET"],
    "eta": ["SET"],
    "encode": ["MODEL", "SET"],
    "calibrate": ["MODEL", "SET"],
    "report": ["RUN"],
    "compare": ["RUN"],
    "benchmark": ["MODEL"],
    "study": ["FILE"],
    "ask": ["MODEL", "IMAGE"],
    "page": ["MODEL"],
    "export": ["MODEL"],
    "bundle": ["MODEL"],
    "convert": ["FOLDER"],
}
OPTIONS = {name: verb.options_path for name, verb in VERBS.items() if verb.options}
HELP = """
import sys
import medclip_dcl
assert dir(medclip_dcl) == ["contrastive_loss", "evaluate", "load"]
from medclip_dcl.__main__ import VERBS, main
main(["--help"])
assert not {"torch", "pandas", "numpy"} & sys.modules.keys()
for name, verb in VERBS.items():
    print(BETWEEN)
    try:
        main([*name.split(), "--help"])
    except SystemExit as end:
        assert not end.code
    assert not {"torch", "pandas"} & sys.modules.keys(), name
"""
BETWEEN = "=" * 9


def test_help_needs_neither_torch_nor_pandas():
    script = f"BETWEEN = {BETWEEN!r}\n{HELP}"
    columns = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=columns, capture_output=True, text=True, check=True
    )
    table, *shown = done.stdout.split(f"{BETWEEN}\n")
    assert all(f"\n{group}:\n" in table for group in GROUPS)
    assert all(f"\n  {name} " in table for name in VERBS)
    for name, text in zip(VERBS, shown, strict=True):
        lines = text.splitlines()
        assert text.startswith(f"usage: medclip-dcl {name} ")
        assert len(lines) <= 50 and max(map(len, lines)) <= 100, name


def test_a_closed_pipe_ends_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "medclip_dcl", "configs"]
    done = subprocess.run(words, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_verb(name, capsys):
    """Positional arguments in the order of the table; each option has help; a wrong one is refused in a line."""
    module, _, cls = OPTIONS[name].rpartition(".")
    fields = dataclasses.fields(getattr(importlib.import_module(module), cls))
    positional = [
        field.metadata.get("metavar", "FILE") for field in fields if field.metadata.get("flag", "") is None
    ]
    assert positional == POSITIONAL.get(name, [])
    assert all(field.metadata["help"] for field in fields)
    with pytest.raises(SystemExit, match="2"):
        main([*name.split(), "--no_such_option"])
    said = capsys.readouterr().err
    assert said.startswith(f"medclip-dcl {name}: error: ") and said.count("\n") == 1


def test_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"medclip-dcl {__version__}\n"


@pytest.mark.parametrize(
    ("word", "verb"), [("train", "fit"), ("Train", "fit"), ("evaluate", "test"), ("calibrat", "calibrate")]
)
def test_words_of_other_programs_are_known(word, verb, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert capsys.readouterr().err.endswith(f"did you mean {verb}?\n")


@pytest.mark.parametrize("words", [["chek", "x"], ["prepare", "mimic"], ["--config", "x.yaml", "fit"]])
def test_an_unknown_verb_is_one_line(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    said = capsys.readouterr().err
    assert said.startswith("medclip-dcl: error: VERB: expected one of demo, prepare mimic-cxr, ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("words", [["prepare"], ["prepare", "--help"]])
def test_prepare_lists_its_sources(words, capsys):
    main(words)
    listed = {line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert listed == set(GROUPS["prepare data"])


def test_the_installed_program_is_this_one():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"]
    assert scripts.split() == ["medclip-dcl", "=", "medclip_dcl.__main__:main"]


def run_installed(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The console script of this environment, which does not search the working directory by itself."""
    script = Path(sys.executable).with_name("medclip-dcl")
    return subprocess.run([script, *words], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("my_rules", ""),
        ("./my_rules.py", ""),
        ("own.rules", ""),
        ("absent", "no module absent"),
        ("time", "expected {folder}/time.py, found built-in"),  # loaded before anything of the user's
        ("yaml", "expected {folder}/yaml/__init__.py"),
    ],
)
def test_the_installed_program_imports_from_its_folder(module, message, tmp_path):
    for file in ("my_rules.py", "own/rules.py", "time.py", "yaml/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("print('rules of mine')")
    done = run_installed("study", "--import", module, "--help", folder=tmp_path)
    assert done.stdout.startswith("rules of mine") == (not message)
    assert done.returncode == 2 * bool(message) and message.format(folder=tmp_path) in done.stderr


def test_each_public_set_has_a_reader():
    assert tuple(READERS) == PUBLIC


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ask", "m", "a.jpg", "--output", "o"], "--text and --classify: expected one of them"),
        (
            ["ask", "m", "--text", "x", "a.jpg", "--classify", "--output", "o"],
            "--text and --classify: expected one",
        ),
        (
            ["calibrate", "m", "--sensitivity", "1", "set", "--specificity", "1"],
            "--sensitivity and --specificity",
        ),
        (["score", "no_file.txt", "--model", "m"], "--output: expected a .csv or .parquet file"),
        (["score", ".", "--model", "m", "--per_token"], "--per_token: of a FILE, but . is a folder"),
        *(
            (
                [name, "--import", "nowhere.mine"],
                "--import nowhere.mine: there is no module nowhere; run this",
            )
            for name in ("ask", "calibrate", "encode", "study", "export", "page", "benchmark")
        ),
        (["compare", "nowhere"], "no run folder nowhere"),
        (["encode", "m", ".", "--device", "gpu"], "'gpu': expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.slow
def test_two_processes_of_torchrun_write_the_same_scores(small_set, small_bert, tmp_path):
    words = ["--model", str(small_bert), "--device", "cpu"]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "medclip_dcl", "score"]
    found = []
    for name, program in (("one", ["-m", "medclip_dcl", "score"]), ("two", torchrun)):
        folder = tmp_path / name
        shutil.copytree(small_set, folder)
        shutil.rmtree(folder / "log_p")
        command = [sys.executable, *program, str(folder), *words]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        found += [file.read_bytes() for file in (folder / "log_p").iterdir()]
    assert len(found) == 2 and found[0] == found[1]
