"""The time that training has left, in the progress bar and, without a terminal, in lines of its own."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.utilities import rank_zero_info
from tqdm import tqdm  # type: ignore[import-untyped]

from medclip_dcl.common.command_line import in_words

_FIRST_SECONDS = 15.0
"""Time of the first estimate, and min time between two lines: earlier steps also load and compile."""
_LINES = 20
"""Max lines of a run."""
_BAR_BATCHES = 10
"""Batches between two drawings of the bar, each of which reads the loss from the device."""


def progress_bar(is_wanted: bool | None) -> list[Callback]:
    """The bar, where it is asked for or (None) standard output is a terminal; a log has the lines of `TimeLeft`.

    Lightning's own bar reads the loss at each step, which waits for a GPU.
    """
    return [_Bar(_BAR_BATCHES)] if is_wanted or (is_wanted is None and sys.stdout.isatty()) else []


class _Bar(TQDMProgressBar):
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        if isinstance(minutes := metrics.pop("minutes_left", None), float):
            metrics["left"] = tqdm.format_interval(60 * minutes)  # m:ss, as the bar's own times
        return metrics


class TimeLeft(Callback):
    """Estimates the time to the end of training from the steps so far, validation and evaluations included.

    The bar shows it as m:ss. Without a bar it is a line every 5% of the run.
    """

    def __init__(self) -> None:
        self._began = self._said = 0.0
        self._first = 0
        self._share_said = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._said = time.perf_counter()
        self._first, self._share_said = trainer.global_step, 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        now, step, total = time.perf_counter(), trainer.global_step, trainer.estimated_stepping_batches
        if step in (self._first, total) or now - self._began < _FIRST_SECONDS or math.isinf(total):
            return
        left = (now - self._began) / (step - self._first) * (total - step)
        if trainer.progress_bar_callback is not None:
            # A tensor of the host: a number would be copied to the device, which waits for a GPU.
            minutes = torch.tensor(left / 60, dtype=torch.float32, device="cpu")
            pl_module.log("minutes_left", minutes, prog_bar=True, logger=False, batch_size=1)
            return
        share = step / total
        if now - self._said >= _FIRST_SECONDS and share - self._share_said >= 1 / _LINES:
            self._said, self._share_said = now, share
            rank_zero_info(f"step {step:,} of {total:,} ({share:.0%}): {in_words(left)} left")
