"""Means over seeds and paired differences: SciPy's tests and loops give the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from medclip_dcl.statistics.contrasts import holm, means, paired_differences

LEVELS = {"CL": 0.0, "low": 0.1, "high": -0.2}


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """Two groups x three levels x seven seeds; at r = 0.5 seed 3 of low is missing and seed 5 of CL has no number."""
    random = np.random.default_rng(0)
    rows = [
        {"r": r, "objective": level, "seed": seed, "value": shift * r + random.normal() + 3 * seed}
        for r in (0.1, 0.5)
        for level, shift in LEVELS.items()
        for seed in range(7)
    ]
    table = pd.DataFrame(rows)
    low = (table["r"] == 0.5) & (table["objective"] == "low") & (table["seed"] == 3)
    table.loc[(table["r"] == 0.5) & (table["objective"] == "CL") & (table["seed"] == 5), "value"] = np.nan
    return table[~low].sample(frac=1, random_state=1)


def values(runs: pd.DataFrame, r: float, level: str) -> pd.Series:
    found = runs[(runs["r"] == r) & (runs["objective"] == level)]
    return found.set_index("seed")["value"].dropna().sort_index()


def records(found: pd.DataFrame) -> list[dict[str, Any]]:
    return found.to_dict("records")  # type: ignore[return-value]


def test_means_and_their_intervals_are_those_of_scipy(runs):
    found = means(runs, ["r", "objective"])
    assert len(found) == 6
    for row in records(found):
        own = values(runs, row["r"], row["objective"])
        low, high = stats.t.interval(0.95, len(own) - 1, own.mean(), stats.sem(own))
        np.testing.assert_allclose(
            [row["n"], row["mean"], row["low"], row["high"]], [len(own), own.mean(), low, high]
        )


def test_differences_are_paired_over_common_seeds(runs):
    found = paired_differences(runs, compared="objective", reference="CL", pairs="seed", groups=["r"])
    assert len(found) == 4
    counts = found.set_index(["r", "objective"])["n"].to_dict()
    assert counts == {(0.1, "low"): 7, (0.1, "high"): 7, (0.5, "low"): 5, (0.5, "high"): 6}
    for row in records(found):
        own, reference = values(runs, row["r"], row["objective"]).align(
            values(runs, row["r"], "CL"), join="inner"
        )
        test = stats.ttest_rel(own, reference)
        interval = test.confidence_interval(0.95)
        expected = [(own - reference).mean(), interval.low, interval.high, test.pvalue]
        np.testing.assert_allclose([row["mean"], row["low"], row["high"], row["p"]], expected)


def test_holm_step_by_step():
    p = np.array([0.04, 0.01, np.nan, 0.03, 0.9])
    # The smallest of four times 4, the next times 3, never below the one before: 0.04, 0.09, max(0.09, 0.08), 0.9.
    np.testing.assert_allclose(holm(p), [0.09, 0.04, np.nan, 0.09, 0.9])
    np.testing.assert_allclose(holm(np.array([0.6, 0.7])), [1.0, 1.0])
    assert len(holm(np.array([]))) == 0


def test_one_seed_and_equal_values_have_no_interval():
    rows = pd.DataFrame({"level": ["a", "b"] * 2, "seed": [0, 0, 1, 1], "value": [1.0, 1.5, 2.0, 2.5]})
    one = means(rows[rows["seed"] == 0], ["level"])
    assert one["mean"].tolist() == [1.0, 1.5] and one[["low", "high"]].isna().all(axis=None)
    # Both differences are 0.5: most likely the seed changes nothing, which is no evidence.
    equal = paired_differences(rows, compared="level", reference="a", pairs="seed")
    assert equal["mean"].tolist() == [0.5] and equal[["low", "high", "p", "p_holm"]].isna().all(axis=None)


def test_differences_equal_but_for_rounding_are_insignificant():
    """One image more of 599 in every seed: k/599 - (k - 1)/599 is rounded to two numbers."""
    counts = {0: 302, 1: 324, 2: 341}
    rows = [
        {"objective": objective, "seed": seed, "value": (count + more) / 599}
        for seed, count in counts.items()
        for objective, more in (("CL", 0), ("low", 1))
    ]
    assert len({(count + 1) / 599 - count / 599 for count in counts.values()}) > 1
    (found,) = records(
        paired_differences(pd.DataFrame(rows), compared="objective", reference="CL", pairs="seed")
    )
    assert found["n"] == 3 and found["mean"] == pytest.approx(1 / 599)
    assert all(np.isnan(found[name]) for name in ("low", "high", "p", "p_holm"))
