"""Public names of the packages: nothing private, no module, each with an object behind it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

PACKAGES = (
    "data",
    "evaluation",
    "use",
    "metrics",
    "models",
    "networks",
    "objectives",
    "scoring",
    "unimodal",
)


@pytest.mark.parametrize("name", ["medclip_dcl", *(f"medclip_dcl.{package}" for package in PACKAGES)])
def test_dir_is_what_a_user_may_import(name):
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    for public in dir(package):
        assert not public.startswith("_") and not isinstance(getattr(package, public), ModuleType)
        assert importlib.util.find_spec(f"{name}.{public}") is None, "a module has this name, too"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'medclip_dcl.networks' has no attribute 'LSENonlocal'"):
        importlib.import_module("medclip_dcl.networks").LSENonlocal  # noqa: B018
