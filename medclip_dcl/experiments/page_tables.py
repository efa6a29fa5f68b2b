"""The tables of an experiment: means over seeds, paired differences, and the best levels of a search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from medclip_dcl.experiments.choice import COMBINATION, choices, ranking
from medclip_dcl.experiments.grid import Experiment, Level, Outcome
from medclip_dcl.experiments.patients import over_patients
from medclip_dcl.report.statistics import ALPHA, means, paired_differences
from medclip_dcl.report.tables import NOTHING, Cell, Column, Row, Table

_MAX_CHOICES = 15
_ONLY = Level("", "", ())


def tables(experiment: Experiment, table: pd.DataFrame) -> list[Table]:
    """The choice of a search, the declared tables, and one for each outcome; none where nothing is finished."""
    if table.empty:
        return []
    ranked = {level: ranking(experiment, rows) for level, rows in choices(experiment, table).items()}
    chosen = [_choice(experiment, found, level) for level, found in ranked.items() if len(found)]
    return [*chosen, *_tables(experiment, table)]


class _Numbers(NamedTuple):
    """Of one outcome: means over the paired axis, and paired differences from the reference (empty without one)."""

    averages: pd.DataFrame
    differences: pd.DataFrame


def _numbers(experiment: Experiment, table: pd.DataFrame) -> dict[str, _Numbers]:
    """Outcome -> its numbers, with intervals over patients where the experiment asks for them."""
    compared, pairs, groups = experiment.compared, experiment.pairs, experiment.groups
    keys = [*groups, *([compared] if compared else [])]
    over = over_patients(experiment, table) if experiment.patients else None
    found = {}
    for name in experiment.outcomes:
        rows = table[table["outcome"] == name]
        averages, differences = means(rows, keys), pd.DataFrame()
        if compared and pairs and experiment.reference:
            reference = experiment.reference.value
            differences = paired_differences(
                rows, compared=compared, reference=reference, pairs=pairs, groups=groups
            )
        if over is not None:
            averages, differences = (
                of_seeds
                if of_seeds.empty
                else of_seeds.assign(outcome=name).merge(of_patients, "left", [*keys, "outcome"])
                for of_seeds, of_patients in zip((averages, differences), over, strict=True)
            )
        found[name] = _Numbers(averages, differences)
    return found


class _Heading(NamedTuple):
    """A column: its heading, the outcome that it shows, and the levels at which."""

    text: str
    outcome: str
    levels: Mapping[str, Any]


def _tables(experiment: Experiment, table: pd.DataFrame) -> list[Table]:
    """The declared tables, then one for each outcome with a column for each level of the last group axis."""
    numbers, found = _numbers(experiment, table), []
    for declared in experiment.tables:
        headings = [_Heading(_title(experiment, name), name, {}) for name in declared.outcomes]
        where = {axis: experiment.level(axis, name).value for axis, name in declared.where.items()}
        found.append(_table(experiment, numbers, declared.title, headings, [("", where)]))
    *outer, inner = experiment.groups or [""]
    rows = []
    for levels in itertools.product(*(experiment.axes[axis] for axis in outer)):
        here = {axis: level.value for axis, level in zip(outer, levels, strict=True)}
        rows.append((", ".join(f"{axis} {value}" for axis, value in here.items()), here))
    for name in experiment.outcomes:
        columns = experiment.axes[inner] if inner else (_ONLY,)
        headings = [
            _Heading(f"{inner} {level.name}" if inner else name, name, {inner: level.value} if inner else {})
            for level in columns
        ]
        found.append(_table(experiment, numbers, _title(experiment, name), headings, rows))
    return found


def _table(
    experiment: Experiment,
    numbers: Mapping[str, _Numbers],
    title: str,
    headings: Sequence[_Heading],
    blocks: Sequence[tuple[str, Mapping[str, Any]]],
) -> Table:
    """In each block a row of means for each compared level and, below, of paired differences."""
    compared, reference = experiment.compared, experiment.reference
    n_pairs = len(experiment.axes[experiment.pairs]) if experiment.pairs else 1

    def row(label: str, kind: str, levels: Mapping[str, Any]) -> Row:
        cells = []
        for heading in headings:
            of = numbers[heading.outcome]
            here = {**levels, **heading.levels}
            matches = [
                one
                for one in _records(of.averages if kind == "run" else of.differences)
                if all(one[axis] == value for axis, value in here.items())
            ]
            outcome = experiment.outcomes[heading.outcome]
            cells += [_cell(one, outcome, n_pairs) for one in matches] or [Cell(NOTHING)]
        return Row(label, kind, cells)

    shown: list[Row] = []
    differences = numbers[headings[0].outcome].differences
    for label, here in blocks:
        if label:
            shown.append(Row(label, "divider"))
        for level in experiment.axes[compared] if compared else (_ONLY,):
            shown.append(
                row(level.name or "mean", "run", {**here, **({compared: level.value} if compared else {})})
            )
        if differences.empty or not compared or reference is None:
            continue
        shown.append(Row(f"differences from {reference.name}, paired by {experiment.pairs}", "divider"))
        for level in experiment.axes[compared]:
            if level != reference:
                shown.append(
                    row(f"{level.name} − {reference.name}", "plain", {**here, compared: level.value})
                )
    is_of_one = len({heading.outcome for heading in headings}) == 1
    columns = [Column(heading.text) for heading in headings]
    return Table(title, columns, shown, note=_note(differences, n_pairs) if is_of_one else "")


def _choice(experiment: Experiment, ranked: pd.DataFrame, level: str) -> Table:
    """The best combinations of levels, with their paired differences from the best."""
    outcome = experiment.outcomes[experiment.choice]
    n_pairs = len(experiment.axes[experiment.pairs]) if experiment.pairs else 1
    rows = []
    for one in _records(ranked.head(_MAX_CHOICES)):
        cells = [_cell(one, outcome, n_pairs)]
        if "mean_difference" in one:
            difference = {x: one[f"{x}_difference"] for x in ("mean", "low", "high")} | {"p_holm": 1.0}
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


def _title(experiment: Experiment, name: str) -> str:
    outcome = experiment.outcomes[name]
    return f"{name}{', %' if outcome.percent else ''}{ {True: ' ↑', False: ' ↓', None: ''}[outcome.higher_is_better] }"


def _records(found: pd.DataFrame) -> list[dict[str, Any]]:
    return found.to_dict("records")  # type: ignore[return-value]


def _cell(one: Mapping[str, Any], outcome: Outcome, n_pairs: int) -> Cell:
    """A mean or a difference (signed, * where it is significant), its interval, and n where pairs are missing."""
    is_difference = "p_holm" in one
    mean, low, high = (
        _number(outcome.scale * one[x], outcome.digits, is_difference) for x in ("mean", "low", "high")
    )
    interval = "" if pd.isna(one["low"]) else f"[{low}, {high}]"
    if not pd.isna(one.get("patients_low", np.nan)):
        ends = (outcome.scale * one[f"patients_{end}"] for end in ("low", "high"))
        interval += f" ({', '.join(_number(end, outcome.digits, is_difference) for end in ends)})"
    n = "" if one["n"] == n_pairs else f"n = {one['n']}"
    star = "*" if is_difference and one["p_holm"] <= ALPHA else ""
    return Cell(f"{mean}{star}", f"{interval.strip()} {n}".strip())


def _number(value: float, digits: int, signed: bool) -> str:
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("+-")


def _note(differences: pd.DataFrame, n_pairs: int) -> str:
    tested = differences.dropna(subset=["p"]) if len(differences) else differences
    if tested.empty:
        return ""
    least = _records(tested.nsmallest(1, "p"))[0]
    text = f"{len(tested)} differences; the smallest p is {least['p']:.2g}, adjusted for all {least['p_holm']:.2g}."
    return text if (differences["n"] == n_pairs).all() else f"{text} n: pairs, where fewer than {n_pairs}."
