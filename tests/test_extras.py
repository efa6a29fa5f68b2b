"""Extras: a missing package names the one that installs it; those that are named exist. Windows is refused."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import medclip_dcl
from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.adapters import LoRA, add_adapters
from medclip_dcl.networks.timm_regions import TimmRegions

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = {name: set(text.split()) for name, text in SETUP["options.extras_require"].items()}


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("peft", lambda: add_adapters(nn.Linear(1, 1), LoRA(rank=1))),
        ("timm", lambda: TimmRegions(architecture={"name": "resnet18"})),
    ],
)
def test_a_missing_package_names_its_extra(package: str, use: Callable[[], object], monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"needs the package {package}: pip install 'medclip_dcl\[models\]'$"
    ):
        use()


def test_named_extras_exist():
    texts = [
        file.read_text(encoding="utf-8")
        for pattern in ("*.md", "docs/*.md", "configs/**/*.yaml", "medclip_dcl/**/*.py", "notebooks/*.ipynb")
        for file in ROOT.glob(pattern)
    ]
    named = {
        name
        for text in texts
        for name in re.findall(r"(?:medclip_dcl|\.)\[(\w+)\]'|needs_extra\(.*\"(\w+)\"\)", text)
    }
    named = {one or other for one, other in named}
    assert named == EXTRAS.keys() & named and len(named) > 5


def test_the_page_takes_dicom_files():
    assert EXTRAS["dicom"] < EXTRAS["page"]


def test_windows_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"^medclip_dcl runs on .*WSL2$"):
        runpy.run_path(str(Path(medclip_dcl.__file__)))
