"""The demo: order of its steps, what a second call skips, failures and interruptions. Steps are stand-ins for verbs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from medclip_dcl.command import demo
from tests.program import shell, verb

STEP = """
import os, sys, time
from pathlib import Path
verb, product, *others = sys.argv[1:]
with open("log", "a") as log:
    log.write(verb + "\\n")
Path(f"started_{verb}").touch()
while not all(Path(f"started_{other}").exists() for other in others):
    time.sleep(0.01)
if Path(f"fails_{verb}").exists():
    sys.exit(3)
Path(f"pid_{verb}").write_text(str(os.getpid()))
while Path(f"hangs_{verb}").exists():
    time.sleep(0.01)
Path(product).touch()
"""
NAMES = ["phantom", "both", "sides", "end"]


@pytest.fixture
def steps(monkeypatch):
    """Four steps of three stages; each of the two in the middle waits until the other has started."""
    monkeypatch.setattr(demo, "PROGRAM", (sys.executable, "-c", STEP))
    first, last = demo.Step("a*.json", 60, "phantom a1.json"), demo.Step("d", 120, "end d")
    middle = (demo.Step("b", 1, "both b sides"), demo.Step("c", 1, "sides c both"))
    monkeypatch.setattr(demo, "STAGES", ((first,), middle, (last,)))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)


def ran(folder: Path) -> list[str]:
    """Names of the steps that the last call ran."""
    log = folder / "log"
    found = log.read_text().split()
    log.unlink()
    return found


def go(folder: Path) -> None:
    verb("demo")(["--folder", str(folder)])


def test_steps_that_are_finished_are_skipped(steps, tmp_path, capsys):
    go(tmp_path)
    assert sorted(ran(tmp_path)) == sorted(NAMES)
    assert f"demo in {tmp_path}: 4 of 4 steps, about 3 min" in capsys.readouterr().out
    go(tmp_path)
    assert not (tmp_path / "log").exists()
    assert capsys.readouterr().out == f"open {tmp_path}/runs/demo/report.html\n"


def test_steps_after_a_missing_or_changed_product_run_again(steps, tmp_path):
    go(tmp_path)
    ran(tmp_path)
    (tmp_path / "c").unlink()
    go(tmp_path)
    assert ran(tmp_path) == ["sides", "end"]
    (tmp_path / "a2.json").touch()
    assert not any(demo.due(tmp_path))
    os.utime(tmp_path / "a1.json", (time.time() + 5,) * 2)
    os.utime(tmp_path / "a2.json", (time.time() + 5,) * 2)
    assert [[step.words.split()[0] for step in stage] for stage in demo.due(tmp_path)] == [
        [],
        ["both", "sides"],
        ["end"],
    ]


def test_a_failed_step_stops_the_others_and_is_named(steps, tmp_path, capsys):
    (tmp_path / "fails_sides").touch()
    (tmp_path / "hangs_both").touch()
    with pytest.raises(SystemExit, match="2"):
        shell("demo")(["--folder", str(tmp_path)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "medclip-dcl sides c both ended with status 3" in said
    assert sorted(ran(tmp_path)) == ["both", "phantom", "sides"] and not (tmp_path / "b").exists()
    for name in ("fails_sides", "hangs_both"):
        (tmp_path / name).unlink()
    go(tmp_path)
    assert sorted(ran(tmp_path)) == ["both", "end", "sides"]


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        shell("demo")(["--folder", str(tmp_path / "file")])
    assert capsys.readouterr().err == f"medclip-dcl demo: error: {tmp_path}/file: File exists\n"


def test_a_step_without_its_product_is_a_failure(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STAGES", ((demo.Step("other", 1, "phantom a"),),))
    with pytest.raises(ValueError, match="phantom a ended with status 0 and without other"):
        go(tmp_path)


def test_a_package_in_the_folder_is_not_run(tmp_path, monkeypatch):
    """Python's -m puts the working folder first."""
    (tmp_path / "medclip_dcl").mkdir()
    (tmp_path / "medclip_dcl/__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.setattr(demo, "STAGES", ((demo.Step("list", 1, "configs mimic_cxr --output list"),),))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    go(tmp_path)
    assert (tmp_path / "list").exists()


WITH_STEPS = f"""
import sys
from medclip_dcl.command import demo
from medclip_dcl.__main__ import main
demo.PROGRAM = (sys.executable, "-c", {STEP!r})
demo.STAGES = ((demo.Step("a", 1, "phantom a"),),)
main(["demo"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_outlives_only_a_killed_demo_which_no_other_joins(number, tmp_path):
    (tmp_path / "hangs_phantom").touch()
    words, root = [sys.executable, "-c", WITH_STEPS], str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    first = subprocess.Popen(words, cwd=tmp_path, env=environment)
    while not (tmp_path / "pid_phantom").exists() or not (tmp_path / "pid_phantom").read_text():
        time.sleep(0.01)
    step = int((tmp_path / "pid_phantom").read_text())
    first.send_signal(number)
    assert first.wait(30) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    if number == signal.SIGTERM:
        with pytest.raises(ProcessLookupError):
            os.kill(step, 0)
    else:
        second = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert second.returncode == 2 and "--folder .: a demo, or a step of one" in second.stderr
        os.kill(step, signal.SIGKILL)
