"""The wheel of this checkout, and an environment in which it alone is medclip_dcl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS, _FILES = (
    ("medclip_dcl", "data_prep", "configs", "tests"),
    ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"),
)


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, since setuptools leaves its own copies beside them."""
    copy, built = folder / "sources", folder / "dist"
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, copy)
    built.mkdir()
    script = f"from setuptools.build_meta import build_wheel; build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    return wheel


class Environment(NamedTuple):
    """A virtual environment that takes the packages of this one, after its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def run(self, words: Sequence[str | Path], where: Path, status: int = 0) -> str:
        """Run its Python in a folder, without the checkout on its path; returns the output, errors included."""
        ours = {**os.environ, "OMP_NUM_THREADS": "1"}
        ours.pop("PYTHONPATH", None)
        done = subprocess.run(
            [self.python, *words], cwd=where, env=ours, stdout=-1, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == status, done.stdout
        return done.stdout


def install(wheel: Path, folder: Path) -> Environment:
    """Install a wheel by its file name, without an index, into a new environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "present.pth").write_text(sysconfig.get_paths()["purelib"])
    words = [
        "-m",
        "pip",
        "--python",
        str(folder),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, *words], check=True)
    return Environment(folder)
