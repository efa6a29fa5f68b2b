"""Fits, thresholds and the file format of calibrations."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from medclip_dcl.metrics import calibration
from medclip_dcl.metrics.calibration import (
    Calibration,
    FindingCalibration,
    choose_threshold,
    fit_finding,
    fit_isotonic,
    fit_platt,
)

PROMPTS = (("no x",), ("x", "much x"))
HALF = {"sensitivity": 0.5}


def cases(
    n: int, temperature: float = 2.5, offset: float = -1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels that follow the stated calibration, and a patient for each case."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 3.0, n)
    return logits, generator.random(n) < expit(logits / temperature + offset), np.arange(n)


def test_a_known_temperature_and_offset_are_recovered():
    logits, labels, patients = cases(40_000)
    found = fit_finding(logits, labels, patients[::-1], HALF, PROMPTS)
    assert found.method == "isotonic", "of so many patients"
    slope, offset = fit_platt(logits, labels)
    assert 1 / slope == pytest.approx(2.5, rel=0.03) and offset == pytest.approx(-1, abs=0.04)
    points = np.linspace(-3, 5, 9)
    np.testing.assert_allclose(found.probabilities(points), expit(points / 2.5 - 1), atol=0.03)


@pytest.mark.parametrize("n, seed", [(23, 1), (71, 2), (301, 3)])
def test_platt_is_a_logistic_regression_on_smoothed_targets(n, seed):
    logits, labels, _ = cases(n, seed=seed)
    share = np.where(labels, (labels.sum() + 1) / (labels.sum() + 2), 1 / ((~labels).sum() + 2))
    both = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000).fit(
        np.concatenate([logits, logits])[:, None],
        np.repeat([1, 0], n),
        np.concatenate([share, 1 - share]),
    )
    slope, offset = fit_platt(logits, labels)
    assert (slope, offset) == pytest.approx((both.coef_[0, 0], both.intercept_[0]), rel=1e-4)
    of_another_unit = fit_platt(1000 * logits + 7000, labels)
    assert of_another_unit == pytest.approx((slope / 1000, offset - 7 * slope), rel=1e-6)


def test_separated_cases_have_a_finite_fit():
    logits = np.arange(51.0)
    slope, offset = fit_platt(logits, logits > 30)
    p = expit(slope * logits + offset)
    assert 0 < p.min() < 0.05 and 0.95 < p.max() < 1
    # Platt's targets: the mean probability is theirs.
    assert p.mean() == pytest.approx((20 * 21 / 22 + 31 / 33) / 51)


def test_isotonic_is_ascending_and_never_certain():
    logits, labels, _ = cases(131)
    knots = fit_isotonic(logits, labels)
    found = FindingCalibration(*PROMPTS, 1, 1, 1, 1, method="isotonic", parameters=knots)
    expected = IsotonicRegression(out_of_bounds="clip").fit(logits, labels).predict(logits)
    np.testing.assert_allclose(found.probabilities(logits), expected.clip(1 / 133, 132 / 133))
    beyond = found.probabilities(np.array([-99.0, 99.0]))
    assert tuple(beyond) == pytest.approx((1 / 133, 132 / 133))


def test_few_patients_and_useless_scores_are_not_calibrated():
    logits, labels, patients = cases(120)
    few = labels & (np.cumsum(labels) > calibration.PLATT_PATIENTS - 1)
    found = fit_finding(logits, labels & ~few, patients, HALF, PROMPTS)
    assert (found.method, found.n_positive, found.threshold) == (None, 19, None)
    assert "19 patients with a positive and 101 with a negative case; a calibration needs 20" in found.reason
    # Many cases of few patients are no more.
    assert fit_finding(logits, labels, patients // 10, HALF, PROMPTS).method is None
    assert "0 with a negative" in fit_finding(logits, labels | True, patients, HALF, PROMPTS).reason
    assert "do not score above" in fit_finding(-logits, labels, patients, HALF, PROMPTS).reason
    assert "do not score above" in fit_finding(np.zeros(120), labels, patients, HALF, PROMPTS).reason
    assert fit_finding(np.empty(0), np.empty(0, bool), np.empty(0, int), HALF, PROMPTS).method is None
    assert np.isnan(found.probabilities(np.zeros(3))).all()


@pytest.mark.parametrize("share", [0.01, 0.55, 0.95, 1.0])
@pytest.mark.parametrize("n", [20, 37])
def test_thresholds_by_trying_all(n, share):
    generator = np.random.default_rng(n)
    p, labels = generator.integers(1, 12, n) / 13, generator.random(n) < 0.5  # many ties
    between = np.unique(p)
    between = (np.concatenate([[0], between]) + np.concatenate([between, [1]])) / 2
    sensitivity = np.array([(p[labels] >= t).mean() for t in between])
    specificity = np.array([(p[~labels] < t).mean() for t in between])
    highest = choose_threshold(p, labels, {"sensitivity": share})
    assert highest == pytest.approx(between[sensitivity >= share - 1e-12].max())
    lowest = choose_threshold(p, labels, {"specificity": share})
    assert lowest == pytest.approx(between[specificity >= share - 1e-12].min())


def test_a_specificity_is_reached_at_probability_1():
    p, labels = np.array([0.2, 1.0, 1.0, 1.0]), np.array([False, False, False, True])
    assert not (p >= choose_threshold(p, labels, {"specificity": 0.9})).any()


@pytest.fixture
def fitted() -> Calibration:
    platt = fit_finding(*cases(151), {"specificity": 0.9}, PROMPTS)
    isotonic = FindingCalibration(
        *PROMPTS, 9, 9, 9, 9, "isotonic", parameters={"logits": [-1.0, 2.0], "probabilities": [0.1, 0.7]}
    )
    nothing = FindingCalibration(("no z",), ("z",), 1, 2, 1, 2, reason="too few")
    findings = {"y": platt, "é": isotonic, "a": nothing}
    return Calibration({"weights": "0f"}, 14.0, {"specificity": 0.9}, {"use": "validate"}, findings)


def test_the_file_gives_the_same_ordered_calibration(fitted, tmp_path):
    fitted.write(tmp_path / "calibration.json")
    again = Calibration.read(tmp_path / "calibration.json")
    assert again == fitted and list(again.findings) == ["y", "é", "a"]


def test_probabilities_are_of_the_scaled_score_differences(fitted):
    scores = pd.DataFrame({"a": [0.1, 0.2], "y": [-0.1, 0.3], "é": [0.0, 1 / 28]}, index=["i", "j"])
    found = fitted.probabilities(scores)
    parameters = fitted.findings["y"].parameters
    assert list(found.columns) == ["a", "y", "é"] and list(found.index) == ["i", "j"]
    expected = 14 * np.array([-0.1, 0.3]) / parameters["temperature"] + parameters["offset"]
    np.testing.assert_allclose(logit(found["y"]), expected)
    np.testing.assert_allclose(found["é"], [0.3, 0.4])
    assert found["a"].isna().all()
