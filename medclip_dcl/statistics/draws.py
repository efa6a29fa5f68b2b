"""Uncertainty of a test: bootstrap by patient of every number of results.json, from the run's predictions.

Patients, whose boxes and images are not independent, are drawn with replacement (cluster bootstrap: Davison and Hinkley
1997, section 3.8); intervals are percentiles of the draws (Efron and Tibshirani 1993, chapter 13). A row counts as
often as its patient was drawn. The draws depend on the patients, their number and the seed alone, so that the
difference of two runs is paired. Ranks of retrieval are those among all candidates; the queries are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped

from medclip_dcl.metrics import summaries
from medclip_dcl.runs.saved import SavedResultsError, SavedRun, value_at

N_DRAWS = 2000
LEVEL = 0.95
"""Nominal coverage of an interval."""
MIN_PATIENTS = 20
"""Patients, of either class, that the interval of one finding or category needs: of 5 it covers 83% (choice)."""

CLASSIFICATIONS = ("classification", "finding_classification")
_CASE = {
    "classification": ["finding", "dicom_id", "subject_id", "label"],
    "finding_classification": ["finding", "dicom_id", "subject_id", "label"],
    "grounding": ["box", "dicom_id", "subject_id", "category", "phrase"],
    "localisation": ["category", "dicom_id", "subject_id"],
    "retrieval": ["direction", "box", "dicom_id", "subject_id"],
    "report_retrieval": ["task", "direction", "query", "subject_id"],
}
"""Columns that identify a case, for pairing two runs."""
_NUMBERS = {
    "classification": ["score_positive", "score_negative"],
    "finding_classification": ["logit"],
    "grounding": [*summaries.GROUNDING, "pair_cnr_signed", "pair_miou"],
    "localisation": [*summaries.LOCALISATION],
    "retrieval": ["rank", "rank_tolerant"],
    "report_retrieval": ["rank", "rank_tolerant"],
}
FEW = f"(n = ...) instead: a number of one finding or category on so few {{units}}, below {MIN_PATIENTS}, of a class."
"""What stands in the place of an interval."""
_OF_CLASSES = ("auc", "average_precision", "acc", "sensitivity", "specificity")
_OF_CATEGORIES = {
    "grounding": summaries.GROUNDING,
    "localisation": (*summaries.LOCALISATION, *summaries.LOCALISATION_OPTIONS),
}
_TOLERANCE = 1e-6
"""results.json rounds an AUC to float32."""
_ELEMENTS_PER_CHUNK = 2**22
"""Weights (draws x cases) held in memory at a time."""

Numbers = dict[str, np.ndarray]
"""Path of a metric -> its value among the tested patients, then in each draw; NaN where there is none."""


class Interval(NamedTuple):
    """A number among the tested patients with its percentile interval, from the draws that gave it; None: unknown.

    `n_patients`, of a number in `Predictions.patients`: those that it rests on.
    """

    value: float | None
    low: float | None
    high: float | None
    n_draws: int
    n_patients: int | None = None


class Difference(NamedTuple):
    """A number of a run minus that of another on the same patients, from the draws that gave both.

    p is two-sided: twice the smaller share of draws on one side of 0, (count + 1) / (draws + 1), at most 1.
    `n_patients` as of an `Interval`.
    """

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n_draws: int
    n_patients: int | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions of a test by section of results.json, from which intervals are computed.

    `tables` may also have "calibration", the cases of a calibrated classification with their probabilities.
    """

    tables: Mapping[str, pd.DataFrame]
    min_cases: int = 5
    name: str = "predictions"

    def compute(self, section: str) -> Callable[..., summaries.Numbers]:
        """Function of rows and weights that gives the numbers of a section."""
        found: Any = getattr(summaries, section.removeprefix("finding_"))
        return partial(found, min_cases=self.min_cases) if section in CLASSIFICATIONS else found

    @cached_property
    def values(self) -> dict[str, Numbers]:
        """Section -> path -> number among the tested patients, as an array of one; without empty sections."""
        return {
            section: dict(summaries.by_path(self.compute(section)(table, summaries.once(table)), section))
            for section, table in self.tables.items()
            if len(table)
        }

    @cached_property
    def patients(self) -> dict[str, int]:
        """Path of each number of one finding or category -> patients with a case, of the rarer class.

        Others, such as means over findings, are not in it.
        """
        found: dict[str, int] = {}
        for section, table in ((name, table) for name, table in self.tables.items() if len(table)):
            if section in (*CLASSIFICATIONS, "calibration"):
                of_class = table.groupby(["finding", table["label"] == 1])["subject_id"].nunique().unstack()
                rarer = of_class.reindex(columns=[False, True]).fillna(0).min(axis=1)
                paths = {f"{section}/by_finding/{finding}": [int(n)] * 5 for finding, n in rarer.items()}
                names: tuple[str, ...] = _OF_CLASSES
            elif names := tuple(name for name in _OF_CATEGORIES.get(section, ()) if name in table):
                is_measured = table[[*names]].astype("float64").apply(np.isfinite)
                of_patient = is_measured.groupby([table["category"], table["subject_id"]]).any()
                rows = of_patient.groupby("category").sum().iterrows()
                paths = {f"{section}/by_category/{category}": [*map(int, row)] for category, row in rows}
            else:
                continue
            found |= {
                f"{path}/{x}": n
                for path, of_path in paths.items()
                for x, n in zip(names, of_path, strict=True)
            }
        return found


class TestedRun(SavedRun):
    """The test of a run's trained or untrained network, whose numbers are computed once."""

    @cached_property
    def predictions(self) -> Predictions:
        """Predictions of all sections, which give the numbers of results.json."""
        results = self.tested
        tables = {}
        for section in (section for section in _CASE if section in results["metrics"]):
            if (table := self.table(section)) is None:
                raise SavedResultsError(f"{self.file_of(section)} is missing; create it with: {self.command}")
            if missing := {*_CASE[section], *_NUMBERS[section]} - set(table):
                raise SavedResultsError(
                    f"{self.file_of(section)} has no column {min(missing)}; test the run again"
                )
            tables[section] = table
        protocols = (results["protocol"].get(section, {}) for section in CLASSIFICATIONS)
        min_cases = next((found["min_cases"] for found in protocols if "min_cases" in found), 5)
        found = Predictions(tables, min_cases, str(self.folder / f"predictions{self.suffix}"))
        for path, (value,) in (one for of_section in found.values.values() for one in of_section.items()):
            stored = value_at(results["metrics"], path)
            known = math.nan if stored is None else stored
            if not np.isclose(value, known, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                raise SavedResultsError(
                    f"{found.name} does not belong to {self.file}: {path} is {_number(value)} by the predictions and"
                    f" {stored} by the results; test the run again"
                )
        return found

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Path in the metrics -> interval."""
        return bootstrap_intervals(self.predictions)


def bootstrap_intervals(
    run: Path | Predictions, n_draws: int = N_DRAWS, seed: int = 0
) -> dict[str, Interval]:
    """Percentile intervals of every number of a run's results.json, or of predictions; a seed gives the same ones.

    A draw without a case (for an AUC and its accuracy: without a case of either class) gives no number and is left out
    of the interval, also of the average over findings. A number of one finding or category that rests on fewer than
    `MIN_PATIENTS` patients (of either class) has no interval, any other one from 2 on. min_cases decides on the tested
    cases, not on the draws.

    Returns:
        Path in results.json's metrics, keys joined by "/", such as "classification/by_finding/Edema/auc" -> interval.
    """
    predictions = _predictions(run)
    return intervals_of(bootstrap_numbers(predictions, n_draws, seed), predictions.patients)


def bootstrap_differences(
    run: Path | Predictions, baseline: Path | Predictions, n_draws: int = N_DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """Paired differences, run minus baseline, of every number that both have: each draw takes the same patients."""
    a, b = _predictions(run), _predictions(baseline)
    require_same_cases(a, b)
    of_run, of_baseline = (bootstrap_numbers(one, n_draws, seed) for one in (a, b))
    return differences_of(of_run, of_baseline, fewer_patients(a, b))


def bootstrap_numbers(
    predictions: Predictions,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    patients: Shaped[np.ndarray, "patient"] | None = None,
) -> Numbers:
    """Value of each number among the tested patients and in every draw.

    Draws take `patients` (subject_id), by default those of each table; tables of the same ones are paired.
    """
    found: Numbers = {}
    drawn = {} if patients is None else {"": patient_draws(len(np.unique(patients)), n_draws, seed)[1:]}
    for section, values in predictions.values.items():
        table = predictions.tables[section].reset_index(drop=True)
        people = np.unique(table["subject_id"] if patients is None else patients)
        counts = drawn[""] if patients is not None else patient_draws(len(people), n_draws, seed)[1:]
        patient = np.searchsorted(people, table["subject_id"])
        compute, is_classified = predictions.compute(section), section in CLASSIFICATIONS
        draws: Numbers = {}
        # The weights of one finding fit into memory for many draws at a time, those of 170 for a few.
        for _, rows in table.groupby("finding", sort=False) if is_classified else [("", table)]:
            draws |= numbers_of_draws(compute, section, rows, counts, patient[rows.index], 2)
        if is_classified:
            draws |= _means_over_findings(section, values, draws)
        found |= {path: np.concatenate([value, draws[path]]) for path, value in values.items()}
    return found


def _means_over_findings(section: str, values: Numbers, draws: Numbers) -> Numbers:
    """Means over the findings that have a number among the tested patients."""
    of_findings, found = f"{section}/by_finding/", {}
    for path in (path for path in values if not path.startswith(of_findings)):
        metric = path.removeprefix(section)
        paths = [one for one in values if one.startswith(of_findings) and one.endswith(metric)]
        found[path] = summaries.mean_of(
            [draws[one] for one in paths if np.isfinite(values[one][0])], draws[path]
        )
    return found


def numbers_of_draws(
    compute: Callable[..., summaries.Numbers],
    prefix: str,
    table: pd.DataFrame,
    counts: Float[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "row"],
    min_patients: int,
) -> Numbers:
    """Path -> number in each draw: rows count as often as their patient (a column of `counts`) was drawn."""
    size = max(1, _ELEMENTS_PER_CHUNK // max(1, len(table)))
    chunks = (counts[first : first + size].take(patient, axis=1) for first in range(0, len(counts), size))
    found = (compute(table, weights, min_patients=min_patients) for weights in chunks)
    parts = [dict(summaries.by_path(part, prefix)) for part in found]
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def fewer_patients(a: Predictions, b: Predictions) -> dict[str, int]:
    """`Predictions.patients` of a difference: those of the run that has fewer."""
    return {path: min(n, b.patients[path]) for path, n in a.patients.items() if path in b.patients}


def without_few(numbers: Numbers, patients: Mapping[str, int]) -> Numbers:
    """Numbers without the draws of those that rest on fewer than `MIN_PATIENTS` patients: they have no interval."""
    return {
        path: np.where(np.arange(len(values)) > 0, np.nan, values)
        if patients.get(path, MIN_PATIENTS) < MIN_PATIENTS
        else values
        for path, values in numbers.items()
    }


def intervals_of(numbers: Numbers, patients: Mapping[str, int]) -> dict[str, Interval]:
    """The percentile interval of each number of :func:`bootstrap_numbers`; `patients` as in `Predictions`."""
    return {
        path: Interval(_number(values[0]), *percentiles(values[1:]), patients.get(path))
        for path, values in without_few(numbers, patients).items()
    }


def differences_of(numbers: Numbers, baseline: Numbers, patients: Mapping[str, int]) -> dict[str, Difference]:
    """Paired differences of two runs' :func:`bootstrap_numbers`, made with the same seed and number of draws."""
    both = {path: values - baseline[path] for path, values in numbers.items() if path in baseline}
    found = {}
    for path, values in without_few(both, patients).items():
        low, high, n_draws = percentiles(values[1:])
        p = _two_sided_p(values[1:]) if low is not None else None
        found[path] = Difference(_number(values[0]), low, high, p, n_draws, patients.get(path))
    return found


def require_same_cases(a: Predictions, b: Predictions) -> None:
    """Refuse to pair runs that were tested on different cases."""
    for section in sorted(a.tables.keys() & b.tables.keys()):
        keys = [
            table[_CASE[section]].sort_values(_CASE[section]).reset_index(drop=True)
            for table in (a.tables[section], b.tables[section])
        ]
        if len(keys[0]) != len(keys[1]) or (keys[0].to_numpy() != keys[1].to_numpy()).any():
            raise SavedResultsError(
                f"{a.name} and {b.name} cannot be paired: cases of {section} differ (image, patient, label or box);"
                " test both on one prepared set"
            )


def units_of(results: Mapping[str, Any]) -> str:
    """The units that the bootstrap draws: patients, or images of a set that names no patients."""
    return "patients" if results["dataset"].get("names_patients", True) else "images"


def method(units: str, n_draws: int = N_DRAWS) -> str:
    """Explanation of the brackets in a table; `units` as from :func:`units_of`."""
    return (
        f"In brackets: {100 * LEVEL:g}% percentile intervals of {n_draws:,} bootstrap draws of {units};"
        f" they say how far a number depends on which {units} were tested, not on the training seed."
        f" {FEW.format(units=units)} Ranks of retrieval are those among all candidates."
    )


def patient_draws(n_patients: int, n_draws: int, seed: int) -> Float[np.ndarray, "one_and_draws patient"]:
    """Number of draws of each patient: once each in row 0 (the tested patients), then n_patients with replacement."""
    chances = np.full(n_patients, 1 / n_patients)
    draws = np.random.default_rng(seed).multinomial(n_patients, chances, size=n_draws)
    return np.concatenate([np.ones((1, n_patients)), draws])


def percentiles(draws: np.ndarray) -> tuple[float | None, float | None, int]:
    """Percentile interval of the finite draws, and their number."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return None, None, 0
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high), len(draws)


def _predictions(run: Path | Predictions) -> Predictions:
    return TestedRun(run).predictions if isinstance(run, Path) else run


def _two_sided_p(differences: np.ndarray) -> float:
    differences = differences[np.isfinite(differences)]
    smaller = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * float(smaller + 1) / (len(differences) + 1))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
