"""A loss that teaches negations: images whose labels are the opposite of a sentence fit it less than its own image."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.contrastive import contrastive_loss


class Negations(AnchorLoss):
    """InfoNCE, and for sentences as anchors a further term (not from a paper)::

        weight * softplus(log sum_o exp s(x,o) - s(x,x+))

    The opposites o are the negatives with label 1 for a finding that the sentence x denies, or 0 for one that it
    states; uncertain and blank labels are none. A level of the sentence's own changes nothing. An anchor has no term
    where its own image is opposite, too, and several positives count as their mean (choices). The loss of sentences has
    1 - `image_to_text` of the whole.
    """

    anchor_requires, candidate_requires = ("signs",), ("states",)
    uses_class_probability = False

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        check_range("loss", "(0, inf)", weight=weight)
        self.weight = weight

    def check(self, fields: Mapping[str, Tensor]) -> None:
        """Refuse labels without a finding that some images have and others have not."""
        if not ((fields["states"] == 1).any(0) & (fields["states"] == 0).any(0)).any():
            raise UserError(
                "labels.parquet: expected a finding with 1 and 0 of training images, found none; take another objective"
            )

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        losses = contrastive_loss(
            anchors.logits, anchors.is_positive, weights=anchors.weights, reduction="none"
        )
        return losses + self.weight * self.term(anchors) if anchors.is_of_sentences else losses

    def term(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        """softplus(log sum_o exp s(x,o) - s(x,x+)); 0, with finite gradients, without opposites."""
        opposite = anchors.logits.masked_fill(~self._is_opposite(anchors), -1e9).logsumexp(1)
        own = anchors.logits.masked_fill(~anchors.is_positive, 0.0).sum(1) / anchors.is_positive.sum(1)
        return softplus(opposite - own)

    def _is_opposite(self, anchors: Anchors) -> Bool[Tensor, "anchor candidate"]:
        signs, states = anchors.of_anchors["signs"], anchors.of_candidates["states"]
        counts = [(signs == x).float() @ (states == y).float().T for x, y in ((1, 0), (-1, 1))]
        is_opposite = counts[0] + counts[1] > 0
        return is_opposite & anchors.is_negative & ~(is_opposite & anchors.is_positive).any(1, keepdim=True)
