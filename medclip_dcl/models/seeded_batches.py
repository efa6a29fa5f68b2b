"""Reproducible dropout in resumed runs: torch is seeded for each training batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor


class SeededBatches(Callback):
    """Seeds torch for each training batch by (seed, epoch, batch, process).

    The seed is torch's own when training starts (`seed_everything`); a checkpoint keeps it. The global generators of
    the CPU and of the model's device are restored when training ends.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._before: dict[str, Tensor] = {}
        self._device = torch.device("cpu")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._seed = None  # of an earlier fit; a checkpoint's comes after this

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed = state_dict["seed"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before, self._device = {"cpu": torch.get_rng_state()}, pl_module.device
        if self._device.type != "cpu":
            self._before["device"] = torch.get_device_module(self._device).get_rng_state()
        if self._seed is None:
            self._seed = int(trainer.strategy.broadcast(torch.initial_seed()))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._seed is not None
        progress: Any = trainer.fit_loop.epoch_progress
        # The epoch by which Lightning sets the sampler's order.
        epoch = progress.current.processed
        seed = seed_of_batch(self._seed, epoch, batch_idx, trainer.global_rank)
        # Not `torch.manual_seed`: it looks for every kind of device, which takes longer than all the rest.
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "cpu" in self._before:
            torch.set_rng_state(self._before["cpu"])
        if "device" in self._before:
            torch.get_device_module(self._device).set_rng_state(self._before["device"])
        self._before = {}


def seed_of_batch(seed: int, epoch: int, batch: int, rank: int) -> int:
    """A distinct seed of 63 bits for each batch of each process."""
    words = np.random.SeedSequence([abs(seed), epoch, batch, rank]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def seeded_batches(module: LightningModule) -> list[Callback]:
    """For `configure_callbacks`: the callback, unless the Trainer has it already."""
    has_it = any(isinstance(callback, SeededBatches) for callback in module.trainer.callbacks)  # type: ignore[attr-defined]
    return [] if has_it else [SeededBatches()]
