"""Control arms of a study of eta: its weight alone, its stop alone, and decoupled contrastive learning.

With one positive that is also the correction's, the debiased loss of an anchor is log(exp(l) - eta B) - log(1 - eta), l
its InfoNCE loss and B = 1 + N: eta weighs the anchor's gradient and stops it (docs/theory.md). N is the total weight of
the anchor's negatives. No paper has the first two losses.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.contrastive import contrastive_loss, eta_of_anchors


class StoppedInfoNCE(AnchorLoss):
    """InfoNCE that stops an anchor where eta would::

        loss = max{ l - log(1 + eta N), 0 }

    The gradient is InfoNCE's where the positive's softmax share exp(-l) is below 1/(1 + eta N), the share at which the
    debiased loss with its floor at 0 stops, and 0 from there on. With several positives l is their mean.
    """

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        return (info_nce(anchors) - _log_stop(anchors)).clamp(min=0)

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Share of anchors that are stopped."""
        is_stopped = (info_nce(anchors) <= _log_stop(anchors)) & (anchors.weights.sum(1) > 0)
        return {"at_floor": is_stopped.float().mean()}


class WeightedInfoNCE(AnchorLoss):
    """InfoNCE with the weight that eta gives each anchor's gradient, and without a stop::

        loss = w l / mean w,    w = 1 / (1 - eta B q),    q = min{ exp(-l), 1/(1 + eta N) }

    w has no gradient. Its mean is that of the anchors of all processes; in evaluation that of this process's, the
    anchors of the batch. With several positives l is their mean.
    """

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        losses = info_nce(anchors)
        weights = _weights(anchors, losses)
        mean = gather_with_grad(weights).mean() if self.training else weights.mean()
        return losses * weights / mean

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Least and greatest weight of an anchor before the division by their mean."""
        weights = _weights(anchors, info_nce(anchors))
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


def info_nce(anchors: Anchors) -> Float[Tensor, "anchor"]:
    """InfoNCE of each anchor; of several positives the mean."""
    return contrastive_loss(anchors.logits, anchors.is_positive, weights=anchors.weights, reduction="none")


def _log_stop(anchors: Anchors) -> Float[Tensor, "anchor"]:
    count = anchors.weights.sum(1)
    return torch.log1p(eta_of_anchors(anchors.class_probability, count) * count)


@torch.no_grad()
def _weights(anchors: Anchors, losses: Float[Tensor, "anchor"]) -> Float[Tensor, "anchor"]:
    count, share = anchors.weights.sum(1), (-losses.maximum(_log_stop(anchors))).exp()
    return 1 / (1 - eta_of_anchors(anchors.class_probability, count) * (1 + count) * share)
