"""The record of training: metrics.csv, the untrained weights, the time it took."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from medclip_dcl.distributed import device_name
from medclip_dcl.files import write_json, write_text
from medclip_dcl.models.image_only import ImageOnlyModel
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.training.run_folder import (
    INITIAL_WEIGHTS_FILE,
    METRICS_FILE,
    UNTRAINED_CHECKPOINT,
    RunFolder,
)

_ROWS = "metrics_rows"


class MetricsFile(Logger):
    """Writes metrics.csv in the run folder; a resumed run appends and never repeats a step (CSVLogger deletes it)."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.file = Path(folder) / METRICS_FILE
        self._columns: list[str] = []
        if self.file.is_file():
            with self.file.open(newline="", encoding="utf-8") as stream:
                self._columns = next(csv.reader(stream), [])

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.file.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings stand in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite(self._rows())
        with self.file.open("a", newline="", encoding="utf-8") as stream:
            csv.DictWriter(stream, self._columns).writerow(row)

    @rank_zero_only
    def forget_after(self, step: int, rows: int | None = None) -> None:
        """Drop the rows that a resumed run will write again.

        Args:
            step: first step that it repeats.
            rows: number of rows to keep, if it resumes with the validation of the step before.
        """
        if self.file.is_file():
            self._rewrite([row for row in self._rows()[:rows] if int(row["step"] or 0) < step])

    def count(self) -> int:
        """Number of rows, after they are flushed to the disk."""
        if not self.file.is_file():
            return 0
        with self.file.open("rb") as stream:
            os.fsync(stream.fileno())
        return len(self._rows())

    def _rows(self) -> list[dict[str, str]]:
        if not self.file.is_file():
            return []
        with self.file.open(newline="", encoding="utf-8") as stream:
            return [row for row in csv.DictReader(stream) if None not in row.values()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text(text.getvalue(), self.file)


class RunRecord(Callback):
    """Keeps what the evaluation needs from `fit`: the untrained weights and the time.

    Args:
        run: its folder.
        keeps_untrained: False keeps no untrained weights.
    """

    def __init__(self, run: RunFolder, keeps_untrained: bool = True) -> None:
        self.run, self.keeps_untrained = run, keeps_untrained
        self._started = 0.0
        self._earlier_seconds = 0.0
        self._rows: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_seconds = float(state_dict["seconds"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        counts = [logger.count() for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        if counts and trainer.validating:
            checkpoint[_ROWS] = counts[0]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._rows = checkpoint.get(_ROWS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.time()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # a trial leaves nothing behind
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        if trainer.global_step == 0:
            # Others, such as classifiers that start from trained weights, are not compared with their untrained state.
            if self.keeps_untrained and isinstance(pl_module, ImageTextModel | ImageOnlyModel):
                trainer.save_checkpoint(untrained, weights_only=True)
            self._write_initial_weights(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.forget_after(trainer.global_step, self._rows)

    def _write_initial_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Names of the tensors that were taken from another training, and of those that were not."""
        taken_over = getattr(pl_module, "initial_weights", None)
        if trainer.is_global_zero and taken_over is not None:
            write_json(asdict(taken_over), self.run.folder / INITIAL_WEIGHTS_FILE)

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
