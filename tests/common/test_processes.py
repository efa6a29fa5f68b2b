"""The commands' threads sleep while they wait; those of a program that imports the package are left alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from medclip_dcl.__main__ import main
from medclip_dcl.common.processes import WAIT_POLICY, let_threads_sleep, locked


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "x")  # restored after the test, also where the program sets it
        monkeypatch.delenv(name)


def test_the_program_lets_threads_sleep(capsys):
    main(["--help"])
    assert os.environ[WAIT_POLICY] == "PASSIVE"


@pytest.mark.parametrize("name", [WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_choice_stands(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    let_threads_sleep()
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks GCC's OpenMP")
def test_it_is_set_before_torch_loads_openmp():
    """OpenMP prints its settings when torch is imported."""
    told = {**os.environ, "OMP_DISPLAY_ENV": "TRUE"}
    command = [sys.executable, "-m", "medclip_dcl", "report", "nothing"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with locked(tmp_path / ".lock") as own, locked(tmp_path / ".lock") as other:
        assert own is not None and other is None
    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / ".lock") as own:
        assert own is not None
    assert (
        "cannot be locked (No locks available): see that no other process works there"
        in capsys.readouterr().err
    )
