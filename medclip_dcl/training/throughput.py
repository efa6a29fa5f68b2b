"""Training speed, and the share of time spent waiting for batches.

Lightning's ThroughputMonitor synchronises the GPU after every step and does not measure the wait for the loader. Here
the host's clock is read, which FiniteCheck lets be one step ahead of a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from medclip_dcl.data.link import trainer_data

_JUDGED_STEPS = 50
"""Steps judged together; the first so many are warm-up and are not judged."""

_MUCH_WAITING = 0.2
"""Share of waiting over these steps above which a warning is shown, once."""


@dataclass
class _Window:
    """Counts since the window began."""

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def waited_share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


class Arrival(Callback):
    """Notes when a batch arrives, as the first callback (`in_order`)."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at = time.perf_counter()


class Throughput(Callback):
    """Logs train/images_per_second and train/data_wait every log_every_n_steps; warns if the loader is too slow.

    images_per_second (sentences_per_second for batches without images) counts all processes, without validation;
    data_wait is the share of time that the first process waits for batches, from the end of a step to the start of the
    next without other callbacks (`in_order`). Both cover the steps since the last row.
    """

    def __init__(self) -> None:
        self.arrival = Arrival()
        self._logged, self._judged = _Window(), _Window()
        self._is_warm = self._has_warned = False
        self._last = self._started = 0.0  # when the last step, or validation, ended; when this step began
        self._waited = 0.0  # for the batch of this step
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged, self._judged, self._is_warm = _Window(), _Window(), False
        # A run resumed in the middle of an epoch has no on_train_epoch_start.
        self._last, self._waited = time.perf_counter(), 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last, self._waited = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waited += self.arrival.at - self._last

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = self.arrival.at
        self._waited += self._started - self._last

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        unit, examples = _examples(batch)
        now = time.perf_counter()
        for window in (self._logged, self._judged):
            window.steps += 1
            window.examples += examples * trainer.world_size
            window.seconds += self._waited + now - self._started
            window.waited += self._waited
        self._last, self._waited = now, 0.0
        self._judge(trainer, unit)
        # After an optimiser step, with the other metrics of training.
        is_new, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not is_new or not every or (trainer.global_step % every and not trainer.should_stop):
            return
        window, self._logged = self._logged, _Window()
        metrics = {
            f"train/{unit}_per_second": window.examples / window.seconds,
            "train/data_wait": window.waited_share,
        }
        pl_module.log_dict(metrics, batch_size=1)

    def _judge(self, trainer: Trainer, unit: str) -> None:
        """Warn once if the loader is the bottleneck."""
        if self._judged.steps < _JUDGED_STEPS:
            return
        window, self._judged = self._judged, _Window()
        is_warm, self._is_warm = self._is_warm, True
        if is_warm and not self._has_warned and window.waited_share > _MUCH_WAITING:
            self._has_warned = True
            rank_zero_warn(_advice(window, unit, trainer_data(trainer)))


def _advice(window: _Window, unit: str, datamodule: Any) -> str:
    workers, cores = getattr(datamodule, "num_workers", None), os.cpu_count()
    remedies = []
    if workers is not None:
        remedies.append(f"raise data.init_args.num_workers (now {workers}; this machine has {cores} cores)")
    if getattr(datamodule, "cache_images", None) is False:
        remedies.append(
            "set data.init_args.cache_images: true, where all images at image_size fit into memory"
        )
    return (
        f"training waits for its loader: over the last {window.steps} steps {window.waited_share:.0%} of the time "
        f"({window.waited / window.steps:.3f} of {window.seconds / window.steps:.3f} s a step, "
        f"{window.examples / window.seconds:.1f} {unit} a second)"
        + "; " * bool(remedies)
        + ", or ".join(remedies)
    )


def _examples(batch: Mapping[str, Any]) -> tuple[str, int]:
    """Unit and size of a batch."""
    for identity in ("dicom_id", "index"):
        if identity in batch:
            return "images", len(batch[identity])
    return "sentences", len(batch.get("row", batch["lengths"]))
