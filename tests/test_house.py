"""Architecture: a file imports only from its own floor or below; tests/test_fresh_process.py imports the floors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    (
        "errors",
        "command_line",
        "files",
        "worker_processes",
        "threads",
        "durations",
        "findings",
        "distributed",
        "formats",
        "weight_files",
        "parts",
        "pictures",
    ),
    ("objectives", "similarity", "heat_maps", "metrics", "calibration", "synthetic_classes"),
    ("encoders", "networks", "scoring", "scoring_plan"),
    ("models", "data"),
    ("training", "evaluation", "report", "inference", "export"),
    ("command", "cli", "ask", "page", "experiments", "demo_time", "__main__"),
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FILES = sorted((ROOT / "medclip_dcl").rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Modules that a file imports, except those under `if TYPE_CHECKING`."""
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT / "medclip_dcl")))
def test_imports_come_from_floors_below(file):
    name = file.relative_to(ROOT / "medclip_dcl").parts[0].removesuffix(".py")
    if name == "__init__":
        return
    for module in imported(file):
        parts = module.split(".")
        assert parts[0] != "data_prep", (
            f"{file.name} imports {module}: nothing in medclip_dcl may import data_prep"
        )
        if parts[0] == "medclip_dcl" and len(parts) > 1:
            assert FLOOR[parts[1]] <= FLOOR[name], f"{file.name} (floor {FLOOR[name]}) imports {module}"
