"""Estimates of (a, k) and of rho, against the truth and against brute force."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from data_prep.scores import eta_estimates
from data_prep.scores.eta_estimates import _FINDINGS as FINDINGS
from data_prep.scores.eta_estimates import (
    best_constant,
    binomial_fit,
    bound_fit,
    bound_term,
    findings_without_labels,
    least_squares_fit,
    named_finding,
    rho_by_labels,
)


@pytest.mark.parametrize(("a", "k"), [(0.3, 0.4), (0.05, 0.9), (0.9, 0.05)])
def test_recovers_the_truth_from_binomial_counts(a: float, k: float) -> None:
    generator = np.random.default_rng(5)
    log_p = -generator.gamma(2.0, 3.0, size=4000)
    counts = generator.binomial(7000, a * np.exp(k * log_p))
    fit = binomial_fit(log_p, counts, 7000, np.ones(4000))
    assert fit.a == pytest.approx(a, rel=0.02) and fit.k == pytest.approx(k, rel=0.02)
    assert fit.at_bound == ()


def test_is_the_maximum_of_the_weighted_binomial_likelihood() -> None:
    """No point of a grid around it is more likely."""
    generator = np.random.default_rng(6)
    log_p, weights = -generator.gamma(3.0, 10.0, size=200), generator.integers(1, 50, size=200)
    counts = generator.binomial(37, 0.4 * np.exp(0.05 * log_p) * generator.uniform(0.5, 1.5, 200))

    def log_likelihood(a: float, k: float) -> float:
        eta = a * np.exp(k * log_p)
        return float((weights * (counts * np.log(eta) + (37 - counts) * np.log1p(-eta))).sum())

    fit = binomial_fit(log_p, counts, 37, weights)
    best = log_likelihood(fit.a, fit.k)
    for da in (0.9, 0.99, 0.999, 1.001, 1.01, 1.1):
        for dk in (0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1):
            assert log_likelihood(fit.a * da, fit.k * dk) < best


def test_weights_are_repetitions() -> None:
    generator = np.random.default_rng(7)
    log_p = -generator.gamma(2.0, 3.0, size=50)
    counts, weights = generator.binomial(90, 0.3 * np.exp(0.3 * log_p)), generator.integers(1, 6, size=50)
    weighted = binomial_fit(log_p, counts, 90, weights)
    repeated = binomial_fit(np.repeat(log_p, weights), np.repeat(counts, weights), 90, np.ones(weights.sum()))
    assert weighted.a == pytest.approx(repeated.a, rel=1e-5) and weighted.k == pytest.approx(
        repeated.k, rel=1e-5
    )


@pytest.mark.parametrize(
    ("counts", "bound"),
    [
        ([0, 3, 6, 9], "k is at its bound 0"),  # the less probable, the more frequent
        ([10, 10, 10, 10], "a is at its bound 0.999"),  # in every report
        ([9, 0, 0, 0], "k is at its bound 10"),  # nothing but the most probable one
    ],
)
def test_says_what_stands_at_a_bound(counts: list[int], bound: str) -> None:
    fit = binomial_fit(np.array([0.0, -0.02, -0.04, -0.06]), np.array(counts), 10, np.ones(4))
    assert bound in fit.at_bound
    assert 0 <= fit.a < 1 and fit.k >= 0


def test_a_search_that_ends_beside_a_bound_stands_at_it() -> None:
    log_p = np.array([-9.0, -2.0])
    assert eta_estimates._fit(0.9989984, 0.3, log_p).at_bound == ("a is at its bound 0.999",)
    assert eta_estimates._fit(0.998, 0.3, log_p).at_bound == ()
    assert eta_estimates._fit(0.5, 1e-9, log_p).at_bound == ("k is at its bound 0",)
    assert eta_estimates._fit(0.5, 9.9999, log_p).at_bound == ("k is at its bound 10",)


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_a_small_k_is_at_no_bound_where_log_p_is_large(scale: float) -> None:
    log_p, rho, weights = weighted_points(4, 200)
    counts = np.random.default_rng(4).binomial(500, rho)
    for factor, at_bound in ((1.0, ()), (-1.0, ("k is at its bound 0",))):
        scores = scale * factor * log_p - (60 * scale if factor < 0 else 0)
        for fit in (
            binomial_fit(scores, counts, 500, weights),
            least_squares_fit(scores, rho, weights),
            bound_fit(scores, rho, weights),
        ):
            assert fit.at_bound == at_bound, (factor, fit)


def weighted_points(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    log_p = -generator.gamma(2.0, 3.0, size=count)
    rho = np.clip(0.5 * np.exp(0.3 * log_p) * generator.lognormal(0, 0.5, count), 0, 0.97)
    return log_p, rho, generator.integers(1, 30, size=count).astype("float64")


def test_least_squares_is_the_textbook_line_and_keeps_its_bounds() -> None:
    log_p, rho, weights = weighted_points(1, 300)
    rho[:5] = 0.0  # no logarithm: left out
    fit = least_squares_fit(log_p, rho, weights)
    slope, intercept = np.polyfit(log_p[5:], np.log(rho[5:]), 1, w=np.sqrt(weights[5:]))
    assert (fit.a, fit.k) == pytest.approx((np.exp(intercept), slope), rel=1e-6)
    rising = least_squares_fit(log_p, np.minimum(0.99, 5 * np.exp(log_p)), weights)
    assert rising.at_bound and rising.a < 1
    falling = least_squares_fit(log_p, 0.01 * np.exp(-0.1 * log_p), weights)
    assert falling.at_bound == ("k is at its bound 0",)


def test_bound_fit_finds_the_truth_and_is_no_worse_than_a_fine_grid() -> None:
    log_p, rho, weights = weighted_points(2, 200)
    exact = bound_fit(log_p, 0.6 * np.exp(0.15 * log_p), weights)
    assert (exact.a, exact.k) == pytest.approx((0.6, 0.15), rel=1e-3)
    fit = bound_fit(log_p, rho, weights)
    grid = [
        bound_term(a * np.exp(k * log_p), rho, weights)
        for a in np.linspace(0.01, 0.99, 60)
        for k in np.linspace(0, 1.5, 60)
    ]
    assert bound_term(fit.eta(log_p), rho, weights) <= min(grid) + 1e-6


def test_bound_term_by_hand() -> None:
    eta, rho, weights = np.array([0.0, 0.5]), np.array([0.5, 0.75]), np.array([3.0, 1.0])
    assert bound_term(eta, rho, weights) == pytest.approx((3 * 1 + 1 * 2) / 4)


def test_no_other_constant_is_better_than_the_best() -> None:
    _, rho, weights = weighted_points(3, 101)
    best = best_constant(rho, weights)
    least = bound_term(np.full(101, best), rho, weights)
    assert all(bound_term(np.full(101, c), rho, weights) >= least - 1e-12 for c in np.linspace(0, 0.95, 400))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No pneumothorax.", ("Pneumothorax", False)),
        ("Small left pleural effusion.", ("Pleural Effusion", True)),
        ("Heart size is normal.", ("Cardiomegaly", False)),
        ("Mild pulmonary edema.", ("Edema", True)),
        ("The lungs are clear.", None),
        ("No pleural effusion or pneumothorax.", None),  # two findings
        ("Small effusion with no change.", ("Pleural Effusion", True)),
        ("No significant change in moderate pulmonary edema.", ("Edema", True)),
        ("The pleural effusion has not changed.", ("Pleural Effusion", True)),
        ("Small pericardial effusion.", None),
        ("Congestive heart failure.", ("Edema", True)),
        ("Unlinear tubercle.", None),  # words inside words
    ],
)
def test_named_finding(text: str, expected: tuple[str, bool] | None) -> None:
    assert named_finding(text) == expected


def test_rho_by_labels_is_the_share_of_matching_studies() -> None:
    labels = pd.DataFrame({name: [np.nan] * 8 for name in FINDINGS})
    labels["Edema"] = [1, 1, 1, 0, np.nan, np.nan, -1, -1]
    labels["Fracture"] = [0] + [np.nan] * 7  # looked for, never found
    labels["Pneumonia"] = -1.0  # nobody knows
    texts = ["Edema.", "No edema.", "Fracture.", "No fracture.", "Clear lungs.", "No pneumonia."]
    found = rho_by_labels(pd.Series(texts), labels)
    assert found.tolist() == pytest.approx([3 / 6, 3 / 6, 0.0, 1.0, np.nan, np.nan], nan_ok=True)


def test_a_finding_that_nobody_labelled_is_neither_absent_nor_present() -> None:
    labels = pd.DataFrame({name: [0.0, np.nan, 1.0] for name in FINDINGS})
    labels[["Fracture", "Enlarged Cardiomediastinum"]] = np.nan
    texts = ["No fracture.", "Old fracture.", "Stable cardiomediastinal silhouette.", "No edema."]
    assert rho_by_labels(pd.Series(texts), labels).tolist() == pytest.approx(
        [np.nan, np.nan, np.nan, 2 / 3], nan_ok=True
    )
    assert findings_without_labels(labels) == ["Enlarged Cardiomediastinum", "Fracture"]
