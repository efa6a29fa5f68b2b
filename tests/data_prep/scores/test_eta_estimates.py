"""Estimates of (a, k) and of rho, against the truth and against brute force."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from data_prep.scores import eta_estimates
from data_prep.scores.eta_estimates import _FINDINGS as FINDINGS
from data_prep.scores.eta_estimates import (
    adjusted_r_squared,
    best_constant,
    binned_means,
    binomial_fit,
    bound_fit,
    bound_term,
    findings_without_labels,
    least_squares_fit,
    named_finding,
    rho_by_labels,
    straight_line,
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


def test_the_straight_line_knows_no_bounds() -> None:
    log_p, rho, weights = weighted_points(1, 300)
    for shift in (0.0, -30.0, 1000.0):
        line = straight_line(log_p + shift, rho, weights)
        slope, intercept = np.polyfit(log_p, np.log(rho), 1, w=np.sqrt(weights))
        assert (line.k, line.log_a + line.k * shift) == pytest.approx((slope, intercept), rel=1e-9)
        assert line.at(log_p + shift) == pytest.approx(intercept + slope * log_p)


@pytest.mark.parametrize(
    ("log_a", "k", "reason"),
    [
        (np.log(0.999), 0.0, ""),
        (-1.0, 10.0, ""),
        (3.0, 0.1, r"eta would be exp\(3\) at log p = 0, more than 0.999$"),
        (-4.0, -0.1, "rho falls where log p rises, k would be below 0$"),
        (1.0, 12.0, "more than 0.999, and k would be above 10$"),
    ],
)
def test_a_line_that_no_class_probability_may_have(log_a: float, k: float, reason: str) -> None:
    log_p = -np.arange(9.0)
    line = straight_line(log_p, np.exp(log_a + k * log_p), np.ones(9))
    assert (line.log_a, line.k) == pytest.approx((log_a, k), abs=1e-9)
    assert re.search(reason, line.beyond) and bool(reason) == bool(line.beyond)


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


def test_bins_see_what_a_line_does_not() -> None:
    generator = np.random.default_rng(4)
    x = generator.uniform(-10, 0, 2000)
    y = (x + 5) ** 2 + generator.normal(0, 1, 2000)
    weights = np.ones(2000)
    line = np.polyval(np.polyfit(x, y, 1), x)
    assert adjusted_r_squared(line, y, weights, 2) < 0.02
    means, bins = binned_means(x, y, weights, 20)
    assert bins == 20 and adjusted_r_squared(means, y, weights, bins) > 0.9
    noise = generator.normal(size=2000)
    assert abs(adjusted_r_squared(binned_means(x, noise, weights, 20)[0], noise, weights, 20)) < 0.02


def test_equal_log_p_shares_a_bin() -> None:
    """The order in which ties stand says nothing about y."""
    y, weights = np.arange(60.0), np.linspace(1, 2, 60)
    means, bins = binned_means(np.full(60, -5.0), y, weights, 20)
    assert bins == 1 and means == pytest.approx(np.average(y, weights=weights))
    x = np.repeat([-3.0, -1.0, -2.0, -4.0], 15)
    means, bins = binned_means(x, y, weights, 20)
    assert bins == 4
    for value in set(x):
        mine = x == value
        assert means[mine] == pytest.approx(np.average(y[mine], weights=weights[mine]))


def test_bins_by_hand() -> None:
    # Shares of the weight in the middle of each value: .1, .45, .7, .75, .9; three bins end at 1/3 and 2/3.
    x, y = np.array([1.0, 2.0, 2.0, 3.0, 4.0, 5.0]), np.array([7.0, 1.0, 4.0, 0.0, 6.0, 9.0])
    means, bins = binned_means(x, y, np.array([4.0, 5.0, 5.0, 0.0, 2.0, 4.0]), 3)
    assert bins == 3 and means.tolist() == pytest.approx([7.0, 2.5, 2.5, 8.0, 8.0, 8.0])


def test_values_that_do_not_vary_are_not_explained() -> None:
    # Their mean is rounded: the variance around it is not 0.
    observed, weights = np.full(123, np.log(0.21)), np.linspace(1, 30, 123)
    assert (observed - (weights * observed).sum() / weights.sum()).any()
    assert np.isnan(adjusted_r_squared(observed, observed, weights, 2))


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
