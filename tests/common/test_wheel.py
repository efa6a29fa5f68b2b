"""The wheel: configurations, prompts, batch files and the other data files travel in it; tests and docs do not."""

from __future__ import annotations

import zipfile

import pytest

from tests.wheel import ROOT, build_wheel


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> set[str]:
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
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
