"""Tables of the digits' control arms against their rows by seed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

RESULTS = Path(__file__).parents[2] / "docs/results"
COLUMNS = {
    "10%": "accuracy_10",
    "all": "accuracy",
    "accuracy with 10% of the labels": "accuracy_10",
    "thinned classes with 10% of the labels": "thinned_10",
    "accuracy": "accuracy",
    "thinned classes": "thinned",
    "share at the floor": "percent_at_floor",
}


@pytest.mark.parametrize(
    ("name", "keys", "outcome", "rounding"),
    [
        ("digits_tau", ["grid", "negatives"], "labels", 0.005),
        ("digits_correction", ["gamma_squared"], "outcome", 0.05),
    ],
)
def test_table_is_that_of_its_seeds(name, keys, outcome, rounding):
    table, seeds = (pd.read_csv(RESULTS / f"{name}{end}.csv") for end in ("", "_by_seed"))
    if "step" in seeds:
        seeds = pd.concat(
            [seeds[seeds["best"] == "yes"].assign(step="best"), seeds.query("step == 200").assign(step="end")]
        )
        keys = [*keys, "step"]
    values = seeds.set_index([*keys, "objective", "seed"]).sort_index()
    for row in table.to_dict("records"):
        key, column = tuple(row[one] for one in keys), COLUMNS[row[outcome]]
        of = values.loc[key, column]
        own = of[row["objective"]]
        if isinstance(row["subtracted"], str):
            own = own - of[row["subtracted"]]
        assert row["seeds"] == len(own) == 10
        if "gain" in row["quantity"]:
            gain = of["unbiased"] - of["CL"]
            assert row["percent"] == pytest.approx(100 * own.mean() / gain.mean(), abs=0.51)
            for end in (row["low"], row["high"]):  # Fieller: the ratios that a t test does not refuse
                slack = 0.0051 * abs(gain.mean())
                low, high = stats.ttest_1samp(own - end / 100 * gain, 0).confidence_interval()
                assert min(abs(low), abs(high)) < slack + 0.01
            continue
        interval = stats.ttest_1samp(own, 0).confidence_interval()
        found = [row["percent"], row["low"], row["high"]]
        assert found == pytest.approx([own.mean(), interval.low, interval.high], abs=1.1 * rounding)
