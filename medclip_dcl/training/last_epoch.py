"""Validate and log at the end of training."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer


class LastEpoch(Callback):
    """Training ends with a validation and a row of metrics.

    Otherwise a run shorter than check_val_every_n_epoch would have no best checkpoint, and one shorter than
    log_every_n_steps no row. It comes after a Timer and before `Throughput` (`in_order`).
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run resumed in the middle of its last epoch has no on_train_epoch_start.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_last_epoch(trainer):
            _validate_in_this_epoch(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.is_last_batch and _is_last_epoch(trainer)) or is_last_step(trainer):
            # At a stop Lightning logs and, in an epoch with validation, validates.
            trainer.should_stop = True
        if trainer.should_stop:  # as well of a Timer
            _validate_in_this_epoch(trainer)


def is_last_step(trainer: Trainer) -> bool:
    """True once trainer.max_steps were made."""
    return 0 <= trainer.max_steps <= trainer.global_step


def _is_last_epoch(trainer: Trainer) -> bool:
    return trainer.current_epoch + 1 == trainer.max_epochs


def _validate_in_this_epoch(trainer: Trainer) -> None:
    if trainer.check_val_every_n_epoch is not None:  # None: by batches, in every epoch
        trainer.check_val_every_n_epoch = 1
