"""The report's section of subgroups: found gaps, and a table of metrics and gaps for each attribute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medclip_dcl.report.intervals import CLASSIFICATIONS, N_DRAWS
from medclip_dcl.report.saved_results import SavedResultsError
from medclip_dcl.report.subgroups import ATTRIBUTES, FOUND, MIN_PATIENTS, UNKNOWN, subgroup_table
from medclip_dcl.report.tables import DESCRIPTIONS, NOTHING, Cell, Column, Row, Table, interval_cell, number


def describe_run(run: Path, missing: list[str]) -> dict[str, Any] | None:
    """The section of a tested run folder; where it cannot be made, None, and `missing` says why."""
    try:
        return describe(subgroup_table(run))
    except SavedResultsError as error:
        missing.append(f"no tables by view, sex and age: {error}")
        return None


def describe(table: pd.DataFrame) -> dict[str, Any] | None:
    """The report's section: found gaps, number of gaps, and a table for each attribute; None without groups."""
    if table.empty:
        return None
    found = table[table["p"] <= FOUND].sort_values(["p", "metric"], kind="stable")
    return {
        "n_gaps": int(table["p"].notna().sum()),
        "found": [
            f"{ATTRIBUTES[row['attribute']]}, {_gap_name(table, row['attribute'], row['group'])}: "
            f"{_label(row['metric'])[0]} {_gap_cell(row, mark='')} (p = {row['p']:.2g})"
            for row in found.to_dict("records")
        ],
        "level": FOUND,
        "least_patients": MIN_PATIENTS,
        "n_draws": N_DRAWS,
        "tables": [_table(rows, str(name)) for name, rows in table.groupby("attribute", sort=False)],
    }


def _table(rows: pd.DataFrame, attribute: str) -> Table:
    """Metrics in rows; groups and their gaps in columns."""
    of_groups = rows.drop_duplicates("group").set_index("group")
    names = [str(name) for name in of_groups.index if name != UNKNOWN]
    by_cell = rows.set_index(["metric", "group"]).to_dict("index")
    gaps = names[:1] if len(names) == 2 else names
    shown = [
        Row(
            "images / patients",
            "counts",
            [_counts(of_groups.loc[name]) for name in names] + [Cell("")] * len(gaps),
        )
    ]
    for metric in rows["metric"].unique():
        cells: list[Mapping[Any, Any]] = [by_cell[metric, name] | {"metric": metric} for name in names]
        if any(np.isfinite(cell["value"]) for cell in cells):
            values = [
                _value_cell(cell, _findings_of(rows, metric, name))
                for name, cell in zip(names, cells, strict=True)
            ]
            label = _label(metric)[0]
            shown.append(Row(label, "plain", [*values, *map(_gap_cell, cells[: len(gaps)])]))
    columns = [*map(Column, names), *(Column(_gap_name(rows, attribute, name)) for name in gaps)]
    note = ""
    if UNKNOWN in of_groups.index:
        n_images, n_patients = of_groups.loc[UNKNOWN, ["images", "patients"]]
        note = f"In no group, because unknown: {n_images:,} images of {n_patients:,} patients."
    return Table(ATTRIBUTES[attribute], columns, shown, note)


def _counts(group: Any) -> Cell:
    return Cell(f"{group['images']:,} / {group['patients']:,}")


def _gap_name(table: pd.DataFrame, attribute: str, group: str) -> str:
    groups = table.loc[(table["attribute"] == attribute) & (table["group"] != UNKNOWN), "group"].unique()
    return f"{groups[0]} − {groups[1]}" if len(groups) == 2 else f"{group} − rest"


def _label(metric: str) -> tuple[str, int]:
    """Name of a metric on the page, and its decimals."""
    for heading, path, digits in DESCRIPTIONS["subgroups"]:
        if metric == path:
            return heading, digits
    finding = metric.split("/by_finding/")[1].removesuffix("/auc")
    return f"AUC ↑, {finding}", 3


def _findings_of(rows: pd.DataFrame, metric: str, group: str) -> str:
    """Number of findings in an average that lacks some of them; "" where it has all, or is none."""
    section, _, name = metric.partition("/")
    of_section = rows[rows["metric"].str.startswith(f"{section}/by_finding/")]
    if section not in CLASSIFICATIONS or "/" in name:
        return ""
    has_number = of_section.loc[of_section["group"] == group, "value"].notna()
    return "" if has_number.all() else f" ({has_number.sum()} of {len(has_number)})"


def _value_cell(cell: Mapping[Any, Any], findings: str) -> Cell:
    if not np.isfinite(cell["value"]):
        return Cell(NOTHING)
    found = interval_cell(cell["value"], cell["low"], cell["high"], _label(cell["metric"])[1])
    return found._replace(text=found.text + findings)


def _gap_cell(cell: Mapping[Any, Any], mark: str = " *") -> Cell:
    """A gap with its sign; the mark follows one that is found."""
    if not np.isfinite(cell["gap"]):
        return Cell(NOTHING)
    gap, low, high = (
        _signed(cell[name], _label(cell["metric"])[1]) for name in ("gap", "gap_low", "gap_high")
    )
    return Cell(f"{gap}{mark if cell['p'] <= FOUND else ''}", f"[{low}, {high}]")


def _signed(value: float, digits: int) -> str:
    return ("+" if value > 0 else "−" if value < 0 else "") + number(abs(value), digits)
