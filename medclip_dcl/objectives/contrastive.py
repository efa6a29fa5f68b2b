"""The debiased contrastive loss: InfoNCE, constant and sample-specific correction are one function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus


class ContrastiveStatistics(NamedTuple):
    """What to watch while a debiased objective trains; each a scalar, averaged over anchors."""

    at_floor: Tensor
    """Share of anchors whose corrected negative term fell to the floor: they hardly train."""
    class_probability: Tensor
    """Mean eta."""
    false_negative_mass: Tensor
    """Mean share of the negatives' mass that the correction takes for false negatives; at most 1, 0 without any."""


class RowStatistics(NamedTuple):
    """All that the loss needs to know of each anchor's row of logits s."""

    log_sum_negative: Float[Tensor, "anchor"]
    """log sum_n w_n exp s(x,u_n) over the negatives u_n; -inf without any."""
    log_count: Float[Tensor, "anchor"]
    """log N, N the negatives' total weight; -inf without any."""
    positive_logits: Float[Tensor, "anchor positive"]
    """s(x,v_m); padded to as many columns as the anchor with the most positives has."""
    is_positive: Bool[Tensor, "anchor positive"]
    """False where padded."""
    log_mean_positive: Float[Tensor, "anchor"]
    """log mean_m exp s(x,v_m)."""


class _Correction(NamedTuple):
    """What debiasing makes of each row, (anchor,)."""

    log_g: Tensor
    is_at_floor: Tensor
    false_negative_mass: Tensor


def contrastive_loss(
    logits: Tensor,
    positives: Tensor,
    *,
    class_probability: float | Tensor = 0.0,
    floor: float | Tensor = -math.inf,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Contrastive loss, corrected for false negatives anchor by anchor.

    With s the logits, N the negatives' total weight and M positives (Wang et al., MLHC 2023, eq. 7 and 8;
    Chuang et al., NeurIPS 2020, eq. 7 and 8)::

        g    = max{ 1/(1-eta) * [ mean_n exp s(x,u_n) - eta * mean_m exp s(x,v_m) ],  exp(floor) }
        loss = -log  exp s(x,x+) / ( exp s(x,x+) + N * g )

    averaged over the M positives x+ of an anchor (choice, not from the papers, which have one). ``eta = 0`` is
    cross entropy (InfoNCE), a constant eta is DCL, one eta for each anchor the sample-specific loss. All of it
    is computed in log space and in float32 at least. Gradients flow into the logits, eta, the floor and the
    weights above 0 (a weight of 0 takes its candidate out, and gets none). `torch.func` and second derivatives
    work, but `vmap` takes values unchecked.

    Args:
        logits: (anchor, candidate) similarities s.
        positives: (anchor,) integers, the column of each anchor's positive; or (anchor, candidate) bool.
        class_probability: eta in [0, 1): the chance that a random candidate fits the anchor; one number or
            (anchor,).
        floor: the least logit, -gamma^2; a number or a scalar tensor (gradients flow into it).
        weights: (anchor, candidate), at least 0: weights of the negatives; positive columns are ignored. The
            mean over negatives is weighted and N is the sum. An anchor with N = 0 costs 0 and counts in the mean.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (anchor,) with reduction "none".

    Raises:
        ValueError: shapes that do not fit, no anchor, eta outside [0, 1), weights that are negative or not finite, a
            floor that is NaN or not one number, an anchor without a positive, an unknown reduction.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        >>> round(contrastive_loss(logits, torch.tensor([0, 1])).item(), 4)
        0.1269
    """
    check_reduction(reduction)
    rows = _row_statistics(logits, positives, weights)
    return reduced(losses_of_rows(rows, class_probability, floor), reduction)


def losses_of_rows(
    rows: RowStatistics, class_probability: float | Tensor = 0.0, floor: float | Tensor = -math.inf
) -> Float[Tensor, "anchor"]:
    """`contrastive_loss` of each anchor from the statistics of its row, however they were computed.

    Arguments and errors as there.
    """
    eta = _checked_class_probability(rows.log_count, class_probability)
    exponent = rows.log_count + _correction(rows, eta, floor).log_g
    losses = softplus(exponent[:, None] - rows.positive_logits)
    losses = losses.where(rows.is_positive, 0).sum(1) / rows.is_positive.sum(1)
    return losses.where(_has_negatives(rows), 0)


def check_reduction(reduction: str) -> None:
    """ValueError unless `reduction` is "mean", "sum" or "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')


def reduced(losses: Float[Tensor, "anchor"], reduction: str) -> Tensor:
    """Mean or sum of the anchors' losses, or the losses themselves."""
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


@torch.no_grad()
def contrastive_statistics(
    logits: Tensor,
    positives: Tensor,
    *,
    class_probability: float | Tensor = 0.0,
    floor: float | Tensor = -math.inf,
    weights: Tensor | None = None,
) -> ContrastiveStatistics:
    """Share of anchors at the floor, mean eta and mean false-negative mass of `contrastive_loss`.

    Arguments and errors as there. The false-negative mass of an anchor is
    ``eta * mean_m exp s(x,v_m) / mean_n exp s(x,u_n)``, at most 1.
    """
    rows = _row_statistics(logits, positives, weights)
    eta = _checked_class_probability(rows.log_count, class_probability)
    correction = _correction(rows, eta, floor)
    return ContrastiveStatistics(
        at_floor=correction.is_at_floor.float().mean(),
        class_probability=eta.mean(),
        false_negative_mass=correction.false_negative_mass.mean(),
    )


class _NegativesAndPositives(torch.autograd.Function):
    """(anchor,) log-sum-exp of the columns that are no positives, and the logits of those that are.

    One function, so that one matrix is written in each direction: autograd's own backward of logsumexp, masking
    and gather would write half a dozen (4,096 anchors: 2.5 times the time). It keeps the logits and (anchor,) results
    and rebuilds the softmax; in place, unless the gradient is itself to be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        return log_sum_exp_(logits.scatter(1, columns, -math.inf)), logits.gather(1, columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs, output[0])

    @staticmethod
    def jvp(ctx: Any, of_logits: Tensor, _: None) -> tuple[Tensor, Tensor]:
        _, columns, _ = ctx.saved_tensors
        return (_softmax(*ctx.saved_tensors) * of_logits).sum(1), of_logits.gather(1, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, gradient_of_positives: Tensor) -> tuple[Tensor, None]:
        logits, columns, log_sum = ctx.saved_tensors
        # The padding repeats a positive with a gradient of 0, hence scatter, then add.
        if torch.is_grad_enabled():
            found = _softmax(logits, columns, log_sum) * gradient[:, None]
            return found.scatter_add(1, columns, gradient_of_positives), None
        found = (logits - _divisor(log_sum)).exp_().mul_(gradient[:, None])
        return found.scatter_(1, columns, 0).scatter_add_(1, columns, gradient_of_positives), None


def _softmax(logits: Tensor, columns: Tensor, log_sum: Tensor) -> Tensor:
    """Softmax of the negatives, 0 elsewhere, in operations that can be differentiated again."""
    # Masked before exp: a positive far above the negatives would overflow, and be infinity times 0.
    return (logits - _divisor(log_sum)).scatter(1, columns, -math.inf).exp()


def _divisor(log_sum: Tensor) -> Tensor:
    """(anchor, 1) log-sum-exp; an empty row has no softmax: minus infinity makes its exponentials 0."""
    return log_sum.where(log_sum > -math.inf, math.inf)[:, None]


def log_sum_exp_(matrix: Float[Tensor, "row column"]) -> Float[Tensor, "row"]:
    """Log-sum-exp of each row; -inf where all are. Overwrites the matrix, torch.logsumexp would take another."""
    if not matrix.shape[1]:
        return matrix.new_full((len(matrix),), -math.inf)
    largest = matrix.amax(1, keepdim=True)
    shift = largest.where(largest > -math.inf, 0)
    return matrix.sub_(shift).exp_().sum(1).log_().add_(shift[:, 0])


def _row_statistics(logits: Tensor, positives: Tensor, weights: Tensor | None) -> RowStatistics:
    """The statistics of a matrix of logits; in float32 at least."""
    columns, is_positive = _positive_columns(logits, positives)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if weights is None:
        log_count = (logits.shape[1] - is_positive.sum(1)).to(logits.dtype).log()
    else:
        log_weights = _log_weights(logits, columns, weights)
        log_count, _ = _NegativesAndPositives.apply(log_weights, columns)
        logits = logits + log_weights
    log_sum_negative, positive_logits = _NegativesAndPositives.apply(logits, columns)
    return RowStatistics(
        log_sum_negative=log_sum_negative,
        log_count=log_count,
        positive_logits=positive_logits,
        is_positive=is_positive,
        log_mean_positive=_log_mean_exp(positive_logits, is_positive),
    )


def _log_mean_exp(positive_logits: Tensor, is_positive: Tensor) -> Tensor:
    if positive_logits.shape[1] == 1:
        return positive_logits[:, 0]
    return positive_logits.where(is_positive, -math.inf).logsumexp(1) - is_positive.sum(1).log()


def _has_negatives(rows: RowStatistics) -> Tensor:
    return rows.log_count > -math.inf


def _correction(rows: RowStatistics, eta: Tensor, floor: float | Tensor) -> _Correction:
    """log g = max{ log[(mean_n exp s - eta mean_m exp s) / (1 - eta)], floor } of each anchor, and where it fell."""
    least = torch.as_tensor(floor, dtype=eta.dtype, device=eta.device)
    if least.dim() or _any(least.isnan()):
        raise ValueError(f"floor must be one number, the least logit, got {floor}")
    has_negatives = _has_negatives(rows)
    # Anchors without negatives cost 0 in the end; until then nothing of theirs may be infinite.
    log_negative = (rows.log_sum_negative - rows.log_count).where(has_negatives, 0)
    # The branch that is not taken must be finite too: its gradient is multiplied by zero.
    is_zero = eta == 0
    mass = (eta.masked_fill(is_zero, 1).log() + rows.log_mean_positive - log_negative).clamp(max=0).exp()
    # log 0 has no gradient, but the product has; its factor is kept finite for the same reason.
    largest = int(math.log(torch.finfo(eta.dtype).max))
    mass = mass.where(~is_zero, eta * (rows.log_mean_positive - log_negative).clamp(max=largest).exp())
    is_correctable = mass < 1
    corrected = log_negative + torch.log1p(-mass.where(is_correctable, 0)) - torch.log1p(-eta)
    is_above = is_correctable & (corrected > least)
    # NaN is below nothing: without this a NaN logit would pass for an anchor at the floor.
    log_g = corrected.where(is_above | log_negative.isnan(), least)
    return _Correction(log_g, ~is_above & has_negatives, mass.where(has_negatives, 0))


def _positive_columns(logits: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """(anchor, positive) columns from either form of `positives`, and False where they are padding."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point of shape (anchor, candidate), got {logits.dtype} {tuple(logits.shape)}"
        )
    anchors, candidates = logits.shape
    if not anchors:
        raise ValueError(f"logits must hold at least one anchor, got shape {tuple(logits.shape)}")
    if positives.dtype == torch.bool:
        if positives.shape != logits.shape:
            raise ValueError(
                f"bool positives must have the logits' shape {tuple(logits.shape)}, got {tuple(positives.shape)}"
            )
        if _any(~positives.any(1)):
            without = (~positives.any(1)).nonzero().flatten()
            raise ValueError(
                f"{without.numel()} of {anchors} anchors have no positive (first: {int(without[0])})"
            )
        return _padded_columns(positives)
    is_integer = not (positives.is_floating_point() or positives.is_complex())
    if not is_integer or positives.shape != (anchors,):
        raise ValueError(
            f"positives must be integers of shape ({anchors},) or bool of shape {tuple(logits.shape)}, "
            f"got {positives.dtype} {tuple(positives.shape)}"
        )
    columns = positives.to(logits.device, torch.int64)[:, None]
    if _any((columns < 0) | (columns >= candidates)):
        raise ValueError(f"positives must be columns in [0, {candidates}), got {positives.tolist()}")
    return columns, torch.ones_like(columns, dtype=torch.bool)


def _padded_columns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of each row's True, padded with the row's first; False where padded."""
    try:
        rows, columns = mask.nonzero().unbind(1)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise RuntimeError(
            "contrastive_loss under torch.func.vmap takes the positives of each problem as integers (anchor,): bool "
            "ones have another number in each row; loop over the problems"
        ) from error
    counts = mask.sum(1)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows), device=mask.device) - starts[rows]
    widest = int(counts.max()) if len(counts) else 1
    padded = columns[starts][:, None].repeat(1, widest)
    padded[rows, places] = columns
    return padded, torch.arange(widest, device=mask.device) < counts[:, None]


def _any(mask: Tensor) -> bool:
    """True if an element is; False where `torch.func.vmap` hides the values: it takes arguments unchecked."""
    try:
        if mask.any():
            return True
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
    return False


def _checked_class_probability(like: Tensor, class_probability: float | Tensor) -> Tensor:
    """(anchor,) eta, checked; anchors, dtype and device are those of `like`."""
    anchors = like.shape[0]
    eta = torch.as_tensor(class_probability, dtype=like.dtype, device=like.device)
    if eta.shape not in ((), (anchors,)):
        raise ValueError(
            f"class_probability must be a number or of shape ({anchors},), got {tuple(eta.shape)}"
        )
    eta = eta.expand(anchors)
    is_wrong = ~((eta >= 0) & (eta < 1))
    if _any(is_wrong):
        wrong = is_wrong.nonzero().flatten()
        first = int(wrong[0])
        raise ValueError(
            f"class_probability must lie in [0, 1); {wrong.numel()} of {anchors} anchors do not "
            f"(first: anchor {first}, {eta[first].item():g})"
        )
    return eta


def _log_weights(logits: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    """(anchor, candidate) log weights: 0 on positives, -inf where the weight is 0."""
    if weights.shape != logits.shape:
        raise ValueError(
            f"weights must have the logits' shape {tuple(logits.shape)}, got {tuple(weights.shape)}"
        )
    weights = weights.to(logits.dtype).scatter(1, columns, 1)
    if _any(~((weights >= 0) & weights.isfinite())):
        raise ValueError("weights of negatives must be finite and at least 0")
    counts = weights > 0
    return weights.where(counts, 1).log().masked_fill(~counts, -math.inf)
