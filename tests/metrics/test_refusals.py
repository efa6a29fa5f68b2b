"""Input that metrics refuse: the call, and the words that its error has."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
import torch

from medclip_dcl.metrics import (
    BoxedHeatMap,
    Rectangle,
    box_mask,
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
NO_PIXEL = "covers no pixel of the 6 x 4 image; boxes are in pixels of the original image"
BEYOND = "is empty or reaches beyond the heat map of 4 x 5 pixels"
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


def agreement(*boxes: Rectangle):
    return lambda: BoxedHeatMap(MAP).agreement(boxes)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (thresholds(), "non-empty vector: found shape (0,)"),
        (thresholds(0.5, 0.25), "strictly ascending numbers: found [0.5, 0.25]"),
        (thresholds(0.5, 0.5), "strictly ascending numbers: found [0.5, 0.5]"),
        (thresholds(0.0, NAN, 1.0), "strictly ascending numbers: found [0.0, nan, 1.0]"),
        (lambda: mean_iou(MAP, torch.zeros_like(BOX)), "box covers no pixel that the heat map defines"),
        (lambda: mean_iou(MAP.masked_fill(BOX, NAN), BOX), "box covers no pixel that the heat map defines"),
        (lambda: mean_iou(MAP, BOX.T), "of one image: found (4, 5) and (5, 4)"),
        (lambda: contrast_to_noise_ratio(MAP, BOX.T), "of one image: found (4, 5) and (5, 4)"),
        *(
            (lambda box=box: box_mask(*box, image_height=4, image_width=6), NO_PIXEL)
            for box in ((6, 0, 3, 3), (0, 4, 2, 2), (-5, 0, 4, 2), (2, 2, 0, 3), (2, 2, 0.3, 0.3))
        ),
        (lambda: box_mask(NAN, 0, 2, 2, image_height=4, image_width=6), "an edge that is not finite"),
        (agreement(), "no box"),
        (agreement(Rectangle(0, 5, 0, 5)), BEYOND),
        (agreement(Rectangle(-1, 2, 0, 2)), BEYOND),
        (agreement(Rectangle(2, 2, 0, 1)), BEYOND),
        (lambda: retrieval_metrics(COSINES), "needs a square matrix: found 2 x 3"),
        (lambda: retrieval_metrics(torch.zeros(0, 0)), "there are no queries"),
        (lambda: retrieval_metrics(torch.eye(3), ks=(10, 0)), "must be at least 1: found (10, 0)"),
        (
            lambda: retrieval_ranks(COSINES, torch.tensor([[True, False, True], [False] * 3])),
            "1 of 2 queries have no correct candidate (first: query 1); leave them out",
        ),
        (lambda: retrieval_ranks(COSINES, torch.tensor([0, 3])), "query 1 has target 3: expected an index"),
        (lambda: retrieval_ranks(COSINES, torch.tensor([-1, 0])), "query 0 has target -1: expected an index"),
        (lambda: retrieval_ranks(COSINES, torch.tensor([1])), "or (2, 3) booleans: found (1,) torch.int64"),
        (lambda: retrieval_ranks(COSINES, torch.ones(1, 3) > 0), "of similarities (2, 3): found (1, 3)"),
        (
            lambda: retrieval_ranks(torch.tensor([[0.0, 1.0], [NAN, 1.0]])),
            "similarities hold NaN for 1 of 2 queries (first: query 1); an embedding is NaN",
        ),
        (
            lambda: cosine_retrieval_ranks(torch.ones(2, 3), torch.ones(3, 3)),
            "needs as many of both: found 2 queries, 3 candidates",
        ),
        (
            lambda: cosine_retrieval_ranks(torch.ones(2, 3), torch.full((2, 3), NAN)),
            "similarities hold NaN for 2 of 2 queries",
        ),
        (
            lambda: cosine_retrieval_ranks(
                torch.ones(2, 3), torch.ones(3, 3), groups=(torch.arange(2), torch.zeros(3).long())
            ),
            "1 of 2 queries have no correct candidate",
        ),
        (lambda: classification(CASES, once(CASES)), "scores: 1 of 2 are NaN; an embedding is NaN"),
        *(
            (lambda target=target: check_target(target), f"{TARGET} {target}")
            for target in ({}, {"sensitivity": 0.0}, {"specificity": 1.1}, {"auc": 0.5})
        ),
        (lambda: FITTED.prompts({"q": ("no x", "x")}), "q is not calibrated, only y, a"),
        (lambda: FITTED.prompts({"y": ("no", "x")}), "y is calibrated with the prompts"),
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
        *(
            (lambda content, name=name, value=value: content["findings"]["y"].update({name: value}), "(y: ")
            for name, value in (
                ("negative", []),
                ("parameters", {}),
                ("parameters", {"temperature": -1.0, "offset": 0.0}),
                ("parameters", {"temperature": 1.0, "offset": NAN}),
                ("threshold", 5.0),
                ("sensitivity", -0.1),
                ("method", "beta"),
            )
        ),
        *(
            (
                lambda content, logits=logits, p=p: content["findings"]["y"].update(
                    method="isotonic", parameters={"logits": logits, "probabilities": p}
                ),
                "(y: ",
            )
            for logits, p in (([-1.0, 2.0], [0.1, 5.0]), ([2.0, -1.0], [0.1, 0.7]), ([], []))
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
    with pytest.raises(ValueError, match=r"not readable JSON .* calibrate again"):
        Calibration.read(file)


def test_fitted_prompts_are_taken():
    assert list(FITTED.prompts()) == ["y", "a"]
    assert FITTED.prompts({"y": ["no x", ["x"]]}) == {"y": (("no x",), ("x",))}
