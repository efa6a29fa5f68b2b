"""Options that the models refuse, with the words that the error must have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.networks.text_encoder import BertSentences
from tests.small import PatchRegions

FROZEN = {"frozen": True}


def image_text(small_bert: Path, **options: Any) -> None:
    ImageTextModel(PatchRegions(), BertSentences(str(small_bert), dim=16), **options)


def classifier(_: Path, **options: Any) -> None:
    Classifier(**{"image_encoder": PatchRegions(), **options})


def language_model(_: Path, **options: Any) -> None:
    MaskedLanguageModel(**{"architecture": BertArchitecture(), **options})


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (image_text, {"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        (image_text, {"learning_rate": math.inf}, "learning_rate: .*, found inf"),
        (image_text, {"weight_decay": math.inf}, "weight_decay: expected at least 0, found inf"),
        (image_text, {"image_to_text": 1.5}, "image_to_text: .* 1.5"),
        (image_text, {"beta2": 1.5}, "beta2: .* 1.5"),
        (image_text, {"masked_language_weight": -1.0}, "masked_language_weight: .* -1"),
        (image_text, {"masked_language_weight": 1.0}, "masked_language_weight .*masked_language_head: true"),
        (image_text, {"init_parts": ["similarity"]}, "init_parts .* init_from"),
        (image_text, {"init_from": "gone.ckpt"}, "gone.ckpt"),
        (image_text, {**FROZEN, "text_learning_rate": 0.1}, "frozen: .*text_learning_rate null.* 0.1"),
        (image_text, {**FROZEN, "masked_language_weight": 0.5}, "frozen: .*masked_language_weight 0.* 0.5"),
        (image_text, {**FROZEN, "compile": True}, "frozen: .*compile false.* True"),
        (classifier, {"image_encoder": None}, "image_encoder: give class_path .* or init_from"),
        (classifier, {"image_encoder": None, "init_from": "gone.ckpt"}, "gone.ckpt"),
        (classifier, {"findings": []}, "model.findings: expected distinct names"),
        (classifier, {"findings": ["Edema", "Edema"]}, "model.findings: expected distinct names"),
        (classifier, {"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        (classifier, {"frozen_steps": -1}, "frozen_steps: .* -1"),
        (classifier, {"layer_decay": 0.0}, "layer_decay: .* 0.0"),
        (classifier, {**FROZEN, "layer_decay": 0.5}, "frozen: .*layer_decay.* 0.5"),
        (classifier, {**FROZEN, "encoder_learning_rate": 1e-3}, "frozen: .*encoder_learning_rate.* 0.001"),
        (classifier, {**FROZEN, "frozen_steps": 2}, "frozen: .*frozen_steps.* 2"),
        (language_model, {"architecture": None}, "either pretrained .* or architecture"),
        (language_model, {"pretrained": "x"}, "either pretrained .* or architecture"),
        (language_model, {"learning_rate": 0.0}, "learning_rate: .* 0.0"),
        (language_model, {"warmup_steps": -1}, "warmup_steps: .* -1"),
        (lambda _: BertArchitecture(dropout=1.0), {}, "dropout: expected a number in .* 1.0"),
    ],
)
def test_options_are_refused(make, options, words, small_bert):
    with pytest.raises(UserError, match=words):
        make(small_bert, **options)
