"""The page and the CSV of a benchmark: means by model and set, then the findings of each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medclip_dcl.common.files import write_text
from medclip_dcl.data.lineage import Answer
from medclip_dcl.metrics import table
from medclip_dcl.report import charts, tables
from medclip_dcl.report.contrasts import Contrasts, Sides, compared, explain, is_marked, side_named, sides_of
from medclip_dcl.report.draws import Estimate, averaged, units_of
from medclip_dcl.report.failures import failures as failures_of
from medclip_dcl.report.page import render_template
from medclip_dcl.report.subgroups import groups_of_run, rows_of
from medclip_dcl.studies.benchmark_plan import APART, BenchmarkedRun, marks

PAGE, CSV, TEX = "benchmark.html", "benchmark.csv", "benchmark.tex"
_BY_FINDING = ("auc", "average_precision", "neg")
_MEANS = [
    *(tables.column_of(f"classification/{x}", arrow=False) for x in _BY_FINDING),
    *(
        tables.column_of(f"classification/{band}/{x}", arrow=False)
        for x in _BY_FINDING
        for band in table.BANDS
    ),
    tables.column_of("localisation/hit", arrow=False),
    tables.column_of("localisation/cnr_signed", arrow=False),
    tables.column_of(["grounding/cnr_signed", 2, "signed CNR of phrases"], arrow=False),
    tables.column_of(["report_retrieval/image_report/recall", 3, "report recall"], arrow=False),
]
_LOCALISED = {"signed CNR": ("cnr_signed", 2), "mIoU": ("miou", 3), "IoU": ("iou", 3), "Dice": ("dice", 3)}
_CHANCE = {
    "chance level: area": {"hit": "area"},
    "between readers": {"iou": "reader_iou", "dice": "reader_dice"},
}
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
    more: Mapping[str, tables.Table] = {},
) -> Path:
    """Write benchmark.html, .csv and .tex; the same results give the same files.

    Args:
        runs: by set.
        baseline: name of the model that is subtracted from the others.
        trained: what the models were trained on.
        notes: lines for the head of the page.
        failures: models and sets that were not tested.
        output: folder.
        more: set -> a further table of it.
    """
    sets = [_compared_on(name, of_set, baseline) for name, of_set in runs.items()]
    groups = {(one.name, run.name): groups_of_run(run) for one in sets for run in one.runs}
    rows = [
        ((one.name, side, minus), "", path, found)
        for one in sets
        for (side, minus), of_pair in one.table.items()
        for path, found in of_pair.items()
    ]
    for of, its in groups.items():
        rows += [((*of, ""), *one) for one in rows_of(its)]
    numbers = pd.DataFrame(
        {**dict(zip(("set", "model", "minus"), of, strict=True)), **place_of(path, group), **found._asdict()}
        for of, group, path, found in rows
    )
    write_text(numbers.rename(columns={"n": "n_draws"}).to_csv(index=False), output / CSV)
    aucs_of = {one.name: {side: tables.aucs(one.table[side, ""]) for side in one.sides} for one in sets}
    marks_of = {(one.name, side): _marks(one, side, trained) for one in sets for side in one.sides}
    of_sets = {}
    for one in sets:
        found = [
            *(_classified(one, trained, name) for name in _BY_FINDING),
            _localised(one, trained),
            *filter(None, [more.get(one.name)]),
        ]
        of_sets[tables.describe_data(one.runs[0].tested)] = [table for table in found if table.rows]
    means = [(one, x._replace(group=one.name)) for one in sets for x in _MEANS]
    sides = {label: side for one in sets for label, side in one.sides.items()}
    compared_with = next((one.baseline for one in sets if one.baseline), None)
    units = units_of(*(run.tested for one in sets for run in one.runs))
    fails = {
        f"{run.name} on {one.name}": failures_of(run.predictions, run.draws(), groups[one.name, run.name])
        for one in sets
        for run in one.runs
    }
    content: dict[str, Any] = {
        "names": list(sides),
        "fails": {name: found for name, found in fails.items() if found},
        "method": explain(sides, compared_with, units, marks_networks=True),
        "notes": notes,
        "failures": failures,
        "forest": charts.forests(aucs_of, marks_of),
        "means": _table(
            trained,
            "Means over findings, by set",
            means,
            {"prevalence": [_mean_prevalence(one, x.path) for one, x in means]},
        ),
        "sets": of_sets,
        "facts": _facts(sets, trained),
    }
    write_text(render_template(PAGE, content, Path(__file__).parent), output / PAGE)
    listed = [replace(x, title=f"{x.title}: {data}") for data, its in of_sets.items() for x in its]
    content |= {"data": ", ".join(of_sets), "tables": [content["means"], *listed]}
    content |= {"reason": "", "phantom": "", "settings": tables.Table("", [], [])}
    write_text(render_template("compare.tex", content), output / TEX)
    return output / PAGE


def _compared_on(name: str, runs: Sequence[BenchmarkedRun], baseline: str) -> _OnSet:
    sides = sides_of(runs)
    minus = side_named(sides, baseline) if baseline in [run.name for run in runs] else None
    cases = (run.predictions.tables.get("classification") for run in runs)
    known = [list(one["finding"].unique()) for one in cases if one is not None]
    shared = [finding for finding in known[0] if all(finding in one for one in known)] if known else []
    findings = None if all(len(one) == len(shared) for one in known) else shared
    return _OnSet(name, runs, sides, minus, findings, compared(sides, minus, findings=findings))


def place_of(path: str, group: str = "") -> dict[str, str]:
    """Section, finding and metric (behind its group) of a path; a finding may itself hold a "/"."""
    section, rest = path.split("/", maxsplit=1)
    place = table.place_of(path)
    finding, metric = place[:2] if place is not None and place.entry else ("", rest)
    return {"section": section, "finding": finding, "metric": group + metric}


def _classified(one: _OnSet, trained: Trained, name: str) -> tables.Table:
    """A number of each finding, after their mean over those that all models classify."""
    of_runs = [run.predictions.tables.get("classification") for run in one.runs]
    cases = pd.concat([x for x in of_runs if x is not None] or [pd.DataFrame(columns=["finding"])])
    first, prevalence = tables.column_of(f"classification/{name}", arrow=False), [""]
    numbers = [first._replace(heading=tables.MEAN)]
    for finding, of_finding in cases.groupby("finding", sort=False):
        labels = of_finding.drop_duplicates("dicom_id")["label"]
        n = f"{(labels == 1).sum():,} / {(labels == 0).sum():,}"
        numbers.append(tables.Column(str(finding), f"classification/by_finding/{finding}/{name}", 3, cases=n))
        prevalence.append(tables.number((labels == 1).mean(), 3))
    note = f"{first.heading} by chance is {'the prevalence' if name == 'average_precision' else '0.5'}."
    if name == "neg":
        note += " Of the negative prompts, for images without the finding; a classifier has no prompts."
    if one.findings is not None:
        left_out = ", ".join(x.heading for x in numbers[1:] if x.heading not in one.findings)
        note += f" The mean is over the findings that all models classify, without {left_out}."
    counts = {"positive / negative cases": [x.cases for x in numbers], "prevalence": prevalence}
    return _table(trained, f"{first.heading} by finding", [(one, x) for x in numbers], counts, note)


def _mean_prevalence(one: _OnSet, path: str) -> str:
    """Of the findings that enter a mean average precision; "" for other numbers."""
    section = path.split("/")[0]
    first = next((run.predictions for run in one.runs if section in run.predictions.tables), None)
    if first is None or not path.endswith("/average_precision"):
        return ""
    shares = first.tables[section].groupby("finding")["label"].mean()
    its = averaged(path, one.findings or shares.index, first.bands)
    has_number = [x for x in its if any(one.find(side, "", x) for side in one.sides)]
    entering = [shares[place_of(x)["finding"]] for x in has_number]
    return tables.number(float(np.mean(entering)), 3) if entering else ""


def _localised(one: _OnSet, trained: Trained) -> tables.Table:
    """Pointing game of each finding with its chance, and the means of the other metrics with the readers' agreement."""
    of_sides = {side: found for (side, minus), found in one.table.items() if not minus}
    start, end = "localisation/by_category/", "/hit"
    paths = [x for found in of_sides.values() for x in found if x.startswith(start) and x.endswith(end)]
    numbers = [tables.Column(tables.MEAN, "localisation/hit", 3, "hit")]
    numbers += [
        tables.Column(x.removeprefix(start).removesuffix(end), x, 3, "hit") for x in dict.fromkeys(paths)
    ]
    numbers += [
        tables.Column(heading, f"localisation/{metric}", digits, "means over findings")
        for heading, (metric, digits) in _LOCALISED.items()
    ]
    first = next((side for side, found in of_sides.items() if "localisation/hit" in found), "")
    others: dict[str, list[str]] = {label: [] for label in _CHANCE}
    for label, (before, _, metric) in product(_CHANCE, (x.path.rpartition("/") for x in numbers)):
        level = one.find(first, "", f"{before}/{_CHANCE[label].get(metric)}")
        others[label].append("" if level is None else tables.number(level.value, 3))
    note = "hit: the max of the heat map lies inside the boxes or masks."
    return _table(trained, "Localisation", [(one, x) for x in numbers], others, note)


def _table(
    trained: Trained,
    title: str,
    numbers: Sequence[tuple[_OnSet, tables.Column]],
    others: Mapping[str, Sequence[str]] = {},
    note: str = "",
) -> tables.Table:
    """A row for each number that a side has; the sides and then their differences are columns.

    Args:
        trained: gives the marks of the sides.
        numbers: their headings are the labels of the rows, their groups dividers above them.
        others: heading of a column before the sides -> its texts, one for each number.
    """
    pairs = list(dict.fromkeys(pair for one, _ in numbers for pair in one.table))
    used = [any(one.find(*pair, x.path) for pair in pairs if not pair[1]) for one, x in numbers]
    left_out = tables.left_out_note(
        [x for (_, x), ok in zip(numbers, used, strict=True) if x.cases and not ok]
    )
    others = {heading: list(compress(texts, used)) for heading, texts in others.items()}
    others = {heading: texts for heading, texts in others.items() if any(texts)}
    numbers = list(compress(numbers, used))

    def cell(one: _OnSet, x: tables.Column, side: str, minus: str) -> tables.Cell:
        if (found := one.find(side, minus, x.path)) is None:
            return tables.Cell(tables.NOTHING)
        shown = tables.interval_cell(found, x.digits, tables.signed if minus else tables.number)
        mark = "*" * is_marked(found) if minus else _marks(one, side, trained)
        return shown._replace(text=shown.text + mark)

    columns: dict[tuple[str, str], tables.Column] = {}
    for side, minus in pairs:
        if any(one.find(side, minus, x.path) for one, x in numbers):
            is_apart = all(APART in _marks(one, side, trained) for one, _ in numbers if side in one.sides)
            group = f"{APART} trained on train patients of the set" * is_apart
            columns[side, minus] = tables.Column(
                side, group=f"paired difference from {minus}" if minus else group
            )
    order = sorted(columns, key=lambda pair: (bool(pair[1]), columns[pair].group))
    rows: list[tables.Row] = []
    for group, members in groupby(enumerate(numbers), lambda one: one[1][1].group):
        rows += [tables.Row(group, "divider")] if group else []
        for place, (one, x) in members:
            cells = [tables.Cell(texts[place]) for texts in others.values()]
            cells += [cell(one, x, *pair) for pair in order]
            rows.append(tables.Row(x.heading, "run" if x.heading == tables.MEAN else "plain", cells))
    shown = [*map(tables.Column, others), *(columns[pair] for pair in order)]
    return tables.Table(title, shown, rows, f"{note} {left_out}".strip())


def _marks(one: _OnSet, side: str, trained: Trained) -> str:
    its = (marks(trained[one.name, run.name]) for run in one.sides.get(side, ()))
    return "".join(sorted({mark for of_run in its for mark in of_run}, reverse=True))


def _facts(sets: Sequence[_OnSet], trained: Trained) -> tables.Table:
    """What was tested: each model once, and how it saw the images of each set."""
    facts = []
    for one, run in [(on_set, run) for on_set in sets for run in on_set.runs]:
        results = run.tested
        here = {"set": one.name, "trained on": trained[one.name, run.name], **tables.facts_of(results)}
        here["several prompts"] = results["protocol"].get("classification", {}).get("ensemble")
        here["device"] = results["timings"]["device"]
        here["fingerprint of the set"] = results["dataset"]["fingerprint"]
        facts.append((run.name, here))
    return tables.facts_table("What was tested", facts)
