"""A grid killed at several moments ends with the numbers of one that was never stopped and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.slow.test_kills import hear_ctrl_c
from tests.studies.grids import MODULE, SETTINGS, write_grid

ROOT = Path(__file__).resolve().parents[2]
TIMES = ["fit_seconds", "test_seconds", "config"]

pytestmark = pytest.mark.slow


def start(file: Path, *more: str) -> subprocess.Popen[str]:
    """The command with two workers in a process group of its own."""
    program = [sys.executable, "-m", "medclip_dcl", "study", str(file)]
    return subprocess.Popen(
        [*program, "--workers", "2", "--import", MODULE, *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def grid(folder: Path) -> Path:
    """Eight runs of 18 steps, 0.1 s each."""
    axes = {
        "rate": {"levels": {"slow": None, "fast": {"configs": ["configs/fast.yaml"]}}},
        "seed": {"set": ["seed_everything", "data.init_args.seed"], "values": 4},
    }
    settings = SETTINGS | {"trainer.max_epochs": 6, "model.init_args.seconds": 0.1}
    return write_grid(folder, axes=axes, settings=settings, plots=None)


def table(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "grid/results.parquet").drop(columns=TIMES)


def members(group: int) -> list[str]:
    """Processes of a group that are alive."""
    found = subprocess.run(["ps", "-eo", "pgid,stat,pid"], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in found.splitlines()[1:]]
    return [pid for pgid, state, pid in lines if int(pgid) == group and not state.startswith("Z")]


def wait_until(is_time, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_time():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(folder: Path) -> int:
    """Rows of all metrics.csv so far."""
    files = folder.glob("grid/runs/*/metrics.csv")
    return sum(len(file.read_text().splitlines()) - 1 for file in files)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A grid that is never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(grid(folder))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("of_all", [True, False], ids=["group", "parent"])
def test_a_stopped_grid_ends_as_if_never_stopped(number, of_all, whole, tmp_path):
    file = grid(tmp_path)
    for least in (2, 12):
        process = start(file)
        wait_until(lambda least=least: steps(tmp_path) >= least)
        (os.killpg if of_all else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
        wait_until(lambda group=process.pid: not members(group), 30)
        assert "FAILED" not in output and "Traceback" not in output
        assert not list(tmp_path.glob("grid/runs/*/error.txt"))
    process = start(file)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    pd.testing.assert_frame_equal(table(tmp_path), table(whole))


def test_two_commands_on_one_folder_share_the_cells(whole, tmp_path):
    file = grid(tmp_path)
    processes = [start(file), start(file)]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for line in "".join(outputs).splitlines() if " done" in line and "seed=" in line]
    assert "trained by another command" in "".join(outputs)
    assert len({line.split()[1] for line in lines}) == 8
    pd.testing.assert_frame_equal(table(tmp_path), table(whole))


def test_tasks_of_an_array_make_the_whole_grid(whole, tmp_path):
    file = grid(tmp_path)
    for task in range(3):
        process = start(file, "--task", str(task), "--tasks", "3")
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and f" {2 if task == 2 else 3} runs, 0 " in output, output
    pd.testing.assert_frame_equal(table(tmp_path), table(whole))
