"""The pairwise sigmoid loss (SigLIP), corrected for false negatives anchor by anchor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from medclip_dcl.common.errors import check_range
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.contrastive import (
    at_least_float32,
    count_of_positives,
    eta_of_anchors,
    reduce_losses,
    weights_of_negatives,
)


class _Terms(NamedTuple):
    """Terms of the loss of each anchor."""

    positive: Float[Tensor, "anchor"]
    """mean_m softplus(-s(x,v_m))"""
    negative: Float[Tensor, "anchor"]
    """N g"""
    is_at_floor: Bool[Tensor, "anchor"]
    corrected_share: Float[Tensor, "anchor"]
    """Share of the negatives' term that the correction subtracts, in [0, 1]."""


def sigmoid_loss(
    logits: Float[Tensor, "anchor candidate"],
    is_positive: Bool[Tensor, "anchor candidate"],
    *,
    class_probability: float | Tensor = 0.0,
    least: float | Tensor = -math.inf,
    weights: Float[Tensor, "anchor candidate"] | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Pairwise sigmoid loss, corrected for false negatives anchor by anchor.

    With s the logits, bias included, N the total weight of the negatives u_n and M positives v_m::

        g    = max{ 1/(1-eta) * [ mean_n softplus(s(x,u_n)) - eta * mean_m softplus(s(x,v_m)) ], softplus(least) }
        loss = mean_m softplus(-s(x,v_m)) + N * g

    ``eta = 0`` is SigLIP's loss (Zhai et al., ICCV 2023): the sum over an anchor's pairs, averaged over anchors; its
    one positive is a mean over M here (choice). Computed in float32 or float64. Gradients flow into the logits, eta,
    the weights and, where it is reached, the floor.

    Args:
        logits: s, any real numbers.
        is_positive: at least one of each anchor.
        class_probability: eta in [0, 1): the chance that a random candidate fits the anchor; one number or (anchor,).
        least: what s is at least; a number or a scalar tensor.
        weights: at least 0, of the negatives; positive columns are ignored. None: 1.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (anchor,) with reduction "none".

    Raises:
        ValueError: eta outside [0, 1), weights that are negative or not finite, an anchor without a positive, an
            unknown reduction. Values that are not on the host are not read: there a wrong one makes the loss NaN.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        >>> round(sigmoid_loss(logits, torch.eye(2, dtype=torch.bool)).item(), 4)
        1.0910
    """
    terms = _terms(logits, is_positive, class_probability, least, weights)
    return reduce_losses(terms.positive + terms.negative, reduction)


def _terms(
    logits: Tensor,
    is_positive: Tensor,
    class_probability: float | Tensor,
    least: float | Tensor,
    weights: Tensor | None,
) -> _Terms:
    logits = at_least_float32(logits)
    weights = torch.ones_like(logits) if weights is None else weights
    weights = weights_of_negatives(weights, is_positive, logits)
    n_positive = count_of_positives(is_positive, logits)
    eta = eta_of_anchors(class_probability, n_positive)

    def of_positives(values: Tensor) -> Tensor:
        return values.masked_fill(~is_positive, 0.0).sum(1) / n_positive

    count = weights.sum(1)
    as_negatives = softplus(logits)
    unlabelled = (weights * as_negatives).sum(1)
    subtracted = eta * count * of_positives(as_negatives)
    floor = count * softplus(torch.as_tensor(least, dtype=logits.dtype, device=logits.device))
    corrected = (unlabelled - subtracted) / (1 - eta)
    return _Terms(
        positive=of_positives(softplus(-logits)),
        negative=torch.maximum(corrected, floor),
        is_at_floor=(corrected <= floor) & (count > 0),
        corrected_share=(subtracted / unlabelled.where(unlabelled > 0, 1)).clamp(max=1),
    )


class SigmoidLoss(AnchorLoss):
    """SigLIP's pairwise sigmoid loss on s = gamma^2 * similarity + b (Zhai et al., ICCV 2023), debiased by eta.

    SigLIP's temperature t is the similarity's gamma^2: 10 initially, learned as exp(t') as here. Without a class
    probability it is SigLIP's loss; with one the correction of `sigmoid_loss` is subtracted anchor by anchor, which no
    paper has (docs/other_losses.md derives it).

    Every pair of a sentence and an image counts once, whichever of the two is called the anchor: `image_to_text` above
    0 is refused.

    Args:
        bias: initial b (-10: SigLIP, that of batches of 20,000 and more); choose about -log N for N negatives, the log
            odds of a random pair. Much lower, small batches first pull all pairs together.
    """

    uses_image_to_text = False

    def __init__(self, bias: float = -10.0) -> None:
        super().__init__()
        check_range("loss", "(-inf, inf)", bias=bias)
        self._initial = bias
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def config(self) -> dict[str, Any]:
        return {"bias": self._initial}

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        terms = self._terms(anchors)
        return terms.positive + terms.negative

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        terms = self._terms(anchors)
        return {
            "bias": self.bias.detach(),
            "at_floor": terms.is_at_floor.float().mean(),
            "corrected_share": terms.corrected_share.mean(),
        }

    def _terms(self, anchors: Anchors) -> _Terms:
        return _terms(
            anchors.logits + self.bias,
            anchors.is_positive,
            anchors.class_probability,
            self.bias - anchors.gamma2,
            anchors.weights,
        )
