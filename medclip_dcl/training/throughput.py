"""How fast training runs, and how much of its time it waits for batches.

Lightning's ThroughputMonitor is not used: it waits for the GPU after every step, counts floating-point operations that
the models would have to declare, takes one process's batches, and does not say how long the loader was waited for.

Time is read from the host's clock, without waiting for the device. The wait for a batch is the time from the end of a
step, with all that other callbacks do there, to the start of the next, without validation; it holds the fetching and
the start of the copy to the device. On a GPU the host runs ahead of it by no more than the optimiser's step, as
FiniteCheck has waited for the backward pass: while the host waits for a batch, the device idles.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

_JUDGED_STEPS = 50
"""Steps that are judged together; the first so many are the warm-up of loaders and kernels, and are not judged."""


@dataclass
class _Window:
    """What was counted since the window began."""

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, examples: int, waited: float, worked: float) -> None:
        self.steps += 1
        self.examples += examples
        self.seconds += waited + worked
        self.waited += waited

    @property
    def waited_share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


class Arrival(Callback):
    """Notes when a batch has come, before other callbacks take their time; it must be the first: `in_order`."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.at = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at = time.perf_counter()


class Throughput(Callback):
    """Logs train/images_per_second and train/data_wait every log_every_n_steps; warns where the loader is too slow.

    images_per_second counts the images (sentences_per_second: the sentences, where a batch has no images) of all
    processes, and not the time of validation; data_wait is the share of the time that this process, the first,
    waited for batches. Both are of the steps since they were logged last. A run's figures differ from the same run's
    on another day.

    It must be the last callback, and `arrival` the first: `in_order`. Then what others do between two steps, such as
    writing a checkpoint, is not taken for waiting.

    Args:
        warn_above: share of the time spent waiting for batches, over 50 steps, above which the user is told, once.

    Attributes:
        arrival: the callback that notes when a batch has come.
    """

    def __init__(self, warn_above: float = 0.2) -> None:
        self.warn_above = warn_above
        self.arrival = Arrival()
        self._logged, self._judged = _Window(), _Window()
        self._is_warm = self._has_warned = False
        self._last = self._started = 0.0  # when the last step, or validation, ended; when this step began
        self._waited = 0.0  # for the batch of this step
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged, self._judged, self._is_warm = _Window(), _Window(), False
        # A run that goes on in the middle of an epoch has no start of an epoch.
        self._last, self._waited = time.perf_counter(), 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The first batch of an epoch is waited for as well: loaders fill up anew.
        self._last, self._waited = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waited += self.arrival.at - self._last

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = self.arrival.at
        self._waited += self._started - self._last

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        unit, examples = _examples(batch)
        now = time.perf_counter()
        for window in (self._logged, self._judged):
            window.add(examples * trainer.world_size, self._waited, now - self._started)
        self._last, self._waited = now, 0.0
        self._judge(trainer, unit)
        # After a step of the optimiser, where the other figures of training are logged as well.
        is_new, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        every = self._log_every(trainer)
        if not is_new or not every or (trainer.global_step % every and not trainer.should_stop):
            return
        window, self._logged = self._logged, _Window()
        figures = {
            f"train/{unit}_per_second": window.examples / window.seconds,
            "train/data_wait": window.waited_share,
        }
        pl_module.log_dict(figures, batch_size=1)

    @staticmethod
    def _log_every(trainer: Trainer) -> int:
        return int(getattr(trainer, "log_every_n_steps"))  # noqa: B009

    def _judge(self, trainer: Trainer, unit: str) -> None:
        """Tell the user, once, if the loader is the bottleneck."""
        if self._judged.steps < _JUDGED_STEPS:
            return
        window, self._judged = self._judged, _Window()
        is_warm, self._is_warm = self._is_warm, True
        if is_warm and not self._has_warned and window.waited_share > self.warn_above:
            self._has_warned = True
            rank_zero_warn(_advice(window, unit, getattr(trainer, "datamodule", None)))


def _advice(window: _Window, unit: str, datamodule: Any) -> str:
    """The numbers found, and what helps."""
    workers, cores = getattr(datamodule, "num_workers", None), os.cpu_count()
    remedies = [f"raise data.init_args.num_workers (now {workers}; this machine has {cores} cores)"]
    if getattr(datamodule, "cache_images", None) is False:
        remedies.append(
            "set data.init_args.cache_images: true, where all images at image_size fit into memory"
        )
    return (
        f"training waits for its loader: over the last {window.steps} steps {window.waited_share:.0%} of the time "
        f"({window.waited / window.steps:.3f} of {window.seconds / window.steps:.3f} s a step, "
        f"{window.examples / window.seconds:.1f} {unit} a second); {', or '.join(remedies)}"
    )


def _examples(batch: Mapping[str, Any]) -> tuple[str, int]:
    """What a batch consists of, and how many."""
    if "dicom_id" in batch:
        return "images", len(batch["dicom_id"])
    return "sentences", len(batch["lengths"])
