"""Means over seeds, and differences paired by seed, with Student's t intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from medclip_dcl.statistics.draws import LEVEL

ALPHA = 0.05
_ROUNDING = 1e-9
"""Relative difference of numbers that are taken for equal: k/599 - (k - 1)/599 depends on k."""


def means(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean of the column value in each group of the columns `by`, with its 95% t interval; NaN is left out.

    Returns:
        The columns of `by`, n, mean, low, high. One run and equal values have no interval (NaN): most likely the
        runs are copies of one another.
    """
    return _by_group(rows.dropna(subset=["value"]), by, "value").drop(columns="p")


def paired_differences(
    rows: pd.DataFrame, *, compared: str, reference: int | float | str, pairs: str, groups: Sequence[str] = ()
) -> pd.DataFrame:
    """Mean difference of each level from the reference over the pairs that both have, with its 95% t interval.

    Args:
        rows: one row for each run, its number in the column value; NaN is left out.
        compared: column of the levels, from which `reference` is subtracted.
        pairs: column by which runs are paired, such as the seed.
        groups: columns within whose combinations the levels are compared.

    Returns:
        The columns of `groups`, `compared`, n (number of pairs), mean, low, high, p of the two-sided paired t
        test, and p_holm, adjusted for all rows by Holm's method. One pair, and differences that are all equal, have
        neither interval nor p (NaN).
    """
    keys = [*groups, pairs]
    rows = rows.dropna(subset=["value"])
    own, others = (rows[is_own] for is_own in (rows[compared] == reference, rows[compared] != reference))
    both = others.merge(own[[*keys, "value"]], on=keys, suffixes=("", "_reference"), validate="many_to_one")
    both["difference"] = both["value"] - both["value_reference"]
    found = _by_group(both, [*groups, compared], "difference")
    return found.assign(p_holm=holm(found["p"].to_numpy("float64")))


def holm(p: np.ndarray) -> np.ndarray:
    """p values adjusted by Holm's step-down method (1979); NaN is not counted as a test."""
    adjusted = np.full(len(p), np.nan)
    order = [place for place in np.argsort(p) if not np.isnan(p[place])]
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def _by_group(rows: pd.DataFrame, by: Sequence[str], column: str) -> pd.DataFrame:
    """Summary of a column in each group; without `by`, one row."""
    groups = rows.groupby(list(by), sort=False)[column] if by else [((), rows[column])]
    found = [dict(zip(by, key, strict=True)) | _summary(values.to_numpy("float64")) for key, values in groups]
    return pd.DataFrame(found, columns=[*by, *_summary(np.empty(0))])


def _summary(values: np.ndarray) -> dict[str, int | float]:
    """n, mean, 95% t interval, and p of the two-sided t test against 0."""
    n = len(values)
    mean = float(values.mean()) if n else np.nan
    are_equal = n < 2 or np.ptp(values) <= _ROUNDING * np.abs(values).max()
    error = np.nan if are_equal else float(values.std(ddof=1)) / np.sqrt(n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, max(n - 1, 1))) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, max(n - 1, 1)))
    return {"n": n, "mean": mean, "low": mean - half, "high": mean + half, "p": p}
