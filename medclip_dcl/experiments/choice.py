"""The best levels by an outcome: a grid search, whose result is a configuration file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
import yaml

from medclip_dcl.common.files import write_text
from medclip_dcl.experiments.grid import Experiment, Level, filled, merged
from medclip_dcl.report.statistics import means, paired_differences

COMBINATION = "levels"


def choices(experiment: Experiment, table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Level of the axis at each of which is chosen -> its rows of results.parquet; without such an axis one, ""."""
    if (axis := experiment.choice_axis) is None:
        return {"": table}
    return {level.name: table[table[axis] == level.value] for level in experiment.axes[axis]}


def ranking(experiment: Experiment, table: pd.DataFrame) -> pd.DataFrame:
    """Combinations of the levels of the axes that are searched, best first.

    Args:
        experiment: says by which outcome.
        table: its results.parquet, or the rows of one of its `choices`.

    Returns:
        levels (their names), n, mean, low, high over the paired axis, and, where there is one, difference,
        difference_low, difference_high and difference_n: the paired difference from the first combination.
    """
    rows = table[table["outcome"] == experiment.choice]
    rows = rows.assign(**{COMBINATION: [_combination(experiment, row) for row in rows.to_dict("records")]})
    outcome = experiment.outcomes[str(experiment.choice)]
    found = means(rows, [COMBINATION]).sort_values(
        "mean", ascending=not outcome.higher_is_better, kind="stable", ignore_index=True
    )
    if experiment.pairs is None or found.empty:
        return found
    differences = paired_differences(
        rows, compared=COMBINATION, reference=found[COMBINATION][0], pairs=experiment.pairs
    )
    names = {
        "mean": "difference",
        "low": "difference_low",
        "high": "difference_high",
        "n": "difference_n",
    }
    return found.merge(differences[[COMBINATION, *names]].rename(columns=names), "left", COMBINATION)


def write_choices(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """Write the settings of the best combinations once all their cells are finished; lines that say what was done."""
    found = choices(experiment, table)
    for file in experiment.folder.glob("chosen*.yaml"):
        if file.name not in map(_file, found):
            file.unlink()  # of an earlier choice at other levels
    n_cells = len(experiment.cells()) // len(found)
    return [_write_choice(experiment, rows, level, n_cells) for level, rows in found.items()]


def _file(level: str) -> str:
    return f"chosen_{level}.yaml" if level else "chosen.yaml"


def _write_choice(experiment: Experiment, table: pd.DataFrame, level: str, n_cells: int) -> str:
    """Of one level of the axis at each of which is chosen."""
    file = experiment.folder / _file(level)
    n_missing = n_cells - table["cell"].nunique()
    n_without = int(table[table["outcome"] == experiment.choice]["value"].isna().sum())
    if n_missing or n_without:
        file.unlink(missing_ok=True)
        return (
            f"{file.name} is written when all cells are finished and have a number: {n_missing} are missing, "
            f"{n_without} have no {experiment.choice}"
        )
    ranked, outcome = ranking(experiment, table), experiment.outcomes[str(experiment.choice)]
    best = str(ranked[COMBINATION][0])
    chosen = next(row for row in table.to_dict("records") if _combination(experiment, row) == best)
    arguments = [argument for level in _levels(experiment, chosen) for argument in level.arguments]
    names = {
        axis: one.name
        for axis, levels in experiment.axes.items()
        for one in levels
        if one.value == chosen[axis]
    }
    said = (
        f"{best}: {experiment.choice} {outcome.scale * ranked['mean'][0]:.{outcome.digits}f}{' %' * outcome.percent}, "
        f"the best mean of {len(ranked)} combinations"
    )
    head = f"# {said}, {experiment.folder.name} ({experiment.file.name}).\n"
    write_text(head + yaml.safe_dump(merged(filled(tuple(arguments), names)), sort_keys=False), file)
    return f"{file}: {said}"


def _levels(experiment: Experiment, row: Mapping[Hashable, Any]) -> list[Level]:
    """Levels of a row of the table on the axes that are searched."""
    return [
        level for axis in experiment.searched for level in experiment.axes[axis] if level.value == row[axis]
    ]


def _combination(experiment: Experiment, row: Mapping[Hashable, Any]) -> str:
    levels = zip(experiment.searched, _levels(experiment, row), strict=True)
    return ", ".join(f"{axis} {level.name}" for axis, level in levels)
