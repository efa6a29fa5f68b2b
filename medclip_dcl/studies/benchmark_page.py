"""The page and the CSV of a benchmark: means by model and set, then the findings of each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from medclip_dcl.common.files import write_text
from medclip_dcl.data.lineage import Answer
from medclip_dcl.report.page import render_template
from medclip_dcl.report.tables import (
    NOTHING,
    Cell,
    Column,
    Row,
    Table,
    describe_data,
    facts_of,
    facts_table,
    interval_cell,
    number,
    signed,
)
from medclip_dcl.statistics.contrasts import (
    Contrasts,
    Sides,
    compared,
    explain,
    is_marked,
    side_named,
    sides_of,
)
from medclip_dcl.statistics.draws import Estimate, units_of
from medclip_dcl.studies.benchmark_plan import APART, BenchmarkedRun, marks

PAGE, CSV = "benchmark.html", "benchmark.csv"
_MEANS = {
    "AUC": ("classification/auc", 3),
    "hit": ("localisation/hit", 3),
    "signed CNR": ("localisation/cnr_signed", 2),
    "signed CNR of phrases": ("grounding/cnr_signed", 2),
    "report recall": ("report_retrieval/image_report/recall", 3),
}
_LOCALISED = {"signed CNR": ("cnr_signed", 2), "mIoU": ("miou", 3), "IoU": ("iou", 3), "Dice": ("dice", 3)}
_CHANCE = {
    "chance level: area": {"hit": "area"},
    "between readers": {"iou": "reader_iou", "dice": "reader_dice"},
}
_GROUPS = ("by_finding/", "by_category/")
Trained = Mapping[tuple[str, str], Answer]
"""(set, model) -> images of the set in the model's training."""


@dataclass(frozen=True)
class _OnSet:
    """The comparison on a set; `findings` enter the means of the classification, where models have other ones."""

    name: str
    runs: Sequence[BenchmarkedRun]
    sides: Sides
    baseline: str | None
    findings: list[str] | None
    table: Contrasts

    def find(self, side: str, minus: str, path: str) -> Estimate | None:
        """A number that has a value."""
        found = self.table.get((side, minus), {}).get(path)
        return None if found is None or found.value is None else found


def write_page(
    runs: Mapping[str, Sequence[BenchmarkedRun]],
    baseline: str,
    trained: Trained,
    notes: Sequence[str],
    failures: Sequence[str],
    output: Path,
) -> Path:
    """Write benchmark.html and benchmark.csv; the same results give the same files.

    Args:
        runs: by set.
        baseline: name of the model that is subtracted from the others.
        trained: what the models were trained on.
        notes: lines for the head of the page.
        failures: models and sets that were not tested.
        output: folder.
    """
    sets = [_compared_on(name, of_set, baseline) for name, of_set in runs.items()]
    numbers = pd.DataFrame(
        {"set": one.name, "model": side, "minus": minus, **_place(path), **found._asdict()}
        for one in sets
        for (side, minus), of_pair in one.table.items()
        for path, found in of_pair.items()
    )
    write_text(numbers.to_csv(index=False), output / CSV)
    of_sets = {}
    for one in sets:
        tables = (_classified(one, trained), _localised(one, trained))
        of_sets[describe_data(one.runs[0].tested)] = [table for table in tables if table.columns]
    means = [(one, Column(name, *place, group=one.name)) for one in sets for name, place in _MEANS.items()]
    sides = {label: side for one in sets for label, side in one.sides.items()}
    compared_with = next((one.baseline for one in sets if one.baseline), None)
    units = units_of(*(run.tested for one in sets for run in one.runs))
    content = {
        "names": list(sides),
        "method": explain(sides, compared_with, units, marks_networks=True),
        "notes": notes,
        "failures": failures,
        "means": _table(trained, "Means over findings, by set", means),
        "sets": of_sets,
        "facts": _facts(sets, trained),
    }
    write_text(render_template(PAGE, content, Path(__file__).parent), output / PAGE)
    return output / PAGE


def _compared_on(name: str, runs: Sequence[BenchmarkedRun], baseline: str) -> _OnSet:
    sides = sides_of(runs)
    minus = side_named(sides, baseline) if baseline in [run.name for run in runs] else None
    tables = (run.predictions.tables.get("classification") for run in runs)
    known = [list(table["finding"].unique()) for table in tables if table is not None]
    shared = [finding for finding in known[0] if all(finding in one for one in known)] if known else []
    findings = None if all(len(one) == len(shared) for one in known) else shared
    return _OnSet(name, runs, sides, minus, findings, compared(sides, minus, findings=findings))


def _place(path: str) -> dict[str, str]:
    """Section, finding and metric of a path; a finding may itself hold a "/"."""
    section, rest = path.split("/", maxsplit=1)
    finding, metric = "", rest
    for group in _GROUPS:
        if rest.startswith(group):
            finding, _, metric = rest.removeprefix(group).rpartition("/")
    return {"section": section, "finding": finding, "metric": metric}


def _classified(one: _OnSet, trained: Trained) -> Table:
    """AUC of each finding, and their mean over those that all models classify."""
    tables = [run.predictions.tables.get("classification") for run in one.runs]
    cases = pd.concat([table for table in tables if table is not None] or [pd.DataFrame(columns=["finding"])])
    findings = list(cases["finding"].unique())
    columns = [Column("mean", "classification/auc", 3)]
    for finding in findings:
        labels = cases[cases["finding"] == finding].drop_duplicates("dicom_id")["label"]
        n = f"{(labels == 1).sum():,} / {(labels == 0).sum():,}"
        columns.append(Column(finding, f"classification/by_finding/{finding}/auc", 3, cases=n))
    note = "AUC by chance is 0.5. Findings with fewer than 5 positive or negative cases are left out."
    if one.findings is not None:
        left_out = ", ".join(finding for finding in findings if finding not in one.findings)
        note += f" The mean is over the findings that all models classify, without {left_out}."
    counts = Row("positive / negative cases", "counts", [Cell(column.cases) for column in columns])
    return _table(trained, "AUC by finding", [(one, column) for column in columns], [counts], note)


def _localised(one: _OnSet, trained: Trained) -> Table:
    """Pointing game of each finding with its chance, and the means of the other metrics with the readers' agreement."""
    numbers = {side: found for (side, minus), found in one.table.items() if not minus}
    start, end = "localisation/by_category/", "/hit"
    paths = [
        path for found in numbers.values() for path in found if path.startswith(start) and path.endswith(end)
    ]
    columns = [Column("mean", "localisation/hit", 3, "hit")]
    columns += [
        Column(path.removeprefix(start).removesuffix(end), path, 3, "hit") for path in dict.fromkeys(paths)
    ]
    columns += [
        Column(heading, f"localisation/{metric}", digits, "means over findings")
        for heading, (metric, digits) in _LOCALISED.items()
    ]
    first = next((side for side, found in numbers.items() if "localisation/hit" in found), "")
    rows = []
    for label, metrics in _CHANCE.items():
        cells = []
        for column in columns:
            before, _, metric = column.path.rpartition("/")
            level = one.find(first, "", f"{before}/{metrics.get(metric)}")
            cells.append(Cell("" if level is None else number(level.value, 3)))
        rows += [Row(label, "chance", cells)] if any(cell.text for cell in cells) else []
    note = "hit: the max of the heat map lies inside the boxes or masks."
    return _table(trained, "Localisation", [(one, column) for column in columns], rows, note)


def _table(
    trained: Trained,
    title: str,
    numbers: Sequence[tuple[_OnSet, Column]],
    others: Sequence[Row] = (),
    note: str = "",
) -> Table:
    """A row for each side, `others` with a cell for each number, then differences; without columns that are empty."""
    pairs = list(dict.fromkeys(pair for one, _ in numbers for pair in one.table))
    sides = [side for side, minus in pairs if not minus]
    places = [
        place
        for place, (one, column) in enumerate(numbers)
        if any(one.find(x, "", column.path) for x in sides)
    ]
    used = [numbers[place] for place in places]

    def marks_of(one: _OnSet, side: str) -> str:
        its = (marks(trained[one.name, run.name]) for run in one.sides.get(side, ()))
        return "".join(sorted({mark for of_run in its for mark in of_run}, reverse=True))

    def row(side: str, minus: str, kind: str) -> list[Row]:
        cells = []
        for one, column in used:
            found = one.find(side, minus, column.path)
            if found is None:
                cells.append(Cell(NOTHING))
                continue
            cell = interval_cell(found, column.digits, signed if minus else number)
            mark = "*" * is_marked(found) if minus else marks_of(one, side)
            cells.append(cell._replace(text=cell.text + mark))
        label = f"{side} − {minus}" if minus else side
        return [Row(label, kind, cells)] if any(cell.text != NOTHING for cell in cells) else []

    apart = [
        side for side in sides if all(APART in marks_of(one, side) for one, _ in used if side in one.sides)
    ]
    rows = [one for side in sides if side not in apart for one in row(side, "", "run")]
    below = [one for side in apart for one in row(side, "", "run")]
    rows += [Row(f"{APART} trained on train patients of the set", "divider"), *below] if below else []
    rows += [other._replace(cells=[other.cells[place] for place in places]) for other in others]
    differences = [one for side, minus in pairs if minus for one in row(side, minus, "difference")]
    if differences:
        rows += [Row("paired differences", "divider"), *differences]
    return Table(title, [column for _, column in used], rows, note)


def _facts(sets: Sequence[_OnSet], trained: Trained) -> Table:
    """What was tested: each model once, and how it saw the images of each set."""
    facts = []
    for one, run in [(on_set, run) for on_set in sets for run in on_set.runs]:
        results = run.tested
        here = {"set": one.name, "trained on": trained[one.name, run.name], **facts_of(results)}
        here["several prompts"] = results["protocol"].get("classification", {}).get("ensemble")
        here["device"] = results["timings"]["device"]
        here["fingerprint of the set"] = results["dataset"]["fingerprint"]
        facts.append((run.name, here))
    return facts_table("What was tested", facts)
