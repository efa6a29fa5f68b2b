"""Objectives read no value of an accelerator on the host: on the meta device every such read is an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from medclip_dcl.networks.similarity import LSE, GlobalCosine, LSENonLocal, NonLocal
from medclip_dcl.objectives import (
    ConstantClassProbability,
    DecoupledLoss,
    HardNegatives,
    KnownClassProbability,
    LanguageModelClassProbability,
    NearTexts,
    Negations,
    PosteriorTargets,
    RankedByText,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    ReweightByTextSimilarity,
    SigmoidLoss,
    SoftTargets,
    StoppedInfoNCE,
    TrueNegatives,
    WeightedInfoNCE,
    contrastive,
    contrastive_loss,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from medclip_dcl.unimodal.simclr import simclr_loss

IMAGES, SENTENCES, REGIONS, DIM = 7, 11, 9, 16
FIELDS: dict[str, Callable[[int], torch.Tensor]] = {
    "log_p": lambda n: -40 * torch.rand(n),
    "rho": torch.rand,
    "sentence_share": torch.rand,
    "class_id": lambda n: torch.randint(0, 5, (n,)),
    "labels": lambda n: torch.randint(0, 2, (n, 14)).float(),
    "text_embedding": lambda n: torch.randn(n, 32),
    "sentence_embedding": lambda n: torch.randn(n, 32),
    "image_classes": lambda n: torch.randint(0, 2, (n, 5)),
    "sentence_ranking": lambda n: torch.randn(n, 12 + 101),
    "report_ranking": lambda n: torch.randn(n, 12),
    "sentence_posterior": lambda n: torch.randn(n, 13),
    "report_posterior": lambda n: torch.randn(n, 12),
    "sentence_id": lambda n: torch.randint(0, 8, (n,)),
    "image_row": torch.arange,
    "signs": lambda n: torch.randint(-1, 2, (n, 5), dtype=torch.int8),
    "states": lambda n: torch.randint(-1, 2, (n, 5)).float(),
}
PROBABILITIES = [
    None,
    ConstantClassProbability(0.1),
    LanguageModelClassProbability(),
    KnownClassProbability(),
    KnownClassProbability(share="sentence_share"),
]
WEIGHTS = [
    None,
    RemoveByLabel(),
    RemoveByTextSimilarity(0.9),
    ReweightByTextSimilarity(),
    ResampleByTextSimilarity(),
    ResampleByTextSimilarity(draws=5),
    HardNegatives(),
    TrueNegatives(),
    RankedByText(),
    RankedByText(0.3, k=0.0, random_seed=1),
]


@pytest.fixture(autouse=True)
def _autocast_on_meta(monkeypatch):
    """torch.autocast does not know the meta device."""
    real = torch.autocast

    def autocast(device_type, **options):
        return nullcontext() if device_type == "meta" else real(device_type, **options)

    monkeypatch.setattr(torch, "autocast", autocast)


def batch_of(objective: InBatchObjective, views: int) -> dict[str, Any]:
    return {
        "image_index": torch.randint(0, IMAGES, (SENTENCES,)),
        "view_of": torch.arange(IMAGES).repeat(1 if objective.correction_images != "own" else views),
        "has_others": torch.rand(IMAGES) > 0.5,
        "study_id": torch.arange(IMAGES) // 2,
        "sentence_id": torch.randint(0, 8, (SENTENCES,)),
        "image_key": torch.arange(IMAGES),
        "anchor": {name: FIELDS[name](SENTENCES) for name in objective.requires_of_sentences},
        "candidate": {name: FIELDS[name](IMAGES) for name in objective.requires_of_images},
    }


OPTIONS: list[dict[str, Any]] = [
    *({"class_probability": eta} for eta in PROBABILITIES),
    *({"negative_weights": weights} for weights in WEIGHTS),
    {"class_probability": LanguageModelClassProbability(), "image_to_text": 0.5, "same_text": "positive"},
    {"negative_weights": ResampleByTextSimilarity(), "image_to_text": 0.5, "same_text": "ignore"},
    {"near_texts": NearTexts(), "image_to_text": 0.5, "same_text": "positive"},
    {"near_texts": NearTexts(compare="reports"), "image_to_text": 0.5, "same_text": "ignore"},
    {"loss": SoftTargets(), "image_to_text": 0.5, "same_text": "ignore"},
    {"loss": PosteriorTargets(0.5), "same_text": "ignore"},
    {
        "class_probability": LanguageModelClassProbability(),
        "correction_images": "class",
        "correction_count": 2,
    },
    {"loss": StoppedInfoNCE(), "class_probability": LanguageModelClassProbability()},
    {"loss": WeightedInfoNCE(), "class_probability": ConstantClassProbability(0.1), "same_text": "ignore"},
    {"loss": DecoupledLoss(), "image_to_text": 0.5},
    {"loss": Negations(), "image_to_text": 0.5},
    {"loss": SigmoidLoss(), "class_probability": LanguageModelClassProbability()},
]


@pytest.mark.parametrize(
    "options, views", [*((options, 3) for options in OPTIONS), *((options, 1) for options in OPTIONS[::8])]
)
def test_an_objective_reads_nothing_from_its_device(options, views):
    objective = InBatchObjective(**options).to("meta")
    with torch.device("meta"):
        views = 1 + objective.correction_count if objective.correction_images != "own" else views
        regions = torch.randn(IMAGES * views, REGIONS, DIM, requires_grad=True)
        sentences = torch.randn(SENTENCES, DIM, requires_grad=True)
        loss, figures = objective(LSENonLocal(DIM), regions, sentences, batch_of(objective, views), step=3)
    loss.backward()
    assert regions.grad is not None and sentences.grad is not None
    assert all(figure.dim() == 0 for figure in figures.values())


@pytest.mark.parametrize("similarity", [LSE, GlobalCosine, LSENonLocal, NonLocal])
@pytest.mark.parametrize("budget", [None, 200])
def test_a_similarity_reads_nothing_from_its_device(similarity, budget):
    with torch.device("meta"):
        module = similarity()
        module.map_budget = budget
        regions = torch.randn(IMAGES, REGIONS, 128, requires_grad=True)
        module(regions, torch.randn(SENTENCES, 128)).sum().backward()


def test_simclr_reads_nothing_from_its_device():
    with torch.device("meta"):
        first, second = torch.randn(2, IMAGES, DIM, requires_grad=True)
        simclr_loss(first, second, class_probability=torch.rand(IMAGES)).backward()


def test_several_positives_cost_the_same_elsewhere(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(5, 9)
    positives = torch.rand(5, 9) < 0.3
    positives[:, 0] = True
    positives[4] = True  # no negatives
    arguments: dict[str, Any] = {"class_probability": 0.1, "floor": -3.0, "reduction": "none"}
    expected = contrastive_loss(logits, positives, **arguments)
    monkeypatch.setattr(contrastive, "is_on_host", lambda values: False)
    torch.testing.assert_close(contrastive_loss(logits, positives, **arguments), expected)
    assert expected[4] == 0
