"""One process trains in a run folder; what another left is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from jsonargparse import Namespace
from pytorch_lightning.utilities import rank_zero_only

from medclip_dcl.command.cli import main
from medclip_dcl.command.lightning_cli import _own_environment
from medclip_dcl.common.errors import UserError
from medclip_dcl.runs.run_folder import LOCK_FILE, RunFolder, RunFolderError, _own_note
from tests.command.small_runs import small

NOTE = {"host": "node1", "process": 7, "time": "a day", "job": "77", "start": 0}
LOCKING = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run folder with the note of a process on another host."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).write_text(json.dumps(NOTE))
    return RunFolder(tmp_path / "run")


@pytest.fixture
def other(run) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the lock."""
    command = [sys.executable, "-c", LOCKING, str(run.folder / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_fit_is_refused(run, other, small_set, small_bert, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", *small(run.folder, small_set, small_bert)])
    assert end.value.code == 2
    assert (
        "run is being trained by process 7 on node1, since a day; wait for its end" in capsys.readouterr().err
    )
    assert [file.name for file in run.folder.iterdir()] == [LOCK_FILE]


def test_a_killed_process_holds_no_lock(run, other):
    other.kill()
    other.wait()
    with run.locked() as earlier:
        assert earlier == "process 7 on node1, since a day"
        assert json.loads((run.folder / LOCK_FILE).read_text())["process"] == os.getpid()
    assert not any(run.folder.iterdir())
    with run.locked() as earlier:
        assert earlier == ""


@pytest.mark.parametrize(("start", "is_taken"), [("0", False), ("1", True)])
def test_a_requeued_job_takes_over_its_earlier_lock(start, is_taken, run, other, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", start)
    if is_taken:
        with run.locked() as earlier:
            assert "node1" in earlier
    else:
        with pytest.raises(RunFolderError, match=r"delete .*training\.lock"), run.locked():
            pass


@pytest.mark.parametrize(
    ("change", "is_alive"),
    [({"process": os.getppid()}, True), ({}, False), ({"host": "node1"}, False), ({"process": 2**30}, False)],
)
def test_without_locks_the_note_decides(change, is_alive, run, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert _own_note()["host"] == socket.gethostname()
    (run.folder / LOCK_FILE).write_text(json.dumps({**_own_note(), **change}))
    if is_alive:
        with pytest.raises(RunFolderError, match="is being trained"), run.locked():
            pass
    else:
        with run.locked() as earlier:
            assert earlier


@pytest.mark.parametrize(("devices", "is_alone"), [(1, True), ("1", True), ([0, 1], False), ("auto", False)])
def test_slurm_tasks_of_one_device_are_jobs(devices, is_alone, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert bool(_own_environment(Namespace(devices=devices, num_nodes=1, accelerator="auto"))) == is_alone
    assert vars(rank_zero_only)["rank"] == (0 if is_alone else 1)


@pytest.mark.parametrize(("devices", "refused"), [(1, True), ("auto", True), (2, False), ([0, 1], False)])
def test_torchrun_with_fewer_devices_is_refused(devices, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = Namespace(devices=devices, num_nodes=1, accelerator="cpu")
    if refused:
        with pytest.raises(UserError, match=r"processes that torchrun started \(WORLD_SIZE\)"):
            _own_environment(trainer)
    else:
        assert _own_environment(trainer) == []


def test_more_slurm_tasks_than_devices_are_a_warning(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(UserWarning, match=r"SLURM_NTASKS is 4, trainer.devices \* trainer.num_nodes 2"):
        assert _own_environment(Namespace(devices=2, num_nodes=1)) == []
