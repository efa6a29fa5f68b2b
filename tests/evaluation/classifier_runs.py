"""Command lines of a classifier's runs, and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = ("Edema", "Fracture", "Support Devices")


def words(
    run: Path, folder: Path, source: Path | None, *more: str, probe: bool = False, blank: str = "ignore"
) -> list[str]:
    """Arguments of a run of seconds."""
    callback = {
        "class_path": "medclip_dcl.evaluation.FindingClassification",
        "init_args": {"min_cases": 2, "blank": blank},
    }
    own = run.parent / f"{run.name}.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    files = ["finetune", *(["linear_probe"] if probe else [])]
    return [
        *(word for name in files for word in ("--config", str(ROOT / f"configs/{name}.yaml"))),
        "--config", str(own),
        "--run_folder", str(run),
        "--trainer.max_epochs", "3",
        "--trainer.enable_progress_bar", "false",
        "--trainer.log_every_n_steps", "1",
        "--trainer.precision", "32-true",
        "--trainer.accelerator", "cpu",
        "--model.init_args.findings", json.dumps(FINDINGS),
        *([] if source is None else ["--model.init_args.init_from", str(source)]),
        "--data.init_args.folder", str(folder),
        "--data.init_args.batch_size", "8",
        "--data.init_args.num_workers", "0",
        *more,
    ]  # fmt: skip


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))
