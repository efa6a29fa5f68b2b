"""Experiment files of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.program import shell

MODULE = "tests.studies.tiny"
"""Of the classes in the grids' files."""

SETTINGS = {
    "trainer.max_epochs": 2,
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": 0,
}


def main(arguments: list[str]) -> None:
    """The command, which the files do not let import the tiny model by themselves."""
    shell("study")([*arguments, "--import", MODULE])


def write_results(folder: Path, metrics: dict[str, Any], **parts: Any) -> None:
    """results.json of a finished run, and fit.json."""
    empty: dict[str, Any] = {
        part: {} for part in ("protocol", "counts", "notes", "checkpoint", "dataset", "timings")
    }
    facts = {"format_version": 2, "metrics": metrics, "precision": "32-true", "versions": {"torch": "2.11"}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**empty, **facts, **parts}))
    (folder / "fit.json").write_text(json.dumps({"epochs": 2, "steps": 6, "seconds": 800.0}))


def write_grid(folder: Path, **changes: Any) -> Path:
    """An experiment file in the folder: noise x learning rate x seed, of which keys are changed; None removes one."""
    base = {"model": {"class_path": f"{MODULE}.TinyModel"}}
    base["data"] = {"class_path": f"{MODULE}.TinyData"}
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    (folder / "configs/base.yaml").write_text(yaml.safe_dump(base))
    (folder / "configs/fast.yaml").write_text("model: {init_args: {learning_rate: 0.2}}")
    grid = {
        "folder": str(folder / "grid"),
        "configs": ["configs/base.yaml"],
        "settings": SETTINGS,
        "axes": {
            "noise": {"set": "data.init_args.noise", "values": [0.1, 1]},
            "rate": {"levels": {"slow": None, "fast": {"configs": ["configs/fast.yaml"]}}},
            "seed": {"set": ["seed_everything", "data.init_args.seed"], "values": 3},
        },
        "pairs": "seed",
        "compare": {"axis": "rate", "reference": "slow"},
        "outcomes": {
            "error": "tiny/error",
            "slope": {"path": "slope/1.0/value", "percent": True, "digits": 1},
        },
        "plots": [
            {"kind": "lines", "name": "error_over_noise", "x": "noise", "y": "error", "log": True},
            {
                "kind": "differences",
                "name": "difference",
                "x": "noise",
                "y": "error",
                "title": "Fast against slow",
            },
            {
                "kind": "lines",
                "name": "both",
                "x": {"label": "what", "outcomes": {"error": 0.1, "slope": 1.0}},
                "where": {"noise": 0.1},
            },
        ],
    } | changes
    file = folder / "grid.yaml"
    file.write_text(
        yaml.safe_dump({key: value for key, value in grid.items() if value is not None}, sort_keys=False)
    )
    return file
