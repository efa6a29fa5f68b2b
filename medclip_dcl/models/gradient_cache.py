"""Contrastive batches larger than memory: encode in parts, recompute each part when its gradient is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def in_parts(
    encode: Callable[..., Tensor], parts: Sequence[tuple[Tensor, ...]], keeps_activations: bool
) -> Tensor:
    """`encode`, a method of an nn.Module, of one part after the other.

    Without keeping activations (GradCache, Gao et al., RepL4NLP 2021) each part is encoded again when the gradient of
    its result is known, with the same random numbers. BatchNorm normalises each part by its own statistics, and its
    running statistics are updated once for each part.
    """
    if keeps_activations or not torch.is_grad_enabled():
        return torch.cat([encode(*part) for part in parts])
    module: nn.Module = encode.__self__  # type: ignore[attr-defined]

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), running_statistics_kept(module)

    return torch.cat([checkpoint(encode, *part, use_reentrant=False, context_fn=contexts) for part in parts])


@contextmanager
def running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Within it BatchNorm normalises as it does, but does not move its running statistics."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        # A copy counts in its stead: the module may hold norms that do not run at all.
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
