"""Orders and batches of examples that depend on (seed, epoch) alone, never on the number of processes.

All samplers subclass DistributedSampler, because Lightning wraps every other sampler in one when it runs on several
devices.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, Generic

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from medclip_dcl.data.link import ConnectedDataModule, Requirements
from medclip_dcl.distributed import rank_and_size
from medclip_dcl.errors import UserError

_SECONDS_AFTER_SIGTERM = 300


class TrainingOrder(DistributedSampler):
    """A training order that is a function of (seed, epoch), and may begin in the middle of an epoch.

    A subclass leaves out of its order the global batches that `trained_on` counts, and sets `epoch`, `count` (of its
    examples) and `batch_size` (of all processes together).
    """

    unit = "images"
    count: int
    batch_size: int
    _start = (0, 0)

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin with this epoch, after so many of its batches; later epochs, and earlier ones, are whole."""
        self.set_epoch(epoch)
        self._start = (epoch, batch)

    @property
    def trained_on(self) -> int:
        """Batches of the epoch at hand that were trained on before the run was resumed."""
        epoch, batch = self._start
        return batch if self.epoch == epoch else 0


class ResumableLoader(DataLoader):
    """A training loader that a resumed run goes on with in the middle of an epoch.

    Its `state_dict` says no more than that to Lightning: the position is the datamodule's. Lightning restores the
    state of loaders too late, where the model asks for the number of steps before (`estimated_stepping_batches`).
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: `EpochDataModule.training_loader` made it begin where the run begins."""


def worker_options(num_workers: int) -> dict[str, Any]:
    """Options of a DataLoader with so many processes, which outlast a signal that asks training to stop."""
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "worker_init_fn": outlast_stop_signals,
    }


def outlast_stop_signals(worker: int) -> None:
    """Let a loader's process live on for a while when a terminal or a batch system signals all processes at once.

    Else its death would end training before the step is done and the checkpoint written. Of a SIGTERM it dies a little
    later, because that is also how a parent ends its children.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _die_later)


def _die_later(number: int, frame: Any) -> None:
    signal.alarm(_SECONDS_AFTER_SIGTERM)


class EpochDataModule(ConnectedDataModule[Requirements], Generic[Requirements]):
    """A datamodule that knows which epoch, and which of its batches, a resumed run begins with.

    A subclass makes its training loader by `training_loader`, with a `TrainingOrder` as its sampler, and draws what
    is random in an example from (seed, epoch, index) alone: then a run that was stopped anywhere goes on as if it had
    not been.

    Attributes:
        first_epoch: 0, or the epoch that the checkpoint's run was in.
        first_batch: how many of its batches were trained on, however many were loaded.
    """

    first_epoch: int = 0
    first_batch: int = 0

    def training_loader(self, dataset: Dataset, sampler: TrainingOrder, **options: Any) -> DataLoader:
        """The loader of `train_dataloader`; Lightning makes its iterator before it tells the sampler the epoch.

        Args:
            dataset: of the examples.
            sampler: their order; one batch of the loader is one global batch of it.
            **options: of torch's DataLoader.
        """
        sampler.start_at(self.first_epoch, self.first_batch)
        if left_out := sampler.count % sampler.batch_size:
            rank_zero_info(
                f"{left_out} of {sampler.count} training {sampler.unit} do not fill a batch of {sampler.batch_size} "
                "and are left out of each epoch, others each time"
            )
        options.setdefault("worker_init_fn", outlast_stop_signals)
        return ResumableLoader(dataset, sampler=sampler, **options)

    def state_dict(self) -> dict[str, int]:
        """Where a resumed run begins."""
        if self.trainer is None:
            return {}
        loop: Any = self.trainer.fit_loop
        epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        is_between_epochs = epochs.processed == epochs.ready
        return {"epoch": epochs.processed, "batch": 0 if is_between_epochs else batches.processed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.first_epoch = state_dict["epoch"]
        # Checkpoints from before this was kept are of an epoch's end.
        self.first_batch = state_dict.get("batch", 0)

    def teardown(self, stage: str) -> None:
        """Another fit with this datamodule begins anew."""
        if stage == "fit":
            self.first_epoch = self.first_batch = 0

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")


def require_whole_batches(count: int, batch_size: int, processes: int, unit: str) -> None:
    """Refuse a global batch that the examples do not fill, or that the processes cannot share equally.

    Raises:
        ValueError: names the option and both numbers.
    """
    if batch_size % processes:
        raise UserError(
            f"data.batch_size {batch_size} (of all processes together) must be a multiple of their number, {processes}"
        )
    if count < batch_size:
        raise UserError(
            f"{count} training {unit} do not fill one batch of {batch_size}; lower data.batch_size"
        )


class EpochSampler(TrainingOrder):
    """Training order: (epoch, index) pairs, shuffled by (seed, epoch), in whole global batches.

    Global batch b holds the examples perm[b * batch_size : (b + 1) * batch_size] whatever the number of processes;
    each rank takes its equal slice of it. What does not fill a global batch is left out of the epoch. The epoch
    travels with the index, so that a worker can draw its random numbers from (seed, epoch, index).

    Args:
        count: number of examples.
        batch_size: of all processes together.
        seed: of the order.

    Raises:
        ValueError: fewer examples than one batch, or a batch that does not divide by the number of processes.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.rank, self.num_replicas = rank_and_size()
        require_whole_batches(count, batch_size, self.num_replicas, self.unit)
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0

    @property
    def batches(self) -> int:
        """Number of global batches in an epoch."""
        return self.count // self.batch_size

    def __len__(self) -> int:
        return self.batches * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        batches = order[: self.batches * self.batch_size].reshape(self.batches, self.num_replicas, -1)
        return iter([(self.epoch, int(index)) for index in batches[self.trained_on :, self.rank].flatten()])


class ShardSampler(DistributedSampler):
    """Evaluation order: every example once, over all processes; nothing is padded or repeated."""

    def __init__(self, count: int) -> None:
        self.rank, self.num_replicas = rank_and_size()
        self.count, self.epoch, self.seed = count, 0, 0

    def __len__(self) -> int:
        return len(range(self.rank, self.count, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, self.count, self.num_replicas))


class FixedBatches(Dataset):
    """Examples in whole batches, each the same in every run; the elements of this data set are batches.

    Args:
        examples: indexed from 0.
        batch_size: examples in a batch; the last may hold fewer.
        collate: makes a batch of a list of examples.
    """

    def __init__(self, examples: Any, batch_size: int, collate: Callable[[list[Any]], Any]) -> None:
        self.examples, self.batch_size, self.collate = examples, batch_size, collate

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __getitem__(self, batch: int) -> Any:
        first = batch * self.batch_size
        last = min(first + self.batch_size, len(self.examples))
        return self.collate([self.examples[index] for index in range(first, last)])
