"""Image-only contrastive loss of two views (SimCLR), debiased, in blocks of rows."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.objectives.contrastive import Rows, at_least_float32, losses_of_rows, reduce_losses

# Logits of a block: 1 MiB of float32 stays in a CPU's second-level cache (choice, measured), 16 MiB fill another
# device (choice, not measured).
_BLOCK_LOGITS = {"cpu": 2**18}
_BLOCK_LOGITS_ELSEWHERE = 2**22
_FEWEST_ROWS = 16

_NOT_IN_BLOCKS = (
    "simclr_loss in several blocks supports neither torch.func nor a second derivative (create_graph=True): set block "
    "to the number of views, 2 * images"
)


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

    Equal to `contrastive_loss` of the (2B, 2B) matrix without its diagonal, but only one block of its rows is in
    memory at a time: the backward pass computes each block again. Computed in float32 or float64.

    Args:
        first: (image, dim) embeddings of the first views, of any norm: they are normalised here.
        second: (image, dim) embeddings of the second views.
        gamma2: gamma^2, one over the temperature; above 0 (2: SSD and DCL).
        class_probability: eta in [0, 1): the chance that another image is of the anchor's class; one number,
            (image,) or (2 * image,).
        reduction: "mean", "sum" or "none".
        block: rows of a block; None chooses by device. `torch.func` and second derivatives need all 2B rows in one
            block, as None has them up to 512 views on a CPU.

    Returns:
        A scalar, or (2 * image,) with reduction "none". A single image has no negatives and costs 0.

    Raises:
        ValueError: no embeddings or two shapes, gamma2 or block out of range, eta of another shape or outside [0, 1),
            an unknown reduction.

    Example:
        >>> first = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> round(simclr_loss(first, first).item(), 4)
        0.2395
    """
    _check(first, second, gamma2, block)
    images = len(first)
    if isinstance(class_probability, Tensor) and class_probability.dim():
        if class_probability.shape not in ((images,), (2 * images,)):
            raise ValueError(
                f"class_probability must be a number or of shape ({images},) or ({2 * images},), "
                f"got {tuple(class_probability.shape)}"
            )
        class_probability = class_probability.repeat(2 * images // len(class_probability))
    with torch.autocast(device_type=first.device.type, enabled=False):
        views = normalize(at_least_float32(torch.cat([first, second])), dim=1)
        positive = (gamma2 * (views[:images] * views[images:]).sum(1)).repeat(2)
        rows = Rows(
            log_sum_negative=_log_sum_negatives(views, gamma2, block),
            log_count=positive.new_full((2 * images,), 2 * images - 2).log(),
            positive_logits=positive[:, None],
            is_positive=torch.ones(2 * images, 1, dtype=torch.bool, device=views.device),
        )
        return reduce_losses(losses_of_rows(rows, class_probability, -gamma2), reduction)


def _log_sum_negatives(views: Tensor, gamma2: float, block: int | None) -> Tensor:
    """(view,) log-sum-exp of each view's logits with all views but itself and its positive."""
    count = len(views)
    if block is None:
        block = max(_FEWEST_ROWS, _BLOCK_LOGITS.get(views.device.type, _BLOCK_LOGITS_ELSEWHERE) // count)
    if count == 2:
        return views.new_full((2,), -math.inf)
    if block >= count:
        return _logits_of_negatives(views, gamma2 * views.T, 0, count).logsumexp(1)
    bounds = [(start, min(start + block, count)) for start in range(0, count, block)]
    return _BlockedLogSum.apply(views, gamma2, bounds)


def _logits_of_negatives(views: Tensor, scaled: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop of the logits; -inf at the view itself and at its positive."""
    rows = torch.arange(start, stop, device=views.device)
    excluded = torch.stack([rows, (rows + len(views) // 2) % len(views)], 1)
    return (views[start:stop] @ scaled).scatter_(1, excluded, -math.inf)


class _BlockedLogSum(torch.autograd.Function):
    """`_logits_of_negatives(...).logsumexp(1)`, block by block of rows, in the backward pass again.

    With a_i the gradient of row i and p_ij its softmax, the gradient of view i is gamma^2 sum_j (a_i p_ij + a_j p_ji)
    z_j: the logits are symmetric, so a block of rows suffices. By hand because torch's `checkpoint` of the same blocks
    needs 3.6 x the time at 2B = 8,192.
    """

    @staticmethod
    def forward(views: Tensor, gamma2: float, bounds: list[tuple[int, int]]) -> Tensor:
        scaled = gamma2 * views.T
        return torch.cat([_logits_of_negatives(views, scaled, *bound).logsumexp(1) for bound in bounds])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, list[tuple[int, int]]], output: Tensor) -> None:
        views, ctx.gamma2, ctx.bounds = inputs
        ctx.save_for_backward(views, output)

    @staticmethod
    def jvp(*arguments: Any) -> NoReturn:
        raise RuntimeError(_NOT_IN_BLOCKS)

    vmap = jvp

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(_NOT_IN_BLOCKS)
        views, log_sum = ctx.saved_tensors
        found = []
        with torch.autocast(device_type=views.device.type, enabled=False):
            scaled = ctx.gamma2 * views.T
            for start, stop in ctx.bounds:
                logits = _logits_of_negatives(views, scaled, start, stop)
                of_others = (logits - log_sum).exp_().mul_(gradient)
                own = logits.sub_(log_sum[start:stop, None]).exp_().mul_(gradient[start:stop, None])
                found.append(own.add_(of_others) @ views)
        return torch.cat(found).mul_(ctx.gamma2), None, None


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
