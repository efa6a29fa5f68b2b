"""Code that the preparation commands share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.command import worker_processes
from medclip_dcl.common.command_line import run_command
from medclip_dcl.common.errors import UserError

ROOT = Path(__file__).parents[2]


def raising(error: BaseException) -> None:
    def main() -> None:
        raise error

    run_command("medclip-dcl", main)


def test_user_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        raising(UserError("no table;\n  do this"))
    assert stop.value.code == 2
    assert capsys.readouterr().err == "medclip-dcl: error: no table; do this\n"


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        run_command("medclip-dcl", lambda: print(int("x")))


def test_a_killed_worker_is_said() -> None:
    with (
        pytest.raises(UserError, match="was killed .* with fewer --workers; a preparation continues"),
        worker_processes(2) as pool,
    ):
        assert pool is not None
        list(pool.map(signal.raise_signal, [signal.SIGKILL]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the process table of Linux")
def test_busy_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Also in an expression that keeps the interpreter's lock, so that no thread of theirs runs."""
    script = tmp_path / "work.py"
    script.write_text(
        "import os, re, time\n"
        "from data_prep.command import worker_processes\n"
        "def work():\n"
        "    print(os.getpid(), flush=True)\n"
        "    re.match('(a|aa)*$', 'a' * 99 + 'b')\n"
        "if __name__ == '__main__':\n"
        "    with worker_processes(2) as pool:\n"
        "        pool.submit(work), pool.submit(work)\n"
        "        time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    for _ in range(100):
        left = [worker for worker in workers if is_running(worker)]
        if not left:
            break
        time.sleep(0.05)
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left


def is_running(process: int) -> bool:
    """False also for a dead process that nobody has waited for yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
