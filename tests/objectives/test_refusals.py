"""Settings and arguments of objectives that are refused, each in a line that names them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.objectives import (
    ClassProbability,
    ConstantClassProbability,
    HardNegatives,
    KnownClassProbability,
    LanguageModelClassProbability,
    NearTexts,
    Negations,
    NegativeWeights,
    PosteriorTargets,
    RankedByText,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    SigmoidLoss,
    SoftTargets,
    contrastive,
    contrastive_loss,
    sigmoid_loss,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_anchor_losses import Proud


class Bare(ClassProbability):
    """Asks for a field that the weights below need of images, and keeps no argument."""

    requires = ("labels",)

    def __init__(self, scale: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))


class Shared(NegativeWeights):
    candidate_requires = ("labels",)


def proud(**options: Any) -> InBatchObjective:
    return InBatchObjective(loss=Proud(), **options)


ONLY_ONES = {"states": torch.tensor([[1.0, math.nan], [1.0, 0.0], [-1.0, 0.0]])}


def drawn(**options: Any) -> InBatchObjective:
    options = {"class_probability": LanguageModelClassProbability(), **options}
    return InBatchObjective(correction_images="class", **options)


def test_a_part_without_a_constructor_has_no_arguments():
    assert Shared().config() == {}


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (RemoveByTextSimilarity, {"threshold": math.nan}, ["negative_weights.threshold", "[-1, 1]", "nan"]),
        (RemoveByLabel, {"findings": ["Edema", "Mood"]}, ["findings", "['Mood']"]),
        (RemoveByLabel, {"findings": []}, ["findings", "[]"]),
        (ResampleByTextSimilarity, {"draws": 0}, ["negative_weights.draws: expected at least 1", "0"]),
        (ResampleByTextSimilarity, {"seed": -1}, ["negative_weights.seed: expected at least 0", "-1"]),
        (HardNegatives, {"beta": -1.0}, ["beta", "-1.0"]),
        (RankedByText, {"mean_share": 0.0}, ["mean_share", "(0, 0.9]", "0.0"]),
        (RankedByText, {"mean_share": 0.91}, ["mean_share", "(0, 0.9]", "0.91"]),
        (RankedByText, {"c": 2.0}, ["mean_share or c", "0.5 and 2.0"]),
        (RankedByText, {"mean_share": None, "c": 0.0}, ["negative_weights.c", "(0, inf)", "0.0"]),
        (RankedByText, {"k": -1.0}, ["negative_weights.k: expected at least 0", "-1.0"]),
        (partial(RankedByText(None, k=0.0, c=0.93).prepare, torch.ones(3), {}), {}, ["0.93", "0.930", "more than 0.9"]),
        (InBatchObjective, {"negative_weights": RankedByText(), "class_probability": ConstantClassProbability(0.1)},
         ["model.class_probability: expected null beside RankedByText", "twice"]),
        (InBatchObjective, {"negative_weights": RankedByText(), "loss": SoftTargets()}, ["SoftTargets does not"]),
        (NearTexts, {"threshold": math.nan}, ["near_texts.threshold", "nan"]),
        (SoftTargets, {"temperature": 0.0}, ["loss.temperature", "0.0"]),
        (PosteriorTargets, {"removal": 1.0}, ["loss.removal", "[0, 1)", "1.0"]),
        (PosteriorTargets, {"removal": math.nan}, ["loss.removal", "nan"]),
        (InBatchObjective, {"loss": PosteriorTargets(), "image_to_text": 0.1}, ["model.image_to_text: expected 0.0"]),
        (Negations, {"weight": 0.0}, ["loss.weight", "0.0"]),
        (Negations().check, {"fields": ONLY_ONES}, ["labels.parquet: expected a finding with 1 and 0"]),
        (SigmoidLoss, {"bias": math.nan}, ["loss.bias", "nan"]),
        (ConstantClassProbability, {"eta": 1.0}, ["eta", "[0, 1)", "1.0"]),
        (ConstantClassProbability, {"max_eta": 1.0}, ["max_eta", "[0, 1)", "1.0"]),
        (LanguageModelClassProbability, {"a": 1.0}, ["class_probability.a", "[0, 1)", "1.0"]),
        (LanguageModelClassProbability, {"k": math.inf}, ["class_probability.k: expected at least 0", "found inf"]),
        (InBatchObjective, {"near_texts": NearTexts()}, ["near_texts", "set model.init_args.same_text: positive"]),
        (proud, {"class_probability": ConstantClassProbability(0.1)}, ["set model.init_args.class_probability: null"]),
        (proud, {"negative_weights": HardNegatives()}, ["Proud does not use it", "negative_weights: null"]),
        (proud, {"image_to_text": 0.1}, ["set model.init_args.image_to_text: 0.0"]),
        (InBatchObjective, {"correction_count": 8}, ["model.correction_count", "1 with correction_images: own", "8"]),
        (drawn, {"correction_count": 0}, ["model.correction_count: expected at least 1", "0"]),
        (drawn, {"image_to_text": 0.1}, ["model.image_to_text: expected 0.0 with correction_images: class"]),
        (drawn, {"same_text": "positive"}, ["model.same_text: expected negative (or ignore)"]),
        (drawn, {"loss": SoftTargets()}, ["model.loss: expected null with correction_images: class"]),
        (drawn, {"class_probability": ConstantClassProbability(0.0)}, ["model.class_probability: expected not 0"]),
        (InBatchObjective, {"class_probability": Bare(), "negative_weights": Shared()}, ["'labels'", "rename one"]),
        (Bare().config, {}, ["Bare: expected plain attributes", "options"]),
    ],
)  # fmt: skip
def test_a_setting_is_refused_by_name(make, options, words):
    with pytest.raises(UserError) as error:
        make(**options)
    assert all(part in str(error.value) for part in words), error.value


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        (LanguageModelClassProbability(), {"log_p": [-1.0, math.nan, 2.0]}, r"found nan \(one of 2 of 3 anchors\)"),
        (KnownClassProbability(), {"rho": [0.1, math.nan, 1.5]}, "NaN"),
    ],
)  # fmt: skip
def test_fields_without_a_probability_are_refused(rule, fields, message, monkeypatch):
    """On another device, whose values are not read, they become NaN."""
    tensors = {name: torch.tensor(values) for name, values in fields.items()}
    with pytest.raises(UserError, match=message):
        rule(**tensors)
    monkeypatch.setattr(contrastive, "is_on_host", lambda values: False)
    assert rule(**tensors).isnan().tolist() == [False, True, True]


L = torch.tensor([[2.0, 0.5, -1.0], [1.0, 3.0, 0.0]])
P = torch.tensor([0, 1])
MASK = torch.eye(2, 3).bool()
ONE_WITHOUT = torch.tensor([[True, False, False], [False] * 3])
WRONG_WEIGHT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, -1.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(2, 3, 1), P), {}, r"logits: expected floating point of shape \(anchor, candidate\)"),
        ((torch.zeros(2, 3, dtype=torch.int64), P), {}, r"found torch.int64 \(2, 3\)"),
        ((L[:0], P[:0]), {}, r"at least one anchor, found torch.float32 \(0, 3\)"),
        ((L, torch.tensor([0, 1, 2])), {}, r"positives: expected integers of shape \(2,\)"),
        ((L, torch.tensor([0.0, 1.0])), {}, r"positives: expected integers .* found torch.float32 \(2,\)"),
        ((L, torch.zeros(3, 2).bool()), {}, r"bool of the logits' shape \(2, 3\), found torch.bool \(3, 2\)"),
        ((L, P), {"class_probability": torch.zeros(3)}, r"a number or the shape \(2,\), found \(3,\)"),
        ((L, P), {"weights": torch.ones(3, 2)}, r"weights: expected the logits' shape \(2, 3\), found \(3, 2\)"),
        ((L, P), {"floor": torch.zeros(2)}, "floor: expected one number"),
        ((L, P), {"correction_logits": torch.ones(2)}, r"correction_logits: expected the shape .* found \(2,\)"),
        ((L, P), {"correction_logits": torch.ones(2, 0)}, r"M of at least 1, found \(2, 0\)"),
        ((L, P), {"reduction": "max"}, 'reduction: expected "mean", "sum" or "none", found \'max\''),
        ((L, torch.tensor([0, 3])), {}, r"1 of 2 anchors have no positive among the 3 candidates \(first: 1\)"),
    ],
)  # fmt: skip
def test_arguments_of_the_loss_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        contrastive_loss(*arguments, **options)


@pytest.mark.parametrize(
    ("loss", "positives", "options", "message"),
    [
        (contrastive_loss, ONE_WITHOUT, {}, r"1 of 2 anchors have no positive .* \(first: 1\)"),
        (contrastive_loss, ONE_WITHOUT & False, {"weights": torch.zeros(2, 3)}, "2 of 2 anchors have no positive"),
        (contrastive_loss, P, {"class_probability": 1.0}, r"in \[0, 1\), found 1 \(one of 2 of 2 anchors\)"),
        (contrastive_loss, P, {"class_probability": torch.tensor([0.1, -0.5])}, r"-0.5 \(one of 1 of 2 anchors\)"),
        (contrastive_loss, P, {"class_probability": torch.tensor([0.1, math.nan])}, "found nan"),
        (contrastive_loss, P, {"floor": math.nan}, "floor: expected a number, found NaN"),
        (contrastive_loss, P, {"weights": WRONG_WEIGHT}, "weights: expected finite numbers"),
        (contrastive_loss, P, {"weights": torch.full((2, 3), math.nan)}, "weights: expected finite numbers"),
        (contrastive_loss, P, {"weights": torch.full((2, 3), math.inf)}, "weights: expected finite numbers"),
        (sigmoid_loss, ONE_WITHOUT, {}, "no positive"),
        (sigmoid_loss, MASK, {"weights": -torch.ones(2, 3)}, "weights: expected finite numbers"),
        (sigmoid_loss, MASK, {"class_probability": 1.0}, "class_probability"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_or_nan(loss, positives, options, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        loss(L, positives, **options)
    monkeypatch.setattr(contrastive, "is_on_host", lambda values: False)
    assert loss(L, positives, **options).isnan()
