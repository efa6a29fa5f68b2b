"""The page of an experiment: tables of means and paired differences, figures, and what the numbers depend on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from medclip_dcl.experiments.cells import LOG_FILE, error_of, is_done
from medclip_dcl.experiments.figures import draw_figures
from medclip_dcl.experiments.grid import Experiment, Level, Outcome
from medclip_dcl.experiments.statistics import means, paired_differences
from medclip_dcl.files import write_text
from medclip_dcl.report.page import render_template
from medclip_dcl.report.tables import NOTHING, Cell, Column, Row, Table

REPORT_FILE = "report.html"
_ALPHA = 0.05
_MOST_FAILURES = 20
_ONLY = Level("", "", ())


def write_report(experiment: Experiment, table: pd.DataFrame) -> Path:
    """Write report.html and figures/*.png into the experiment's folder; the same cells give the same page.

    Args:
        experiment: whose cells are reported.
        table: its results.parquet.
    """
    cells = experiment.cells()
    n_done = sum(is_done(cell, experiment.commands) for cell in cells)
    failures = [
        f"{cell.name}: {error} (cells/{cell.name}/{LOG_FILE})"
        for cell in cells
        if (error := error_of(cell)) and not is_done(cell, experiment.commands)
    ]
    runs = table.drop_duplicates("cell")
    seconds = runs[["fit_seconds", "test_seconds"]].sum(axis=None) if len(runs) else 0.0
    content = {
        "name": experiment.folder.resolve().name,
        "grid": " × ".join(f"{len(levels)} {axis}" for axis, levels in experiment.axes.items()),
        "tiles": [
            ("cells done", f"{n_done:,} of {len(cells):,}"),
            ("failed", len(failures)),
            *(
                [(f"levels of {experiment.pairs}", len(experiment.axes[experiment.pairs]))]
                if experiment.pairs
                else []
            ),
            ("hours of fit and test", f"{seconds / 3600:.1f}"),
        ],
        "notes": _notes(runs, len(cells) - n_done),
        "failures": failures[:_MOST_FAILURES]
        + [f"and {len(failures) - _MOST_FAILURES} more"] * (len(failures) > _MOST_FAILURES),
        "method": _method(experiment),
        "tables": [_table(experiment, table, name) for name in experiment.outcomes] if len(table) else [],
        "figures": draw_figures(experiment, table),
        "facts": _facts(runs),
        "file": experiment.file.name,
        "text": experiment.file.read_text(encoding="utf-8"),
    }
    file = experiment.folder / REPORT_FILE
    write_text(render_template("experiment.html", content), file)
    return file


def _method(experiment: Experiment) -> str:
    """How the tables are made, in words."""
    if experiment.pairs is None:
        return "One run a cell: there are no intervals."
    text = f"Means over {experiment.pairs}; in brackets, 95% t intervals over {experiment.pairs}, each for itself."
    if experiment.reference is not None:
        text += (
            f" Differences from {experiment.reference.name} are paired by {experiment.pairs}. * marks those with "
            f"p ≤ {_ALPHA} by the paired t test, adjusted by Holm's method for all differences of their table."
        )
    return text


def _table(experiment: Experiment, table: pd.DataFrame, name: str) -> Table:
    """Means of an outcome and, below them, paired differences; a column for each level of the last group axis."""
    outcome, compared, pairs = experiment.outcomes[name], experiment.compared, experiment.pairs
    rows, reference = table[table["outcome"] == name], experiment.reference
    *outer, inner = experiment.groups or [""]
    columns = experiment.axes[inner] if inner else (_ONLY,)
    n_pairs = len(experiment.axes[pairs]) if pairs else 1

    def row(label: str, kind: str, found: pd.DataFrame, levels: Mapping[str, Any]) -> Row:
        cells = []
        for column in columns:
            here = {**levels, **({inner: column.value} if inner else {})}
            match = found[
                [all(one[axis] == value for axis, value in here.items()) for one in _records(found)]
            ]
            cells += [_cell(one, outcome, n_pairs) for one in _records(match)] or [Cell(NOTHING)]
        return Row(label, kind, cells)

    averages = means(rows, [*experiment.groups, *([compared] if compared else [])])
    differences = pd.DataFrame()
    if compared and pairs and reference:
        differences = paired_differences(
            rows, compared=compared, reference=reference.value, pairs=pairs, groups=experiment.groups
        )
    shown: list[Row] = []
    for combination in itertools.product(*(experiment.axes[axis] for axis in outer)):
        levels: dict[str, Any] = {axis: level.value for axis, level in zip(outer, combination, strict=True)}
        if levels:
            shown.append(Row(", ".join(f"{axis} {value}" for axis, value in levels.items()), "divider"))
        for level in experiment.axes[compared] if compared else (_ONLY,):
            here = levels | ({compared: level.value} if compared else {})
            shown.append(row(level.name or "mean", "run", averages, here))
        if len(differences) and reference:
            shown.append(Row(f"differences from {reference.name}, paired by {pairs}", "divider"))
        for level in experiment.axes[compared] if compared and len(differences) else ():
            if reference and level != reference:
                label = f"{level.name} − {reference.name}"
                shown.append(row(label, "plain", differences, levels | {str(compared): level.value}))
    title = f"{name}{', %' if outcome.percent else ''}{ {True: ' ↑', False: ' ↓', None: ''}[outcome.higher_is_better] }"
    headings = [Column(f"{inner} {level.name}" if inner else name) for level in columns]
    return Table(title, headings, shown, note=_note(differences, n_pairs))


def _records(found: pd.DataFrame) -> list[dict[str, Any]]:
    return found.to_dict("records")  # type: ignore[return-value]


def _cell(one: Mapping[str, Any], outcome: Outcome, n_pairs: int) -> Cell:
    """A mean or a difference (signed, * where it is significant), its interval, and n where pairs are missing."""
    is_difference = "p_holm" in one
    mean, low, high = (
        _number(outcome.scale * one[x], outcome.digits, is_difference) for x in ("mean", "low", "high")
    )
    interval = "" if pd.isna(one["low"]) else f"[{low}, {high}]"
    n = "" if one["n"] == n_pairs else f"n = {one['n']}"
    star = "*" if is_difference and one["p_holm"] <= _ALPHA else ""
    return Cell(f"{mean}{star}", f"{interval} {n}".strip())


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


def _notes(runs: pd.DataFrame, n_missing: int) -> list[str]:
    found = [f"{n_missing:,} cells are missing: averages are over those that are finished."] * (n_missing > 0)
    for column, what in (
        ("versions", "versions of the software"),
        ("precision", "precisions"),
        ("device", "devices"),
        ("dataset", "data sets"),
    ):
        if (n := runs[column].nunique()) > 1:
            found.append(f"The cells were run with {n} {what}; results.parquet says which.")
    return found


def _facts(runs: pd.DataFrame) -> dict[str, str]:
    """Distinct values over the finished cells."""

    def distinct(column: str) -> str:
        values = sorted(runs[column].dropna().unique())
        return (
            ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values) or NOTHING
        )

    versions = [json.loads(text) for text in runs["versions"].dropna().unique()]
    names = sorted({name for one in versions for name in one})
    seconds = runs[["fit_seconds", "test_seconds"]].median()
    return {
        "device": distinct("device"),
        "precision": distinct("precision"),
        "epochs": distinct("epochs"),
        "steps": distinct("steps"),
        "data set": distinct("dataset"),
        "versions": "; ".join(
            f"{x} {', '.join(sorted({one[x] for one in versions if x in one}))}" for x in names
        ),
        "seconds of a cell": f"fit {seconds['fit_seconds']:.1f}, test {seconds['test_seconds']:.1f} (medians)",
    }
