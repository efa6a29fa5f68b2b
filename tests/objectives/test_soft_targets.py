"""Soft targets by the similarity of texts, against a loop over anchors and candidates."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import (
    SoftTargets,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, STUDY, knows, make_batch
from tests.objectives.test_negative_weights import cosine


def term(candidates, temperature):
    """Cross entropy of one anchor, and the target of its positives; candidates are (logit, cosine, is positive)."""
    targets = [math.exp((1.0 if is_positive else c) / temperature) for _, c, is_positive in candidates]
    total = sum(math.exp(s) for s, _, _ in candidates)
    shares = [target / sum(targets) for target in targets]
    loss = -sum(share * (s - math.log(total)) for share, (s, _, _) in zip(shares, candidates, strict=True))
    own = sum(share for share, (_, _, is_positive) in zip(shares, candidates, strict=True) if is_positive)
    return loss, own


@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("same_text", ["negative", "positive", "ignore"])
@pytest.mark.parametrize("views", [1, 3])
def test_is_the_loop_in_both_directions(views, same_text, temperature):
    of_sentence, of_image = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    regions, sentences, batch = make_batch(views, text_embedding=of_image)
    batch["anchor"] = {"sentence_embedding": of_sentence}
    similarity = GlobalCosine(gamma2=5.0).double()
    objective = InBatchObjective(loss=SoftTargets(temperature), image_to_text=0.4, same_text=same_text)
    loss, figures = objective(similarity, regions, sentences, batch)
    logits = similarity(regions, sentences).tolist()
    cosines = [[cosine(of_sentence[s], of_image[i]) for i in range(4)] for s in range(6)]

    def role(sentence, image):
        """Positive, negative or neither."""
        if IMAGE_OF[sentence] == image:
            return True
        if same_text == "negative" or not knows(sentence, image):
            return False
        return True if same_text == "positive" else None

    of_sentences = []
    for s in range(6):
        candidates = []
        for view in range(4 * views):
            i = view % 4
            is_positive = role(s, i)
            if is_positive is False and views > 1 and (view >= 4 or STUDY[i] == STUDY[IMAGE_OF[s]]):
                continue
            if is_positive is not None:
                candidates.append((logits[s][view], cosines[s][i], is_positive))
        of_sentences.append(term(candidates, temperature))

    def is_candidate(sentence, image):
        is_positive = role(sentence, image)
        is_other_image = views > 1 and STUDY[image] == STUDY[IMAGE_OF[sentence]]
        return is_positive is not None and (is_positive or not is_other_image)

    of_images = [
        term([(logits[s][i], cosines[s][i], role(s, i)) for s in range(6) if is_candidate(s, i)], temperature)
        for i in range(4)
    ]
    means = [sum(loss for loss, _ in terms) / len(terms) for terms in (of_sentences, of_images)]
    assert loss.item() == pytest.approx(0.6 * means[0] + 0.4 * means[1], rel=1e-9)
    expected = sum(own for _, own in of_sentences) / 6
    assert figures["positive_target"].item() == pytest.approx(expected, rel=1e-9)


def test_ignored_candidates_have_neither_loss_nor_gradient():
    """Finite in float32, whatever their logits."""
    regions, sentences, batch = make_batch(text_embedding=torch.randn(4, 3))
    batch["anchor"] = {"sentence_embedding": torch.randn(6, 3)}
    regions = regions.float().requires_grad_()
    objective = InBatchObjective(loss=SoftTargets(), same_text="ignore", image_to_text=0.5)
    loss, _ = objective(GlobalCosine(gamma2=100.0), regions, sentences.float(), batch)
    loss.backward()
    assert regions.grad is not None and regions.grad.isfinite().all() and regions.grad.abs().max() > 0
