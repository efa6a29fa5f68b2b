"""A set that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(small_set: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_set, tmp_path / "copy"))
