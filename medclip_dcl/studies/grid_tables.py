"""The tables of an experiment: means over seeds, paired differences, and the best levels of a search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from medclip_dcl.metrics.table import ARROWS
from medclip_dcl.report.contrasts import ALPHA, means, paired_differences
from medclip_dcl.report.draws import Estimate
from medclip_dcl.report.tables import NOTHING, Cell, Column, Row, Table, interval_cell, number, signed
from medclip_dcl.studies.grid import BEST, Experiment, Level, Outcome
from medclip_dcl.studies.grid_choice import COMBINATION, choices, ranking
from medclip_dcl.studies.grid_patients import over_patients

_MAX_CHOICES = 15
_ONLY = Level("", "", ())


def tables(experiment: Experiment, table: pd.DataFrame) -> list[Table]:
    """The hypotheses, the choice of a search, the declared tables, one for each outcome, and those over steps."""
    if table.empty:
        return []
    curves, table = table, table[table["chosen"]]
    ranked = {level: ranking(experiment, rows) for level, rows in choices(experiment, table).items()}
    chosen = [_choice(experiment, found, level) for level, found in ranked.items() if len(found)]
    tested = [_hypotheses(experiment, table)] if experiment.hypotheses else []
    return [*tested, *chosen, *_tables(experiment, table), *_over_steps(experiment, curves)]


def _hypotheses(experiment: Experiment, table: pd.DataFrame) -> Table:
    """The difference of each hypothesis, with the interval and the star of its share of alpha."""
    axis, pairs, rows = str(experiment.compared), str(experiment.pairs), []
    n_pairs = len(experiment.axes[pairs])
    for name, one in experiment.hypotheses.items():
        level, minus = (experiment.level(axis, side) for side in (one.level, one.minus))
        here = table[(table["outcome"] == one.outcome) & table[axis].isin([level.value, minus.value])]
        for other, at in one.where.items():
            here = here[here[other] == experiment.level(other, at).value]
        outside = one.alpha * (1 if one.alternative == "two-sided" else 2)
        bounds = experiment.outcomes[one.outcome].bounds
        found = paired_differences(
            here, compared=axis, reference=minus.value, pairs=pairs, level=1 - outside, bounds=bounds
        )
        cells = [Cell(NOTHING), Cell(NOTHING)]
        for row in found.to_dict("records"):
            p = row["p"]
            if one.alternative != "two-sided":
                p = p / 2 if (row["mean"] > 0) == (one.alternative == "greater") else 1 - p / 2
            tested = {"is_difference": True, "p_holm": p * ALPHA / one.alpha}  # a star is p <= its share
            if row["n"] < n_pairs:
                tested["p_holm"] = np.nan
            cells[0] = _cell({**row, **tested}, experiment.outcomes[one.outcome], n_pairs)
            cells[1] = Cell(NOTHING if np.isnan(p) else f"{p:.2g}", one.alternative)
        where = "".join(f", {other} {at}" for other, at in one.where.items())
        heading = f"{name}: {level.name} − {minus.name}, {_title(experiment, one.outcome)}{where}"
        rows.append(Row(heading, "plain", [*cells, Cell(f"{one.alpha:g}")]))
    note = (
        "In brackets, the interval that leaves the share of alpha outside: both ends together, or one-sided each."
        f" * marks p ≤ the share of the paired t test, where all {n_pairs} pairs are there."
    )
    return Table("Hypotheses", [Column("difference"), Column("p"), Column("share of alpha")], rows, note=note)


def _over_steps(experiment: Experiment, table: pd.DataFrame) -> list[Table]:
    """A table of each outcome that has a row for each kept step."""
    blocks, found = _blocks(experiment, experiment.groups), []
    for name in (name for name, one in experiment.outcomes.items() if one.step == BEST):
        rows = table[table["outcome"] == name]
        numbers = _numbers(experiment, rows, ["step"])
        columns = {f"step {step}": {"outcome": name, "step": step} for step in sorted(rows["step"].unique())}
        found.append(_table(experiment, numbers, _title(experiment, name, "over steps"), columns, blocks))
    return found


def _blocks(experiment: Experiment, axes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Heading of each combination of levels -> axis -> level."""
    found = {}
    for levels in itertools.product(*(experiment.axes[axis] for axis in axes)):
        here = {axis: level.value for axis, level in zip(axes, levels, strict=True)}
        found[", ".join(f"{axis} {value}" for axis, value in here.items())] = here
    return found


_Numbers: TypeAlias = Mapping[Any, Any]
"""A mean or a paired difference: its outcome, levels of axes, n, mean, low and high."""


def _numbers(experiment: Experiment, table: pd.DataFrame, also: Sequence[str] = ()) -> list[_Numbers]:
    """Means over the paired axis and paired differences from the reference, with intervals over patients if asked."""
    compared, pairs, groups = experiment.compared, experiment.pairs, [*experiment.groups, *also]
    over = over_patients(experiment, table) if experiment.patients else None
    found: list[_Numbers] = []
    for name in experiment.outcomes:
        rows = table[table["outcome"] == name]
        bounds = experiment.outcomes[name].bounds
        parts = [means(rows, [*experiment.rows, *also], bounds)]
        if compared and pairs and experiment.reference:
            reference = experiment.reference.value
            parts.append(
                paired_differences(
                    rows, compared=compared, reference=reference, pairs=pairs, groups=groups, bounds=bounds
                )
            )
        for place, part in enumerate(parts):
            part = part.assign(outcome=name, is_difference=place == 1)
            if experiment.hypotheses:  # other differences are described
                part = part.assign(p=np.nan, p_holm=np.nan)
            if over is not None and len(part) and len(over[place]):
                part = part.merge(over[place], "left", [*experiment.rows, "outcome"])
            found += part.to_dict("records")
    return found


def _tables(experiment: Experiment, table: pd.DataFrame) -> list[Table]:
    """The declared tables, then one for each outcome with a column for each level of the last group axis."""
    numbers, found = _numbers(experiment, table), []
    for declared in experiment.tables:
        shown = {_title(experiment, name): {"outcome": name} for name in declared.outcomes}
        where = {axis: experiment.level(axis, name).value for axis, name in declared.where.items()}
        found.append(_table(experiment, numbers, declared.title, shown, {"": where}))
    *outer, inner = experiment.groups or [""]
    for name in experiment.outcomes:
        columns: dict[str, dict[str, Any]] = {name: {"outcome": name}}
        if inner:
            columns = {
                f"{inner} {level.name}": {"outcome": name, inner: level.value}
                for level in experiment.axes[inner]
            }
        found.append(
            _table(experiment, numbers, _title(experiment, name), columns, _blocks(experiment, outer))
        )
    return found


def _table(
    experiment: Experiment,
    numbers: Sequence[_Numbers],
    title: str,
    columns: Mapping[str, Mapping[str, Any]],
    blocks: Mapping[str, Mapping[str, Any]],
) -> Table:
    """In each block a row of means for each compared level and, below, of paired differences.

    `columns` and `blocks`: heading -> outcome and levels of axes.
    """
    compared, reference = experiment.compared, experiment.reference
    n_pairs = len(experiment.axes[experiment.pairs]) if experiment.pairs else 1
    outcomes = [str(own["outcome"]) for own in columns.values()]
    differences = [one for one in numbers if one["is_difference"] and one["outcome"] in outcomes[:1]]

    def cells(levels: Mapping[str, Any]) -> list[Cell]:
        found = []
        for own in columns.values():
            here = {**levels, **own}
            shown = [one for one in numbers if all(one[key] == value for key, value in here.items())]
            outcome = experiment.outcomes[own["outcome"]]
            found += [_cell(one, outcome, n_pairs) for one in shown] or [Cell(NOTHING)]
        return found

    rows: list[Row] = []
    for label, here in blocks.items():
        if label:
            rows.append(Row(label, "divider"))
        for level in experiment.axes[compared] if compared else (_ONLY,):
            own = {compared: level.value} if compared else {}
            rows.append(Row(level.name or "mean", "run", cells({**here, **own, "is_difference": False})))
        if not (differences and compared and reference):
            continue
        rows.append(Row(f"differences from {reference.name}, paired by {experiment.pairs}", "divider"))
        for level in experiment.axes[compared]:
            if level != reference:
                own = {compared: level.value, "is_difference": True}
                rows.append(Row(f"{level.name} − {reference.name}", "plain", cells({**here, **own})))
    note = _note(differences, n_pairs) if len(set(outcomes)) == 1 else ""
    return Table(title, [Column(heading) for heading in columns], rows, note=note)


def _choice(experiment: Experiment, ranked: pd.DataFrame, level: str) -> Table:
    """The best combinations of levels, with their paired differences from the best."""
    outcome = experiment.outcomes[experiment.choice]
    n_pairs = len(experiment.axes[experiment.pairs]) if experiment.pairs else 1
    rows = []
    for one in ranked.head(_MAX_CHOICES).to_dict("records"):
        cells = [_cell(one, outcome, n_pairs)]
        if "mean_difference" in one:
            difference = {x: one[f"{x}_difference"] for x in ("mean", "low", "high")}
            difference |= {"is_difference": True, "p_holm": 1.0}
            n = one["n_difference"]  # none of the first
            cells += [Cell(NOTHING) if pd.isna(n) else _cell({**difference, "n": int(n)}, outcome, n_pairs)]
        rows.append(Row(str(one[COMBINATION]), "plain", cells))
    headings = [Column(x) for x in ("mean", "minus the first")[: len(rows[0].cells)]]
    note = (
        f"The best {len(rows)} of {len(ranked)}. The first was chosen for its number, which is therefore too good; "
        "what it is worth is seen on other cases."
    )
    where = f" at {experiment.choice_axis} {level}" if level else ""
    return Table(f"Choice by {_title(experiment, experiment.choice)}{where}", headings, rows, note)


def _title(experiment: Experiment, name: str, rule: str = "") -> str:
    outcome = experiment.outcomes[name]
    named = ", ".join(filter(None, (name, rule or outcome.rule, "%" * outcome.percent)))
    return named + ARROWS[outcome.higher_is_better]


def _cell(one: _Numbers, outcome: Outcome, n_pairs: int) -> Cell:
    """A mean or a difference (signed, * where it is significant), its interval, and n where pairs are missing."""
    is_difference = bool(one.get("is_difference"))
    names = ("mean", "low", "high", "patients_low", "patients_high")
    numbers = (one.get(name, np.nan) for name in names)
    mean, low, high, *over_patients = [None if pd.isna(x) else outcome.scale * x for x in numbers]
    show = signed if is_difference else number
    text, interval = interval_cell(Estimate(mean, low, high), outcome.digits, show)
    wider = interval_cell(Estimate(mean, over_patients[0], over_patients[1]), outcome.digits, show).interval
    n = "" if one["n"] == n_pairs else f"n = {one['n']}"
    star = "*" if is_difference and one["p_holm"] <= ALPHA else ""
    parts = (interval, wider.replace("[", "(").replace("]", ")"), n)
    return Cell(f"{text}{star}", " ".join(filter(None, parts)))


def _note(differences: Sequence[_Numbers], n_pairs: int) -> str:
    tested = [one for one in differences if not pd.isna(one["p"])]
    if not tested:
        return ""
    least = min(tested, key=lambda one: one["p"])
    text = f"{len(tested)} differences; the smallest p is {least['p']:.2g}, adjusted for all {least['p_holm']:.2g}."
    return text + f" n: pairs, where fewer than {n_pairs}." * any(one["n"] != n_pairs for one in differences)
