"""Draws of a test: every number of results.json, from the run's predictions, in bootstrap draws of its patients.

Patients, whose boxes and images are not independent, are drawn with replacement (cluster bootstrap: Davison and Hinkley
1997, section 3.8); intervals are percentiles of the draws (Efron and Tibshirani 1993, chapter 13). A row counts as
often as its patient was drawn. A draw takes the same patients, of all tested images, for all numbers. It depends on
these patients and the seed alone, so that differences of runs are paired. Ranks of retrieval are those among all
candidates; the queries are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int, Shaped, UInt8

from medclip_dcl import __version__
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file, write_parquet
from medclip_dcl.common.findings import MIN_PATIENTS
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.table import CLASSIFICATIONS, SECTIONS, place_of
from medclip_dcl.metrics.weighted import mean_of
from medclip_dcl.runs.saved import SavedResultsError, SavedRun, value_at

N_DRAWS = 2000
LEVEL = 0.95
"""Nominal coverage of an interval."""

_FINITE = ("logit", "rank", "rank_tolerant", "score", "score_negative", "score_positive", "subject_id")
FEW = f"(n = ...) where no draw differs, or a finding or category has fewer than {MIN_PATIENTS} {{units}} of a class."
"""What stands in the place of an interval."""
_TOLERANCE = 1e-6
"""results.json rounds an AUC to float32."""
ROUNDING = 1e-12  # of draws that are equal
_ELEMENTS_PER_CHUNK = 2**22
"""Weights (draws x cases) held in memory at a time."""

Numbers = dict[str, np.ndarray]
"""Path of a metric -> its value among the tested patients, then in each draw; NaN where there is none."""


Patients = Shaped[np.ndarray, "patient"]
"""Sorted subject_id."""


class Estimate(NamedTuple):
    """A number of a side, or of a side minus another (then with p), and its 95% interval; None: unknown.

    `n` draws or seeds gave the interval. `n_patients`: see `Predictions.n_patients`; also of a number without interval.
    """

    value: float | None
    low: float | None
    high: float | None
    p: float | None = None
    n: int = 0
    n_patients: int | None = None
    over: Literal["patients", "seeds"] = "patients"


@dataclass(frozen=True)
class Predictions:
    """Predictions of a test by section of results.json, from which intervals are computed.

    `tables` may also have "calibration", the cases of a calibrated classification with their probabilities.
    """

    tables: Mapping[str, pd.DataFrame]
    min_cases: int = 5
    name: str = "predictions"
    images: pd.DataFrame | None = None

    @cached_property
    def patients(self) -> Patients:
        """Sorted subject_id of all tested images (`images`; without them, of the tables)."""
        tables = [*self.tables.values(), *([] if self.images is None else [self.images])]
        return np.unique(np.concatenate([table["subject_id"].to_numpy() for table in tables]))

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
    def bands(self) -> dict[str, str]:
        """Band of each finding that is classified."""
        tables = (self.tables[section] for section in CLASSIFICATIONS if section in self.tables)
        return {finding: band for one in tables for finding, band in summaries.finding_bands(one).items()}

    @cached_property
    def n_patients(self) -> dict[str, int]:
        """Path of each number of one finding or category -> patients with a case, of the rarer class.

        Others, such as means over findings, are not in it.
        """
        found: dict[str, int] = {}
        for section, values in self.values.items():
            table = self.tables[section]
            places = {path: place for path in values if (place := place_of(path)) is not None and place.entry}
            if "finding" in table:
                of_class = table.groupby(["finding", table["label"] == 1])["subject_id"].nunique().unstack()
                rarer = of_class.reindex(columns=[False, True]).fillna(0).min(axis=1)
                found |= {path: int(rarer[place.entry]) for path, place in places.items()}
                continue
            for path, place in places.items():
                column = "reader" if "/by_reader/" in path else "category"
                rows = table[table[column].astype(str) == place.entry]
                is_measured = np.isfinite(rows[place.name].astype("float64"))
                found[path] = rows.loc[is_measured, "subject_id"].nunique()
        return found

    def n_behind(self, path: str) -> int:
        """Patients that a number rests on, 0 if too few; of a mean over findings, of the rarest, but `MIN_PATIENTS`."""
        section, n = path.split("/")[0], self.n_patients.get(path)
        if n is not None:
            return n if n >= MIN_PATIENTS else 0
        if section in CLASSIFICATIONS:
            its = averaged(path, self.tables[section]["finding"].unique(), self.bands)
            known = (self.n_patients[one] for one in its if np.isfinite(self.values[section][one][0]))
            return max(MIN_PATIENTS, min(known, default=0))
        return self.tables[section]["subject_id"].nunique()


class TestedRun(SavedRun):
    """The test of a run's trained or untrained network, whose numbers are computed once."""

    def table(self, name: str) -> pd.DataFrame | None:
        """A table in predictions/, of values that a test writes; None if the file is missing."""
        table = super().table(name)
        for column, values in () if table is None else table.filter(["label", *_FINITE]).items():
            is_wrong = values.isna() | values.isin([math.inf, -math.inf])
            if column == "label":
                is_wrong = ~values.isin([0, 1])
            if is_wrong.any():
                found = f"{values[is_wrong].iloc[0]} in {is_wrong.sum():,} of {len(values):,} rows"
                raise UserError(f"{self.file_of(name)} is damaged: {column} is {found}; test the run again")
        return table

    @cached_property
    def predictions(self) -> Predictions:
        """Predictions of all sections, which give the numbers of results.json."""
        results = self.tested
        tables = {}
        for section in (section for section in SECTIONS if section in results["metrics"]):
            if (table := self.table(section)) is None:
                raise SavedResultsError(f"{self.file_of(section)} is missing; create it with: {self.command}")
            if missing := {*SECTIONS[section].case_columns, *SECTIONS[section].value_columns} - set(table):
                raise SavedResultsError(
                    f"{self.file_of(section)} has no column {min(missing)}; test the run again"
                )
            tables[section] = table
        protocols = (results["protocol"].get(section, {}) for section in CLASSIFICATIONS)
        min_cases = next((found["min_cases"] for found in protocols if "min_cases" in found), 5)
        name = str(self.folder / f"predictions{self.suffix}")
        found = Predictions(tables, min_cases, name, self.table("images"))
        leaves = (summaries.by_path(results["metrics"][section] or {}, section) for section in tables)
        values = {path: x for of_section in found.values.values() for path, (x,) in of_section.items()}
        values = {path: math.nan for of in leaves for path, x in of if isinstance(x, float)} | values
        first = [f"{section}/{SECTIONS[section].first}" for section in found.values]
        for path, value in values.items():
            stored = value_at(results["metrics"], path, "no number")
            if stored == "no number" and path not in first:
                continue  # results.json may lack a number
            known = math.nan if stored in (None, "no number") else stored
            if not np.isclose(value, known, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                raise UserError(
                    f"{found.name} does not belong to {self.file}: {path} is {_number(value)} by the predictions and"
                    f" {stored} by the results; test the run again"
                )
        return found

    @cached_property
    def intervals(self) -> dict[str, Estimate]:
        """Path in the metrics -> number with its interval over patients."""
        return intervals_of(self.draws(), [self.predictions])

    def draws(self, patients: Patients | None = None, n_draws: int = N_DRAWS) -> Numbers:
        """:func:`bootstrap_numbers` with seed 0, kept in the run folder."""
        predictions = self.predictions
        patients = predictions.patients if patients is None else patients
        files = [digest_of_file(file) for file in (self.file, *map(self.file_of, SECTIONS))]
        # The values tell another definition of a metric, which in a checkout has no version of its own.
        values = {path: float(x) for one in predictions.values.values() for path, (x,) in one.items()}
        key = digest(str((__version__, n_draws, files, values, patients.tolist())).encode())
        file = self.folder / f"patient_draws{self.suffix}.parquet"
        with suppress(OSError, ValueError):
            kept = pd.read_parquet(file)
            if kept.attrs.get("key") == key:
                return {str(path): values.to_numpy() for path, values in kept.items()}
        numbers = bootstrap_numbers(predictions, n_draws, patients=patients)
        kept = pd.DataFrame(numbers)
        kept.attrs["key"] = key
        with suppress(OSError):  # a folder that may not be written
            write_parquet(kept, file)
        return numbers


def bootstrap_intervals(
    run: Path | Predictions, n_draws: int = N_DRAWS, seed: int = 0
) -> dict[str, Estimate]:
    """Percentile intervals of every number of a run's results.json, or of predictions; a seed gives the same ones.

    A draw without a case (for an AUC and its accuracy: without a case of either class) gives no number and is left out
    of the interval, also of the average over findings. A number that no draw changes has no interval, nor one of a
    finding or category on fewer than `MIN_PATIENTS` patients (of either class), nor a mean over findings without one;
    any other number has one from 2 patients on. min_cases decides on the tested cases, not on the draws.

    Returns:
        Path in results.json's metrics, keys joined by "/", such as "classification/by_finding/Edema/auc" -> estimate.
    """
    predictions = predictions_of(run)
    return intervals_of(bootstrap_numbers(predictions, n_draws, seed), [predictions])


def bootstrap_numbers(
    predictions: Predictions, n_draws: int = N_DRAWS, seed: int = 0, patients: Patients | None = None
) -> Numbers:
    """Value of each number among the tested patients and in every draw of `patients` (default: the tested ones)."""
    people = predictions.patients if patients is None else patients
    counts = patient_draws(len(people), n_draws, seed)[1:]
    found: Numbers = {}
    for section, values in predictions.values.items():
        table = predictions.tables[section].reset_index(drop=True)
        patient = np.searchsorted(people, table["subject_id"])
        compute = predictions.compute(section)
        draws = numbers_of_draws(compute, section, table, counts, patient, 2, values)
        found |= {path: np.concatenate([value, draws[path]]) for path, value in values.items()}
    return found


def is_mean_over_findings(path: str) -> bool:
    """The number of a classification is a mean over all its findings, or over those of a band."""
    return path.split("/")[0] in CLASSIFICATIONS and "/by_finding/" not in path


def averaged(path: str, findings: Iterable[str], bands: Mapping[str, str]) -> list[str]:
    """Paths of the findings, of a band's path those of the band, over which the mean at `path` is taken."""
    section, *band, metric = path.split("/")
    its = (one for one in findings if band in ([], [bands.get(one)]))
    return [f"{section}/by_finding/{one}/{metric}" for one in its]


def _means_over_findings(values: Numbers, draws: Numbers, table: pd.DataFrame) -> Numbers:
    """Means over the findings that have a number among the tested patients."""
    findings, bands, found = table["finding"].unique(), summaries.finding_bands(table), {}
    for path in filter(is_mean_over_findings, values):
        known = [one for one in averaged(path, findings, bands) if np.isfinite(values[one][0])]
        found[path] = mean_of([draws[one] for one in known], np.full_like(draws[path], np.nan))
    return found


def numbers_of_draws(
    compute: Callable[..., summaries.Numbers],
    prefix: str,
    table: pd.DataFrame,
    counts: Shaped[np.ndarray, "draw patient"],
    patient: Int[np.ndarray, "row"],
    min_patients: int,
    values: Numbers | None = None,
) -> Numbers:
    """Path -> number in each draw: rows count as often as their patient (a column of `counts`) was drawn.

    A mean over findings takes those that have a number in `values` (default: in the first draw).
    """
    group = "finding" if "finding" in table else "class" if prefix == "sentences" else None
    # The weights of one finding fit into memory for many draws at a time, those of 170 for a few.
    parts = []
    for _, rows in table.groupby(group, sort=False) if group else [("", table)]:
        if prefix in CLASSIFICATIONS:  # Sorted once, not for each chunk.
            rows = rows.iloc[np.argsort(summaries.scores_of(rows).to_numpy())]
        its, size = patient[rows.index], max(1, _ELEMENTS_PER_CHUNK // max(1, len(rows)))
        chunks = []
        for first in range(0, len(counts), size):
            weights = counts[first : first + size].take(its, axis=1).astype("float64")
            numbers = compute(rows, weights, min_patients=min_patients)
            chunks.append(dict(summaries.by_path(numbers, prefix)))
        parts.append({path: np.concatenate([chunk[path] for chunk in chunks]) for path in chunks[0]})
    draws = {path: x for part in parts for path, x in part.items()}
    if prefix in CLASSIFICATIONS:
        draws |= _means_over_findings(values or draws, draws, table)
    elif prefix == "sentences":
        # One of another band has no number at all.
        of_path = {path: [part[path] for part in parts if np.isfinite(part[path]).any()] for path in draws}
        draws = {path: mean_of(of_path[path], np.full_like(draws[path], np.nan)) for path in draws}
    return draws


def intervals_of(
    numbers: Numbers,
    sides: Sequence[Predictions],
    p: Mapping[str, float] = {},
    findings: Iterable[str] | None = None,
) -> dict[str, Estimate]:
    """The percentile interval of each number of :func:`bootstrap_numbers`, or of the difference of two sides.

    A mean over findings (of a classification over `findings`, default: all) none of which has an interval has none.
    """
    found: dict[str, Estimate] = {}
    for path, values in numbers.items():
        n = min((one.n_patients[path] for one in sides if path in one.n_patients), default=None)
        found[path] = estimate(values, n, p.get(path, math.nan))
    for path in [path for path, one in found.items() if one.n_patients is None and one.value is not None]:
        section, metric = path.split("/", 1)
        its = [x for x in found if x.startswith(f"{section}/by_") and x.endswith(f"/{metric}")]
        if is_mean_over_findings(path):
            of_all = sides[0].tables[section]["finding"].unique() if findings is None else findings
            its = [x for x in averaged(path, of_all, sides[0].bands) if x in found]
        parts = [found[x] for x in its if found[x].value is not None and section != "grounding"]
        if found[path].low is None or (parts and all(one.low is None for one in parts)):
            n = min([one.n_patients or 0 for one in parts] or [one.n_behind(path) for one in sides])
            found[path] = found[path]._replace(low=None, high=None, n=0, n_patients=n)
    return found


def estimate(
    values: Shaped[np.ndarray, "one_and_draws"], n_patients: int | None = None, p: float = math.nan
) -> Estimate:
    """A number with its percentile interval; without one if no draw differs or on less than `MIN_PATIENTS` patients."""
    is_few, draws = n_patients is not None and n_patients < MIN_PATIENTS, values[1:][np.isfinite(values[1:])]
    if is_few or not len(draws) or np.abs(draws - values[0]).max() <= ROUNDING:
        return Estimate(_number(values[0]), None, None, _number(p), 0, n_patients)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(_number(values[0]), float(low), float(high), _number(p), len(draws), n_patients)


def require_same_cases(a: Predictions, b: Predictions) -> None:
    """Refuse to pair runs that were tested on different cases; of a classification, among the findings of both."""
    for section in sorted(a.tables.keys() & b.tables.keys()):
        case = [*SECTIONS[section].case_columns]
        keys = [one.tables[section][case] for one in (a, b)]
        if section in CLASSIFICATIONS:
            both = {*keys[0]["finding"]} & {*keys[1]["finding"]}
            keys = [one[one["finding"].isin(both)] for one in keys]
        if keys[0].reset_index(drop=True).equals(keys[1].reset_index(drop=True)):
            continue
        here, there = (one.sort_values(case).to_numpy() for one in keys)
        if len(here) != len(there) or (here != there).any():
            raise SavedResultsError(
                f"{a.name} and {b.name} cannot be paired: cases of {section} differ (image, patient, label or box);"
                " test both on one prepared set"
            )


def units_of(*results: Mapping[str, Any]) -> str:
    """The units that the bootstrap draws: patients, images of sets that name no patients, or "patients or images"."""
    found = {"patients" if one["dataset"].get("names_patients", True) else "images" for one in results}
    return " or ".join(sorted(found, reverse=True)) or "patients"


def method(units: str, n_draws: int = N_DRAWS) -> str:
    """Explanation of the brackets in a table; `units` as from :func:`units_of`."""
    return (
        f"In brackets: {100 * LEVEL:g}% percentile intervals of {n_draws:,} bootstrap draws of {units};"
        f" they say how far a number depends on which {units} were tested, not on the training seed."
        f" {FEW.format(units=units)} Ranks of retrieval are those among all candidates."
    )


@lru_cache(maxsize=1)
def patient_draws(n_patients: int, n_draws: int, seed: int) -> UInt8[np.ndarray, "one_and_draws patient"]:
    """Number of draws of each patient: once each in row 0 (the tested patients), then n_patients with replacement.

    The array is kept for the next call: it is read-only.
    """
    # Bytes: more than 255 draws of one of thousands of patients do not occur.
    draws, random = np.ones((1 + n_draws, n_patients), np.uint8), np.random.default_rng(seed)
    for row in draws[1:]:
        row[:] = random.multinomial(n_patients, np.full(n_patients, 1 / n_patients))
    draws.flags.writeable = False
    return draws


def predictions_of(run: Path | Predictions) -> Predictions:
    """Predictions of a run folder, or those given."""
    return TestedRun(run).predictions if isinstance(run, Path) else run


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
