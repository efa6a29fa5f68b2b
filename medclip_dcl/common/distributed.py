"""Differentiable gather of ragged rows across processes, and gathers of plain values."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T")


def is_distributed() -> bool:
    """True inside an initialised process group of more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_size() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) outside a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


class _GatherRagged(torch.autograd.Function):
    """Forward: the rows of all ranks in rank order. Backward: summed over ranks, then this rank's slice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.count], None, None


def gather_with_grad(rows: Shaped[Tensor, "local ..."]) -> Shaped[Tensor, "all ..."]:
    """Rows of all processes, in rank order; the counts may differ from rank to rank.

    The backward pass sums the gradients of all ranks. Under DistributedDataParallel, which averages parameter
    gradients, a loss that every rank computes as (sum over local anchors) * world size / (global number of
    anchors) then has exactly the gradient of one process with the concatenated batch.

    Outside a process group it returns its argument. Inside one, torch refuses a second derivative and `torch.func`.
    """
    if not is_distributed():
        return rows
    return _GatherRagged.apply(rows, _counts(rows.shape[0], rows.device), dist.get_rank())


def global_mean(values: Shaped[Tensor, "local"]) -> Shaped[Tensor, ""]:
    """Mean over all processes' values, scaled so that averaging gradients over ranks gives the global gradient.

    On each rank: sum(values) * world size / (global count). Averaged over ranks it is the global mean; 0, with a
    gradient of 0, where no process has a value.
    """
    if not is_distributed():
        return values.mean() if len(values) else values.sum()
    total = torch.tensor(values.shape[0], device=values.device)
    dist.all_reduce(total)
    return values.sum() * (dist.get_world_size() / max(1, int(total)))


def local_offset(count: int, device: torch.device | None = None) -> int:
    """Number of rows of all lower ranks, where this rank has `count`: index of its first row after a gather."""
    return sum(_counts(count, device)[: dist.get_rank()]) if is_distributed() else 0


def _counts(count: int, device: torch.device | None) -> list[int]:
    """The counts of all processes, by rank."""
    mine = torch.tensor([count], device=device)
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, mine)
    return [int(count) for count in counts]


def gather_objects(value: T) -> list[T]:
    """The values of all processes, by rank; plain Python objects, no gradient."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def greatest_of_all(values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The greatest of all processes' values, element by element, on each of them; overwrites `values`."""
    if is_distributed():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
