"""The commands' threads sleep while they wait; those of a program that imports the package are left alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

import data_prep
import medclip_dcl
from medclip_dcl.command.cli import main
from medclip_dcl.common.processes import WAIT_POLICY

PACKAGES = [medclip_dcl, data_prep]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "x")  # restored after the test, also where the program sets it
        monkeypatch.delenv(name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_commands_let_threads_sleep_libraries_do_not(package, monkeypatch):
    importlib.reload(package)
    assert WAIT_POLICY not in os.environ
    monkeypatch.setattr(sys, "argv", ["-m", "fit"])
    importlib.reload(package)
    assert os.environ[WAIT_POLICY] == "PASSIVE"


def test_the_installed_script_does_too():
    with pytest.raises(SystemExit):
        main(["--help"])
    assert os.environ[WAIT_POLICY] == "PASSIVE"


@pytest.mark.parametrize("name", [WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_choice_stands(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", ["-m"])
    before = dict(os.environ)
    importlib.reload(medclip_dcl)
    assert dict(os.environ) == before


@pytest.mark.skipif(sys.platform != "linux", reason="asks GCC's OpenMP")
def test_it_is_set_before_torch_loads_openmp():
    """A module of the package run by `python -m`; OpenMP prints its settings when torch is imported."""
    told = {**os.environ, "OMP_DISPLAY_ENV": "TRUE"}
    command = [sys.executable, "-m", "medclip_dcl.networks.similarity"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
