"""Near-duplicate texts: the images that they find against a loop, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import LanguageModelClassProbability, NearTexts
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, by_loop, knows, make_batch
from tests.objectives.test_negative_weights import cosine


@pytest.mark.parametrize(
    "sentences, images, threshold, compare",
    [
        (1, 2, -1.0, "sentences"),
        (1, 2, 0.4, "reports"),
        (7, 4, 1.0, "sentences"),
        (7, 4, 0.0, "reports"),
        (11, 5, 0.4, "sentences"),
        (11, 5, 1.0, "reports"),
    ],
)
def test_is_the_loop(sentences, images, threshold, compare):
    of_sentence = torch.randn(sentences, 3, dtype=torch.float64)
    of_image = torch.randn(images, 3, dtype=torch.float64)
    own = torch.randint(images, (sentences,))
    rule = NearTexts(threshold, compare)
    fields = {"sentence_embedding": of_sentence}, {"text_embedding": of_image}
    found = rule(own, images, *fields)
    assert found.shape == (sentences, images)
    for s in range(sentences):
        for i in range(images):
            if compare == "reports":
                near = [cosine(of_image[own[s]], of_image[i])]
            else:
                near = [cosine(of_sentence[s], of_sentence[o]) for o in range(sentences) if own[o] == i]
            # A text and itself are at 1, give or take the last digit.
            expected = any(x > threshold and not math.isclose(x, threshold) for x in near)
            assert found[s, i] == expected


@pytest.mark.parametrize("compare, threshold", [("sentences", 0.6), ("reports", 0.2)])
@pytest.mark.parametrize("same_text", ["positive", "ignore"])
@pytest.mark.parametrize("views", [1, 3])
def test_the_objective_with_near_texts_is_the_loop(views, same_text, compare, threshold):
    of_sentence, of_image = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    regions, sentences, batch = make_batch(
        views, **({"text_embedding": of_image} if compare == "reports" else {})
    )
    if compare == "sentences":
        batch["anchor"]["sentence_embedding"] = of_sentence
    rule = NearTexts(threshold, compare)
    objective = InBatchObjective(
        LanguageModelClassProbability(a=0.25, k=0.2), image_to_text=0.4, same_text=same_text, near_texts=rule
    )
    assert objective.requires_of_sentences == ("log_p", *rule.anchor_requires)

    def is_near(sentence, image):
        if compare == "reports":
            return cosine(of_image[IMAGE_OF[sentence]], of_image[image]) > threshold
        others = [other for other in range(6) if IMAGE_OF[other] == image]
        return any(cosine(of_sentence[sentence], of_sentence[other]) > threshold for other in others)

    pairs = [(s, i) for s in range(6) for i in range(4)]
    assert any(is_near(*pair) and not knows(*pair) for pair in pairs)
    assert not all(is_near(*pair) or knows(*pair) for pair in pairs)
    similarity = GlobalCosine().double()
    loss, _ = objective(similarity, regions, sentences, batch)
    eta = [0.25 * math.exp(-0.2 * i) for i in range(6)]
    expected = by_loop(
        *(similarity(regions, sentences), views, same_text, eta, 0.4, -14.0),
        knows=lambda *pair: knows(*pair) or is_near(*pair),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_threshold_that_finds_nearly_everything_is_refused():
    alike = torch.ones(50, 8) + 0.01 * torch.randn(50, 8)
    alike[0] = torch.tensor([1.0, -1.0] * 4)
    with pytest.raises(UserError, match=r"threshold: 0.9 takes 9\d% of the pairs of sentences"):
        NearTexts(0.9).check({"sentence_embedding": alike, "log_p": torch.zeros(50)})
    with pytest.warns(UserWarning, match=r"threshold: 0.0 takes \d\d% of the pairs of reports for near"):
        NearTexts(0.0, "reports").check({"text_embedding": torch.randn(50, 8) + 0.2})
    NearTexts(0.9).check({"sentence_embedding": torch.randn(50, 8)})
