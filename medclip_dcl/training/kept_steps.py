"""Weights kept at chosen optimiser steps of a training, with a validation at each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from medclip_dcl.common.errors import UserError
from medclip_dcl.runs.saved import step_checkpoint
from medclip_dcl.training.last_checkpoint import validate_in_this_epoch


class KeptSteps(Callback):
    """Validates after chosen optimiser steps and keeps the validated weights, with an average the averaged ones.

    Args:
        folder: of the checkpoints, step_N.ckpt.
        steps: ascending, at least 1.
    """

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        if list(steps) != sorted(set(steps)) or any(step < 1 for step in steps):
            raise UserError(f"kept_steps: expected ascending steps of at least 1, found {list(steps)}")
        self.folder, self.steps = folder, steps
        self._done = self._before = 0
        self._usual: tuple[Any, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done = state_dict["done"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        if self.steps and self.steps[-1] > total:
            raise UserError(
                f"kept_steps: expected steps of the run's {total:,}, found {self.steps[-1]:,}; raise"
                " trainer.max_epochs or trainer.max_steps"
            )
        if self.steps and not trainer.enable_validation:
            raise UserError(
                "kept_steps: expected a validation at each, found none; remove trainer.limit_val_batches: 0"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        missing = [step for step in self.steps if self._done < step < trainer.global_step]
        if missing:
            rank_zero_warn(
                f"kept_steps: training begins at step {trainer.global_step}, so that {missing} are not kept"
            )
        self._before = self._done  # a run resumed at the beginning of a validation repeats it
        self._validate_if_due(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._restore(trainer)
        self._before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._validate_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._usual is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.folder / step_checkpoint(trainer.global_step), weights_only=True)
            self._done = trainer.global_step

    def _validate_if_due(self, trainer: Trainer) -> None:
        if trainer.global_step in self.steps and trainer.global_step > self._before:
            self._usual = trainer.check_val_every_n_epoch, trainer.val_check_batch
            validate_in_this_epoch(trainer)
            trainer.val_check_batch = 1

    def _restore(self, trainer: Trainer) -> None:
        if self._usual is not None:
            trainer.check_val_every_n_epoch, trainer.val_check_batch = self._usual
            self._usual = None
