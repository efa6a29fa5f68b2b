"""Input that metrics refuse: the call, and the words that its error has."""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest
import torch

from medclip_dcl.metrics import (
    box_bounds,
    contrast_to_noise_ratio,
    cosine_retrieval_ranks,
    mean_iou,
    retrieval_metrics,
    retrieval_ranks,
)
from medclip_dcl.metrics.calibration import Calibration, FindingCalibration, check_target
from medclip_dcl.metrics.summaries import classification, once

NAN = float("nan")
MAP, BOX = torch.rand(4, 5), torch.arange(20).reshape(4, 5) > 12
NO_PIXEL = "expected one that covers a pixel of the 6 x 4 image"
COSINES = torch.zeros(2, 3)
CASES = pd.DataFrame({"finding": "Edema", "label": [0, 1], "subject_id": [0, 1], "logit": [0.1, NAN]})
TARGET = "target: expected a sensitivity or a specificity in (0, 1], found"
FITTED = Calibration(
    {"weights": "0f"},
    14.0,
    {"specificity": 0.9},
    {},
    {
        "y": FindingCalibration(
            *(("no x",), ("x",), 30, 30, 30, 30, "platt"), parameters={"temperature": 1.0, "offset": 0.0}
        ),
        "a": FindingCalibration(("no z",), ("z",), 1, 2, 1, 2, reason="too few"),
    },
)


def thresholds(*values: float):
    return lambda: mean_iou(MAP, BOX, torch.tensor(values, dtype=torch.float32))


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (thresholds(), "thresholds: expected a vector that ascends strictly, found []"),
        (thresholds(0.5, 0.5), "found [0.5, 0.5]"),
        (thresholds(NAN), "found [nan]"),
        (lambda: mean_iou(MAP, torch.zeros_like(BOX)), "box covers no pixel that the heat map defines"),
        (lambda: mean_iou(MAP.masked_fill(BOX, NAN), BOX), "box covers no pixel that the heat map defines"),
        (lambda: mean_iou(MAP, BOX.T), "of one image, found (4, 5) and (5, 4)"),
        (lambda: contrast_to_noise_ratio(MAP, BOX.T), "of one image, found (4, 5) and (5, 4)"),
        *(
            (lambda box=box: box_bounds(*box, image_height=4, image_width=6), NO_PIXEL)
            for box in ((6, 0, 3, 3), (-5, 0, 4, 2), (2, 2, 0, 3), (NAN, 0, 2, 2), (0, 0, math.inf, 2))
        ),
        (lambda: retrieval_metrics(COSINES), "None for a square matrix, found None"),
        (lambda: retrieval_metrics(torch.zeros(0, 0)), "expected a query at least"),
        (
            lambda: retrieval_ranks(COSINES, torch.tensor([[True, False, True], [False] * 3])),
            "1 of 2 queries have no correct one of the 3 candidates (first: query 1); leave them out",
        ),
        (lambda: retrieval_ranks(COSINES, torch.tensor([-1, 3])), "2 of 2 queries have no correct one"),
        (lambda: retrieval_ranks(COSINES, torch.tensor([1])), "(2, 3) booleans, or None"),
        (lambda: retrieval_ranks(COSINES, torch.ones(1, 3) > 0), "found (1, 3) torch.bool"),
        (
            lambda: retrieval_ranks(torch.tensor([[0.0, 1.0], [NAN, 1.0]])),
            "similarities hold NaN for 1 of 2 queries (first: query 1); an embedding is NaN",
        ),
        (lambda: cosine_retrieval_ranks(COSINES, torch.ones(3, 3)), "for 2 queries and 3 candidates"),
        (
            lambda: cosine_retrieval_ranks(torch.ones(2, 3), torch.full((2, 3), NAN)),
            "similarities hold NaN for 2 of 2 queries",
        ),
        (lambda: classification(CASES, once(CASES)), "scores: 1 of 2 are NaN; an embedding is NaN"),
        *(
            (lambda target=target: check_target(target), f"{TARGET} {target}")
            for target in ({}, {"sensitivity": 0.0}, {"specificity": 1.1}, {"auc": 0.5})
        ),
        (lambda: FITTED.prompts({"q": ("no x", "x")}), "q is not calibrated with the prompts"),
        (lambda: FITTED.prompts({"y": ("no", "x")}), "only (('no x',), ('x',))"),
        (lambda: FITTED.prompts({"a": ("no z", "z")}), "none of these findings is calibrated: a: too few"),
    ],
)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(format_version=2), "found version 2"),
        (lambda content: content.update(findings=[1]), "is not a calibration of medclip_dcl"),
        (lambda content: content.update(more=1), "is not a calibration of medclip_dcl"),
        (lambda content: content["findings"]["y"].update(negative=[]), "y needs a negative"),
        (lambda content: content["findings"]["y"].update(positive=[1]), "y needs a negative"),
        *(
            (lambda content, change=change: content["findings"]["y"].update(change), "is out of range")
            for change in (
                {"parameters": {"temperature": -1.0, "offset": 0.0}},
                {"parameters": {"temperature": 1e300, "offset": 0.0}},
                {"parameters": {"temperature": 1e-300, "offset": 0.0}},
                {"parameters": {"temperature": 1.0, "offset": 1e300}},
                {"parameters": {"temperature": 1.0, "offset": NAN}},
                {"method": "isotonic", "parameters": {"logits": [2.0, -1.0], "probabilities": [0.1, 0.7]}},
                {"method": "isotonic", "parameters": {"logits": [], "probabilities": []}},
                {"threshold": 5.0},
                {"method": "beta"},
            )
        ),
    ],
)
def test_damaged_calibrations_are_refused(change, words, tmp_path):
    content = json.loads(FITTED.to_json())
    change(content)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(words)):
        Calibration.read(file)
    file.write_text(FITTED.to_json()[:90])
    with pytest.raises(ValueError, match="calibrate again"):
        Calibration.read(file)


def test_fitted_prompts_are_taken():
    assert list(FITTED.prompts()) == ["y", "a"]
    assert FITTED.prompts({"y": ["no x", ["x"]]}) == {"y": (("no x",), ("x",))}
