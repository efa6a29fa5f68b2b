"""Intervals over patients of the means over the paired axis, and of the differences, of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medclip_dcl.common.findings import MIN_PATIENTS
from medclip_dcl.report.contrasts import findings_of, mean_over_seeds
from medclip_dcl.report.draws import (
    Numbers,
    TestedRun,
    estimate,
    intervals_of,
    is_mean_over_findings,
    require_same_cases,
)
from medclip_dcl.studies.grid import Experiment, Outcome

Sides = dict[object, dict[object, Numbers]]


def over_patients(experiment: Experiment, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """95% percentile intervals over patients of the means over the paired axis, and of the paired differences.

    Two tables: the group axes, the compared axis if any, outcome, patients_low, patients_high. Outcomes that no draw of
    patients changes, such as those of the validation, are in neither; those of too few patients have no interval.
    """
    columns = [*experiment.rows, "outcome", "patients_low", "patients_high"]
    means, differences = [], []
    for key, sides in sides_of_groups(experiment, table):
        for level, side in sides.items():
            here = dict(zip(experiment.rows, [*key, level], strict=False))
            means += _intervals(here, mean_over_seeds([*side.values()]))
            if experiment.reference is None or level == experiment.reference.value:
                continue
            reference = sides.get(experiment.reference.value, {})
            if both := [pair for pair in side if pair in reference]:
                own, minus = (mean_over_seeds([of[pair] for pair in both]) for of in (side, reference))
                differences += _intervals(here, {name: own[name] - minus[name] for name in own})
    return pd.DataFrame(means, columns=columns), pd.DataFrame(differences, columns=columns)


def sides_of_groups(experiment: Experiment, table: pd.DataFrame) -> Iterator[tuple[tuple[Any, ...], Sides]]:
    """Levels of the group axes -> compared level (None without such an axis) -> pair -> draws of each outcome."""
    compared, pairs = experiment.compared, experiment.pairs or "run"
    folders = {run.name: run.folder for run in experiment.runs()}
    finished = table.drop_duplicates("run")
    groups = finished.groupby(experiment.groups, sort=False) if experiment.groups else [((), finished)]
    for key, rows in groups:
        draws = _of_group([folders[name] for name in rows["run"]], experiment.outcomes)
        of_level = rows[compared] if compared else [None] * len(rows)
        sides: Sides = {level: {} for level in of_level}
        for level, pair, numbers in zip(of_level, rows[pairs], draws, strict=True):
            sides[level][pair] = numbers
        yield key, sides


def _of_group(folders: Sequence[Path], outcomes: Mapping[str, Outcome]) -> list[Numbers]:
    """Draws of each outcome of the test, of runs that were tested on the same cases."""
    runs = [TestedRun(folder) for folder in folders]
    for run in runs:
        require_same_cases(runs[0].predictions, run.predictions)
    patients = np.unique(np.concatenate([run.predictions.patients for run in runs]))
    found, drawn = [], [run.draws(patients) for run in runs]
    # As for `compare`: a mean over findings is compared with one over the same findings.
    are_alike = len({frozenset(findings_of(numbers)) for numbers in drawn}) == 1
    for run, numbers in zip(runs, drawn, strict=True):
        for path, one in intervals_of(numbers, [run.predictions]).items():
            if one.n_patients is not None and one.n_patients < MIN_PATIENTS:
                numbers[path] = np.append(numbers[path][:1], np.full(len(numbers[path]) - 1, np.nan))
        nothing = np.full_like(next(iter(numbers.values())), np.nan)
        if not are_alike:
            numbers = {path: one for path, one in numbers.items() if not is_mean_over_findings(path)}
        found.append(
            {
                name: np.mean([numbers.get(path, nothing) for path in outcome.paths], axis=0)
                for name, outcome in outcomes.items()
                if not outcome.is_of_validation
            }
        )
    return found


def _intervals(levels: Mapping[str, object], draws: Numbers) -> list[dict[str, object]]:
    """A row for each outcome that all runs have."""
    known = ((name, estimate(values)) for name, values in draws.items() if np.isfinite(values).any())
    return [{**levels, "outcome": x, "patients_low": one.low, "patients_high": one.high} for x, one in known]
