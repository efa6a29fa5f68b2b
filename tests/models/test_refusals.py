"""Options that the models refuse, with the words that the error must have."""

from __future__ import annotations

import math
from typing import Any

import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.networks.text_encoder import BertSentences
from tests.small import PatchRegions

FROZEN = {"frozen": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        ({"learning_rate": math.inf}, r"learning_rate: expected a number in \(0, inf\), found inf"),
        ({"weight_decay": math.inf}, "weight_decay: expected at least 0, found inf"),
        ({"image_to_text": 1.5}, "image_to_text: .* 1.5"),
        ({"beta2": 1.5}, "beta2: .* 1.5"),
        ({"masked_language_weight": -1.0}, "masked_language_weight: .* -1"),
        ({"masked_language_weight": 1.0}, "masked_language_weight .*masked_language_head: true"),
        ({"init_parts": ["similarity"]}, "init_parts .* init_from"),
        ({"init_from": "gone.ckpt"}, "gone.ckpt"),
        ({**FROZEN, "text_learning_rate": 0.1}, "frozen: .*text_learning_rate null.* 0.1"),
        ({**FROZEN, "masked_language_weight": 0.5}, "frozen: .*masked_language_weight 0.* 0.5"),
        ({**FROZEN, "compile": True}, "frozen: .*compile false.* True"),
    ],
)
def test_an_image_text_model(options: dict[str, Any], words: str, small_bert) -> None:
    with pytest.raises(UserError, match=words):
        ImageTextModel(PatchRegions(), BertSentences(str(small_bert), dim=16), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_encoder": None}, "image_encoder: give class_path .* or init_from"),
        ({"image_encoder": None, "init_from": "gone.ckpt"}, "gone.ckpt"),
        ({"findings": []}, "model.findings: expected distinct names"),
        ({"findings": ["Edema", "Edema"]}, "model.findings: expected distinct names"),
        ({"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        ({"frozen_steps": -1}, "frozen_steps: .* -1"),
        ({"layer_decay": 0.0}, "layer_decay: .* 0.0"),
        ({**FROZEN, "layer_decay": 0.5}, "frozen: .*layer_decay.* 0.5"),
        ({**FROZEN, "encoder_learning_rate": 1e-3}, "frozen: .*encoder_learning_rate.* 0.001"),
        ({**FROZEN, "frozen_steps": 2}, "frozen: .*frozen_steps.* 2"),
    ],
)
def test_a_classifier(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Classifier(**{"image_encoder": PatchRegions(), **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": None}, "either pretrained .* or architecture"),
        ({"pretrained": "x"}, "either pretrained .* or architecture"),
        ({"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        ({"warmup_steps": -1}, "warmup_steps: .* -1"),
    ],
)
def test_a_language_model(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MaskedLanguageModel(**{"architecture": BertArchitecture(), **options})


def test_dropout_of_everything_is_refused() -> None:
    with pytest.raises(UserError, match="dropout: expected a number in .* 1.0"):
        BertArchitecture(dropout=1.0)
