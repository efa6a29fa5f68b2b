"""AnchorLoss: what a loss of one's own gets, is refused, and brings back from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import (
    AnchorLoss,
    Anchors,
    LanguageModelClassProbability,
    RemoveByLabel,
    contrastive_loss,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, make_batch


class Plugged(AnchorLoss):
    """The debiased contrastive loss by way of the interface."""

    def forward(self, anchors: Anchors) -> torch.Tensor:
        return contrastive_loss(
            anchors.logits,
            anchors.is_positive,
            class_probability=anchors.class_probability,
            floor=-anchors.gamma2,
            weights=anchors.weights,
            reduction="none",
        )


@pytest.mark.parametrize("views, same_text", [(1, "negative"), (1, "positive"), (3, "ignore")])
@pytest.mark.parametrize("by_label", [False, True])
def test_default_loss_through_the_interface_is_the_default(views, same_text, by_label):
    labels = torch.zeros(4, 14)
    labels[[1, 3], CHEXPERT.index("Edema")] = 1.0
    regions, sentences, batch = make_batch(views, **({"labels": labels} if by_label else {}))
    options: dict[str, Any] = {
        "class_probability": LanguageModelClassProbability(a=0.25, k=0.2),
        "negative_weights": RemoveByLabel() if by_label else None,
        "image_to_text": 0.4,
        "same_text": same_text,
    }
    found = [
        InBatchObjective(**options, loss=loss)(GlobalCosine().double(), regions, sentences, batch)
        for loss in (None, Plugged())
    ]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=0)
    for name in ("class_probability", "weight", "capped"):
        torch.testing.assert_close(found[1][1][name], found[0][1][name], check_dtype=False)


class Recorded(AnchorLoss):
    anchor_requires, candidate_requires = ("log_p",), ("grade",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Anchors] = []

    def forward(self, anchors: Anchors) -> torch.Tensor:
        self.seen.append(anchors)
        return anchors.logits.mean(1)


def test_losses_get_fields_of_both_directions():
    regions, sentences, batch = make_batch(grade=torch.tensor([3.0, 1.0, 4.0, 1.5]))
    objective = InBatchObjective(loss=(loss := Recorded()), image_to_text=0.5)
    assert objective.requires_of_sentences == ("log_p",) and objective.requires_of_images == ("grade",)
    objective(GlobalCosine(gamma2=9.0).double(), regions, sentences, batch)
    of_sentences, of_images = loss.seen
    own = batch["candidate"]["grade"][IMAGE_OF]
    assert of_sentences.is_of_sentences and not of_images.is_of_sentences
    for fields in (of_sentences.of_anchors, of_images.of_candidates):
        assert torch.equal(fields["log_p"], batch["anchor"]["log_p"]) and torch.equal(fields["grade"], own)
    for fields in (of_sentences.of_candidates, of_images.of_anchors):
        assert fields.keys() == {"grade"} and torch.equal(fields["grade"], batch["candidate"]["grade"])
    assert of_sentences.is_positive.tolist() == [[image == own for image in range(4)] for own in IMAGE_OF]
    assert torch.equal(of_images.is_positive, of_sentences.is_positive.T)
    assert torch.equal(of_sentences.weights.bool(), ~of_sentences.is_positive)
    torch.testing.assert_close(of_sentences.gamma2.item(), 9.0)


class Proud(AnchorLoss):
    uses_class_probability = uses_negative_weights = uses_image_to_text = False


class Scaled(AnchorLoss):
    """Has a parameter, an argument and a figure."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.start = start
        self.scale = nn.Parameter(torch.tensor(start))

    def forward(self, anchors: Anchors) -> torch.Tensor:
        losses = contrastive_loss(
            anchors.logits, anchors.is_positive, weights=anchors.weights, reduction="none"
        )
        return self.scale.exp() * losses - self.scale

    def figures(self, anchors: Anchors) -> dict[str, torch.Tensor]:
        return {"scale": self.scale}
