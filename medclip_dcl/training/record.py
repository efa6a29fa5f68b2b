"""The record of training: metrics.csv, the untrained weights, the time it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, Timer
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl.common.devices import device_name
from medclip_dcl.common.files import write_json
from medclip_dcl.common.find_model import FoundModel
from medclip_dcl.common.terms import copy_terms
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.data.lineage import LINEAGE
from medclip_dcl.data.link import trainer_data
from medclip_dcl.runs.loggers import MetricsFile
from medclip_dcl.runs.run_folder import INITIAL_WEIGHTS_FILE, UNTRAINED_CHECKPOINT, RunFolder

_KEY = "record"
"""Of a checkpoint: seconds of training, and the rows of metrics.csv to keep where a validation is repeated."""


class RunRecord(Callback):
    """Keeps what the evaluation needs from `fit`: the untrained weights, if asked, and the time."""

    def __init__(self, run: RunFolder, keeps_untrained: bool = True) -> None:
        self.run, self.keeps_untrained = run, keeps_untrained
        self.begin: Callable[[], None] | None = None
        """Called by the first process once a checkpoint, if any, is restored; pickled with the Trainer."""
        self._started = 0.0
        self._earlier_seconds = 0.0
        self._rows: int | None = None
        self._stopped: list[int | None] | None = None
        self._source: str | Path | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        counts = [logger.count() for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        rows = counts[0] if counts and trainer.validating else None
        timers = (one for one in trainer.callbacks if isinstance(one, Timer))  # type: ignore[attr-defined]
        whole: Any = trainer.fit_loop.epoch_progress.current
        checkpoint[LINEAGE] = self.run.data()
        checkpoint[_KEY] = {
            "seconds": self._seconds(),
            "rows": rows,
            "timed_out": any((one.time_remaining() or 1) <= 0 for one in timers),
            "complete_epochs": whole.processed,
            "stopped": _length(trainer) if trainer.should_stop and not trainer.validating else None,
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        is_own = Path(trainer.ckpt_path or "").parent.resolve() == self.run.checkpoints.resolve()
        found = checkpoint.get(_KEY, {}) if is_own else {}
        self._earlier_seconds, self._rows = found.get("seconds", 0.0), found.get("rows")
        self._stopped = found.get("stopped")
        self._source = None if is_own else trainer.ckpt_path

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.begin is not None:
            self.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.time()
        # A callback had ended this run, which was killed before its fit.json; one that was made longer goes on.
        trainer.should_stop |= self._stopped == _length(trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # a trial leaves nothing behind
        if trainer.is_global_zero and self._source is not None:
            copy_terms(FoundModel(Path(self._source)).folder, self.run.folder)
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        if trainer.global_step == 0:
            # Classifiers, which start from trained weights, are not compared with their untrained state.
            if self.keeps_untrained and getattr(pl_module, "tests_untrained", False):
                trainer.save_checkpoint(untrained, weights_only=True)
            taken_over = getattr(pl_module, "initial_weights", None)
            if trainer.is_global_zero and taken_over is not None:
                write_json(asdict(taken_over), self.run.folder / INITIAL_WEIGHTS_FILE)
                copy_terms(FoundModel(Path(taken_over.source)).folder, self.run.folder)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.forget_after(trainer.global_step, self._rows)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for one in trainer.early_stopping_callbacks:
            if isinstance(one, EarlyStopping) and one.stopping_reason_message:
                reason = one.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
                rank_zero_info(f"EarlyStopping ended training in epoch {trainer.current_epoch}: {reason}")

    def record(self, trainer: Trainer, last: SavedModel) -> dict[str, Any]:
        """Content of fit.json, from last.ckpt: the Trainer of processes that it started itself has trained nothing."""
        found = last.checkpoint.get(_KEY, {})
        return {
            "seconds": round(max(self._seconds(), found.get("seconds", 0.0)), 1),
            "epochs": last.progress.get("epoch", trainer.current_epoch),
            "complete_epochs": found.get("complete_epochs", trainer.current_epoch),
            "steps": last.progress.get("step", trainer.global_step),
            "timed_out": found.get("timed_out", False),
            "train_patients": getattr(trainer_data(trainer), "train_patients", None),
            "precision": str(trainer.precision),
            "devices": trainer.world_size,
            "device": device_name(trainer.strategy.root_device),
        }

    def _seconds(self) -> float:
        return self._earlier_seconds + (time.time() - self._started if self._started else 0.0)


def _length(trainer: Trainer) -> list[int | None]:
    return [trainer.max_epochs, trainer.max_steps]
