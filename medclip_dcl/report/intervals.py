"""Uncertainty of a test: bootstrap by patient of every number of results.json, from the run's predictions.

Boxes and images of one patient are no independent cases, so whole patients are drawn with replacement (the cluster
bootstrap: Davison and Hinkley 1997, section 3.8) and intervals are percentiles of the draws (Efron and Tibshirani
1993, chapter 13). A draw is how often each patient was drawn; every metric is computed with these counts as weights
of the patient's cases, which equals repeating the rows. The draws depend on the patients, their number and the seed
alone: all metrics of an evaluation, and all runs tested on the same patients, share them, so that the difference of
two runs is paired.

The intervals say how far a number depends on which patients were tested. They say nothing of the training seed.
Ranks of retrieval are those among all candidates, computed once; the queries are resampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from medclip_dcl.report.saved_results import SavedResultsError, command_of_test, read_results, value_at

N_DRAWS = 2000
LEVEL = 0.95
POLICY = (
    "a draw without a case (for an AUC and its accuracy: without a case of either class) gives no number and is left"
    " out of the interval, also of the average over findings; a number that rests on fewer than 2 patients (of either"
    " class) has no interval; min_cases decides on the tested cases, not on the draws"
)
"""What happens to draws that cannot give a number."""

_KS = (10, 50, 100)
_DIRECTIONS = ("image_to_text", "text_to_image")
_GROUNDING = ("cnr", "cnr_signed", "miou")
_COLUMNS = {
    "classification": ("dicom_id", "subject_id", "finding", "label", "score_positive", "score_negative"),
    "finding_classification": ("dicom_id", "subject_id", "finding", "label", "logit"),
    "grounding": ("dicom_id", "subject_id", "category", "phrase", "box", *_GROUNDING),
    "retrieval": ("direction", "dicom_id", "subject_id", "box", "rank", "rank_tolerant"),
    "report_retrieval": ("task", "direction", "query", "subject_id", "rank", "rank_tolerant"),
}
_CASES = {
    "classification": ["finding", "dicom_id", "subject_id", "label"],
    "finding_classification": ["finding", "dicom_id", "subject_id", "label"],
    "grounding": ["box", "dicom_id", "subject_id", "category", "phrase"],
    "retrieval": ["direction", "box", "dicom_id", "subject_id"],
    "report_retrieval": ["task", "direction", "query", "subject_id"],
}
"""What tells the cases of two runs apart."""
_CLASSIFICATIONS = ("classification", "finding_classification")
_TOLERANCE = 1e-6
"""results.json rounds an AUC to float32."""
_ELEMENTS_PER_CHUNK = 2**22
"""Weights (draws x cases) held at a time: bounds the memory whatever the number of cases."""

Numbers = dict[str, np.ndarray]
"""Metric path -> its value among the tested patients, then in each draw; NaN where there is none."""


class Interval(NamedTuple):
    """A number with its percentile interval; None where it cannot be given.

    Attributes:
        value: among the tested patients, as in results.json.
        low: lower bound.
        high: upper bound.
        n_draws: draws that gave the number.
    """

    value: float | None
    low: float | None
    high: float | None
    n_draws: int


class Difference(NamedTuple):
    """A number of a run minus that of another on the same patients, with its percentile interval.

    Attributes:
        value: the difference among the tested patients.
        low: lower bound.
        high: upper bound.
        p: two-sided: twice the smaller share of draws on one side of 0, (count + 1) / (draws + 1), at most 1.
        n_draws: draws that gave both numbers.
    """

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n_draws: int

    @property
    def excludes_zero(self) -> bool:
        """The interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Predictions:
    """What intervals are computed from.

    Attributes:
        tables: "classification", "finding_classification", "grounding", "retrieval", "report_retrieval" -> rows as the
            evaluations write them; any may lack.
        min_cases: cases of either class that a finding needs (protocol of the classification, of which a run has one).
        name: for messages.
    """

    tables: Mapping[str, pd.DataFrame]
    min_cases: int = 5
    name: str = "predictions"


def bootstrap_intervals(
    run: Path | Predictions, n_draws: int = N_DRAWS, seed: int = 0, level: float = LEVEL, suffix: str = ""
) -> dict[str, Interval]:
    """Percentile intervals of every number of results.json.

    Args:
        run: a run folder, or predictions.
        n_draws: bootstrap draws of patients.
        seed: of the draws; the same seed gives the same intervals.
        level: coverage aimed at, in (0, 1).
        suffix: "_untrained" for results_untrained.json and predictions_untrained/ of a run folder.

    Returns:
        Path in results.json's metrics, keys joined by "/", such as "classification/by_finding/Edema/auc" -> interval.
        A number that results.json gives as None is None, and :data:`POLICY` says which have no interval.

    Raises:
        SavedResultsError: see :func:`read_predictions` and :func:`bootstrap_numbers`.
    """
    predictions = read_predictions(run, suffix) if isinstance(run, Path) else run
    return intervals_of(bootstrap_numbers(predictions, n_draws, seed, level), level)


def bootstrap_differences(
    run: Path | Predictions,
    baseline: Path | Predictions,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> dict[str, Difference]:
    """Run minus baseline for every number that both have, paired: each draw takes the same patients in both.

    Args:
        run: a run folder, or predictions.
        baseline: what is subtracted.
        n_draws: as in :func:`bootstrap_intervals`.
        seed: as there.
        level: as there.

    Raises:
        SavedResultsError: the two were not tested on the same cases; as :func:`bootstrap_intervals`.
    """
    a, b = (read_predictions(one) if isinstance(one, Path) else one for one in (run, baseline))
    require_same_cases(a, b)
    of_run, of_baseline = (bootstrap_numbers(one, n_draws, seed, level) for one in (a, b))
    return differences_of(of_run, of_baseline, level)


def read_predictions(run: Path, suffix: str = "") -> Predictions:
    """The predictions of a tested run folder, found to be those of which its results.json speaks.

    Args:
        run: run folder.
        suffix: "_untrained" for the untrained network's.

    Raises:
        SavedResultsError: the run is not tested; a file is missing or not readable, lacks a column, or gives other
            numbers than results.json.
    """
    results = read_results(run, suffix)
    if results is None:
        raise SavedResultsError(
            f"{run / f'results{suffix}.json'} is not there; made by: {command_of_test(run)}"
        )
    folder = run / f"predictions{suffix}"
    sections = [section for section in _COLUMNS if section in results["metrics"]]
    protocols = (results["protocol"].get(section, {}) for section in _CLASSIFICATIONS)
    min_cases = next((found["min_cases"] for found in protocols if "min_cases" in found), 5)
    predictions = Predictions(
        {section: _read_table(folder / f"{section}.parquet", section, run) for section in sections},
        min_cases,
        str(folder),
    )
    _require_agreement(predictions, results["metrics"], run / f"results{suffix}.json")
    return predictions


def bootstrap_numbers(
    predictions: Predictions, n_draws: int = N_DRAWS, seed: int = 0, level: float = LEVEL
) -> Numbers:
    """Each number among the tested patients and in every draw.

    Raises:
        SavedResultsError: a level outside (0, 1), or too few draws for it.
    """
    if not 0 < level < 1:
        raise SavedResultsError(f"level must lie between 0 and 1, such as 0.95: found {level}")
    least = int(np.ceil(2 / (1 - level)))
    if n_draws < least:
        raise SavedResultsError(
            f"an interval of level {level} needs at least {least} draws, better 2,000: found {n_draws}"
        )
    return _numbers(predictions, n_draws, seed)


def intervals_of(numbers: Numbers, level: float = LEVEL) -> dict[str, Interval]:
    """The percentile interval of each number of :func:`bootstrap_numbers`."""
    found = {}
    for path, values in numbers.items():
        low, high, n_draws = _percentiles(values[1:], level)
        found[path] = Interval(_number(values[0]), low, high, n_draws)
    return found


def differences_of(numbers: Numbers, baseline: Numbers, level: float = LEVEL) -> dict[str, Difference]:
    """Paired differences of two runs' :func:`bootstrap_numbers`, made with the same seed and number of draws."""
    found = {}
    for path in numbers.keys() & baseline.keys():
        values = numbers[path] - baseline[path]
        low, high, n_draws = _percentiles(values[1:], level)
        p = _two_sided_p(values[1:]) if low is not None else None
        found[path] = Difference(_number(values[0]), low, high, p, n_draws)
    return {path: found[path] for path in numbers if path in found}


def require_same_cases(a: Predictions, b: Predictions) -> None:
    """Refuse to pair runs that were tested on other cases.

    Raises:
        SavedResultsError: names the evaluation, and how many cases differ.
    """
    for section in sorted(a.tables.keys() & b.tables.keys()):
        keys = [
            table[_CASES[section]].sort_values(_CASES[section]).reset_index(drop=True)
            for table in (a.tables[section], b.tables[section])
        ]
        sizes = [len(key) for key in keys]
        n_other = abs(sizes[0] - sizes[1])
        if not n_other and sizes[0]:
            n_other = int((keys[0].to_numpy() != keys[1].to_numpy()).any(axis=1).sum())
        if n_other:
            raise SavedResultsError(
                f"{a.name} and {b.name} cannot be paired: {n_other} of {max(sizes)} cases of {section} are not the"
                " same (image, patient, label or box); test both on one prepared set"
            )


def method(n_draws: int = N_DRAWS, seed: int = 0, level: float = LEVEL) -> str:
    """One sentence for the reader of a table: what stands in the brackets."""
    return (
        f"In brackets: {100 * level:g}% percentile intervals of {n_draws:,} bootstrap draws of patients (seed {seed});"
        " they say how far a number depends on which patients were tested, not on the training seed."
        " Ranks of retrieval are those among all candidates."
    )


def patient_draws(n_patients: int, n_draws: int, seed: int) -> Float[np.ndarray, "one_and_draws patient"]:
    """How often each patient was drawn: once each in row 0 (the tested patients), then n_patients with replacement."""
    chances = np.full(n_patients, 1 / n_patients)
    draws = np.random.default_rng(seed).multinomial(n_patients, chances, size=n_draws)
    return np.concatenate([np.ones((1, n_patients)), draws])


def weighted_means(
    counts: Float[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "case"],
    values: Float[np.ndarray, "case metric"],
) -> Float[np.ndarray, "draw metric"]:
    """Mean of each metric over the cases in which it is finite, each case as often as its patient was drawn.

    A draw without a case gives NaN.
    """
    finite = np.isfinite(values)
    sums, sizes = np.zeros((2, counts.shape[1], values.shape[1]))
    np.add.at(sums, patient, np.where(finite, values, 0.0))
    np.add.at(sizes, patient, finite.astype(float))
    with np.errstate(invalid="ignore"):
        return (counts @ sums) / (counts @ sizes)


def weighted_auc(
    counts: Float[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "case"],
    scores: Float[np.ndarray, "case"],
    positive: Bool[np.ndarray, "case"],
) -> Float[np.ndarray, "draw"]:
    """Area under the ROC curve with cases as often as their patient was drawn; a tie counts half.

    The chance that a positive case scores above a negative one (Mann-Whitney): cases are sorted once, and cumulative
    weights of the negatives say in every draw how many of them a positive beats. A draw that lacks a class gives NaN.
    """
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) > 0)
    found = np.empty(len(counts))
    for rows, weights in _case_weights(counts, patient[order]):
        positives = np.add.reduceat(weights * positive[order], starts, axis=1)
        negatives = np.add.reduceat(weights * ~positive[order], starts, axis=1)
        wins = (positives * (negatives.cumsum(axis=1) - negatives / 2)).sum(axis=1)
        with np.errstate(invalid="ignore"):
            found[rows] = wins / (positives.sum(axis=1) * negatives.sum(axis=1))
    return found


def weighted_average_precision(
    counts: Float[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "case"],
    scores: Float[np.ndarray, "case"],
    positive: Bool[np.ndarray, "case"],
) -> Float[np.ndarray, "draw"]:
    """Average precision with cases as often as their patient was drawn; tied cases are one threshold.

    Sum over thresholds of (recall - recall before) * precision. A draw without a positive case gives NaN.
    """
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(-scores[order], prepend=-np.inf) > 0)
    found = np.empty(len(counts))
    for rows, weights in _case_weights(counts, patient[order]):
        positives = np.add.reduceat(weights * positive[order], starts, axis=1)
        cases = np.add.reduceat(weights, starts, axis=1).cumsum(axis=1)
        # Thresholds above the first case that was drawn have neither recall nor precision.
        precision = positives.cumsum(axis=1) / np.maximum(cases, 1)
        with np.errstate(invalid="ignore"):
            found[rows] = (positives * precision).sum(axis=1) / positives.sum(axis=1)
    return found


def weighted_median(
    counts: Float[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "case"],
    values: Float[np.ndarray, "case"],
) -> Float[np.ndarray, "draw"]:
    """Median with cases as often as their patient was drawn; of an even number the mean of the middle two.

    A draw without a case gives NaN.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    found = np.empty(len(counts))
    for rows, weights in _case_weights(counts, patient[order]):
        below = weights.cumsum(axis=1)
        total = below[:, -1:]
        places = [((total - 1) // 2), total // 2]
        middle = [(below <= place).sum(axis=1).clip(max=len(ordered) - 1) for place in places]
        found[rows] = np.where(total[:, 0] > 0, (ordered[middle[0]] + ordered[middle[1]]) / 2, np.nan)
    return found


def _numbers(predictions: Predictions, n_draws: int, seed: int) -> Numbers:
    found: Numbers = {}
    for section, table in predictions.tables.items():
        if table.empty:
            continue
        patients, patient = np.unique(table["subject_id"].to_numpy(), return_inverse=True)
        counts = patient_draws(len(patients), n_draws, seed)
        rows = table.assign(patient=patient)
        if section in _CLASSIFICATIONS:
            numbers = _classification(rows, counts, predictions.min_cases)
        else:
            of_section = {
                "grounding": _grounding,
                "retrieval": _retrieval,
                "report_retrieval": _report_retrieval,
            }
            numbers = of_section[section](rows, counts)
        found |= {f"{section}/{path}": values for path, values in numbers.items()}
    return found


def _classification(cases: pd.DataFrame, counts: np.ndarray, min_cases: int) -> Numbers:
    """By two prompts, or by a classifier's logit, which has an average precision besides."""
    has_logits = "logit" in cases
    names = ("auc", "average_precision", "acc") if has_logits else ("auc", "acc")
    found: Numbers = {}
    for finding in pd.unique(cases["finding"]):
        rows = cases[cases["finding"] == finding]
        scores = rows["logit"] if has_logits else rows["score_positive"] - rows["score_negative"]
        of_finding = _of_finding(names, rows, scores.to_numpy(dtype="float64"), counts, min_cases)
        found |= {f"by_finding/{finding}/{name}": values for name, values in of_finding.items()}
    for name in names:
        of_findings = [values for path, values in found.items() if path.endswith(f"/{name}")]
        counted = [values for values in of_findings if not np.isnan(values[0])]
        found[name] = np.mean(counted, axis=0) if counted else np.full(len(counts), np.nan)
    return found


def _of_finding(
    names: Iterable[str], rows: pd.DataFrame, scores: np.ndarray, counts: np.ndarray, min_cases: int
) -> Numbers:
    """The named numbers of one finding; its predicted label is positive where the score is above 0."""
    positive, patient = rows["label"].to_numpy() == 1, rows["patient"].to_numpy()
    if min(positive.sum(), (~positive).sum()) < min_cases:
        return {name: np.full(len(counts), np.nan) for name in names}
    auc = weighted_auc(counts, patient, scores, positive)
    numbers = {"auc": auc}
    if "average_precision" in names:
        numbers["average_precision"] = weighted_average_precision(counts, patient, scores, positive)
    correct = (scores > 0) == positive
    numbers["acc"] = weighted_means(counts, patient, correct[:, None].astype(float))[:, 0]
    n_patients = min(len(np.unique(patient[positive])), len(np.unique(patient[~positive])))
    # A draw without either class says nothing of the others either.
    return {name: _of_patients(n_patients, np.where(np.isnan(auc), np.nan, x)) for name, x in numbers.items()}


def _grounding(boxes: pd.DataFrame, counts: np.ndarray) -> Numbers:
    found = _grounding_means(boxes, counts, "", _GROUNDING)
    for category, rows in boxes.groupby("category", sort=True):
        found |= _grounding_means(rows, counts, f"by_category/{category}/", _GROUNDING)
    # Written since the intervals exist; without them a pair of several boxes is not known.
    if {"pair_cnr_signed", "pair_miou"} <= set(boxes):
        pairs = boxes.drop_duplicates(["dicom_id", "phrase"])
        pairs = pairs.assign(pair_cnr=pairs["pair_cnr_signed"].abs())
        found |= _grounding_means(pairs, counts, "by_pair/", [f"pair_{name}" for name in _GROUNDING])
    return found


def _grounding_means(rows: pd.DataFrame, counts: np.ndarray, prefix: str, columns: Iterable[str]) -> Numbers:
    patient = rows["patient"].to_numpy()
    values = rows[list(columns)].to_numpy(dtype="float64")
    means = weighted_means(counts, patient, values)
    n_patients = [len(np.unique(patient[np.isfinite(column)])) for column in values.T]
    return {
        prefix + name: _of_patients(n, column)
        for name, n, column in zip(_GROUNDING, n_patients, means.T, strict=True)
    }


def _retrieval(queries: pd.DataFrame, counts: np.ndarray) -> Numbers:
    return {
        **_retrieval_of(queries, counts, "", "rank"),
        **_retrieval_of(queries, counts, "tolerant/", "rank_tolerant"),
    }


def _report_retrieval(queries: pd.DataFrame, counts: np.ndarray) -> Numbers:
    """Of images and reports, of which several may say the same, and of images and sentences."""
    found: Numbers = {}
    for task, rows in queries.groupby("task"):
        numbers = (
            _retrieval(rows, counts) if task == "image_report" else _retrieval_of(rows, counts, "", "rank")
        )
        found |= {f"{task}/{path}": values for path, values in numbers.items()}
    return found


def _retrieval_of(queries: pd.DataFrame, counts: np.ndarray, prefix: str, column: str) -> Numbers:
    found: Numbers = {}
    recalls, medians = [], []
    for direction in _DIRECTIONS:
        rows = queries[queries["direction"] == direction]
        patient, ranks = rows["patient"].to_numpy(), rows[column].to_numpy(dtype="float64")
        n_patients = len(np.unique(patient))
        hits = np.stack([ranks <= k for k in _KS], axis=1).astype(float)
        for k, recall in zip(_KS, weighted_means(counts, patient, hits).T, strict=True):
            found[f"{prefix}{direction}/R@{k}"] = _of_patients(n_patients, recall)
            recalls.append(found[f"{prefix}{direction}/R@{k}"])
        median = _of_patients(n_patients, weighted_median(counts, patient, ranks))
        found[f"{prefix}{direction}/MedR"] = median
        medians.append(median)
    found[f"{prefix}recall"] = np.mean(recalls, axis=0)
    found[f"{prefix}medr"] = np.mean(medians, axis=0)
    return found


def _of_patients(n_patients: int, values: np.ndarray) -> np.ndarray:
    """Without draws where they would say nothing: a number of one patient is the same in each of them."""
    return values if n_patients >= 2 else np.concatenate([values[:1], np.full(len(values) - 1, np.nan)])


def _case_weights(counts: np.ndarray, patient: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """(draw, case) weights of some draws at a time."""
    n_rows = max(1, _ELEMENTS_PER_CHUNK // max(1, len(patient)))
    for first in range(0, len(counts), n_rows):
        rows = slice(first, first + n_rows)
        yield rows, counts[rows, patient]


def _percentiles(draws: np.ndarray, level: float) -> tuple[float | None, float | None, int]:
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return None, None, 0
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high), len(draws)


def _two_sided_p(differences: np.ndarray) -> float:
    differences = differences[np.isfinite(differences)]
    smaller = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * float(smaller + 1) / (len(differences) + 1))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _read_table(file: Path, section: str, run: Path) -> pd.DataFrame:
    if not file.is_file():
        raise SavedResultsError(f"{file} is not there; made by: {command_of_test(run)}")
    try:
        table = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise SavedResultsError(
            f"{file} is not a readable Parquet file ({error}); test the run again"
        ) from error
    missing = [column for column in _COLUMNS[section] if column not in table]
    if missing:
        raise SavedResultsError(f"{file} has no column {missing[0]}; test the run again")
    return table


def _require_agreement(predictions: Predictions, metrics: Mapping[str, Any], results_file: Path) -> None:
    for path, values in _numbers(predictions, n_draws=0, seed=0).items():
        found, stored = _number(values[0]), value_at(metrics, path)
        same = found is stored if found is None or stored is None else _is_close(found, stored)
        if not same:
            raise SavedResultsError(
                f"{predictions.name} does not belong to {results_file}: {path} is {found} by the predictions and"
                f" {stored} by the results; test the run again"
            )


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(1.0, abs(b))
