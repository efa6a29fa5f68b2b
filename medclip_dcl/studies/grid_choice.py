"""The best levels by an outcome: a grid search, whose result is a configuration file."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from medclip_dcl.common.files import read_text, write_text
from medclip_dcl.report.contrasts import means, paired_differences
from medclip_dcl.studies.grid import Experiment, Level, merged

COMBINATION = "levels"


def choices(experiment: Experiment, table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of results.parquet to choose from, by level of the axis that the choice is made within.

    One entry, "", without such an axis; none without a choice.
    """
    if (axis := experiment.choice_axis) is None:
        return {"": table} if experiment.choice else {}
    return {level.name: table[table[axis] == level.value] for level in experiment.axes[axis]}


def ranking(experiment: Experiment, table: pd.DataFrame) -> pd.DataFrame:
    """Combinations of the levels of the axes that are searched, best first, in rows of one of the `choices`.

    Columns: levels (their names), n, mean, low, high over the paired axis, and, where there is one, n_difference,
    mean_difference, low_difference and high_difference: the paired difference from the first combination.
    """
    rows = table[table["outcome"] == experiment.choice]
    rows = rows.assign(**{COMBINATION: [_combination(experiment, row) for row in rows.to_dict("records")]})
    outcome = experiment.outcomes[experiment.choice]
    found = means(rows, [COMBINATION], outcome.bounds)
    found = found.sort_values(
        "mean", ascending=not outcome.higher_is_better, kind="stable", ignore_index=True
    )
    if experiment.pairs is None or found.empty:
        return found
    best = found[COMBINATION][0]
    differences = paired_differences(
        rows, compared=COMBINATION, reference=best, pairs=experiment.pairs, bounds=outcome.bounds
    )
    columns = [COMBINATION, "n", "mean", "low", "high"]
    return found.merge(differences[columns], "left", COMBINATION, suffixes=("", "_difference"))


def write_choices(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """Write the settings of the best combinations once all their runs are finished; lines that say what was done."""
    found = {
        f"chosen_{level}.yaml" if level else "chosen.yaml": rows
        for level, rows in choices(experiment, table).items()
    }
    for file in experiment.folder.glob("chosen*.yaml"):
        # Of an earlier choice at other levels; not a copy of one.
        if found and file.name not in found and read_text(file).startswith(f"# {file.name}: "):
            file.unlink()
    return [
        _write_choice(experiment, rows, experiment.folder / name, len(experiment.runs()) // len(found))
        for name, rows in found.items()
    ]


def _write_choice(experiment: Experiment, table: pd.DataFrame, file: Path, n_runs: int) -> str:
    n_missing = n_runs - table["run"].nunique()
    n_without = int(table[table["outcome"] == experiment.choice]["value"].isna().sum())
    if n_missing or n_without:
        file.unlink(missing_ok=True)
        return (
            f"{file.name} is written when all runs are finished and have a number: {n_missing} are missing, "
            f"{n_without} have no {experiment.choice}"
        )
    ranked, outcome = ranking(experiment, table), experiment.outcomes[experiment.choice]
    best = str(ranked[COMBINATION][0])
    chosen = next(row for row in table.to_dict("records") if _combination(experiment, row) == best)
    levels = _levels(experiment, chosen, experiment.axes)
    arguments = [argument for axis in experiment.searched for argument in levels[axis].arguments]
    names = {axis: level.name for axis, level in levels.items()}
    said = (
        f"{best}: {experiment.choice} {outcome.scale * ranked['mean'][0]:.{outcome.digits}f}{' %' * outcome.percent}, "
        f"the best mean of {len(ranked)} combinations"
    )
    head = f"# {file.name}: {said}, {experiment.folder.name} ({experiment.file.name}).\n"
    write_text(head + yaml.safe_dump(merged(experiment.filled(arguments, names)), sort_keys=False), file)
    return f"{file}: {said}"


def _levels(experiment: Experiment, row: Mapping[Hashable, Any], axes: Iterable[str]) -> dict[str, Level]:
    return {axis: level for axis in axes for level in experiment.axes[axis] if level.value == row[axis]}


def _combination(experiment: Experiment, row: Mapping[Hashable, Any]) -> str:
    levels = _levels(experiment, row, experiment.searched)
    return ", ".join(f"{axis} {level.name}" for axis, level in levels.items())
