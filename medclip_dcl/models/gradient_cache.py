"""Contrastive batches larger than memory: encode in parts, recompute each part when its gradient is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def in_parts(encode: Callable[..., Any], parts: Sequence[tuple[Tensor, ...]], keeps_activations: bool) -> Any:
    """`encode`, a method of an nn.Module, of one part after the other; its result is a tensor or a NamedTuple of them.

    Without keeping activations (GradCache, Gao et al., RepL4NLP 2021) each part is encoded again when the gradient of
    its result is known, with the same random numbers. BatchNorm normalises each part by its own statistics, and its
    running statistics are updated once for each part.
    """
    if keeps_activations or not torch.is_grad_enabled():
        return _joined([encode(*part) for part in parts])
    module: nn.Module = encode.__self__  # type: ignore[attr-defined]

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), running_statistics_kept(module)

    return _joined([checkpoint(encode, *part, use_reentrant=False, context_fn=contexts) for part in parts])


def _joined(found: Sequence[Any]) -> Any:
    """The results of all parts as one; a member that is None in each stays None."""
    if isinstance(found[0], Tensor):
        return torch.cat(list(found))
    members = zip(*found, strict=True)
    return type(found[0])(*(None if each[0] is None else torch.cat(each) for each in members))


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
