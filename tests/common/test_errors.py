"""What is not among the choices of a setting is refused, by the setting's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.labelled import LabelledDataModule
from medclip_dcl.evaluation import FindingClassification, Grounding, ZeroShotClassification
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import KnownClassProbability, NearTexts
from medclip_dcl.objectives.in_batch import InBatchObjective


@pytest.mark.usefixtures("_shapes_unchecked")  # annotations are checked with them
@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (lambda **x: ImageTextDataModule("set", **x), "data.sentences"),
        (lambda **x: LabelledDataModule("set", **x), "data.uncertain"),
        (lambda **x: LabelledDataModule("set", **x), "data.blank"),
        (ResNetRegions, "image_encoder.depth"),
        (ResNetRegions, "image_encoder.stride"),
        (ResNetRegions, "image_encoder.projection"),
        (lambda **x: BertSentences("model", **x), "text_encoder.projection"),
        (LSENonLocal, "similarity.attention"),
        (KnownClassProbability, "class_probability.share"),
        (InBatchObjective, "model.same_text"),
        (NearTexts, "near_texts.compare"),
        (ZeroShotClassification, "ZeroShotClassification.ensemble"),
        (FindingClassification, "FindingClassification.blank"),
        (Grounding, "Grounding.heat_map_size"),
        (Grounding, "Grounding.interpolation"),
    ],
)
def test_value_outside_the_choices_is_refused(build: Callable[..., Any], setting: str) -> None:
    name = setting.partition(".")[2]
    with pytest.raises(UserError, match=rf"^{setting}: expected one of .*, found 'else'$"):
        build(**{name: "else"})


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", [0.5, 1, None], [0, -1, 1.1, math.inf, math.nan]),
        ("[1, inf)", [1, 9], [0, math.inf, math.nan]),
        ("[0, inf]", [0, math.inf], [-1, math.nan]),
        ("(-inf, inf)", [-9], [math.inf, -math.inf, math.nan]),
    ],
)
def test_ranges_have_open_and_closed_ends(interval, inside, outside):
    for value in inside:
        check_range("data", interval, size=value)
    for value in outside:
        with pytest.raises(UserError, match=f"data.size: expected .*, found {value}"):
            check_range("data", interval, size=value)
