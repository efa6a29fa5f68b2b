"""A grid runs through the command line, keeps what is done, and goes on where it was stopped."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from medclip_dcl.experiments import lanes
from medclip_dcl.experiments.__main__ import main
from medclip_dcl.experiments.cells import run_cell
from medclip_dcl.experiments.plan import read_experiment
from tests.experiments.grids import write_grid
from tests.processes import FRESH

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quick_lanes(monkeypatch):
    """Lanes are forked from a process that has imported Lightning."""
    monkeypatch.setattr(lanes, "CONTEXT", FRESH)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the experiment file of a finished grid."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "CONTEXT", FRESH)
        main([str(write_grid(folder)), "--lanes", "2"])
    return folder


def test_a_grid(finished, capsys):
    table = pd.read_parquet(finished / "grid/results.parquet")
    print(table.to_string())
    assert 0
