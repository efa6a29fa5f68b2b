"""best.ckpt of a run: the checkpoint with the best value of a metric, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import link
from medclip_dcl.common.find_model import BEST
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.metrics.table import is_higher_better
from medclip_dcl.models.trained_model import refuse_owners

_NAMES = ("best", "last", "new", "previous", "unreadable", "untrained")
"""Checkpoints of a run."""


def best_mode(where: str, metric: str, given: str | None) -> str | None:
    """The mode that selects the best value of a metric of this package; the given one for any other metric."""
    known = {True: "max", False: "min", None: given}[is_higher_better(metric)]
    if given not in (None, known):
        raise UserError(f"{where}.mode: expected {known} for {metric}, found {given}")
    return known


def complete_selection(options: Any) -> None:
    """Set the mode where it is None, and refuse options that contradict best.ckpt or last.ckpt."""
    for name in ("save_last", "save_on_exception"):
        if options.get(name):
            raise UserError(f"checkpoint.{name}: expected false, found true; last.ckpt is written anyway")
    if options.filename in _NAMES[1:]:
        raise UserError(f"checkpoint.filename: {options.filename}.ckpt is another checkpoint of the run")
    if options.monitor is None:
        return
    options.mode = best_mode("checkpoint", options.monitor, options.mode)
    if options.mode is None:
        raise UserError(f"checkpoint.mode: expected min or max for {options.monitor}, a metric of your own")
    for name in ("every_n_train_steps", "train_time_interval", "save_on_train_epoch_end"):
        if options.get(name) and options.monitor.startswith("validate/"):
            raise UserError(
                f"checkpoint.{name}: {options.monitor} is of the weights at a validation; set "
                "trainer.val_check_interval, or checkpoint.monitor: null"
            )


def check_callbacks(callbacks: Collection[Callback]) -> None:
    """Refuse callbacks that own weights, take the worst value for the best, or write checkpoints of the run."""
    refuse_owners(callbacks)
    averages = any(isinstance(one, WeightAveraging) for one in callbacks)
    for one in callbacks:
        name = f"trainer.callbacks: {type(one).__name__}"
        if averages and isinstance(one, ModelCheckpoint) and one.save_weights_only:
            raise UserError(
                "checkpoint.save_weights_only: expected false with ema_decay, found true; the file would hold the last "
                "weights, not their average"
            )
        if isinstance(monitor := getattr(one, "monitor", None), str):
            best_mode(name, monitor, getattr(one, "mode", None))
        if not isinstance(one, ModelCheckpoint) or one.dirpath is not None:
            continue
        if one.save_last or one.filename in _NAMES:
            raise UserError(
                f"{name} would write best.ckpt or last.ckpt; give another filename, and no save_last"
            )


class BestCheckpoint(ModelCheckpoint):
    """Keeps best.ckpt, the checkpoint with the best finite value of `monitor`; none without such a value.

    Lightning's ModelCheckpoint keeps the first NaN, and under a fixed name the last of several checkpoints. Here
    best.ckpt is the best of all whatever `save_top_k` and `filename` say.
    """

    def __init__(self, *, mode: Literal["min", "max"] | None = None, **options: Any) -> None:
        known = best_mode("checkpoint", options.get("monitor") or "", None)
        super().__init__(mode=mode or known or "min", **options)
        if self.monitor is None and self.save_top_k == 1 and self._every_n_epochs == 1:
            self.save_top_k = 0  # it would equal last.ckpt
        if self.monitor is None and self.filename == "best":
            self.filename = "step{step}"
        elif self.save_top_k != 1 and "{step" not in (self.filename or "{step}"):
            self.filename = f"{self.filename}-step{{step}}"

    @property
    def _best(self) -> Path:
        return Path(self.dirpath or "", BEST)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """True for a value that is finite on every process and among the best."""
        is_finite = current is not None and bool(current.isfinite())
        is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        return is_finite and super().check_monitor_top_k(trainer, current)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: Any) -> None:
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if trainer.is_global_zero and Path(self.best_model_path) != self._best:
            link(Path(self.best_model_path), self._best)

    def selected(self, last: Mapping[str, Any]) -> dict[str, Any] | None:
        """Epoch and steps of best.ckpt, metric and value that selected it; None if there is none.

        `last`: content of last.ckpt, which has the state of a training in processes that the Trainer started itself.
        """
        if self.best_model_score is None and (state := last.get("callbacks", {}).get(self.state_key)):
            self.load_state_dict(state)
        if self.best_model_score is None or not self._best.is_file():
            return None
        value = float(f"{float(self.best_model_score):.6g}")
        return {**read_model(self._best).progress, "metric": self.monitor, "value": value}

    def describe(self, selected: Mapping[str, Any] | None, epochs: int) -> str:
        """One line about the checkpoint that `test` and `load` use."""
        if selected is not None:
            best = "best checkpoint: epoch {epoch} of {of} ({step} steps), {metric} {value:.4g}"
            return best.format(of=epochs, **selected)
        reason = f"{self.monitor} had no finite value at a time of saving"
        if self.monitor is None:
            reason = "checkpoint.monitor is null"
        elif self.save_top_k == 0:
            reason = "checkpoint.save_top_k is 0"
        return f"no checkpoint was selected, since {reason}: the last is used, of epoch {epochs}"
