"""CMC's cross-view loss: each view of an image picks the other out of the batch, debiased."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.common.errors import check_range
from medclip_dcl.objectives.class_probability import ClassProbability
from medclip_dcl.objectives.contrastive import contrastive_loss, contrastive_statistics
from medclip_dcl.unimodal.views import LossAndFigures, Views, ViewsObjective


class CrossView(ViewsObjective):
    """Loss between the two views of each image in both directions, debiased (Tian et al., 2019; DCL, section 5.2).

    The anchor is one view of an image, the other view its positive, and the other views of the B - 1 other images are
    its negatives: `contrastive_loss` of the (B, B) matrix of s = gamma^2 * cosine and of its transpose, with floor
    -gamma^2. CMC adds both directions, here they are averaged (choice); its negatives come from a memory of all images,
    here from the batch (choice). The correction has M = 1, the positive itself, as in DCL's table 1.

    Args:
        class_probability: eta of each image, for both directions; None for 0, which is no correction.
        gamma2: gamma^2, one over the temperature; above 0 (CMC: 1 / 0.07).
    """

    def __init__(self, class_probability: ClassProbability | None = None, gamma2: float = 1 / 0.07) -> None:
        super().__init__()
        check_range("objective", "(0, inf)", gamma2=gamma2)
        self.class_probability, self.gamma2 = class_probability, gamma2
        self.requires = () if class_probability is None else class_probability.requires

    def loss_of_batch(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Loss; share of anchors at the floor, mean eta, mean corrected share, share of capped etas."""
        first, second = normalize(embeddings, dim=2)
        logits, rule = self.gamma2 * first @ second.T, self.class_probability
        both, own = torch.cat([logits, logits.T]), torch.arange(len(logits), device=logits.device)
        eta = 0.0 if rule is None else rule(**{name: fields[name] for name in rule.requires})
        etas = torch.as_tensor(eta, device=logits.device).expand(len(logits)).repeat(2)
        options: dict[str, Any] = {"class_probability": etas, "floor": -self.gamma2}
        loss = contrastive_loss(both, own.repeat(2), **options)
        if rule is None:
            return loss, {}
        figures = contrastive_statistics(both, own.repeat(2), **options)._asdict()
        return loss, {**figures, "capped": torch.as_tensor(rule.share_capped)}
