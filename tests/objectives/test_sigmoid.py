"""The sigmoid loss against a loop over its pairs and against the risk that its correction estimates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import (
    LanguageModelClassProbability,
    RemoveByLabel,
    SigmoidLoss,
    contrastive_loss,
    sigmoid_loss,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, by_loop, make_batch


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def term(bias):
    """Loss of one anchor, pair by pair; negatives are (score, weight)."""

    def of_anchor(positive_scores, negative_scores, eta, floor):
        count = sum(w for _, w in negative_scores)
        of_positives = sum(-log_sigmoid(s + bias) for s in positive_scores) / len(positive_scores)
        if count == 0:
            return of_positives
        as_negatives = sum(-log_sigmoid(-(s + bias)) for s in positive_scores) / len(positive_scores)
        of_negatives = sum(w * -log_sigmoid(-(s + bias)) for s, w in negative_scores) / count
        g = max((of_negatives - eta * as_negatives) / (1 - eta), -log_sigmoid(-(floor + bias)))
        return of_positives + count * g

    return of_anchor


@pytest.mark.parametrize("gamma2, bias", [(2.0, 0.5), (10.0, -10.0)])
@pytest.mark.parametrize("same_text", ["negative", "positive", "ignore"])
@pytest.mark.parametrize("views", [1, 3])
def test_is_the_loop(views, same_text, gamma2, bias):
    labels = torch.zeros(4, 14)
    labels[[1, 3], CHEXPERT.index("Edema")] = 1.0
    for rule in (None, RemoveByLabel()):
        regions, sentences, batch = make_batch(views, **({} if rule is None else {"labels": labels}))
        similarity = GlobalCosine(gamma2=gamma2).double()
        objective = InBatchObjective(
            LanguageModelClassProbability(a=0.25, k=0.2), rule, same_text=same_text, loss=SigmoidLoss(bias)
        )
        loss, figures = objective(similarity, regions, sentences, batch)
        eta = [0.25 * math.exp(-0.2 * i) for i in range(6)]

        def weight(sentence, image, rule=rule):
            return 0.0 if rule is not None and {IMAGE_OF[sentence], image} <= {1, 3} else 1.0

        logits = similarity(regions, sentences)
        expected = by_loop(logits, views, same_text, eta, 0.0, -gamma2, weight, term(bias))
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert figures["bias"].item() == bias and 0 < figures["corrected_share"].item() <= 1
        assert figures["at_floor"].item() > 0 or gamma2 == 2.0


def test_without_a_class_probability_it_is_siglip():
    """Equations of the paper: one positive, the sum over all pairs, divided by the size of the batch."""
    logits = 8 * torch.rand(5, 5, dtype=torch.float64) - 6
    labels = 2 * torch.eye(5) - 1
    total = -sum(
        log_sigmoid(float(labels[i, j] * logits[i, j])) for i, j in itertools.product(range(5), repeat=2)
    )
    found = sigmoid_loss(logits, torch.eye(5, dtype=torch.bool))
    assert found.item() == pytest.approx(total / 5, rel=1e-12)


ETA = 0.2
POSITIVE = {0: 0.5, 1: 0.3, 2: 0.2, 3: 0.0, 4: 0.0}
"""p+ over the points of a finite world, seen from one anchor."""
NEGATIVE = {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
"""p-; a point may be a positive or a negative."""
SCORES = [1.0, 0.4, 0.1, -0.6, -1.0]
CANDIDATES = 3


def expectation(loss_of) -> float:
    """Of the loss, over every draw of a positive from p+ and of the candidates from p = eta p+ + (1 - eta) p-."""
    unlabelled = {z: ETA * POSITIVE[z] + (1 - ETA) * NEGATIVE[z] for z in POSITIVE}
    draws = list(itertools.product(POSITIVE, repeat=CANDIDATES + 1))
    chances = torch.tensor(
        [POSITIVE[v] * math.prod(unlabelled[u] for u in rest) for v, *rest in draws], dtype=torch.float64
    )
    assert chances.sum().item() == pytest.approx(1.0)
    logits = torch.tensor(SCORES, dtype=torch.float64)[torch.tensor(draws)]
    is_positive = (torch.arange(CANDIDATES + 1) == 0).expand(len(draws), -1)
    return float((chances * loss_of(logits, is_positive)).sum())


def test_the_correction_is_unbiased():
    """The floor does not bind here: eta times the largest term of a positive is below the least of a candidate."""

    def softplus(s: float) -> float:
        return math.log(1 + math.exp(s))

    assert ETA * softplus(max(SCORES)) < softplus(min(SCORES))
    risk = sum(chance * softplus(-SCORES[z]) for z, chance in POSITIVE.items())
    risk += CANDIDATES * sum(chance * softplus(SCORES[z]) for z, chance in NEGATIVE.items())
    options: dict[str, Any] = {"class_probability": ETA, "reduction": "none"}
    found = expectation(lambda logits, is_positive: sigmoid_loss(logits, is_positive, **options))
    assert found == pytest.approx(risk, rel=1e-12)
    without = expectation(lambda logits, is_positive: sigmoid_loss(logits, is_positive, reduction="none"))
    assert without > risk + 0.1
    # A floor that binds for some draws biases upwards.
    floored = expectation(
        lambda logits, is_positive: sigmoid_loss(logits, is_positive, least=-0.5, **options)
    )
    assert floored > risk + 0.01
    # The logarithm of the debiased contrastive loss makes its plug-in estimate biased.
    exact = sum(
        POSITIVE[v]
        * -math.log(
            math.exp(SCORES[v])
            / (
                math.exp(SCORES[v])
                + CANDIDATES * sum(chance * math.exp(SCORES[z]) for z, chance in NEGATIVE.items())
            )
        )
        for v in POSITIVE
    )
    contrastive = expectation(lambda logits, is_positive: contrastive_loss(logits, is_positive, **options))
    assert abs(contrastive - exact) > 0.01


def test_gradients_are_finite_also_at_the_floor():
    logits = torch.tensor([[90.0, -3.0, 2.0], [-110.0, 30.0, -110.0], [5.0, 5.0, 5.0]], requires_grad=True)
    is_positive = torch.tensor([[True, False, False], [True, False, False], [True, True, True]])
    loss = sigmoid_loss(logits, is_positive, class_probability=0.3, least=-110.0, reduction="none")
    loss.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and loss.isfinite().all()
    # At the floor the negatives of the first anchor have no gradient; the third has no negatives.
    assert logits.grad[0, 1:].abs().max() == 0
    torch.testing.assert_close(logits.grad[2], -torch.sigmoid(torch.tensor(-5.0)).expand(3) / 3)
    torch.testing.assert_close(loss[2], torch.nn.functional.softplus(torch.tensor(-5.0)))
