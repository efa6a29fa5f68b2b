"""Posterior targets: the candidates share an anchor's target by the chance that the sentence is true of each."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from medclip_dcl.common.devices import widest_float
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.objectives.anchor_losses import Anchors
from medclip_dcl.objectives.contrastive import checked
from medclip_dcl.objectives.soft_targets import SoftTargets


class PosteriorTargets(SoftTargets):
    """Cross entropy with targets by P(x, r), the chance that sentence x is true of the image with report r.

    A report says few of the sentences that are true of its image. `medclip-dcl rank --posterior` learns from training
    reports and their labels the chance g(x, r) that r says x. With c(x) the mean of g over the training reports that
    say x, P = min{ g / c, 1 } (Elkan and Noto, KDD 2008, whose c is one number); P = 1 for an anchor's positives. The
    loss of an anchor (not from a paper), with the N negatives n and all candidates j::

        D    = sum over positives of exp s + N / sum_n w_n * sum_n w_n exp s_n,    w_n = 1 - removal P(x, r_n)
        loss = sum_j t_j (log D - s_j),    t_j = P(x, r_j) / sum_i P(x, r_i)

    Without removal these are soft targets; where P of all negatives is 0 and there is one positive, InfoNCE. Sentences
    alone are anchors, as P of two sentences cannot be compared. A subclass with another `posterior`, and the fields
    that it requires, has other targets.

    Args:
        removal: share of P that is taken off a negative's weight, in [0, 1) (0: choice).
    """

    anchor_requires: tuple[str, ...] = ("sentence_posterior",)
    candidate_requires: tuple[str, ...] = ("report_posterior",)
    uses_image_to_text = False

    def __init__(self, removal: float = 0.0) -> None:
        super().__init__()
        check_range("loss", "[0, 1)", removal=removal)
        self.removal = removal

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        if not self.removal:
            return super().forward(anchors)
        weights = (1 - self.removal * self._fits(anchors)).masked_fill(~anchors.is_negative, 0)
        mean = weights.sum(1, keepdim=True) / anchors.is_negative.sum(1, keepdim=True)
        log_weights = (weights / mean).where(anchors.is_negative, 1).log()
        # The logits s + log w give the denominator D; the targets' mean of log w is not part of the loss.
        weighted = super().forward(anchors._replace(logits=anchors.logits + log_weights))
        return weighted + (self.targets(anchors) * log_weights).sum(1)

    @torch.no_grad()
    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Mean target of an anchor's positives, all together, and share of anchors with no other target."""
        is_alone = (self._fits(anchors) * anchors.is_negative == 0).all(1)
        return {**super().figures(anchors), "no_other_target": is_alone.float().mean()}

    def targets(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        """Target probability of each candidate; 0 of one that is neither positive nor negative."""
        fits = self._fits(anchors)
        return fits / fits.sum(1, keepdim=True)

    def posterior(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        """P of each pair, in [0, 1]."""
        return posterior(anchors.of_anchors["sentence_posterior"], anchors.of_candidates["report_posterior"])

    def _fits(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        """P, 1 of positives, and 0 of a candidate that is neither positive nor negative."""
        fits = self.posterior(anchors).to(anchors.logits.dtype)
        least, most = fits.aminmax()
        error = UserError(f"{type(self).__name__}.posterior: expected P in [0, 1], found others")
        fits = checked(fits, ~((least >= 0) & (most <= 1)), lambda: error)
        is_candidate = anchors.is_positive | anchors.is_negative
        return fits.masked_fill(anchors.is_positive, 1).masked_fill(~is_candidate, 0)


def posterior(
    sentences: Float[Tensor, "sentence _"], reports: Float[Tensor, "report _"]
) -> Float[Tensor, "sentence report"]:
    """P = min{ g / c, 1 } from the vectors that `medclip-dcl rank --posterior` wrote, log c the last of a sentence's.

    g is the sigmoid of the vectors' product.
    """
    precise = widest_float(reports.device)
    logits = sentences[:, :-1].to(precise) @ reports.to(precise).T
    return (logsigmoid(logits) - sentences[:, -1:]).clamp(max=0).exp()
