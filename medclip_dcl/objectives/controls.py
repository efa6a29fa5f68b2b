"""Control arms of a study of eta: its weight alone, its stop alone, and decoupled contrastive learning.

With one positive that is also the correction's, eta weighs an anchor's gradient until the corrected negative term is at
its floor e^(-gamma^2), where only the attraction log(1 + N e^(-gamma^2 - s+)) is left (docs/theory.md). N is the total
weight of the anchor's negatives, B = 1 + N. No paper has the first two losses.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.contrastive import (
    AnchorLogits,
    eta_of_anchors,
    floor_reached,
    losses_of_rows,
    rows_of_logits,
)


class StoppedInfoNCE(AnchorLoss):
    """InfoNCE that stops an anchor where eta stops it.

    The value is the debiased loss. Its gradient is InfoNCE's above the floor and the debiased loss's at it, which the
    anchor reaches once the positive's softmax share is 1 / (eta B + (1 - eta)(1 + N e^(-gamma^2 - s+))) or more. With
    several positives, both losses are the means over them.
    """

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        rows, correction = _rows(anchors), _correction(anchors)
        info_nce, debiased = losses_of_rows(rows), losses_of_rows(rows, *correction)
        of_info_nce = debiased.detach() + (info_nce - info_nce.detach())
        return debiased.where(floor_reached(rows, *correction), of_info_nce)

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Share of anchors that are stopped."""
        return {"at_floor": floor_reached(_rows(anchors), *_correction(anchors)).float().mean()}


class WeightedInfoNCE(AnchorLoss):
    """InfoNCE with the weight that eta gives each anchor's gradient, and without a stop::

        loss = w l / mean w,    w = 1 + eta B exp(-d) / (1 - eta)

    l is InfoNCE's loss and d the debiased one. w is 1 / (1 - eta B exp(-l)) above the floor, and at the floor what that
    is where the anchor reaches it. w has no gradient. Its mean is that of the anchors of all processes; in evaluation
    that of this process's, the anchors of the batch. With several positives l and d are the means over them.
    """

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        weights = _weights(anchors)
        mean = gather_with_grad(weights).mean() if self.training else weights.mean()
        return losses_of_rows(_rows(anchors)) * weights / mean

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Least and greatest weight of an anchor before the division by their mean."""
        weights = _weights(anchors)
        return {"anchor_weight_min": weights.amin(), "anchor_weight_max": weights.amax()}


class DecoupledLoss(AnchorLoss):
    """Decoupled contrastive learning (Yeh et al., ECCV 2022): InfoNCE without the positive in the denominator::

        loss = -s(x,x+) + log sum_n w_n exp s(x,u_n)

    It equals the debiased loss with eta = 1/B, up to a constant of B, until that one stops. Yeh et al. weigh the
    positive's term in a variant, which is not this one. An anchor without negatives costs 0; several positives count as
    the mean of their losses (choice). There is no class probability.
    """

    uses_class_probability = False

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        least = torch.finfo(anchors.logits.dtype).min
        log_weights = anchors.weights.where(anchors.weights > 0, 1).log().where(anchors.weights > 0, least)
        log_sum = (anchors.logits + log_weights).logsumexp(1)
        positive = anchors.logits.masked_fill(~anchors.is_positive, 0).sum(1) / anchors.is_positive.sum(1)
        return (log_sum - positive).where(anchors.weights.sum(1) > 0, 0)


def _rows(anchors: Anchors) -> AnchorLogits:
    return rows_of_logits(anchors.logits, anchors.is_positive, anchors.weights)


def _correction(anchors: Anchors) -> tuple[float | Tensor, Tensor]:
    """eta and the floor."""
    return anchors.class_probability, -anchors.gamma2


@torch.no_grad()
def _weights(anchors: Anchors) -> Float[Tensor, "anchor"]:
    rows = _rows(anchors)
    eta = eta_of_anchors(anchors.class_probability, rows.log_count)
    debiased = losses_of_rows(rows, *_correction(anchors))
    return 1 + eta / (1 - eta) * (1 + rows.log_count.exp()) * (-debiased).exp()
