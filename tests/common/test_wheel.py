"""The wheel: configurations, prompts, batch files and the other data files travel in it; tests and docs do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> set[str]:
    """Files of the wheel, built without network from a copy: the folder build/ of a checkout would keep old files."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("configs", "medclip_dcl", "data_prep", "tests"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD, str(output)], cwd=source, check=True, capture_output=True)
    (wheel,) = output.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_each_configuration_is_in_the_wheel(names):
    expected = {f"medclip_dcl/{file.relative_to(ROOT)}" for file in (ROOT / "configs").rglob("*.*")}
    assert len(expected) > 60 and {name for name in names if "/configs/" in name} == expected


def test_each_module_and_data_file_is_in_the_wheel(names):
    expected = {
        str(file.relative_to(ROOT))
        for folder in ("medclip_dcl", "data_prep")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    own = {name for name in names if ".dist-info/" not in name and "/configs/" not in name}
    assert own == expected
