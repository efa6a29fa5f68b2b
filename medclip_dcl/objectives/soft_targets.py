"""Soft targets: the candidates share an anchor's target probability by the similarity of their texts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.errors import check_range
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.negative_weights import cosines


class SoftTargets(AnchorLoss):
    """Cross entropy with targets by the similarity of texts, after MedCLIP (Wang et al., EMNLP 2022).

    With c the cosine of frozen embeddings of the sentence and of the image's report, 1 for positives, the targets are
    softmax(c / temperature) over the candidates, and the loss of an anchor is -sum_j target_j log softmax(logits)_j.
    MedCLIP compares labels, where this compares texts; see docs/other_losses.md for what else differs. A temperature
    towards 0 gives InfoNCE, where an anchor has one positive.

    Args:
        temperature: of the targets, above 0 (0.05: choice). `medclip-dcl similar` prints what a temperature
            leaves to an anchor's own image.
    """

    anchor_requires: tuple[str, ...] = ("sentence_embedding",)
    candidate_requires: tuple[str, ...] = ("text_embedding",)
    uses_class_probability = uses_negative_weights = False

    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        check_range("loss", "(0, inf)", temperature=temperature)
        self.temperature = temperature

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        is_candidate = anchors.is_positive | anchors.is_negative
        log_share = anchors.logits.masked_fill(~is_candidate, -math.inf).log_softmax(1)
        # Outside the candidates 0 times a finite number, whose gradient is finite, too.
        return -(self.targets(anchors) * log_share.masked_fill(~is_candidate, 0.0)).sum(1)

    @torch.no_grad()
    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Mean target of an anchor's positives, all together."""
        return {"positive_target": (self.targets(anchors) * anchors.is_positive).sum(1).mean()}

    def targets(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        """Target probability of each candidate; 0 of one that is neither positive nor negative."""
        mine, other = "sentence_embedding", "text_embedding"
        if not anchors.is_of_sentences:
            mine, other = other, mine
        cosine = cosines(anchors.of_anchors[mine], anchors.of_candidates[other])
        cosine = cosine.masked_fill(anchors.is_positive, 1.0).to(anchors.logits.dtype)
        is_candidate = anchors.is_positive | anchors.is_negative
        return (cosine / self.temperature).masked_fill(~is_candidate, -math.inf).softmax(1)
