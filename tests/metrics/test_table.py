"""The declared numbers: one place for each path, directions, bounds, and those that were declared later."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from sklearn.metrics import f1_score

from medclip_dcl.metrics.summaries import calibration, once
from medclip_dcl.metrics.table import (
    BANDS,
    CALIBRATION,
    SECTIONS,
    STORED,
    band_of,
    bounds_of,
    is_computed,
    is_higher_better,
    place_of,
)
from tests.metrics.test_summaries import cases_of

ALL = [
    (section, declared)
    for sections in (SECTIONS, STORED, {"calibration": CALIBRATION})
    for section, declared in sections.items()
]


@pytest.mark.parametrize(("section", "declared"), ALL)
def test_each_path_has_exactly_its_number(section, declared):
    for part, number in product(declared.parts, declared.numbers):
        if part and number.family in BANDS:  # means over findings
            continue
        path = "/".join(filter(None, (section, part, number.name))).replace("*", "a/b")
        place = place_of(path)
        assert place is not None and place.number is number
        assert place.entry == "a/b" * part.endswith("*")
        assert place.name == number.name.replace("*", "a/b")


@pytest.mark.parametrize(
    ("share", "band"),
    [(1, "head"), (0.11, "head"), (0.1, "middle"), (0.01, "middle"), (0.0099, "tail"), (0, "tail")],
)
def test_bands_end_at_a_tenth_and_a_hundredth(share, band):
    assert band_of(share, 0.1, 0.01) == band


def test_names_of_a_user_are_not_declared():
    for path in ("image_norm/mean", "classification/by_finding/Edema/kappa", "grounding/by_pair", "auc"):
        assert place_of(path) is None and not is_computed(path) and is_higher_better(path) is None
    assert is_computed("classification/by_finding/Edema/f/acc") and not is_computed(
        "classification/n_findings"
    )
    assert bounds_of(["image_norm/mean"]) == (-math.inf, math.inf)


def test_bounds_of_a_findings_validation():
    names = ("auc_edema", "acc_lung_opacity", "average_precision_edema", "balanced_acc_edema")
    assert bounds_of([f"validate/{name}" for name in names]) == (0, 1)
    assert all(is_higher_better(f"validate/{name}") for name in names)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("retrieval/tolerant/text_to_image/MedR", False),
        ("localisation/area", None),
        ("validate/auc_pleural_effusion", True),
        ("validate/balanced_acc", True),
        ("validate/balanced_acc_edema", True),
        ("validate/image_report_recall", True),
        ("train/masked_language_loss", False),
        ("train/auc", None),
        ("unimodal/linear_probe/1.0/accuracy", True),
        ("unimodal/intraclass_deviation", False),
    ],
)
def test_directions_of_numbers_and_logged_metrics(metric, direction):
    assert is_higher_better(metric) is direction


def test_f1_is_scikit_learns_at_the_threshold():
    random = np.random.default_rng(2)
    labels, after = random.integers(0, 2, 57), random.random(57)
    cases = cases_of("Edema", labels.tolist(), before=after, after=after, threshold=0.37)
    found = calibration(cases, once(cases))["by_finding"]["Edema"]
    assert found["f1"] == pytest.approx(f1_score(labels, after >= 0.37))
    never = cases.assign(label=0, threshold=2.0)
    assert np.isnan(calibration(never, once(never))["by_finding"]["Edema"]["f1"]).all()
