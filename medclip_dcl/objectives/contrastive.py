"""The debiased contrastive loss: InfoNCE, constant and sample-specific correction are one function."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


class ContrastiveStatistics(NamedTuple):
    """What to watch while a debiased objective trains; each a scalar, averaged over anchors."""

    at_floor: Tensor
    """Share of anchors whose corrected negative term fell to the floor: they hardly train."""
    class_probability: Tensor
    """Mean eta."""
    false_negative_mass: Tensor
    """Mean share of the negatives' mass that the correction takes for false negatives, at most 1."""


class _Terms(NamedTuple):
    """The pieces of the loss for each anchor, in log space."""

    logits: Tensor
    is_positive: Tensor
    log_count: Tensor
    log_g: Tensor
    is_at_floor: Tensor
    has_negatives: Tensor
    class_probability: Tensor
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
    is computed in log space and in float32 at least.

    Args:
        logits: (anchor, candidate) similarities s.
        positives: (anchor,) int64, the column of each anchor's positive; or (anchor, candidate) bool.
        class_probability: eta in [0, 1): the chance that a random candidate fits the anchor; one number or
            (anchor,).
        floor: the least logit, -gamma^2; a number or a scalar tensor (gradients flow into it).
        weights: (anchor, candidate), at least 0: weights of the negatives; positive columns are ignored. The
            mean over negatives is weighted and N is the sum. An anchor with N = 0 costs 0 and counts in the mean.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (anchor,) with reduction "none".

    Raises:
        ValueError: shapes that do not fit, eta outside [0, 1), weights that are negative or not finite, a floor that
            is NaN or not one number, an anchor without a positive, an unknown reduction.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        >>> round(contrastive_loss(logits, torch.tensor([0, 1])).item(), 4)
        0.1269
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    terms = _terms(logits, positives, class_probability, floor, weights)
    loss_by_pair = softplus((terms.log_count + terms.log_g)[:, None] - terms.logits)
    losses = (loss_by_pair * terms.is_positive).sum(1) / terms.is_positive.sum(1)
    losses = torch.where(terms.has_negatives, losses, torch.zeros_like(losses))
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
    terms = _terms(logits, positives, class_probability, floor, weights)
    return ContrastiveStatistics(
        at_floor=terms.is_at_floor.float().mean(),
        class_probability=terms.class_probability.mean(),
        false_negative_mass=terms.false_negative_mass.mean(),
    )


def _terms(
    logits: Tensor,
    positives: Tensor,
    class_probability: float | Tensor,
    floor: float | Tensor,
    weights: Tensor | None,
) -> _Terms:
    is_positive = _positive_mask(logits, positives)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    eta = _checked_class_probability(logits, class_probability)
    log_weights = _log_weights(logits, is_positive, weights)

    has_negatives = ~torch.isneginf(log_weights).all(dim=1)
    # Rows without negatives take weight 1 everywhere, so that nothing in them is NaN; their loss is set to 0.
    log_weights = torch.where(has_negatives[:, None], log_weights, torch.zeros_like(log_weights))
    log_count = torch.logsumexp(log_weights, 1)
    log_negative = torch.logsumexp(log_weights + logits, 1) - log_count
    log_positive = torch.logsumexp(logits.masked_fill(~is_positive, -math.inf), 1) - is_positive.sum(1).log()

    # log[(exp l_neg - eta exp l_pos) / (1 - eta)]; the branch that is not taken must be finite: its gradient
    # is multiplied by zero.
    log_mass = torch.log(eta) + log_positive - log_negative
    is_correctable = log_mass < 0
    mass = torch.where(is_correctable, log_mass, torch.full_like(log_mass, -math.inf)).exp()
    is_correctable = is_correctable & (mass < 1)
    mass = torch.where(is_correctable, mass, torch.zeros_like(mass))
    corrected = log_negative + torch.log1p(-mass) - torch.log1p(-eta)
    least = torch.as_tensor(floor, dtype=logits.dtype, device=logits.device)
    if least.dim() or least.isnan():
        raise ValueError(f"floor must be one number, the least logit, got {floor}")
    is_above = is_correctable & (corrected > least)
    log_g = torch.where(is_above, corrected, least)
    return _Terms(
        logits=logits,
        is_positive=is_positive,
        log_count=log_count,
        log_g=log_g,
        is_at_floor=~is_above & has_negatives,
        has_negatives=has_negatives,
        class_probability=eta,
        false_negative_mass=log_mass.clamp(max=0).exp(),
    )


def _positive_mask(logits: Tensor, positives: Tensor) -> Tensor:
    """(anchor, candidate) bool from either form of `positives`."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point of shape (anchor, candidate), got {logits.dtype} {tuple(logits.shape)}"
        )
    anchors, candidates = logits.shape
    if positives.dtype == torch.bool:
        if positives.shape != logits.shape:
            raise ValueError(
                f"bool positives must have the logits' shape {tuple(logits.shape)}, got {tuple(positives.shape)}"
            )
        without = (~positives.any(1)).nonzero().flatten()
        if without.numel():
            raise ValueError(
                f"{without.numel()} of {anchors} anchors have no positive (first: {int(without[0])})"
            )
        return positives
    if positives.dtype != torch.int64 or positives.shape != (anchors,):
        raise ValueError(
            f"positives must be int64 of shape ({anchors},) or bool of shape {tuple(logits.shape)}, "
            f"got {positives.dtype} {tuple(positives.shape)}"
        )
    if ((positives < 0) | (positives >= candidates)).any():
        raise ValueError(f"positives must be columns in [0, {candidates}), got {positives.tolist()}")
    return torch.arange(candidates, device=logits.device) == positives[:, None]


def _checked_class_probability(logits: Tensor, class_probability: float | Tensor) -> Tensor:
    """(anchor,) eta, checked."""
    anchors = logits.shape[0]
    eta = torch.as_tensor(class_probability, dtype=logits.dtype, device=logits.device)
    if eta.shape not in ((), (anchors,)):
        raise ValueError(
            f"class_probability must be a number or of shape ({anchors},), got {tuple(eta.shape)}"
        )
    eta = eta.expand(anchors)
    wrong = (~((eta >= 0) & (eta < 1))).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise ValueError(
            f"class_probability must lie in [0, 1); {wrong.numel()} of {anchors} anchors do not "
            f"(first: anchor {first}, {eta[first].item():g})"
        )
    return eta


def _log_weights(logits: Tensor, is_positive: Tensor, weights: Tensor | None) -> Tensor:
    """(anchor, candidate) log weights of the negatives; -inf on positives and where the weight is 0."""
    if weights is None:
        return torch.zeros_like(logits).masked_fill(is_positive, -math.inf)
    if weights.shape != logits.shape:
        raise ValueError(
            f"weights must have the logits' shape {tuple(logits.shape)}, got {tuple(weights.shape)}"
        )
    weights = weights.to(logits.dtype)
    if not ((weights >= 0) & weights.isfinite()).masked_fill(is_positive, True).all():
        raise ValueError("weights of negatives must be finite and at least 0")
    counts = (weights > 0) & ~is_positive
    return torch.where(counts, weights, torch.ones_like(weights)).log().masked_fill(~counts, -math.inf)
