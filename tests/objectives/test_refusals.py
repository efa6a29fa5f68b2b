"""Settings and arguments of objectives that are refused, each in a line that names them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.objectives import (
    ConstantClassProbability,
    HardNegatives,
    IndividualTemperatures,
    KnownClassProbability,
    LanguageModelClassProbability,
    NearTexts,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    SigmoidLoss,
    SoftTargets,
    contrastive_loss,
    sigmoid_loss,
)
from medclip_dcl.objectives.in_batch import InBatchObjective
from tests.objectives.test_anchor_losses import Proud
from tests.objectives.test_in_batch import make_batch


def proud(**options: Any) -> InBatchObjective:
    return InBatchObjective(loss=Proud(), **options)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (RemoveByTextSimilarity, {"threshold": 1.5}, ["threshold", "[-1, 1]", "1.5"]),
        (RemoveByTextSimilarity, {"threshold": math.nan}, ["threshold", "nan"]),
        (RemoveByLabel, {"findings": ["Edema", "Mood"]}, ["findings", "['Mood']"]),
        (RemoveByLabel, {"findings": []}, ["findings", "[]"]),
        (ResampleByTextSimilarity, {"draws": 0}, ["draws must be at least 1", "0"]),
        (ResampleByTextSimilarity, {"seed": -1}, ["seed at least 0", "-1"]),
        (HardNegatives, {"beta": -1.0}, ["beta", "-1.0"]),
        (NearTexts, {"threshold": math.nan}, ["near_texts: threshold", "nan"]),
        (SoftTargets, {"temperature": 0.0}, ["SoftTargets: temperature", "0.0"]),
        (SigmoidLoss, {"bias": math.nan}, ["bias must be finite", "nan"]),
        (ConstantClassProbability, {"eta": 1.0}, ["eta", "[0, 1)", "1.0"]),
        (ConstantClassProbability, {"max_eta": 1.0}, ["max_eta", "[0, 1)", "1.0"]),
        (LanguageModelClassProbability, {"a": 1.0}, ["a must lie in [0, 1)", "1.0"]),
        (LanguageModelClassProbability, {"a": math.nan}, ["a must lie in [0, 1)", "nan"]),
        (LanguageModelClassProbability, {"k": -1.0}, ["k must be", "-1.0"]),
        (LanguageModelClassProbability, {"k": math.inf}, ["k must be", "inf"]),
        (KnownClassProbability, {"table": {1: 1.5}}, ["shares", "[0, 1]", "1.5"]),
        (IndividualTemperatures, {"temperature": 0.001}, ["0 < min_temperature <= temperature", "0.001"]),
        (IndividualTemperatures, {"rho": 0.0}, ["rho must be above 0", "0.0"]),
        (IndividualTemperatures, {"moving_average": 0.0}, ["moving_average", "(0, 1]", "0.0"]),
        (IndividualTemperatures, {"sentences": 0}, ["sentences must be at least 1", "0"]),
        (InBatchObjective, {"near_texts": NearTexts()}, ["near_texts", "set model.init_args.same_text: positive"]),
        (proud, {"class_probability": ConstantClassProbability(0.1)}, ["set model.init_args.class_probability: null"]),
        (proud, {"class_probability": LanguageModelClassProbability()}, ["does not use class_probability"]),
        (proud, {"negative_weights": HardNegatives()}, ["does not use negative_weights"]),
        (proud, {"image_to_text": 0.1}, ["set model.init_args.image_to_text: 0.0"]),
    ],
)  # fmt: skip
def test_a_setting_is_refused_by_name(make, options, words):
    with pytest.raises(UserError) as error:
        make(**options)
    assert all(part in str(error.value) for part in words), error.value


def test_losses_use_what_they_declare():
    for loss in (SigmoidLoss(), SoftTargets(), IndividualTemperatures()):
        assert not (loss.uses_image_to_text and loss.uses_class_probability)
    objective = proud(class_probability=ConstantClassProbability(0.0))
    objective.check_similarity(GlobalCosine(learn_gamma=False))
    with pytest.raises(UserError, match="learn_gamma: false"):
        objective.check_similarity(GlobalCosine())


def test_temperatures_need_tables_and_keys():
    regions, sentences, batch = make_batch()
    for loss in (IndividualTemperatures(), IndividualTemperatures(sentences=10, images=4)):
        objective = InBatchObjective(loss=loss, image_to_text=0.5)
        with pytest.raises(UserError, match="needs the number of training sentences .*, and image_key"):
            objective(GlobalCosine(learn_gamma=False).double(), regions, sentences, batch)


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        (LanguageModelClassProbability(), {"log_p": [-1.0, math.nan, -2.0]}, r"NaN for 1 of 3 anchors \(first: 1\)"),
        (LanguageModelClassProbability(), {"log_p": [2.0]}, "natural logarithms"),
        (KnownClassProbability({1: 0.1}), {"class_id": [7, 1]}, r"lacks the classes \[7\]"),
        (KnownClassProbability(), {"rho": [math.nan]}, "not be NaN"),
    ],
)  # fmt: skip
def test_fields_without_a_probability_are_refused(rule, fields, message):
    with pytest.raises(UserError, match=message):
        rule(**{name: torch.tensor(values) for name, values in fields.items()})


L = torch.zeros(2, 3)
P = torch.tensor([0, 1])
ONE_WITHOUT = torch.tensor([[True, False, False], [False] * 3])
CONTRASTIVE: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any], str]] = [
    ((torch.zeros(2, 3, 1), P), {}, r"logits must be floating point of shape \(anchor, candidate\)"),
    ((torch.zeros(2, 3, dtype=torch.int64), P), {}, r"got torch.int64 \(2, 3\)"),
    ((L[:0], P[:0]), {}, r"at least one anchor, got torch.float32 \(0, 3\)"),
    ((L, torch.tensor([0, 1, 2])), {}, r"positives must be integers of shape \(2,\)"),
    ((L, torch.tensor([0.0, 1.0])), {}, r"positives must be integers .* got torch.float32 \(2,\)"),
    ((L, torch.tensor([0, 3])), {}, r"columns in \[0, 3\), got \[0, 3\]"),
    ((L, torch.zeros(3, 2).bool()), {}, r"bool of the logits' shape \(2, 3\), got torch.bool \(3, 2\)"),
    ((L, ONE_WITHOUT), {}, r"1 of 2 anchors have no positive \(first: 1\)"),
    ((L, P), {"class_probability": 1.0}, r"\[0, 1\); 2 of 2 anchors do not \(first: anchor 0, 1\)"),
    ((L, P), {"class_probability": torch.tensor([0.1, -0.1])}, r"1 of 2 anchors do not \(first: anchor 1"),
    ((L, P), {"class_probability": torch.tensor([0.1, math.nan])}, "first: anchor 1, nan"),
    ((L, P), {"class_probability": torch.zeros(3)}, r"a number or of shape \(2,\), got \(3,\)"),
    ((L, P), {"weights": torch.ones(3, 2)}, r"weights must have the logits' shape \(2, 3\), got \(3, 2\)"),
    ((L, P), {"weights": -torch.ones(2, 3)}, "weights .* finite and at least 0"),
    ((L, P), {"weights": torch.full((2, 3), math.nan)}, "weights .* finite and at least 0"),
    ((L, P), {"weights": torch.full((2, 3), math.inf)}, "weights .* finite and at least 0"),
    ((L, P), {"floor": math.nan}, "floor must be one number, the least logit, got nan"),
    ((L, P), {"floor": torch.zeros(2)}, "floor must be one number"),
    ((L, P), {"reduction": "max"}, 'reduction must be "mean", "sum" or "none", got \'max\''),
]
SIGMOID: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any], str]] = [
    ((L, ONE_WITHOUT), {}, "every anchor needs a positive"),
    ((L, torch.eye(2, 3).bool()), {"weights": -torch.ones(2, 3)}, "weights of negatives"),
    ((L, torch.eye(2, 3).bool()), {"weights": torch.full((2, 3), math.inf)}, "weights of negatives"),
    ((L, torch.eye(2, 3).bool()), {"class_probability": 1.0}, "class_probability"),
]


@pytest.mark.parametrize(
    ("loss", "arguments", "options", "message"),
    [(contrastive_loss, *row) for row in CONTRASTIVE] + [(sigmoid_loss, *row) for row in SIGMOID],
)
def test_arguments_of_a_loss_are_refused(loss, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        loss(*arguments, **options)
