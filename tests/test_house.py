"""Architecture: a file imports only from its own floor or below, and the lower floors do not import Lightning."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.similarity import LSENonLocal

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    (
        "errors",
        "files",
        "worker_processes",
        "findings",
        "distributed",
        "formats",
        "weight_files",
        "pictures",
    ),
    ("objectives", "similarity", "heat_maps", "metrics", "calibration"),
    ("encoders", "networks", "scoring", "scoring_plan"),
    ("models", "data"),
    ("training", "evaluation", "report", "inference", "export"),
    ("command", "cli", "ask", "page", "__main__"),
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


def test_the_lower_floors_load_and_ask_work_without_lightning(small_bert, tmp_path):
    parts = ResNetRegions(dim=6, stride=16), BertSentences(str(small_bert), dim=6), LSENonLocal(dim=6)
    ImageTextNetwork(*parts, image_size=32).save_pretrained(tmp_path / "model")
    Image.effect_noise((40, 30), 9).save(tmp_path / "a.png")
    to_model = ["--model", str(tmp_path / "model"), str(tmp_path / "a.png")]
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES
    ]
    lower = [name for name in names if name.count(".") and FLOOR[name.split(".")[1]] <= FLOOR["networks"]]
    assert {"medclip_dcl.scoring", "medclip_dcl.networks.initial_weights"} < set(lower)
    code = f"""
import importlib, sys
for name in {lower}:
    importlib.import_module(name)
    assert "pytorch_lightning" not in sys.modules, name
from medclip_dcl import load
load({str(tmp_path / "model")!r})
assert "pytorch_lightning" not in sys.modules, "load"
from medclip_dcl.ask import __main__ as ask
ask.main({[*to_model, "--text", "x", "--output", str(tmp_path / "out")]})
ask.main({[*to_model, "--classify", "--output", str(tmp_path / "out/scores.parquet")]})
assert "pytorch_lightning" not in sys.modules, "ask"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
