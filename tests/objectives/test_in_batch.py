"""InBatchObjective against a loop over the formula: views, equal sentences, both directions, its figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal
from medclip_dcl.objectives import (
    LanguageModelClassProbability,
    RemoveByLabel,
    contrastive_loss,
    contrastive_statistics,
)
from medclip_dcl.objectives.in_batch import InBatchObjective

IMAGE_OF = [0, 0, 1, 2, 3, 3]
SENTENCE_ID = [5, 6, 7, 6, 8, 9]
STUDY = [40, 41, 40, 42]


def make_batch(views=1, **fields):
    generator = torch.Generator().manual_seed(1)
    regions = torch.randn(4 * views, 3, 5, dtype=torch.float64, generator=generator)
    sentences = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    batch = {
        "image_index": torch.tensor(IMAGE_OF),
        "view_of": torch.arange(4).repeat(views),
        "study_id": torch.tensor(STUDY),
        "sentence_id": torch.tensor(SENTENCE_ID),
        "anchor": {"log_p": -torch.arange(6, dtype=torch.float64)},
        "candidate": fields,
    }
    return regions, sentences, batch


def term(positive_scores, negative_scores, eta, floor):
    """Loss of one anchor: mean over its positives of -log e^s+ / (e^s+ + N g); negatives are (score, weight)."""
    count = sum(w for _, w in negative_scores)
    if count == 0:
        return 0.0
    mean_negative = sum(w * math.exp(s) for s, w in negative_scores) / count
    mean_positive = sum(math.exp(s) for s in positive_scores) / len(positive_scores)
    g = max((mean_negative - eta * mean_positive) / (1 - eta), math.exp(floor))
    losses = [-math.log(math.exp(s) / (math.exp(s) + count * g)) for s in positive_scores]
    return sum(losses) / len(losses)


def knows(sentence, image):
    """The image is of the sentence's study, or has the same sentence in the batch."""
    mine = [SENTENCE_ID[other] for other in range(6) if IMAGE_OF[other] == image]
    return STUDY[IMAGE_OF[sentence]] == STUDY[image] or SENTENCE_ID[sentence] in mine


def by_loop(
    logits,
    views,
    same_text,
    eta,
    image_to_text,
    floor,
    weight=lambda sentence, image: 1.0,
    term=term,
    knows=knows,
):
    """The objective, pair by pair; logits (sentence, view), first views first; `term` is the loss of an anchor."""
    logits = logits.detach()
    of_sentences, of_images = [], []
    for sentence in range(6):
        positive, negative = [], []
        for view in range(4 * views):
            image, score = view % 4, float(logits[sentence, view])
            is_known = image == IMAGE_OF[sentence] or (same_text != "negative" and knows(sentence, image))
            if image == IMAGE_OF[sentence] or (is_known and same_text == "positive"):
                positive.append(score)
            elif not is_known and view < 4 and (views == 1 or STUDY[image] != STUDY[IMAGE_OF[sentence]]):
                negative.append((score, weight(sentence, image)))
        of_sentences.append(term(positive, negative, eta[sentence], floor))
    for image in range(4):
        positive, negative = [], []
        own = [sentence for sentence in range(6) if IMAGE_OF[sentence] == image]
        for sentence in range(6):
            score = float(logits[sentence, image])
            is_known = sentence in own or (same_text != "negative" and knows(sentence, image))
            if sentence in own or (is_known and same_text == "positive"):
                positive.append(score)
            elif not is_known and (views == 1 or STUDY[IMAGE_OF[sentence]] != STUDY[image]):
                negative.append((score, weight(sentence, image)))
        of_images.append(term(positive, negative, sum(eta[s] for s in own) / len(own), floor))
    mean = [sum(losses) / len(losses) for losses in (of_sentences, of_images)]
    return (1 - image_to_text) * mean[0] + image_to_text * mean[1]


@pytest.mark.parametrize(
    "views, same_text, image_to_text, gamma2",
    [
        (1, "negative", 0.4, 14.0),
        (1, "positive", 1.0, 1.0),
        (1, "ignore", 0.0, 14.0),
        (2, "negative", 0.0, 1.0),
        (2, "positive", 0.4, 14.0),
        (2, "ignore", 1.0, 1.0),
        (3, "negative", 1.0, 14.0),
        (3, "positive", 0.0, 14.0),
        (3, "ignore", 0.4, 1.0),
    ],
)
def test_is_the_loop(views, same_text, image_to_text, gamma2):
    regions, sentences, batch = make_batch(views)
    similarity = GlobalCosine(gamma2=gamma2).double()
    objective = InBatchObjective(
        LanguageModelClassProbability(a=0.25, k=0.2), image_to_text=image_to_text, same_text=same_text
    )
    loss, figures = objective(similarity, regions, sentences, batch)
    eta = [0.25 * math.exp(-0.2 * i) for i in range(6)]
    expected = by_loop(similarity(regions, sentences), views, same_text, eta, image_to_text, -gamma2)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert figures["class_probability"].item() == pytest.approx(sum(eta) / 6)


@pytest.mark.parametrize(
    "views, image_to_text, same_text",
    [(1, 0.4, "negative"), (2, 0.0, "negative"), (1, 0.0, "positive"), (2, 0.4, "ignore")],
)
def test_with_weights_is_the_loop(views, image_to_text, same_text):
    labels = torch.zeros(4, 14)
    labels[[1, 3], CHEXPERT.index("Pleural Other")] = 1.0
    regions, sentences, batch = make_batch(views, labels=labels)
    batch["anchor"] = {}
    similarity = GlobalCosine().double()
    objective = InBatchObjective(
        negative_weights=RemoveByLabel(findings=["Pleural Other"]),
        image_to_text=image_to_text,
        same_text=same_text,
    )
    assert (objective.requires_of_sentences, objective.requires_of_images) == ((), ("labels",))

    def weight(sentence, image):
        return 0.0 if {IMAGE_OF[sentence], image} <= {1, 3} else 1.0

    loss, figures = objective(similarity, regions, sentences, batch)
    logits = similarity(regions, sentences)
    expected = by_loop(logits, views, same_text, [0.0] * 6, image_to_text, -14.0, weight)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    if same_text == "negative":
        # Sentence 2 (image 1) loses image 3, sentences 4 and 5 (image 3) lose image 1: 3 of 18 negatives.
        # With two views images 0 and 2 of one study are no negatives of each other's three sentences.
        assert figures["weight"].item() == pytest.approx(15 / 18 if views == 1 else 12 / 15)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("same_text", ["negative", "ignore"])
def test_drawn_images_are_the_corrections_positives(m, same_text):
    """Against the loss with the logits of all pairs, of which each sentence takes those of its image's draws."""
    regions, sentences, batch = make_batch(1 + m)
    batch |= {"view_of": torch.arange(4), "has_others": torch.tensor([True, True, False, True])}
    similarity = LSENonLocal(dim=5, gamma2=4.0).double()
    rule = LanguageModelClassProbability(a=0.25, k=0.2)
    objective = InBatchObjective(rule, same_text=same_text, correction_images="sentence", correction_count=m)
    leaves = regions.requires_grad_(), sentences.requires_grad_()
    loss, figures = objective(similarity, *leaves, batch)
    every = similarity(regions, sentences)
    correction = torch.stack(
        [torch.stack([every[s, 4 * (1 + k) + IMAGE_OF[s]] for k in range(m)]) for s in range(6)]
    )
    weights = torch.tensor(
        [[float(same_text == "negative" or not knows(s, image)) for image in range(4)] for s in range(6)]
    ).double()
    arguments: dict[str, Any] = {
        "class_probability": rule(batch["anchor"]["log_p"]),
        "floor": -similarity.gamma2,
        "weights": weights,
        "correction_logits": correction,
    }
    expected = contrastive_loss(every[:, :4], torch.tensor(IMAGE_OF), **arguments)
    torch.testing.assert_close(loss, expected)
    parts = [*leaves, *similarity.parameters()]
    for found, wanted in zip(
        torch.autograd.grad(loss, parts), torch.autograd.grad(expected, parts), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    statistics = contrastive_statistics(every[:, :4], torch.tensor(IMAGE_OF), **arguments)
    torch.testing.assert_close(figures["corrected_share"], statistics.corrected_share)
    assert figures["correction_own"].item() == 0.25
