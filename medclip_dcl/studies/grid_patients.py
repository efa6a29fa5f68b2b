"""Intervals over patients: each bootstrap draw takes the same patients in all runs of a group; seeds are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from medclip_dcl.common.files import write_parquet
from medclip_dcl.runs.saved import RESULTS_FILE
from medclip_dcl.statistics.draws import (
    Predictions,
    TestedRun,
    bootstrap_numbers,
    percentiles,
    require_same_cases,
    units_of,
)
from medclip_dcl.studies.grid import Experiment, Outcome

N_DRAWS = 1000
SEED = 0
_FILE = "patient_draws.parquet"
"""In a run's folder: a column for each metric, its value among the tested patients, then in each draw."""


def over_patients(experiment: Experiment, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """95% percentile intervals over patients of the means over the paired axis, and of the paired differences.

    Two tables: the group axes, the compared axis if any, outcome, patients_low, patients_high. Outcomes that no draw of
    patients changes, such as those of the validation, are in neither.
    """
    compared, pairs = experiment.compared, experiment.pairs or "run"
    folders = {run.name: run.folder for run in experiment.runs()}
    means, differences = [], []
    finished = table.drop_duplicates("run")
    groups = finished.groupby(experiment.groups, sort=False) if experiment.groups else [((), finished)]
    for key, rows in groups:
        draws = _of_group([folders[name] for name in rows["run"]], experiment.outcomes)
        of_level = rows[compared] if compared else [None] * len(rows)
        found = dict(zip(zip(of_level, rows[pairs], strict=True), draws, strict=True))
        for level in dict.fromkeys(of_level):
            here = dict(zip(experiment.groups, key, strict=True)) | ({compared: level} if compared else {})
            own = {pair: one for (of, pair), one in found.items() if of == level}
            means += _intervals(here, list(own.values()))
            if experiment.reference is None or level == (reference := experiment.reference.value):
                continue
            both = [pair for pair in own if (reference, pair) in found]
            differences += _intervals(here, [own[pair] - found[reference, pair] for pair in both])
    columns = [
        *experiment.groups,
        *([compared] if compared else []),
        "outcome",
        "patients_low",
        "patients_high",
    ]
    return pd.DataFrame(means, columns=columns), pd.DataFrame(differences, columns=columns)


def units_drawn(experiment: Experiment, table: pd.DataFrame) -> str:
    """The units that the draws of these runs take: patients, or images of sets that name no patients."""
    folders = [run.folder for run in experiment.runs() if run.name in set(table["run"])]
    found = {units_of(TestedRun(folder).tested) for folder in folders}
    return found.pop() if len(found) == 1 else "patients (of sets that name none: images)"


def _of_group(folders: Sequence[Path], outcomes: Mapping[str, Outcome]) -> list[pd.DataFrame]:
    """Draws of runs that were tested on the same cases: a column for each outcome of the test."""
    paths = {name: one.paths for name, one in outcomes.items() if not one.is_of_validation}
    first: Predictions | None = None
    found = []
    for folder in folders:
        predictions = TestedRun(folder).predictions
        first = first or predictions
        require_same_cases(first, predictions)
        numbers = _numbers(folder, predictions, sorted({path for some in paths.values() for path in some}))
        found.append(
            pd.DataFrame({name: numbers[some].mean(axis=1, skipna=False) for name, some in paths.items()})
        )
    return found


def _numbers(folder: Path, predictions: Predictions, paths: list[str]) -> pd.DataFrame:
    """The draws of a run by path, NaN where it has no such number, from its file where that has them."""
    file = folder / _FILE
    if file.is_file() and file.stat().st_mtime_ns > (folder / RESULTS_FILE).stat().st_mtime_ns:
        kept = pd.read_parquet(file)
        if set(paths) <= set(kept):
            return kept[paths]
    numbers = bootstrap_numbers(predictions, N_DRAWS, SEED)
    kept = pd.DataFrame({path: numbers.get(path, np.nan) for path in paths}, index=range(N_DRAWS + 1))
    write_parquet(kept, file)
    return kept


def _intervals(levels: Mapping[str, object], draws: Sequence[pd.DataFrame]) -> list[dict[str, object]]:
    """A row for each outcome that all runs have."""
    if not draws:
        return []
    means = (sum(draws[1:], draws[0]) / len(draws)).dropna(axis=1, how="all")
    ends = {name: percentiles(values.to_numpy()[1:]) for name, values in means.items()}
    return [
        {**levels, "outcome": name, "patients_low": low, "patients_high": high}
        for name, (low, high, _) in ends.items()
    ]
