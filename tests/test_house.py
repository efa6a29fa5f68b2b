"""The house: no package imports one above it, none two ways; `python -m tests.test_house` writes its page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from medclip_dcl.__main__ import VERBS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("medclip_dcl", "data_prep")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
PROGRAM = ROOT / "medclip_dcl" / "__main__.py"
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES}
NAMES = ROOT / "medclip_dcl" / "__init__.py"
"""Its names for type checkers are those of upper floors, imported when somebody asks for them."""
_NAME = re.compile(r"(medclip_dcl|data_prep)(\.\w+)+")


def imported(file: Path) -> set[str]:
    """Modules that a file imports or names in a string, those for type checkers included.

    Left out are the table of verbs and the lazy names of `NAMES`.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file == NAMES:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif file != PROGRAM and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if _NAME.fullmatch(node.value) else set()
    return found


@cache
def arrows(package: str = "medclip_dcl") -> dict[str, set[str]]:
    """From each room of a package (a folder, or a module beside them) to those of its rooms that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        if file.is_relative_to(ROOT / package):
            room = file.relative_to(ROOT / package).parts[0].removesuffix(".py")
            names = (f"{name}.__init__".split(".") for name in imported(file))
            found[room] |= {there for first, there, *_ in names if first == package} - {room}
    return found


@cache
def floors(package: str = "medclip_dcl") -> dict[str, int]:
    """Floor of each room of a package: one above the highest that it imports.

    Raises:
        ValueError: packages import each other in a circle.
    """
    found: dict[str, int] = {}
    left = dict(arrows(package))
    while left:
        free = {room for room, below in left.items() if below <= found.keys()}
        if not free:
            raise ValueError(f"these import each other in a circle: {sorted(left)}")
        # Of one round, so that rooms of a floor cannot import each other.
        found |= dict.fromkeys(free, 1 + max(found.values(), default=0))
        left = {room: below for room, below in left.items() if room not in free}
    return found


def table() -> str:
    """The page's table: each floor with its rooms, in the words of their first lines."""
    rows = ["| floor | room | | imports |", "|---|---|---|---|"]
    for floor in sorted(set(floors().values()), reverse=True):
        for room in sorted(name for name, found in floors().items() if found == floor):
            folder = ROOT / "medclip_dcl" / room
            file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            words = (
                (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
                .splitlines()[0]
                .replace("|", "\\|")
            )
            rows.append(f"| {floor} | `{room}` | {words} | {', '.join(sorted(arrows()[room]))} |")
    return "\n".join(rows)


def _page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index("| floor |"), text.index("\n\n", text.index("| floor |"))
    return text[:start] + table() + text[end:]


@pytest.mark.parametrize(("package", "most"), [("medclip_dcl", 8), ("data_prep", 6)])
def test_no_circle_between_rooms(package: str, most: int):
    assert 1 < max(floors(package).values()) <= most


def test_each_name_of_the_table_exists():
    for name in {
        name
        for verb in VERBS.values()
        for name in (verb.function, verb.options and verb.options_path)
        if name
    }:
        module, _, member = name.rpartition(".")
        assert hasattr(import_module(module), member), name


def test_training_and_evaluation_do_not_know_each_other():
    assert "evaluation" not in arrows()["training"] and "training" not in arrows()["evaluation"]
    assert "report" not in arrows()["evaluation"], "it measures and does not report"


def test_only_the_table_of_verbs_names_data_prep():
    product = [file for file in FILES if file.is_relative_to(ROOT / "medclip_dcl")]
    assert [file for file in product if "data_prep" in file.read_text(encoding="utf-8")] == [PROGRAM]


def test_the_page_shows_the_house_of_today():
    assert PAGE.read_text(encoding="utf-8") == _page(), "run: python -m tests.test_house"


if __name__ == "__main__":
    PAGE.write_text(_page(), encoding="utf-8")
