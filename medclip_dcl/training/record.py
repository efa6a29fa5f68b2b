"""The record of training: metrics.csv, the untrained weights, the time it took."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from medclip_dcl.common.devices import device_name
from medclip_dcl.common.files import write_json
from medclip_dcl.common.terms import copy_terms_of_model
from medclip_dcl.runs.loggers import MetricsFile
from medclip_dcl.runs.run_folder import INITIAL_WEIGHTS_FILE, UNTRAINED_CHECKPOINT, RunFolder

_KEY = "record"
"""Of a checkpoint: seconds of training, and the rows of metrics.csv to keep where a validation is repeated."""


class RunRecord(Callback):
    """Keeps what the evaluation needs from `fit`: the untrained weights, if asked, and the time."""

    def __init__(self, run: RunFolder, keeps_untrained: bool = True) -> None:
        self.run, self.keeps_untrained = run, keeps_untrained
        self._started = 0.0
        self._earlier_seconds = 0.0
        self._rows: int | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        counts = [logger.count() for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        rows = counts[0] if counts and trainer.validating else None
        checkpoint[_KEY] = {"seconds": self._seconds(), "rows": rows}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        found = checkpoint.get(_KEY, {})
        self._earlier_seconds, self._rows = found.get("seconds", 0.0), found.get("rows")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.time()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # a trial leaves nothing behind
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        if trainer.global_step == 0:
            # Classifiers, which start from trained weights, are not compared with their untrained state.
            if self.keeps_untrained and getattr(pl_module, "tests_untrained", False):
                trainer.save_checkpoint(untrained, weights_only=True)
            taken_over = getattr(pl_module, "initial_weights", None)
            if trainer.is_global_zero and taken_over is not None:
                write_json(asdict(taken_over), self.run.folder / INITIAL_WEIGHTS_FILE)
                copy_terms_of_model(Path(taken_over.source), self.run.folder)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.forget_after(trainer.global_step, self._rows)

    def record(self, trainer: Trainer) -> dict[str, Any]:
        """Content of fit.json."""
        return {
            "seconds": round(self._seconds(), 1),
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "precision": str(trainer.precision),
            "devices": trainer.world_size,
            "device": device_name(trainer.strategy.root_device),
        }

    def _seconds(self) -> float:
        return self._earlier_seconds + (time.time() - self._started if self._started else 0.0)
