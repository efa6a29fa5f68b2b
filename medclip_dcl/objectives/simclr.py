"""Image-only contrastive loss of two views (SimCLR), debiased, in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.objectives.contrastive import (
    RowStatistics,
    check_reduction,
    log_sum_exp_,
    losses_of_rows,
    reduced,
)

# On a CPU a block should stay in the second-level cache: 1 MiB of float32 (choice, measured). Elsewhere it should
# fill the device (choice, not measured).
_BLOCK_ELEMENTS = {"cpu": 2**18}
_BLOCK_ELEMENTS_ELSEWHERE = 2**22
_FEWEST_ROWS = 16


def simclr_loss(
    first: Tensor,
    second: Tensor,
    *,
    gamma2: float = 2.0,
    class_probability: float | Tensor = 0.0,
    reduction: str = "mean",
    block: int | None = None,
) -> Tensor:
    """Contrastive loss between two views of each image, corrected for false negatives.

    The 2B views are the anchors, first views before second ones; the other view of the image is the positive x+,
    the views of all other images are the N = 2B - 2 negatives u_n (Chuang et al., NeurIPS 2020, eq. 7 and 8, M = 1;
    Wang et al., MLHC 2023, section 3.1). With s = gamma^2 * cosine::

        g    = max{ 1/(1-eta) * [ mean_n exp s(x,u_n) - eta * exp s(x,x+) ],  exp(-gamma^2) }
        loss = -log  exp s(x,x+) / ( exp s(x,x+) + N * g )

    It is `contrastive_loss` of the whole (2B, 2B) matrix without its diagonal, but no more than a block of rows of
    that matrix exists at a time: the backward pass computes each block again. In float32 at least.

    Args:
        first: (image, dim) embeddings of the first views, of any length: they are normalised here.
        second: (image, dim) embeddings of the second views.
        gamma2: gamma^2, one over the temperature; above 0 (2: SSD and DCL).
        class_probability: eta in [0, 1): the chance that another image is of the anchor's class; one number,
            (image,) or (2 * image,).
        reduction: "mean", "sum" or "none".
        block: rows of a block; null for what fits the device.

    Returns:
        A scalar, or (2 * image,) with reduction "none". A single image has no negatives and costs 0.

    Raises:
        ValueError: embeddings that do not fit each other or are none, gamma2 or block out of range, eta of another
            shape or outside [0, 1), an unknown reduction.

    Example:
        >>> first = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> round(simclr_loss(first, first).item(), 4)
        0.2395
    """
    check_reduction(reduction)
    _check(first, second, gamma2, block)
    with torch.autocast(device_type=first.device.type, enabled=False):
        views = torch.cat([first, second])
        views = normalize(views.float() if views.dtype in (torch.float16, torch.bfloat16) else views, dim=1)
        rows = _row_statistics(views, gamma2, block or _default_block(views))
        eta = _eta_of_views(class_probability, len(first))
        return reduced(losses_of_rows(rows, eta, floor=-gamma2), reduction)


def _check(first: Tensor, second: Tensor, gamma2: float, block: int | None) -> None:
    if first.dim() != 2 or not first.is_floating_point() or not len(first):
        raise ValueError(
            f"first must be floating point of shape (image, dim), image at least 1, got {first.dtype} "
            f"{tuple(first.shape)}"
        )
    if second.shape != first.shape or second.dtype != first.dtype:
        raise ValueError(
            f"second must be {first.dtype} of shape {tuple(first.shape)} as first is, got {second.dtype} "
            f"{tuple(second.shape)}"
        )
    if not (gamma2 > 0 and math.isfinite(gamma2)):
        raise ValueError(f"gamma2 must be finite and above 0, got {gamma2}")
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1 row, got {block}")


def _default_block(views: Tensor) -> int:
    return max(_FEWEST_ROWS, _BLOCK_ELEMENTS.get(views.device.type, _BLOCK_ELEMENTS_ELSEWHERE) // len(views))


def _eta_of_views(class_probability: float | Tensor, images: int) -> float | Tensor:
    """A number, or one eta for each of the 2 * images views."""
    if not isinstance(class_probability, Tensor) or class_probability.dim() == 0:
        return class_probability
    if class_probability.shape not in ((images,), (2 * images,)):
        raise ValueError(
            f"class_probability must be a number or of shape ({images},) or ({2 * images},), "
            f"got {tuple(class_probability.shape)}"
        )
    return class_probability.repeat(2 * images // len(class_probability))


def _row_statistics(views: Float[Tensor, "view dim"], gamma2: float, block: int) -> RowStatistics:
    """What the loss needs to know of each view's row of the matrix that is never held."""
    count = len(views)
    first, second = views.chunk(2)
    positive = (gamma2 * (first * second).sum(1)).repeat(2)
    return RowStatistics(
        log_sum_negative=_NegativesInBlocks.apply(views, gamma2, block),
        log_count=positive.new_full((count,), count - 2).log(),
        positive_logits=positive[:, None],
        is_positive=torch.ones(count, 1, dtype=torch.bool, device=views.device),
        log_mean_positive=positive,
    )


class _NegativesInBlocks(torch.autograd.Function):
    """(view,) log-sum-exp of the logits of each view with all views but itself and its other one.

    With a_i the gradient of row i's result and p_ij its softmax, the gradient of the symmetric logits' embeddings is
    gamma^2 * sum_j (a_i p_ij + a_j p_ji) z_j: row i needs nothing of other rows but their log-sum-exp.
    """

    @staticmethod
    def forward(views: Tensor, gamma2: float, block: int) -> Tensor:
        return torch.cat([log_sum_exp_(logits) for _, logits in _blocks(views, gamma2, block)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, int], output: Tensor) -> None:
        views, ctx.gamma2, ctx.block = inputs
        ctx.save_for_backward(views, output)
        ctx.save_for_forward(views, output)

    @staticmethod
    def jvp(ctx: Any, of_views: Tensor, *_: None) -> Tensor:
        views, log_sum = ctx.saved_tensors
        of_logits = of_views @ views.T + views @ of_views.T
        return ctx.gamma2 * (_softmax(views, ctx.gamma2, log_sum) * of_logits).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        views, log_sum = ctx.saved_tensors
        with torch.autocast(device_type=views.device.type, enabled=False):
            if torch.is_grad_enabled():
                of_rows = _softmax(views, ctx.gamma2, log_sum) * gradient[:, None]
                return ctx.gamma2 * (of_rows + of_rows.T) @ views, None, None
            log_sum = _finite(log_sum)
            found, space = torch.empty_like(views), views.new_empty(min(ctx.block, len(views)), len(views))
            for rows, logits in _blocks(views, ctx.gamma2, ctx.block):
                of_others = torch.sub(logits, log_sum, out=space[: len(logits)]).exp_().mul_(gradient)
                own = logits.sub_(log_sum[rows, None]).exp_().mul_(gradient[rows, None])
                torch.mm(own.add_(of_others), views, out=found[rows])
        return found.mul_(ctx.gamma2), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], views: Tensor, gamma2: float, block: int
    ) -> tuple[Tensor, int]:
        # Blocks are written over each other, hence one problem after the other.
        problems = views.unbind(in_dims[0])
        return torch.stack([_NegativesInBlocks.apply(own, gamma2, block) for own in problems]), 0


def _softmax(views: Tensor, gamma2: float, log_sum: Tensor) -> Tensor:
    """The whole matrix of the rows' softmax, in operations that can be differentiated again."""
    own = torch.eye(len(views), dtype=torch.bool, device=views.device)
    excluded = own | own.roll(len(views) // 2, 0)
    return (gamma2 * views @ views.T - _finite(log_sum)[:, None]).masked_fill(excluded, -math.inf).exp()


def _finite(log_sum: Tensor) -> Tensor:
    """An empty row has no softmax: minus infinity makes its exponentials 0."""
    return log_sum.where(log_sum > -math.inf, math.inf)


def _blocks(views: Tensor, gamma2: float, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the logits, -inf at the view itself and at its positive.

    Each is written over the last: new memory for each block would cost time, and break the heap into pieces.
    """
    count = len(views)
    scaled, space = gamma2 * views.T, views.new_empty(min(block, count), count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        rows = torch.arange(start, stop, device=views.device)
        logits = torch.mm(views[start:stop], scaled, out=space[: stop - start])
        excluded = torch.stack([rows, (rows + count // 2) % count], 1)
        yield slice(start, stop), logits.scatter_(1, excluded, -math.inf)
