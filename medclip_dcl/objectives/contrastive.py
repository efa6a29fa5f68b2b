"""The debiased contrastive loss: InfoNCE, constant and sample-specific correction are one function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from medclip_dcl.common.devices import is_on_host


def checked(values: Tensor, is_wrong: Tensor, error: Callable[[], Exception]) -> Tensor:
    """Return `values`; wrong ones raise on the host and become NaN on another device.

    Reading a value of another device would stall it. NaN reaches the loss, at which training stops (`training.finite`).
    """
    if not is_on_host(values):
        return values.masked_fill(is_wrong, math.nan)
    if _any(is_wrong):
        raise error()
    return values


class ContrastiveStatistics(NamedTuple):
    """Statistics to log while a debiased objective trains; each a scalar, averaged over anchors."""

    at_floor: Tensor
    """Share of anchors whose corrected negative term is at the floor: they hardly train."""
    class_probability: Tensor
    """Mean eta."""
    corrected_share: Tensor
    """Mean share of the negatives' sum of exp s that the correction subtracts, in [0, 1]."""


class AnchorLogits(NamedTuple):
    """The statistics of each anchor's logits s that the loss needs."""

    log_sum_negative: Float[Tensor, "anchor"]
    """log sum_n w_n exp s(x,u_n) over the negatives u_n; -inf without any."""
    log_count: Float[Tensor, "anchor"]
    """log N, N the total weight of the negatives; -inf without any."""
    positive_logits: Float[Tensor, "anchor positive"]
    """s(x,v_m); columns beyond an anchor's number of positives mean nothing."""
    n_positive: Float[Tensor, "anchor"]
    log_mean_positive: Float[Tensor, "anchor"] | None = None
    """log mean_m exp s(x,v_m) of the correction; None: of the positives above."""

    @property
    def is_positive(self) -> Bool[Tensor, "anchor positive"]:
        """True in an anchor's own columns."""
        columns = torch.arange(self.positive_logits.shape[1], device=self.n_positive.device)
        return columns < self.n_positive[:, None]


def contrastive_loss(
    logits: Tensor,
    positives: Tensor,
    *,
    class_probability: float | Tensor = 0.0,
    floor: float | Tensor = -math.inf,
    weights: Tensor | None = None,
    correction_logits: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Contrastive loss, corrected for false negatives anchor by anchor.

    With s the logits, N the total weight of the negatives and M positives (Wang et al., MLHC 2023, eq. 7 and 8;
    Chuang et al., NeurIPS 2020, eq. 7 and 8)::

        g    = max{ 1/(1-eta) * [ mean_n exp s(x,u_n) - eta * mean_m exp s(x,v_m) ],  exp(floor) }
        loss = -log  exp s(x,x+) / ( exp s(x,x+) + N * g )

    averaged over an anchor's positives x+ (choice, not from the papers, which have one x+), which are also the M v_m
    unless ``correction_logits`` has others: the derivation draws v_m apart from x+ (docs/theory.md). ``eta = 0`` is
    cross entropy (InfoNCE), a constant eta is DCL, one eta per anchor is the sample-specific loss. Computed in log
    space, in float32 or float64. Gradients flow into the logits, eta, the floor and the positive weights. Under
    `torch.func.vmap` the values of the arguments are not checked, and positives must be integers.

    Args:
        logits: (anchor, candidate) similarities s.
        positives: (anchor,) integers, the column of each anchor's positive; or (anchor, candidate) bool.
        class_probability: eta in [0, 1): the chance that a random candidate fits the anchor; one number or
            (anchor,).
        floor: the least logit, -gamma^2; a number or a scalar tensor.
        weights: (anchor, candidate), at least 0: weights of the negatives; positive columns are ignored. The
            mean over negatives is weighted and N is the sum. An anchor with N = 0 costs 0 and counts in the mean.
        correction_logits: (anchor, M) s(x,v_m) of the correction's positives; None: those of the positives.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (anchor,) with reduction "none".

    Raises:
        ValueError: shapes that do not fit, no anchor, eta outside [0, 1), weights that are negative or not finite, a
            floor that is NaN or not one number, an anchor without a positive, an unknown reduction. Values that are
            not on the host are not read: there a wrong one makes the loss NaN.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        >>> round(contrastive_loss(logits, torch.tensor([0, 1])).item(), 4)
        0.1269
    """
    rows = rows_of_logits(logits, positives, weights, correction_logits)
    return reduce_losses(losses_of_rows(rows, class_probability, floor), reduction)


@torch.no_grad()
def contrastive_statistics(
    logits: Tensor,
    positives: Tensor,
    *,
    class_probability: float | Tensor = 0.0,
    floor: float | Tensor = -math.inf,
    weights: Tensor | None = None,
    correction_logits: Tensor | None = None,
) -> ContrastiveStatistics:
    """Share of anchors at the floor, mean eta and mean corrected share of `contrastive_loss`.

    Arguments and errors as there. The corrected share of an anchor is
    ``eta * mean_m exp s(x,v_m) / mean_n exp s(x,u_n)``, at most 1. Where x+ is the one v_m, it says how near the anchor
    is to its floor; where the v_m are other members of its class, it estimates the false negatives' share of the sum.
    """
    rows = rows_of_logits(logits, positives, weights, correction_logits)
    return statistics_of_rows(rows, class_probability, floor)


def losses_of_rows(
    rows: AnchorLogits, class_probability: float | Tensor = 0.0, floor: float | Tensor = -math.inf
) -> Float[Tensor, "anchor"]:
    """`contrastive_loss` of each anchor from the statistics of its logits."""
    is_plain = not isinstance(class_probability, Tensor) and not isinstance(floor, Tensor)
    if is_plain and (class_probability, floor) == (0, -math.inf):
        # The same values as of `_log_g` in half the time, which small batches notice.
        log_g = (rows.log_sum_negative - rows.log_count).where(rows.log_count != -math.inf, 0)
    else:
        log_g, _, _ = _log_g(rows, eta_of_anchors(class_probability, rows.log_count), floor)
    losses = softplus((rows.log_count + log_g)[:, None] - rows.positive_logits)
    total = losses.where(rows.is_positive, 0).sum(1).masked_fill(rows.log_count == -math.inf, 0)
    return total / rows.n_positive


@torch.no_grad()
def statistics_of_rows(
    rows: AnchorLogits, class_probability: float | Tensor = 0.0, floor: float | Tensor = -math.inf
) -> ContrastiveStatistics:
    """`contrastive_statistics` from the statistics of each anchor's logits."""
    eta = eta_of_anchors(class_probability, rows.log_count)
    _, is_at_floor, share = _log_g(rows, eta, floor)
    return ContrastiveStatistics(is_at_floor.float().mean(), eta.mean(), share.mean())


@torch.no_grad()
def floor_reached(
    rows: AnchorLogits, class_probability: float | Tensor, floor: float | Tensor
) -> Bool[Tensor, "anchor"]:
    """True for anchors whose corrected negative term is at the floor."""
    return _log_g(rows, eta_of_anchors(class_probability, rows.log_count), floor)[1]


def reduce_losses(losses: Float[Tensor, "anchor"], reduction: str) -> Tensor:
    """Mean or sum of the anchors' losses, or the losses themselves."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction: expected "mean", "sum" or "none", found {reduction!r}')
    return losses if reduction == "none" else getattr(losses, reduction)()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32, all else as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rows_of_logits(
    logits: Tensor, positives: Tensor, weights: Tensor | None, correction_logits: Tensor | None = None
) -> AnchorLogits:
    """Statistics of each anchor's logits. Arguments and errors of `contrastive_loss`."""
    if logits.dim() != 2 or not logits.is_floating_point() or not len(logits):
        raise ValueError(
            "logits: expected floating point of shape (anchor, candidate) with at least one anchor, found "
            f"{logits.dtype} {tuple(logits.shape)}"
        )
    is_mask = positives.dtype == torch.bool
    is_number = positives.is_floating_point() or positives.is_complex()
    if is_number or positives.shape != (logits.shape if is_mask else logits.shape[:1]):
        raise ValueError(
            f"positives: expected integers of shape ({len(logits)},) or bool of the logits' shape "
            f"{tuple(logits.shape)}, found {positives.dtype} {tuple(positives.shape)}"
        )
    logits = at_least_float32(logits)
    positives = positives.to(logits.device)
    numbers = torch.arange(logits.shape[1], device=logits.device)
    is_positive = positives if is_mask else numbers == positives[:, None]
    n_positive = count_of_positives(is_positive, logits)
    columns = positives[:, None]
    if is_mask:
        # The number of positives of another device is not read.
        most = int(n_positive.max()) if is_on_host(logits) else len(numbers)
        columns = positives.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    # Excluded candidates are at the least number: the gradient of logsumexp is NaN in a row of -inf.
    least = torch.finfo(logits.dtype).min
    weighted = logits
    if weights is None:
        log_count = (logits.shape[1] - n_positive).log()
    else:
        weights = weights_of_negatives(weights, is_positive, logits)
        is_kept = ~(weights <= 0)
        log_weights = weights.where(is_kept, 1).log().where(is_kept, least)
        log_count = _log_sum_exp(log_weights)
        weighted = logits + log_weights
    log_mean_positive = None
    if correction_logits is not None:
        if (
            correction_logits.dim() != 2
            or len(correction_logits) != len(logits)
            or not correction_logits.numel()
        ):
            raise ValueError(
                f"correction_logits: expected the shape ({len(logits)}, M) with M of at least 1, found "
                f"{tuple(correction_logits.shape)}"
            )
        others = correction_logits.to(logits)
        log_mean_positive = others.logsumexp(1) - math.log(others.shape[1])
    return AnchorLogits(
        log_sum_negative=_log_sum_exp(weighted.masked_fill(is_positive, least)),
        log_count=log_count,
        positive_logits=logits.gather(1, columns.long()),
        n_positive=n_positive,
        log_mean_positive=log_mean_positive,
    )


def count_of_positives(is_positive: Tensor, like: Tensor) -> Float[Tensor, "anchor"]:
    """Number of each anchor's positives, at least one."""
    count = is_positive.sum(1).to(like.dtype)

    def error() -> ValueError:
        without = (count == 0).nonzero().flatten().tolist()
        return ValueError(
            f"{len(without)} of {len(count)} anchors have no positive among the {is_positive.shape[1]} candidates "
            f"(first: {without[0]})"
        )

    return checked(count, count == 0, error)


def weights_of_negatives(weights: Tensor, is_positive: Tensor, like: Tensor) -> Tensor:
    """Weights in the logits' precision, 0 at the positives."""
    if weights.shape != like.shape:
        raise ValueError(
            f"weights: expected the logits' shape {tuple(like.shape)}, found {tuple(weights.shape)}"
        )
    weights = weights.to(like.dtype).masked_fill(is_positive, 0.0)
    error = ValueError("weights: expected finite numbers of at least 0 for the negatives")
    return checked(weights, ~((weights.amin() >= 0) & (weights.amax() < math.inf)), lambda: error)


def _log_sum_exp(values: Tensor) -> Tensor:
    """Log-sum-exp of each row; -inf, without a gradient, where all of it is excluded."""
    log_sum = values.logsumexp(1)
    return log_sum.masked_fill(log_sum <= torch.finfo(values.dtype).min, -math.inf)


def _log_g(rows: AnchorLogits, eta: Tensor, floor: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log g of each anchor, True where it is at the floor, and the corrected share.

    log g = max{ log mean_n exp s + log(1 - share) - log(1 - eta), floor }, share = eta mean_m exp s / mean_n exp s.
    """
    least = torch.as_tensor(floor, dtype=eta.dtype, device=eta.device)
    if least.dim():
        raise ValueError(f"floor: expected one number, the least logit, found {floor}")
    least = checked(least, least.isnan(), lambda: ValueError("floor: expected a number, found NaN"))
    log_positive = rows.positive_logits[:, 0]
    if rows.log_mean_positive is not None:
        log_positive = rows.log_mean_positive
    elif rows.positive_logits.shape[1] > 1:
        log_sum = rows.positive_logits.where(rows.is_positive, -math.inf).logsumexp(1)
        log_positive = log_sum - rows.n_positive.log()
    # Everything below stays finite in the branches that `where` does not take: their gradient is multiplied by 0.
    has_negatives = rows.log_count != -math.inf
    log_negative = (rows.log_sum_negative - rows.log_count).where(has_negatives, 0)
    is_zero = eta == 0
    share = (eta.masked_fill(is_zero, 1).log() + log_positive - log_negative).clamp(max=0).exp()
    # At eta = 0 the share is 0, but not its gradient into eta.
    largest = int(math.log(torch.finfo(eta.dtype).max))
    share = share.where(~is_zero, eta * (log_positive - log_negative).clamp(max=largest).exp())
    is_correctable = share < 1
    corrected = log_negative + torch.log1p(-share.where(is_correctable, 0)) - torch.log1p(-eta)
    is_above = is_correctable & (corrected > least)
    # NaN compares false: without this a NaN logit or eta would pass for an anchor at the floor.
    log_g = corrected.where(is_above | corrected.isnan(), least)
    return log_g, ~is_above & has_negatives, share.where(has_negatives, 0)


def eta_of_anchors(
    class_probability: float | Tensor, like: Float[Tensor, "anchor"]
) -> Float[Tensor, "anchor"]:
    eta = torch.as_tensor(class_probability, dtype=like.dtype, device=like.device)
    if eta.shape not in ((), like.shape):
        raise ValueError(
            f"class_probability: expected a number or the shape ({len(like)},), found {tuple(eta.shape)}"
        )
    eta = eta.expand(like.shape)
    is_wrong = ~((eta >= 0) & (eta < 1))

    def error() -> ValueError:
        wrong = eta[is_wrong]
        return ValueError(
            f"class_probability: expected values in [0, 1), found {wrong[0].item():g} (one of {len(wrong)} of "
            f"{len(eta)} anchors)"
        )

    return checked(eta, is_wrong, error)


def _any(mask: Tensor) -> bool:
    """True if an element is; False under `torch.func.vmap`, which hides values."""
    try:
        return bool(mask.any())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return False
