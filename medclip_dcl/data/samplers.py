"""Orders and batches of examples that depend on (seed, epoch) alone, never on the number of processes.

Both samplers subclass DistributedSampler, because Lightning wraps every other sampler in one when it runs on several
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pytorch_lightning import LightningDataModule
from torch.utils.data import Dataset, DistributedSampler

from medclip_dcl.distributed import rank_and_size


class EpochDataModule(LightningDataModule):
    """A datamodule that knows which epoch a resumed run begins with.

    Lightning makes a resumed run's first iterator before it tells the sampler the epoch; give `first_epoch` to the
    training sampler, or the run repeats the order of epoch 0.

    Attributes:
        first_epoch: 0, or the epoch after the checkpoint's.
    """

    first_epoch: int = 0

    def state_dict(self) -> dict[str, int]:
        """The epoch that a resumed run begins with."""
        if self.trainer is None:
            return {}
        progress = self.trainer.fit_loop.state_dict()["epoch_progress"]
        return {"epoch": int(progress["current"]["processed"])}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.first_epoch = state_dict["epoch"]


def require_whole_batches(count: int, batch_size: int, processes: int, unit: str) -> None:
    """Refuse a global batch that the examples do not fill, or that the processes cannot share equally.

    Raises:
        ValueError: names the option and both numbers.
    """
    if batch_size % processes:
        raise ValueError(
            f"data.batch_size {batch_size} (of all processes together) must be a multiple of their number, {processes}"
        )
    if count < batch_size:
        raise ValueError(
            f"{count} training {unit} do not fill one batch of {batch_size}; lower data.batch_size"
        )


class EpochSampler(DistributedSampler):
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
        require_whole_batches(count, batch_size, self.num_replicas, "images")
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
        return iter([(self.epoch, int(index)) for index in batches[:, self.rank].flatten()])


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
