"""Common names of findings: the table ``findings.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

NAMES_FILE = Path(__file__).with_name("findings.yaml")


def plain_finding(name: str) -> str:
    """The same for names of a finding that differ in case, blanks, dashes and underscores."""
    return re.sub(r"[\s_/-]+", " ", name).strip().lower()


class Alias(NamedTuple):
    """Common name of a set's finding; `is_choice` if the two names need not mean the same."""

    finding: str
    is_choice: bool


@cache
def table(name: str = "findings.yaml", package: str = "medclip_dcl.common") -> dict[str, Any]:
    """A table of a package: finding -> its other names by kind (``findings.yaml``), or set -> its names."""
    return dict(yaml.safe_load((files(package) / name).read_text(encoding="utf-8")))


def aliases() -> dict[str, Alias]:
    """Plain name of a finding in any set -> its common name."""
    found = {plain_finding(finding): Alias(finding, False) for finding in table()}
    for finding, other in table().items():
        for kind in ("same", "choice"):
            found |= {plain_finding(name): Alias(finding, kind == "choice") for name in other.get(kind, ())}
    return found


def common_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """A set's names of findings -> common names (its own where the table has none), and the choices among them."""
    known, found, choices = aliases(), {}, []
    for name in dict.fromkeys(names):
        alias = known.get(plain_finding(name), Alias(name, False))
        found[name] = alias.finding
        if alias.is_choice:
            choices.append(f"{name!r} counts as {alias.finding}")
    return found, [f"findings: {'; '.join(choices)} (choices)"] if choices else []
