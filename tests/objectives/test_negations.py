"""Negations against a loop over sentences and images, and what it does to a negation that fits all images alike."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import Anchors, Negations
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, STUDY, by_loop, knows, make_batch

# Of two findings: labels of the four images, signs of the six sentences. Sentence 2 is the opposite of its own image.
STATES = [[1.0, 0.0], [0.0, math.nan], [-1.0, 1.0], [0.0, 1.0]]
SIGNS = [[1, 0], [0, -1], [1, 0], [0, 0], [-1, 1], [-1, 0]]


def is_opposite(sentence: int, image: int) -> bool:
    return any(
        (sign, label) in ((1, 0.0), (-1, 1.0))
        for sign, label in zip(SIGNS[sentence], STATES[image], strict=True)
    )


@pytest.mark.parametrize(
    "views, same_text", [(1, "negative"), (2, "positive"), (3, "ignore"), (2, "negative")]
)
@pytest.mark.parametrize("image_to_text", [0.0, 0.4])
def test_is_the_loop(views, same_text, image_to_text):
    regions, sentences, batch = make_batch(views, states=torch.tensor(STATES, dtype=torch.float64))
    batch["anchor"]["signs"] = torch.tensor(SIGNS, dtype=torch.int8)
    similarity = GlobalCosine(gamma2=5.0).double()
    objective = InBatchObjective(loss=Negations(0.7), same_text=same_text, image_to_text=image_to_text)
    loss, _ = objective(similarity, regions, sentences, batch)
    logits, terms = similarity(regions, sentences).tolist(), []
    for s in range(6):
        own, others = [], []
        for view in range(4 * views):
            i = view % 4
            is_known = same_text != "negative" and knows(s, i)
            if i == IMAGE_OF[s] or (is_known and same_text == "positive"):
                own.append((logits[s][view], is_opposite(s, i)))
            elif (
                not is_known
                and (views == 1 or (view < 4 and STUDY[i] != STUDY[IMAGE_OF[s]]))
                and is_opposite(s, i)
            ):
                others.append(math.exp(logits[s][view]))
        mean = sum(score for score, _ in own) / len(own)
        terms.append(0.0 if any(x for _, x in own) else math.log1p(sum(others) * math.exp(-mean)))
    assert 0 in terms and len({*terms}) > 2
    base = by_loop(similarity(regions, sentences), views, same_text, [0.0] * 6, image_to_text, -5.0)
    assert loss.item() == pytest.approx(base + (1 - image_to_text) * 0.7 * sum(terms) / 6, rel=1e-6)


def test_a_level_of_the_sentence_gets_no_gradient():
    """The term trains differences of images of one sentence, and is finite where nothing is opposite."""
    logits = torch.tensor([[2.0, -1.0, 60.0], [1.0, 0.0, 3.0]], requires_grad=True)
    of_anchors, of_candidates = (
        {"signs": torch.tensor([[-1], [0]])},
        {"states": torch.tensor([[0.0], [1.0], [1.0]])},
    )
    is_positive = torch.eye(2, 3, dtype=torch.bool)
    rest = (~is_positive, (~is_positive).float(), 0.0, torch.tensor(60.0), True, of_anchors, of_candidates)
    term = Negations().term(Anchors(logits, is_positive, *rest))
    term.sum().backward()
    assert logits.grad is not None and term.tolist() == pytest.approx([58.0, 0.0])
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
