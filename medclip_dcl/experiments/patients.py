"""Intervals over patients: each bootstrap draw takes the same patients in all cells of a group; seeds are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from medclip_dcl.common.files import write_parquet
from medclip_dcl.experiments.grid import Experiment, Outcome
from medclip_dcl.report.intervals import (
    Predictions,
    TestedRun,
    bootstrap_numbers,
    percentiles,
    require_same_cases,
)
from medclip_dcl.runs.saved import RESULTS_FILE

N_DRAWS = 1000
SEED = 0
_FILE = "patient_draws.parquet"
"""In a cell's folder: a column for each metric, its value among the tested patients, then in each draw."""

Draws = Mapping[str, np.ndarray]
"""Outcome -> its value in each draw."""


def over_patients(experiment: Experiment, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """95% percentile intervals over patients of the means over the paired axis, and of the paired differences.

    They say how far a number depends on who was tested, those of `statistics` how far on the training.

    Args:
        experiment: whose cells were tested.
        table: its results.parquet.

    Returns:
        Two tables: the group axes, the compared axis if any, outcome, patients_low, patients_high. Outcomes that no
        draw of patients changes, such as those of the validation, are in neither.
    """
    compared, pairs = experiment.compared, experiment.pairs or "cell"
    folders = {cell.name: cell.folder for cell in experiment.cells()}
    means, differences = [], []
    runs = table.drop_duplicates("cell")
    groups = runs.groupby(experiment.groups, sort=False) if experiment.groups else [((), runs)]
    for key, rows in groups:
        draws = _of_group([folders[name] for name in rows["cell"]], experiment.outcomes)
        of_level = rows[compared] if compared else [None] * len(rows)
        found = dict(zip(zip(of_level, rows[pairs], strict=True), draws, strict=True))
        for level in dict.fromkeys(of_level):
            here = dict(zip(experiment.groups, key, strict=True)) | ({compared: level} if compared else {})
            own = {pair: one for (of, pair), one in found.items() if of == level}
            means += _intervals(here, list(own.values()))
            if experiment.reference is None or level == (reference := experiment.reference.value):
                continue
            both = [pair for pair in own if (reference, pair) in found]
            of_pairs = [_minus(own[pair], found[reference, pair]) for pair in both]
            differences += _intervals(here, of_pairs)
    columns = [
        *experiment.groups,
        *([compared] if compared else []),
        "outcome",
        "patients_low",
        "patients_high",
    ]
    return pd.DataFrame(means, columns=columns), pd.DataFrame(differences, columns=columns)


def _of_group(folders: Sequence[Path], outcomes: Mapping[str, Outcome]) -> list[Draws]:
    """Draws of cells that were tested on the same cases."""
    paths = {path for one in outcomes.values() if not one.is_of_validation for path in one.paths}
    first: Predictions | None = None
    found: list[Draws] = []
    for folder in folders:
        predictions = TestedRun(folder).predictions
        if first is None:
            first = predictions
        require_same_cases(first, predictions)
        numbers = _numbers(folder, predictions, paths)
        found.append(
            {
                name: np.mean([numbers[path] for path in one.paths], axis=0)
                for name, one in outcomes.items()
                if set(one.paths) <= numbers.keys()
            }
        )
    return found


def _numbers(folder: Path, predictions: Predictions, paths: set[str]) -> Draws:
    """The draws of a cell by path, from its file where that has them."""
    file = folder / _FILE
    if file.is_file() and file.stat().st_mtime_ns > (folder / RESULTS_FILE).stat().st_mtime_ns:
        kept = pd.read_parquet(file)
        if paths <= set(kept):
            return _with_numbers(kept[sorted(paths)])
    numbers = bootstrap_numbers(predictions, N_DRAWS, SEED)
    kept = pd.DataFrame({path: numbers.get(path, np.nan) for path in sorted(paths)}, index=range(N_DRAWS + 1))
    write_parquet(kept, file)
    return _with_numbers(kept)


def _with_numbers(kept: pd.DataFrame) -> Draws:
    return {str(path): values.to_numpy() for path, values in kept.items() if values.notna().any()}


def _minus(a: Draws, b: Draws) -> Draws:
    return {name: a[name] - b[name] for name in a if name in b}


def _intervals(levels: Mapping[str, object], draws: Sequence[Draws]) -> list[dict[str, object]]:
    """A row for each outcome that all cells have."""
    rows = []
    for name in draws[0] if draws else ():
        if all(name in one for one in draws):
            low, high, _ = percentiles(np.mean([one[name] for one in draws], axis=0)[1:])
            rows.append({**levels, "outcome": name, "patients_low": low, "patients_high": high})
    return rows
