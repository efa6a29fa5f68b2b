"""Comparisons: a side minus another, over patients or over trainings, with intervals and adjusted p.

A side is a run, or runs that differ in the seed alone. The method is chosen for each pair of sides. With three seeds in
common, differences are paired by seed: Student's t, p adjusted by Holm's method for all differences of a number.
Otherwise patients are drawn, of the mean over a side's seeds, and p compares a difference with the largest standardised
deviation of the draws over all numbers of the pair (max-t; Westfall and Young 1993), so that no other side moves it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy import stats

from medclip_dcl.metrics.table import ANY, bounds_of, place_of
from medclip_dcl.metrics.weighted import mean_of
from medclip_dcl.report import draws
from medclip_dcl.runs.run_folder import FIT_FILE
from medclip_dcl.runs.saved import SavedResultsError, differing_settings, read_json, setting

ALPHA = 0.05
MIN_SEEDS = 3  # of an interval over seeds
Bounds = tuple[float, float]
UNTRAINED = "untrained"
SEEDS = ("seed_everything", *(f"data.init_args.{name}" for name in ("seed", "subset_seed", "label_seed")))
"""Settings in which trainings of one configuration differ."""
_ROUNDING = 1e-9
"""Relative difference of numbers that are taken for equal: k/599 - (k - 1)/599 depends on k."""
_OF_FINDING = "/by_finding/"

Sides = Mapping[str, Sequence[draws.TestedRun]]
"""Label -> a run, or runs that differ in the seed alone."""
Contrasts = dict[tuple[str, str], dict[str, draws.Estimate]]
"""The table of a comparison: (side, side that is subtracted or "") -> path of a number -> estimate."""


def sides_of(runs: Sequence[draws.TestedRun]) -> dict[str, list[draws.TestedRun]]:
    """Sides by label: runs together where their settings are known and differ in the seed alone."""
    alike: list[list[draws.TestedRun]] = []
    for run in runs:
        side = next((side for side in alike if _differ_in_seed(side, run)), None)
        if side is None:
            alike.append(side := [])
        side.append(run)
    found = {}
    for side in alike:
        first, suffix = side[0].name, f", {UNTRAINED}" if side[0].suffix else ""
        shared = os.path.commonprefix([run.name for run in side]).removesuffix(suffix)
        if all(run.name[len(shared) :][:1].isdigit() for run in side):
            shared = shared.rstrip("0123456789")  # the first digits of seeds
        shared = shared.rstrip("-_. ")
        labels = [f"{name} ({len(side)} seeds){suffix}" for name in (shared or first, first)]
        found[first if len(side) == 1 else labels[labels[0] in found]] = side
    return found


def side_named(sides: Sides, name: str) -> str:
    """Label of the side with this label, or with the run of this name or folder."""
    for label, runs in sides.items():
        is_folder = any(not run.suffix and Path(name).resolve() == run.folder.resolve() for run in runs)
        if is_folder or name in (label, *(run.name for run in runs)):
            return label
    for label in sides:
        if name == label.partition(" (")[0]:
            return label
    raise SavedResultsError(
        f"--baseline: expected one of {', '.join(sides)} (the untrained ones come with --untrained), found {name!r}"
    )


def _differ_in_seed(side: Sequence[draws.TestedRun], run: draws.TestedRun) -> bool:
    first = side[0]
    if first.config is None or run.config is None or first.suffix != run.suffix:
        return False
    is_new = all(_seed(run) != _seed(other) for other in side)
    # NOT_COMPARED has it, as a resumed run may name it; here it is the start of the training.
    is_new &= first.config.get("ckpt_path") == run.config.get("ckpt_path")
    (file, precision), (its_file, its_precision) = map(_trained, (first, run))
    is_new &= file == its_file and ("" in (precision, its_precision) or precision == its_precision)
    return is_new and differing_settings(first.config, run.config).keys() <= set(SEEDS)


def _trained(run: draws.TestedRun) -> tuple[str, str]:
    """Name of the tested checkpoint, and the precision of the training where it is known."""
    file = run.folder / FIT_FILE
    checkpoint = Path(str((run.results or {}).get("checkpoint", {}).get("file", ""))).name
    return checkpoint, str(read_json(file).get("precision", "")) if file.is_file() else ""


def _are_paired(a: Sequence[draws.TestedRun], b: Sequence[draws.TestedRun]) -> bool:
    return len({*map(_seed, a)} & {*map(_seed, b)}) >= MIN_SEEDS


def _seed(run: draws.TestedRun) -> Hashable:
    """Pairs trainings."""
    return tuple(setting(run.config, name) for name in SEEDS)


def compared(
    sides: Sides,
    baseline: str | None = None,
    *,
    findings: Sequence[str] | None = None,
    n_draws: int = draws.N_DRAWS,
) -> Contrasts:
    """Every number of each side, and its difference from the baseline's.

    A side of several runs has means over its seeds; from `MIN_SEEDS` on with t intervals, else over patients.

    Args:
        sides: tested on the same cases.
        baseline: label of the side that is subtracted; None: no differences.
        findings: means of a classification are over these, default: over each side's own. p of such a mean is that
            of results.json's where both sides have these findings alone; else it is adjusted for these means only.
        n_draws: of patients.
    """
    seeds = {label: runs for label, runs in sides.items() if len(runs) >= MIN_SEEDS}
    over_seeds = _over_seeds(seeds, baseline, findings)
    predictions = {label: runs[0].predictions for label, runs in sides.items()}

    @cache
    def drawn(label: str, other: str) -> draws.Numbers:
        own = predictions[label].patients
        patients = np.union1d(own, predictions[other].patients)
        if other != label and len(patients) == len(own):
            return drawn(label, label)
        return mean_over_seeds([run.draws(patients, n_draws) for run in sides[label]])

    table: Contrasts = {}
    for label in sides:
        if label in seeds:
            table[label, ""] = over_seeds.get((label, ""), {})
        else:
            numbers = drawn(label, label)
            numbers = numbers | shared_means(numbers, findings, predictions[label].bands)
            table[label, ""] = draws.intervals_of(numbers, [predictions[label]], findings=findings)
        if baseline is None or label == baseline:
            continue
        if _are_paired(sides[label], sides[baseline]):
            table[label, baseline] = over_seeds.get((label, baseline), {})
            continue
        both = predictions[label], predictions[baseline]
        pair = [drawn(label, baseline), drawn(baseline, label)]
        table[label, baseline] = differences(pair, both)
        if findings is not None and any(findings_of(one) != {*findings} for one in pair):
            shared = differences(pair, both, findings).items()
            table[label, baseline] |= {path: one for path, one in shared if draws.is_mean_over_findings(path)}
    return table


def explain(
    sides: Sides,
    baseline: str | None,
    units: str,
    n_draws: int = draws.N_DRAWS,
    *,
    marks_networks: bool = False,
) -> str:
    """Words for the head of a page: how its differences and intervals are made, and which are marked."""
    are_paired = {
        _are_paired(runs, sides[baseline]) for label, runs in sides.items() if baseline not in (None, label)
    }
    text = []
    if False in are_paired:
        text.append(
            f"* marks networks that differ on further {units} of the set (p ≤ {ALPHA} and an interval without 0); a "
            "training repeated may differ by more."
            if marks_networks
            else f"Differences over {units} are not marked: they compare these networks, not objectives, whose numbers "
            "change with the seed. Train each with three seeds or more: runs that differ in the seed alone are a side."
        )
        text.append(
            "p is adjusted for all numbers of two sides on a set (max-t): 5% a pair and set. Each draw takes the same "
            f"{units} for both, of the mean over the seeds of a side."
        )
    if True in are_paired:
        text.append(
            f"Differences of sides with three seeds or more in common are paired by seed; * marks p ≤ {ALPHA} of the "
            "paired t test, adjusted by Holm's method for all differences of that number."
        )
    if any(len(runs) > 1 for runs in sides.values()):
        text.append(
            "A side of several seeds has their mean; of three or more, in brackets, the 95% t interval over trainings, "
            f"which does not cover other {units}."
        )
    if any(len(runs) < MIN_SEEDS for runs in sides.values()):
        text.append(draws.method(units, n_draws))
    return " ".join(text)


def mean_over_seeds(numbers: Sequence[draws.Numbers]) -> draws.Numbers:
    """Mean of each number that all have, among the tested patients and in each draw."""
    paths = (path for path in numbers[0] if all(path in one for one in numbers))
    return {path: mean_of([one[path] for one in numbers], numbers[0][path]) for path in paths}


def shared_means(
    numbers: draws.Numbers, findings: Sequence[str] | None, bands: Mapping[str, str]
) -> draws.Numbers:
    """Means of a classification over those of the findings that have a number; `bands` of the findings."""
    found = {}
    for path in filter(draws.is_mean_over_findings, () if findings is None else numbers):
        of_findings = (numbers[one] for one in draws.averaged(path, findings or (), bands))
        found[path] = mean_of(
            [one for one in of_findings if np.isfinite(one[0])], np.full_like(numbers[path], np.nan)
        )
    return found


def bootstrap_differences(
    run: Path | draws.Predictions,
    baseline: Path | draws.Predictions,
    n_draws: int = draws.N_DRAWS,
    seed: int = 0,
) -> dict[str, draws.Estimate]:
    """Paired differences, run minus baseline, of every number that both have: each draw takes the same patients."""
    pair = [draws.predictions_of(one) for one in (run, baseline)]
    draws.require_same_cases(*pair)
    patients = np.union1d(*(one.patients for one in pair))
    return differences([draws.bootstrap_numbers(one, n_draws, seed, patients) for one in pair], pair)


def differences(
    numbers: Sequence[draws.Numbers],
    predictions: Sequence[draws.Predictions],
    findings: Sequence[str] | None = None,
) -> dict[str, draws.Estimate]:
    """Differences of two sides in each draw; p by :func:`joint_p` over all numbers of a family (`Number.family`).

    Means over findings are compared where both sides have the same findings, or over `findings`, with p by themselves.
    """
    sides = zip(numbers, predictions, strict=True)
    a, b = (one | shared_means(one, findings, its.bands) for one, its in sides)
    are_alike = findings is not None or findings_of(a) == findings_of(b)
    paths = [path for path in a if path in b and (are_alike or not draws.is_mean_over_findings(path))]
    found = {path: a[path] - b[path] for path in paths}
    # Classifiers beside each other have one section name, and the families of theirs.
    are_logits = all("logit" in one.tables.get("classification", ()) for one in predictions)
    families: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        if findings is None or draws.is_mean_over_findings(path):
            place = (place_of(f"finding_{path}") if are_logits else None) or place_of(path)
            families[path.split("/")[-1] if place is None else place.number.family].append(path)
    p: dict[str, float] = {}
    for family in families.values():
        behind = np.array([min(one.n_behind(path) for one in predictions) for path in family], dtype=int)
        p |= zip(family, joint_p(np.array([found[path] for path in family]), behind), strict=True)
    return draws.intervals_of(found, predictions, p, findings)


def over_patients_and_seeds(
    gaps: Float[np.ndarray, "seed one_and_draws"], bounds: Bounds = ANY
) -> draws.Estimate:
    """Mean over seeds of a number's difference, with a 95% interval over patients and seeds; none for a single seed.

    To each draw of patients an error of the mean over seeds is added, from Student's distribution: alike seeds give the
    percentile interval over patients, and alike draws the t interval over seeds.
    """
    n_seeds, numbers = len(gaps), gaps.mean(axis=0)
    if n_seeds < 2:
        return draws.estimate(numbers[:1])
    shares = (np.random.default_rng(0).permutation(len(numbers) - 1) + 0.5) / (len(numbers) - 1)
    numbers[1:] += stats.t.ppf(shares, n_seeds - 1) * gaps[:, 0].std(ddof=1) / np.sqrt(n_seeds)
    distance = bounds[1] - bounds[0]
    return draws.estimate(numbers.clip(-distance, distance))


def is_marked(difference: draws.Estimate) -> bool:
    """True for a difference that is found: p of at most `ALPHA`, and an interval without 0."""
    p, low, high = difference.p, difference.low, difference.high
    return None not in (p, low, high) and p <= ALPHA and not low <= 0 <= high  # type: ignore[operator]


def findings_of(numbers: draws.Numbers) -> set[str]:
    """Findings with an AUC."""
    paths = (path for path in numbers if _OF_FINDING in path and path.endswith("/auc"))
    return {path.split(_OF_FINDING)[1].removesuffix("/auc") for path in paths}


def joint_p(
    gaps: Float[np.ndarray, "gap one_and_draws"], n_patients: Int[np.ndarray, "gap"]
) -> Float[np.ndarray, "gap"]:
    """Adjusted p of each gap: the share of its draws whose largest standardised deviation reaches that of it from 0.

    A draw without the gap, such as one without a class of a rare finding, does not count. Gaps are standardised by the
    standard deviation s of their draws. With n patients gap / (s sqrt(n / (n - 1))) has about Student's distribution
    with n - 1 degrees of freedom, and is taken as the normal deviate of the same probability. Of a gap that no draw
    changes it is 1 where it is 0, else that of n signs alike, but no less than draws can show. Fewer than 2 patients
    and no number give NaN.
    """
    p = np.full(len(gaps), np.nan)
    is_known = np.isfinite(gaps[:, 0]) & (np.isfinite(gaps[:, 1:]).sum(axis=1) > 1) & (n_patients > 1)
    known = np.flatnonzero(is_known)
    deviations = np.nanstd(gaps[known, 1:], axis=1, ddof=1)
    least = np.maximum(1 / gaps.shape[1], 2.0 ** (1 - n_patients[known]))
    p[known] = np.where(np.abs(gaps[known, 0]) <= draws.ROUNDING, 1.0, least)
    known, deviations = known[deviations > draws.ROUNDING], deviations[deviations > draws.ROUNDING]
    if len(known):
        observed, drawn, n = gaps[known, 0], gaps[known, 1:], n_patients[known]
        largest = np.nan_to_num(np.abs(drawn - observed[:, None]) / deviations[:, None]).max(axis=0)
        student = np.abs(observed) / (deviations * np.sqrt(n / (n - 1)))
        has_number = np.isfinite(drawn)
        reached = has_number & (largest >= stats.norm.isf(stats.t.sf(student, n - 1))[:, None])
        p[known] = (reached.sum(axis=1) + 1) / (has_number.sum(axis=1) + 1)
    return p


def _over_seeds(sides: Sides, baseline: str | None, findings: Sequence[str] | None) -> Contrasts:
    """Means over seeds and differences paired by seed, with t intervals."""
    rows = []
    for label, runs in sides.items():
        for run in runs:
            numbers = {
                path: x for of_section in run.predictions.values.values() for path, x in of_section.items()
            }
            numbers |= shared_means(numbers, findings, run.predictions.bands)
            rows += [(label, _seed(run), path, value) for path, (value,) in numbers.items()]
    table: Contrasts = {}
    found = pd.DataFrame(rows, columns=["label", "seed", "path", "value"])
    for path, of_path in found.groupby("path", sort=False):
        bounds = bounds_of([str(path)])
        parts = {"": means(of_path, ["label"], bounds)}
        if baseline in sides:
            pairs: dict[str, Any] = {
                "compared": "label",
                "reference": baseline,
                "pairs": "seed",
                "bounds": bounds,
            }
            parts[str(baseline)] = paired_differences(of_path, **pairs)
        for minus, part in parts.items():
            for one in part.astype(object).where(part.notna(), None).to_dict("records"):
                about = one["mean"], one["low"], one["high"], one.get("p_holm"), one["n"]
                table.setdefault((one["label"], minus), {})[str(path)] = draws.Estimate(*about, over="seeds")
    return table


def means(rows: pd.DataFrame, by: Sequence[str], bounds: Bounds = ANY) -> pd.DataFrame:
    """Mean of the column value in each group of the columns `by`, with its 95% t interval within the number's bounds.

    Returns:
        The columns of `by`, n, mean, low, high; NaN is left out. One or two runs and equal values have no interval
        (NaN): most likely the latter are copies of one another.
    """
    return _within(bounds, _by_group(rows.dropna(subset=["value"]), by, "value").drop(columns="p"))


def _within(bounds: Bounds, found: pd.DataFrame) -> pd.DataFrame:
    return found.assign(low=found["low"].clip(lower=bounds[0]), high=found["high"].clip(upper=bounds[1]))


def paired_differences(
    rows: pd.DataFrame,
    *,
    compared: str,
    reference: int | float | str,
    pairs: str,
    groups: Sequence[str] = (),
    level: float = draws.LEVEL,
    bounds: Bounds = ANY,
) -> pd.DataFrame:
    """Mean difference of each level from the reference over the pairs that both have, with its t interval.

    Args:
        rows: one row for each run, its number in the column value; NaN is left out.
        compared: column of the levels, from which `reference` is subtracted.
        pairs: column by which runs are paired, such as the seed.
        groups: columns within whose combinations the levels are compared.
        level: of the interval.
        bounds: of the number; its differences are at most their distance.

    Returns:
        The columns of `groups`, `compared`, n (number of pairs), mean, low, high, p of the two-sided paired t
        test, and p_holm, adjusted for all rows by Holm's method. One or two pairs, and differences that are all
        equal, have neither interval nor p (NaN).
    """
    keys = [*groups, pairs]
    rows = rows.dropna(subset=["value"])
    own, others = (rows[is_own] for is_own in (rows[compared] == reference, rows[compared] != reference))
    both = others.merge(own[[*keys, "value"]], on=keys, suffixes=("", "_reference"), validate="many_to_one")
    both["difference"] = both["value"] - both["value_reference"]
    found = _by_group(both, [*groups, compared], "difference", level)
    distance = bounds[1] - bounds[0]
    return _within((-distance, distance), found).assign(p_holm=holm(found["p"].to_numpy("float64")))


def holm(p: np.ndarray) -> np.ndarray:
    """p values adjusted by Holm's step-down method (1979); NaN is not counted as a test."""
    adjusted = np.full(len(p), np.nan)
    order = [place for place in np.argsort(p) if not np.isnan(p[place])]
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def _by_group(rows: pd.DataFrame, by: Sequence[str], column: str, level: float = draws.LEVEL) -> pd.DataFrame:
    """Summary of a column in each group; without `by`, one row."""
    groups = rows.groupby(list(by), sort=False)[column] if by else [((), rows[column])]
    found = [
        dict(zip(by, key, strict=True)) | _summary(values.to_numpy("float64"), level)
        for key, values in groups
    ]
    return pd.DataFrame(found, columns=[*by, *_summary(np.empty(0))])


def _summary(values: np.ndarray, level: float = draws.LEVEL) -> dict[str, int | float]:
    """n, mean, t interval, and p of the two-sided t test against 0."""
    n = len(values)
    mean = float(values.mean()) if n else np.nan
    are_equal = n < MIN_SEEDS or np.ptp(values) <= _ROUNDING * np.abs(values).max()
    error = np.nan if are_equal else float(values.std(ddof=1)) / np.sqrt(n)
    half = float(stats.t.ppf((1 + level) / 2, max(n - 1, 1))) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, max(n - 1, 1)))
    return {"n": n, "mean": mean, "low": mean - half, "high": mean + half, "p": p}
