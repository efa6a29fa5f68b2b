"""Posterior targets: against a loop over anchors and candidates, and against the losses that they contain."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.ranking import NEVER_TRUE
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import PosteriorTargets
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_in_batch import IMAGE_OF, STUDY, knows, make_batch


def vectors(log_c: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of six sentences, with log c, and of four images' reports."""
    generator = torch.Generator().manual_seed(7)
    of_sentences, of_reports = (
        2 * torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (6, 4)
    )
    last = -2 * torch.rand(6, 1, dtype=torch.float64, generator=generator)
    return torch.cat(
        [of_sentences, last if log_c is None else torch.full_like(last, log_c)], dim=1
    ), of_reports


def loss_of(loss, views=1, same_text="negative", log_c=None, gamma2=5.0):
    """Loss, figures and logits of the small batch."""
    of_sentences, of_reports = vectors(log_c)
    regions, sentences, batch = make_batch(views, report_posterior=of_reports)
    batch["anchor"] = {"sentence_posterior": of_sentences}
    similarity = GlobalCosine(gamma2=gamma2).double()
    found = InBatchObjective(loss=loss, same_text=same_text)(similarity, regions, sentences, batch)
    return *found, similarity(regions, sentences).detach()


def true_chance(sentence: int, image: int) -> float:
    of_sentences, of_reports = (x.tolist() for x in vectors())
    logit = sum(a * b for a, b in zip(of_sentences[sentence], of_reports[image], strict=False))
    return min(1 / (1 + math.exp(-logit)) / math.exp(of_sentences[sentence][-1]), 1)


@pytest.mark.parametrize("removal", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("same_text", ["negative", "positive", "ignore"])
@pytest.mark.parametrize("views", [1, 3])
def test_is_the_loop(views, same_text, removal):
    loss, figures, logits = loss_of(PosteriorTargets(removal), views, same_text)
    losses, alone = [], []
    for s in range(6):
        positives, negatives = [], []
        for view in range(4 * views):
            i = view % 4
            is_known = same_text != "negative" and knows(s, i)
            if IMAGE_OF[s] == i or (is_known and same_text == "positive"):
                positives.append((logits[s, view].item(), 1.0))
            elif not is_known and (views == 1 or (view < 4 and STUDY[i] != STUDY[IMAGE_OF[s]])):
                negatives.append((logits[s, view].item(), true_chance(s, i)))
        weights = [1 - removal * p for _, p in negatives]
        total = sum(math.exp(score) for score, _ in positives)
        if negatives:
            of_negatives = sum(w * math.exp(x) for w, (x, _) in zip(weights, negatives, strict=True))
            total += len(negatives) / sum(weights) * of_negatives
        mass = sum(p for _, p in positives + negatives)
        losses.append(sum(p / mass * (math.log(total) - score) for score, p in positives + negatives))
        alone.append(not negatives)
    assert loss.item() == pytest.approx(sum(losses) / 6, rel=1e-9)
    assert figures["no_other_target"].item() == pytest.approx(sum(alone) / 6)
    assert 0 < figures["positive_target"] < 1


@pytest.mark.parametrize("removal", [0.0, 0.5])
def test_sentences_that_no_report_says_have_infonce(removal):
    loss, figures, _ = loss_of(PosteriorTargets(removal), log_c=NEVER_TRUE)
    assert loss.item() == pytest.approx(loss_of(None)[0].item(), rel=1e-12)
    assert figures["no_other_target"] == 1 and figures["positive_target"] == 1


def test_true_images_are_pulled_and_less_repelled():
    """Certain that all images fit, a pair's gradient is that of a uniform target; with P = 1 weights cancel."""
    loss, _, logits = loss_of(PosteriorTargets(), log_c=-40.0)
    assert loss.item() == pytest.approx(-logits.log_softmax(1).mean().item(), rel=1e-9)
    assert loss_of(PosteriorTargets(0.9), log_c=-40.0)[0].item() == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("same_text", ["positive", "ignore"])
def test_gradients_are_finite_without_a_negative(same_text):
    _, _, batch = make_batch(report_posterior=vectors()[1].float())
    batch |= {"study_id": torch.zeros(4), "anchor": {"sentence_posterior": vectors()[0].float()}}
    regions = torch.randn(4, 3, 5, requires_grad=True)
    objective = InBatchObjective(loss=PosteriorTargets(0.5), same_text=same_text)
    loss, _ = objective(GlobalCosine(gamma2=100.0), regions, torch.randn(6, 5), batch)
    loss.backward()
    assert regions.grad is not None and regions.grad.isfinite().all()
    assert (loss > 0) == (same_text == "positive")


class Other(PosteriorTargets):
    """P of one's own, by the images' numbers."""

    anchor_requires, candidate_requires = (), ("chance",)

    def posterior(self, anchors):
        return anchors.of_candidates["chance"].expand_as(anchors.logits)


def test_targets_of_ones_own_are_chances():
    regions, sentences, batch = make_batch(chance=torch.tensor([0.0, 0.5, 1.0, 0.25]))
    batch["anchor"] = {}
    objective = InBatchObjective(loss=Other())
    assert (objective.requires_of_sentences, objective.requires_of_images) == ((), ("chance",))
    _, figures = objective(GlobalCosine().double(), regions, sentences, batch)
    own = [1 / (1 + 1.75 - p) for p in (0.0, 0.5, 1.0, 0.25)]
    assert figures["positive_target"].item() == pytest.approx(sum(own[i] for i in IMAGE_OF) / 6)
    for wrong in (1.5, -0.1, math.nan):
        batch["candidate"]["chance"][3] = wrong
        with pytest.raises(UserError, match=r"Other.posterior: expected P in \[0, 1\]"):
            objective(GlobalCosine().double(), regions, sentences, batch)
