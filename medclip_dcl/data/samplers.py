"""Samplers whose order depends on (seed, epoch) alone, and training that resumes in the middle of an epoch.

All samplers subclass DistributedSampler: Lightning wraps every other sampler when it runs on several devices.
"""

from __future__ import annotations

import atexit
import math
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import RawValue
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import UserError

_SECONDS_AFTER_SIGTERM = 300
_STALLED_SECONDS = 600
"""Max wait for a batch of worker processes; then an error ends the training, whose last.ckpt is there."""
_DESCRIPTORS = 2 * (4 + 2 * 13)
"""Open files a worker, of the loaders of training and validation: four of the worker itself, and 13 (measured) for each
of two batches on their way."""

ENDS, SAVES, _EXITS = range(3)
at_sigterm = RawValue("b", ENDS)
"""Answer of this process's loader workers to SIGTERM: they end, outlast it (a handler waits for the end of a step, for
which it needs batches), or exit without a complaint, at the end of this process."""
atexit.register(setattr, at_sigterm, "value", _EXITS)


class TrainingOrder(DistributedSampler):
    """A training order that is a function of (seed, epoch), and may begin in the middle of an epoch.

    A subclass skips the first `trained_on` global batches of its order. `batch_size` is of all processes together.
    """

    unit = "images"

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.rank, self.num_replicas = rank_and_size()
        require_whole_batches(count, batch_size, self.num_replicas, self.unit)
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0
        self._start = (0, 0)

    @property
    def batches(self) -> int:
        return self.count // self.batch_size

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin with this epoch, after that many of its batches; other epochs are whole."""
        self.set_epoch(epoch)
        self._start = (epoch, batch)

    @property
    def trained_on(self) -> int:
        """Batches of the current epoch that were trained on before the run resumed."""
        epoch, batch = self._start
        return batch if self.epoch == epoch else 0


class ResumableLoader(DataLoader):
    """A training loader of which Lightning may resume an epoch in the middle.

    `EpochDataModule` keeps the position: Lightning restores loaders after the model has asked for
    `estimated_stepping_batches`.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the dataset gives whole batches."""
    return batch


def worker_options(num_workers: int) -> dict[str, Any]:
    """DataLoader options; the worker processes outlast a signal that stops training.

    Raises:
        UserError: the system allows too few open files, with which a loader would wait for ever.
    """
    if num_workers:
        _require_descriptors(num_workers)
    return {
        "num_workers": num_workers,
        "timeout": _STALLED_SECONDS if num_workers else 0,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "worker_init_fn": partial(_outlast_stop_signals, at_sigterm),
    }


def _require_descriptors(num_workers: int) -> None:
    """Raise this process's limit of open files as far as the workers need it, or refuse their number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    needed = len(os.listdir("/dev/fd")) + _DESCRIPTORS * num_workers
    if needed > hard:
        raise UserError(
            f"data.num_workers: expected a limit of {needed} open files (ulimit -n) for {num_workers} workers, found "
            f"{hard}; raise it, or lower num_workers"
        )
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))


def _outlast_stop_signals(state: Any, worker: int) -> None:
    """Keep a worker alive when a terminal or batch system signals all processes, until the checkpoint is written."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def on_sigterm(*_: Any) -> None:
        if state.value == SAVES:
            signal.alarm(_SECONDS_AFTER_SIGTERM)
        elif state.value == _EXITS:
            os._exit(0)
        else:  # the parent hears of a signal's victims alone
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)


class EpochDataModule(LightningDataModule):
    """A datamodule whose training resumes at the batch where it stopped.

    A subclass builds its training loader by `training_loader`, with a `TrainingOrder` as sampler, and draws everything
    random in an example from (seed, epoch, index). A resumed run has trained on `first_batch` batches of `first_epoch`.
    """

    first_epoch: int = 0
    first_batch: int = 0

    def training_loader(self, dataset: Dataset, sampler: TrainingOrder, **options: Any) -> DataLoader:
        """The loader of `train_dataloader`, in which one batch is one global batch of the sampler."""
        # Lightning makes the iterator before it tells the sampler the epoch.
        sampler.start_at(self.first_epoch, self.first_batch)
        if left_out := sampler.count % sampler.batch_size:
            rank_zero_info(
                f"{left_out} of {sampler.count} training {sampler.unit} do not fill a batch of {sampler.batch_size} "
                "and are left out of each epoch, others each time"
            )
        return ResumableLoader(
            dataset, sampler=sampler, **{**worker_options(options.get("num_workers", 0)), **options}
        )

    def state_dict(self) -> dict[str, int]:
        """Position at which a resumed run begins."""
        if self.trainer is None:
            return {}
        loop: Any = self.trainer.fit_loop
        epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        is_between_epochs = epochs.processed == epochs.ready
        return {"epoch": epochs.processed, "batch": 0 if is_between_epochs else batches.processed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.first_epoch, self.first_batch = state_dict["epoch"], state_dict["batch"]

    def teardown(self, stage: str) -> None:
        """Start the next fit from the beginning."""
        if stage == "fit":
            self.first_epoch = self.first_batch = 0

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")


def require_whole_batches(count: int, batch_size: int, processes: int, unit: str) -> None:
    """Refuse a global batch that the examples do not fill, or that the processes cannot share equally."""
    if batch_size % processes or count < batch_size:
        raise UserError(
            f"data.batch_size (or contrastive_batch): expected a multiple of the number of processes, {processes}, and "
            f"no more than the {count} training {unit}, found a batch of {batch_size}; lower it"
        )


class EpochSampler(TrainingOrder):
    """Training order: (epoch, index) pairs, shuffled by (seed, epoch), in whole global batches.

    Global batch b holds the examples perm[b * batch_size : (b + 1) * batch_size] whatever the number of processes;
    each rank takes an equal slice of it. Workers draw random numbers from (seed, epoch, index).
    """

    def __len__(self) -> int:
        return self.batches * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        batches = order[: self.batches * self.batch_size].reshape(self.batches, self.num_replicas, -1)
        return iter([(self.epoch, int(index)) for index in batches[self.trained_on :, self.rank].flatten()])


class ShardSampler(DistributedSampler):
    """Evaluation order: every key once, over all processes; nothing is padded or repeated."""

    def __init__(self, keys: Sequence[Any]) -> None:
        rank, processes = rank_and_size()
        if 0 < len(keys) < processes:  # one without any would leave the others waiting
            raise UserError(
                f"data.batch_size: expected evaluated images or batches for each of {processes} processes, found "
                f"{len(keys)}; lower it, or use fewer processes"
            )
        self.own, self.epoch = keys[rank::processes], 0

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)


@dataclass(eq=False)
class FixedBatches(Dataset):
    """Examples in whole batches: the elements of this data set."""

    examples: Any
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __getitem__(self, batch: int) -> Any:
        indices = range(len(self.examples))[batch * self.batch_size :][: self.batch_size]
        return self.examples.collate([self.examples[index] for index in indices])
