"""Architecture: a file imports only from its own floor or below; tests/test_fresh_process.py imports the floors."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    (
        "errors",
        "command_line",
        "files",
        "processes",
        "findings",
        "distributed",
        "formats",
        "weight_files",
        "parts",
        "pictures",
    ),
    ("objectives", "similarity", "heat_maps", "metrics"),
    ("encoders", "networks", "scoring"),
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


def test_imports_come_from_floors_below():
    refused = []
    for file in FILES:
        path = file.relative_to(ROOT / "medclip_dcl")
        name = path.parts[0].removesuffix(".py")
        for module in imported(file) if name != "__init__" else ():
            first, second, *_ = *module.split("."), ""
            if first == "data_prep":
                refused.append(f"{path} imports {module}: nothing in medclip_dcl may import data_prep")
            if first == "medclip_dcl" and second and FLOOR[second] > FLOOR[name]:
                refused.append(f"{path} (floor {FLOOR[name]}) imports {module} (floor {FLOOR[second]})")
    assert not refused
