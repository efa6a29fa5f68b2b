"""The page of a benchmark: means by model and set, then the findings of each set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
    interval_cell,
    number,
    signed,
)
from medclip_dcl.runs.saved import describe_checkpoint, describe_image_size
from medclip_dcl.statistics.contrasts import ALPHA
from medclip_dcl.statistics.draws import FEW, N_DRAWS, TestedRun
from medclip_dcl.statistics.models import CLASSIFICATION, PLACE, SetNumbers
from medclip_dcl.studies.benchmark_plan import APART, marks

PAGE = "benchmark.html"
_LOCALISATION = "localisation"
_MEANS = {
    "AUC": (CLASSIFICATION, "auc", 3),
    "hit": (_LOCALISATION, "hit", 3),
    "signed CNR": (_LOCALISATION, "cnr_signed", 2),
    "signed CNR of phrases": ("grounding", "cnr_signed", 2),
    "report recall": ("report_retrieval", "image_report/recall", 3),
}
_LOCALISED = {"signed CNR": ("cnr_signed", 2), "mIoU": ("miou", 3), "IoU": ("iou", 3), "Dice": ("dice", 3)}


@dataclass(frozen=True)
class Benchmark:
    """Tested runs by set and model, their numbers, and lines about them.

    `trained` has (set, model) -> images of the set in the model's training.
    """

    runs: Mapping[str, Mapping[str, TestedRun]]
    numbers: Mapping[str, SetNumbers]
    table: pd.DataFrame
    baseline: str
    trained: Mapping[tuple[str, str], Answer]
    notes: Sequence[str]
    failures: Sequence[str]

    @cached_property
    def by_place(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """(set, model, minus, section, finding, metric) -> row of the table."""
        return {tuple(row[name] for name in PLACE): row for row in self.table.to_dict("records")}  # type: ignore[misc]


class _Number(NamedTuple):
    """A column of a page's table: heading, decimals, and the place of its number in the benchmark's table."""

    heading: str
    digits: int
    set: str
    section: str
    metric: str
    finding: str = ""
    group: str = ""


def write_page(benchmark: Benchmark, output: Path) -> Path:
    """Write benchmark.html; the same results give the same page."""
    of_sets = {}
    for name, runs in benchmark.runs.items():
        tables = (_classified(benchmark, name), _localised(benchmark, name))
        title = describe_data(next(iter(runs.values())).tested)
        of_sets[title] = [table for table in tables if table.columns]
    means = [
        _Number(heading, digits, name, section, metric, group=name)
        for name in benchmark.runs
        for heading, (section, metric, digits) in _MEANS.items()
    ]
    content = {
        "names": list(dict.fromkeys(benchmark.table["model"])),
        "method": _method(benchmark.baseline),
        "notes": benchmark.notes,
        "failures": benchmark.failures,
        "means": _table(benchmark, "Means over findings, by set", means),
        "sets": of_sets,
        "facts": _facts(benchmark),
    }
    write_text(render_template(PAGE, content, Path(__file__).parent), output / PAGE)
    return output / PAGE


def _method(baseline: str) -> str:
    return (
        f"In brackets, 95% percentile intervals of {N_DRAWS:,} bootstrap draws of patients, or of images where a set "
        f"names no patients. Differences from {baseline} are paired: each draw takes the same patients for both. * "
        f"marks p ≤ {ALPHA}, two-sided, of the difference over the standard deviation of its draws, adjusted by Holm's "
        "method for all differences of that metric, over all sets, findings and models. With one training of each they "
        f"compare these networks, not the ways of training. {FEW.format(units='patients')}"
    )


def _classified(benchmark: Benchmark, name: str) -> Table:
    """AUC of each finding, and their mean over those that all models classify."""
    numbers = benchmark.numbers[name]
    columns = [_Number("mean", 3, name, CLASSIFICATION, "auc")]
    cases = {}
    for finding, row in numbers.cases.iterrows():
        columns.append(_Number(str(finding), 3, name, CLASSIFICATION, "auc", str(finding)))
        cases[str(finding)] = f"{row['positives']:,} / {row['negatives']:,}"
    left_out = [finding for finding in numbers.cases.index if finding not in numbers.findings]
    note = "AUC by chance is 0.5. Findings with fewer than 5 positive or negative cases are left out."
    if left_out:
        note += f" The mean is over the findings that all models classify, without {', '.join(left_out)}."
    counts = Row("positive / negative cases", "counts", [Cell(cases.get(one.finding, "")) for one in columns])
    return _table(benchmark, "AUC by finding", columns, [counts], note)


def _localised(benchmark: Benchmark, name: str) -> Table:
    """Pointing game of each finding with its chance, and the means of the other metrics with the readers' agreement."""
    is_here = (benchmark.table["set"] == name) & (benchmark.table["section"] == _LOCALISATION)
    found = benchmark.table[is_here & (benchmark.table["minus"] == "")]
    findings = [finding for finding in found["finding"].unique() if finding]
    columns = [
        _Number(finding or "mean", 3, name, _LOCALISATION, "hit", finding, "hit")
        for finding in ["", *findings]
    ]
    columns += [
        _Number(heading, digits, name, _LOCALISATION, metric, group="means over findings")
        for heading, (metric, digits) in _LOCALISED.items()
    ]
    first = found["model"].iloc[0] if len(found) else ""
    others = {
        "chance level: area": {"hit": "area"},
        "between readers": {"iou": "reader_iou", "dice": "reader_dice"},
    }
    rows = []
    for label, metrics in others.items():
        places = [one._replace(metric=metrics.get(one.metric, "none")) for one in columns]
        values = [_find(benchmark, first, "", place) for place in places]
        cells = [Cell("" if value is None else number(value["value"], 3)) for value in values]
        rows += [Row(label, "chance", cells)] if any(cell.text for cell in cells) else []
    return _table(
        benchmark,
        "Localisation",
        columns,
        rows,
        "hit: the max of the heat map lies inside the boxes or masks.",
    )


def _table(
    benchmark: Benchmark, title: str, numbers: Sequence[_Number], others: Sequence[Row] = (), note: str = ""
) -> Table:
    """A row for each model, `others` with a cell for each number, then differences; without columns that are empty."""
    models = list(dict.fromkeys(benchmark.table["model"]))
    trained = benchmark.trained
    places = [place for place, one in enumerate(numbers) if any(_find(benchmark, x, "", one) for x in models)]
    used = [numbers[place] for place in places]

    def is_apart(model: str) -> bool:
        return all(trained[x.set, model].train_images for x in used if (x.set, model) in trained)

    def rows_of(minus: str, kind: str, models: Sequence[str]) -> list[Row]:
        label = f" − {minus}" if minus else ""
        rows = [
            Row(model + label, kind, [_cell(benchmark, model, minus, x) for x in used]) for model in models
        ]
        return [row for row in rows if any(cell.text != NOTHING for cell in row.cells)]

    apart = rows_of("", "run", list(filter(is_apart, models)))
    rows = rows_of("", "run", [model for model in models if not is_apart(model)])
    rows += [Row(f"{APART} trained on train patients of the set", "divider"), *apart] if apart else []
    rows += [row._replace(cells=[row.cells[place] for place in places]) for row in others]
    if differences := rows_of(benchmark.baseline, "difference", models):
        rows += [Row(f"paired difference from {benchmark.baseline}", "divider"), *differences]
    return Table(title, [Column(one.heading, group=one.group) for one in used], rows, note)


def _find(benchmark: Benchmark, model: str, minus: str, one: _Number) -> dict[str, Any] | None:
    """The row of a number in the benchmark's table, if it has a value."""
    found = benchmark.by_place.get((one.set, model, minus, one.section, one.finding, one.metric))
    return None if found is None or math.isnan(found["value"]) else found


def _cell(benchmark: Benchmark, model: str, minus: str, one: _Number) -> Cell:
    found = _find(benchmark, model, minus, one)
    if found is None:
        return Cell(NOTHING)
    value, low, high = (None if math.isnan(found[name]) else found[name] for name in ("value", "low", "high"))
    n_patients = None if math.isnan(found["patients"]) else int(found["patients"])
    cell = interval_cell(value, low, high, one.digits, signed if minus else number, n_patients)
    mark = "*" * (found["p_holm"] <= ALPHA) if minus else marks(benchmark.trained[one.set, model])
    return cell._replace(text=cell.text + mark)


def _facts(benchmark: Benchmark) -> Table:
    """What was tested: each model once, and how it saw the images of each set."""
    rows = []
    facts: dict[str, str] = {}
    for name, runs in benchmark.runs.items():
        for model, run in runs.items():
            results = run.tested
            protocol = results["protocol"].get("classification", {})
            facts = {
                "set": name,
                "trained on": str(benchmark.trained[name, model]),
                "checkpoint": describe_checkpoint(results["checkpoint"]) or NOTHING,
                "weights": results["checkpoint"]["weights"],
                "images shown at": describe_image_size(results),
                "several prompts": protocol.get("ensemble") or NOTHING,
                "precision": results["precision"],
                "medclip_dcl": results["versions"]["medclip_dcl"],
                "device": results["timings"]["device"],
                "fingerprint of the set": results["dataset"]["fingerprint"],
            }
            rows.append(Row(model, "plain", [Cell(str(value)) for value in facts.values()]))
    return Table("What was tested", [*map(Column, facts)], rows)
