"""Tables in the shape of SSD's tables 1, 3, 4 and 5, of image-report retrieval, and of a classifier's findings.

tables.yaml describes them, with the published rows. :func:`filled` adds the numbers of runs and the level of chance.
The run report and the comparison of runs share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from medclip_dcl.common.findings import CHEX5
from medclip_dcl.metrics.summaries import DIRECTIONS, KS, by_path
from medclip_dcl.report.intervals import Interval
from medclip_dcl.runs.saved import value_at

Results = Mapping[str, Any]
Show = Callable[[Any, int], str]
"""Number, decimals -> text."""

DESCRIPTIONS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")
)
UNTRAINED = "untrained"
NOTHING = "–"
CLASSIFIER = "finding_classification"
"""Section of results.json that only a classifier's run has."""
REPORTS = "report_retrieval"
"""Section of image-report retrieval; results of images without sentences lack it."""
PUBLISHED_COUNTS = {"boxes": 1448, "pairs": 1162, "images": 1047}
"""Boxes, image-phrase pairs and images of MS-CXR in the paper."""

_A_NUMBER = {
    "classification": "auc",
    "grounding": "miou",
    "retrieval": "recall",
    REPORTS: "image_report/recall",
    CLASSIFIER: "by_finding",
}
"""Section -> an entry that is there if the section has any number."""


class Column(NamedTuple):
    """A number of results.json: its path in the metrics, keys joined by "/", and its decimals."""

    heading: str
    path: str = ""
    digits: int = 0


class Cell(NamedTuple):
    """A number and its interval as text; the interval may be empty."""

    text: str
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


class Row(NamedTuple):
    """A row; ``kind``: run, untrained, counts, chance, difference, published, plain, or divider, a line of text."""

    label: str
    kind: str
    cells: Sequence[Cell] = ()


@dataclass
class Table:
    """A table for the templates.

    Attributes:
        title: above the table.
        columns: without that of the labels.
        rows: in order, without the published ones.
        note: below the table.
        groups: (heading, number of columns) above the headings.
        published: rows of the paper.
        is_folded: the published rows are of another data set: HTML shows them on demand, other formats not at all.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    note: str = ""
    groups: Sequence[tuple[str, int]] = ()
    published: list[Row] = field(default_factory=list)
    is_folded: bool = False

    @property
    def shown(self) -> list[Row]:
        """All rows but folded ones."""
        if self.is_folded or not self.published:
            return self.rows
        return [*self.rows, Row("published, not rerun; MIMIC-CXR/MS-CXR", "divider"), *self.published]

    @property
    def headings(self) -> list[str]:
        """Headings of the columns; equal ones with that of their group."""
        headings = [column.heading for column in self.columns]
        if len(set(headings)) == len(headings) or not self.groups:
            return headings
        groups = _spread(self.groups)
        pairs = zip(groups, headings, strict=True)
        return [f"{group}: {heading}" if group else heading for group, heading in pairs]


def is_of_classifier(results: Results) -> bool:
    """The results are those of a classifier of findings, not of an image-text model."""
    return CLASSIFIER in results["metrics"]


def is_measured(results: Results, section: str) -> bool:
    """The evaluation gave numbers: the set has labels, boxes or reports."""
    return value_at(results["metrics"], f"{section}/{_A_NUMBER[section]}") is not None


def unlike_published(results: Results) -> str:
    """Reason why the paper's rows, of MIMIC-CXR and MS-CXR, do not compare with these results; "" if they do."""
    dataset, counts = results["dataset"], results["counts"].get("grounding") or {}
    if dataset.get("phantom"):
        return "this set is a phantom"
    if not str(dataset.get("source")).startswith("mimic-cxr"):
        return f"this set is {dataset.get('source')}"
    if "grounding" not in results["counts"]:
        return "its boxes were not evaluated"
    same = {name for name, count in PUBLISHED_COUNTS.items() if counts.get(name) == count}
    if "boxes" in same and len(same) >= 2:
        return ""
    boxes, pairs, images = (counts.get(name) or 0 for name in PUBLISHED_COUNTS)
    return f"this set has {boxes:,} boxes, {pairs:,} image-phrase pairs on {images:,} images"


def why_left_out(results: Results) -> str:
    """One line for the reader where published rows are not shown; "" where they are."""
    reason = unlike_published(results)
    if not reason or is_of_classifier(results):
        return ""
    return (
        "Published rows are of MIMIC-CXR with MS-CXR ({boxes:,} boxes, {pairs:,} image-phrase pairs on {images:,}"
        " images); {reason}: the numbers do not compare."
    ).format(**PUBLISHED_COUNTS, reason=reason)


def describe_data(results: Results) -> str:
    """Name and source of the tested set, with its numbers of images, patients and boxes."""
    dataset, counts = results["dataset"], results["counts"]
    source = str(dataset.get("source"))
    if "grounding" in counts and unlike_published(results) and source.startswith("mimic-cxr"):
        source = f"in the layout of {source}"
    words = [
        f"{dataset['folder']} ({source})",
        f"{dataset['images']:,} test images of {dataset['patients']:,} patients",
    ]
    n_boxes = (counts.get("grounding") or {}).get("boxes")
    if n_boxes is not None:
        words.append(f"{n_boxes:,} boxes" if n_boxes else "no boxes")
    return ", ".join(words)


def chance_levels(results: Results) -> dict[str, float]:
    """Path in the metrics -> expectation of a model without skill, from the counts.

    Accuracy: of the commoner label. The unsigned CNR and the mIoU have none: it depends on the model.
    """
    found: dict[str, float] = {"grounding/cnr_signed": 0.0, "grounding/by_pair/cnr_signed": 0.0}
    for section in ("classification", CLASSIFIER):
        averaged: dict[str, list[float]] = defaultdict(list)
        for finding, cases in (results["counts"].get(section) or {}).get("by_finding", {}).items():
            path, n = f"{section}/by_finding/{finding}", cases["positives"] + cases["negatives"]
            if n and value_at(results["metrics"], f"{path}/auc") is not None:
                share = cases["positives"] / n
                levels = {"auc": 0.5, "acc": max(cases.values()) / n, "average_precision": share}
                for name, level in levels.items():
                    found[f"{path}/{name}"] = level
                    averaged[name].append(level)
        found |= {f"{section}/{name}": sum(levels) / len(levels) for name, levels in averaged.items()}
    by_chance = (results["counts"].get(REPORTS) or {}).get("by_chance", {})
    tasks = {f"{REPORTS}/{task}": levels for task, levels in by_chance.items()}
    if n_boxes := (results["counts"].get("retrieval") or {}).get("boxes"):
        recalls = {f"R@{k}": min(1.0, k / n_boxes) for k in KS}
        tasks["retrieval"] = dict.fromkeys(DIRECTIONS, recalls | {"MedR": (n_boxes + 1) / 2})
    for prefix, levels in tasks.items():
        found |= {f"{prefix}/{d}/{name}": level for d in DIRECTIONS for name, level in levels[d].items()}
        found[f"{prefix}/recall"] = sum(levels[d][f"R@{k}"] for d in DIRECTIONS for k in KS) / 6
        found[f"{prefix}/medr"] = sum(levels[d]["MedR"] for d in DIRECTIONS) / 2
    return found


def number(value: Any, digits: int) -> str:
    """A number with its decimals; a dash for None; ranks without decimals where they are whole."""
    if value is None:
        return NOTHING
    return f"{value:,.1f}".removesuffix(".0") if digits == 0 else f"{value:.{digits}f}"


def interval_cell(value: Any, low: Any, high: Any, digits: int, show: Show = number) -> Cell:
    """A number with its interval; without one where that is None."""
    return Cell(show(value, digits), "" if low is None else f"[{show(low, digits)}, {show(high, digits)}]")


class Shown(NamedTuple):
    """Results of a run, and the intervals of its numbers by their paths."""

    results: Results
    intervals: Mapping[str, Interval]

    def cell(self, path: str, digits: int, show: Show = number) -> Cell:
        """A number with its interval, if it has one, else from results.json."""
        if (found := self.intervals.get(path)) is not None:
            return interval_cell(found.value, found.low, found.high, digits, show)
        return interval_cell(value_at(self.results["metrics"], path), None, None, digits, show)


def filled(runs: Mapping[str, Shown], show: Show = number, detailed: bool = False) -> list[Table]:
    """Tables of what was measured in any of the runs (by the name of the row), which share protocol and cases.

    `detailed` adds tables by finding and by category of box.
    """
    measured = {}
    for section in _A_NUMBER:
        if of_runs := [run.results for run in runs.values() if is_measured(run.results, section)]:
            measured[section] = of_runs[0]
    found = []
    for description in DESCRIPTIONS["tables"]:
        table = _table(description, measured, runs, show)
        if not table.columns:
            continue
        is_by_finding = detailed and description.get("prefix") == "classification"
        # Only the findings of the paper need the paper's table beside that by finding.
        if not is_by_finding or table.published:
            found.append(table)
        if is_by_finding:
            found.append(_by_finding(runs))
        if detailed and description.get("prefix") == "grounding":
            found += _by_category(runs)
    return found


def other_tables(runs: Mapping[str, Results]) -> list[Table]:
    """A table for each section of results.json that no table describes, such as a user's evaluation."""
    found = []
    names = dict.fromkeys(name for results in runs.values() for name in results["metrics"])
    for name in [name for name in names if name not in _A_NUMBER]:
        numbers = [dict(by_path(results["metrics"].get(name, {}), "")) for results in runs.values()]
        rows = [
            Row(
                path[1:].replace("/", ", "),
                "plain",
                [Cell(number(of_run.get(path), 3)) for of_run in numbers],
            )
            for path, value in numbers[0].items()
            if value is None or isinstance(value, int | float)
        ]
        if rows:
            found.append(Table(name.replace("_", " ").capitalize(), [Column(run) for run in runs], rows))
    return found


def detail_tables(runs: Mapping[str, Shown]) -> list[Table]:
    """Tables by finding and by category of box alone, of the runs that measured them."""
    classified, grounded = (
        {name: run for name, run in runs.items() if is_measured(run.results, section)}
        for section in ("classification", "grounding")
    )
    found = [_by_finding(classified)] if classified else []
    return [*found, *_by_category(grounded)] if grounded else found


def _table(
    description: Mapping[str, Any],
    measured: Mapping[str, Results],
    runs: Mapping[str, Shown],
    show: Show,
) -> Table:
    """A described table with the columns of the measured sections."""
    first = next(iter(runs.values())).results
    prefix = description.get("prefix", "")
    counts = {section: _counts(results, section) for section, results in measured.items()}
    columns, label, texts = _columns(description, measured)
    sections = [column.path.split("/")[0] for column in columns]
    kept = [place for place, section in enumerate(sections) if section in measured]
    columns = [columns[place] for place in kept]

    variants = description.get("variants", {})
    notes = [
        note.format_map(counts[section])
        for section, note in description["notes"].items()
        if section in measured
    ]
    if "note_of_variants" in description and REPORTS in counts:
        if counts[REPORTS]["distinct_reports"] == counts[REPORTS]["reports"]:
            variants = {}
        else:
            notes.append(description["note_of_variants"])

    rows = _rows_of_runs(columns, runs, show)
    for variant, key in variants.items():
        inner = [c._replace(path=c.path.replace(prefix, f"{prefix}/{key}", 1)) for c in columns]
        rows += _rows_of_runs(inner, runs, show, f", {variant}")
    if label:
        cells = [Cell(texts[place].format_map(counts[sections[place]])) for place in kept]
        rows.append(Row(label, "counts", cells))
    # A run may lack a section, such as retrieval of reports, and its counts.
    levels = {path: level for run in runs.values() for path, level in chance_levels(run.results).items()}
    if any(column.path in levels for column in columns):
        cells = [Cell(show(levels.get(column.path), column.digits)) for column in columns]
        rows.append(Row("chance level", "chance", cells))

    # The paper's AUC and ACC are those of CheX5.
    is_chex5 = list(_cases(first, "classification")) == list(CHEX5)
    comparable = [place for place in kept if sections[place] != "classification" or is_chex5]
    published = []
    for name, values in description.get("published", {}).items() if comparable else ():
        shown = [values[place] if place in comparable else None for place in kept]
        cells = [Cell(show(value, c.digits)) for value, c in zip(shown, columns, strict=True)]
        published.append(Row(name, "published", cells))

    title = description["title"] if published else description["title"].removeprefix("Table 3. ")
    names = list(dict.fromkeys(sections[place] for place in kept))
    listed = ", ".join([*names[:-2], " and ".join(names[-2:])])
    listed = listed.replace("classification", "zero-shot classification").capitalize()
    groups = _spread(description["groups"]) if "groups" in description else []
    return Table(
        title.format(sections=listed),
        columns,
        rows,
        " ".join(notes),
        [(name, len(list(of))) for name, of in groupby(groups[place] for place in kept)] if groups else [],
        published,
        bool(unlike_published(first)),
    )


def _columns(
    description: Mapping[str, Any], measured: Mapping[str, Results]
) -> tuple[list[Column], str, list[str]]:
    """Columns, and label and texts of the row of counts."""
    prefix = description.get("prefix", "")
    if "findings" in description:
        cases, name = _cases(measured.get(prefix, {}), prefix), description["findings"]
        columns = [Column(finding, f"{prefix}/by_finding/{finding}/{name}", 3) for finding in cases]
        average = Column("average", f"{prefix}/{name}", 3)
        return [*columns, average], "positive / negative cases", [*cases.values(), ""]
    columns = [
        Column(heading, f"{prefix}/{path}".removeprefix("/"), digits)
        for heading, path, digits in description["columns"]
    ]
    label, *spans = description.get("counts", [""])
    return columns, label, _spread(spans)


def _by_category(runs: Mapping[str, Shown]) -> list[Table]:
    """Grounding by category of box, the runs beside each other; nothing without boxes."""
    counts = next(iter(runs.values())).results["counts"].get("grounding", {}).get("boxes_by_category", {})
    names = {"CNR": "cnr", "signed CNR": "cnr_signed", "mIoU": "miou"}
    rows = []
    for category, n_boxes in counts.items():
        paths = [f"grounding/by_category/{category}/{name}" for name in names.values()]
        cells = [run.cell(path, 2) for run in runs.values() for path in paths]
        rows.append(Row(category, "plain", [Cell(f"{n_boxes:,}"), *cells]))
    chance = [Cell(NOTHING), Cell("0"), Cell(NOTHING)]
    rows.append(Row("chance level", "chance", [Cell(""), *chance * len(runs)]))
    columns = [Column("boxes"), *[Column(heading) for heading in names] * len(runs)]
    groups = [("", 1), *((run, len(names)) for run in runs)]
    return [Table("Grounding by category", columns, rows, groups=groups)] if counts else []


def _by_finding(runs: Mapping[str, Shown]) -> Table:
    """Zero-shot classification with a row for each finding, the runs beside each other."""
    first = next(iter(runs.values())).results
    levels = chance_levels(first)
    rows = []
    for finding, cases in _cases(first, "classification").items():
        path = f"classification/by_finding/{finding}"
        cells = [run.cell(f"{path}/{name}", 3) for run in runs.values() for name in ("auc", "acc")]
        chance = Cell(number(levels.get(f"{path}/acc"), 3))
        rows.append(Row(finding, "plain", [Cell(cases), *cells, chance]))
    columns = [Column("positive / negative cases"), *[Column("AUC"), Column("ACC")] * len(runs)]
    return Table(
        "Zero-shot classification by finding",
        [*columns, Column("ACC by chance")],
        rows,
        "–: too few positive or negative cases. AUC by chance is 0.5; ACC, the share of the commoner label.",
        [("", 1), *((run, 2) for run in runs), ("", 1)],
    )


def _counts(results: Results, section: str) -> Mapping[str, Any]:
    """Counts of a measured section, and its choice of reports."""
    selection = results["protocol"].get(section, {}).get("reports", "all")
    return {**results["counts"][section], "selection": selection}


def _cases(results: Results, section: str) -> dict[str, str]:
    """Finding -> its numbers of positive and negative cases."""
    findings = results.get("metrics", {}).get(section, {}).get("by_finding", {})
    counts = results.get("counts", {}).get(section, {}).get("by_finding", {})
    return {f: "{positives} / {negatives}".format(**counts[f]) if f in counts else NOTHING for f in findings}


def _spread(spans: Sequence[Sequence[Any]]) -> list[str]:
    return [text for text, n_columns in spans for _ in range(n_columns)]


def _rows_of_runs(
    columns: Sequence[Column], runs: Mapping[str, Shown], show: Show, suffix: str = ""
) -> list[Row]:
    rows = []
    for name, run in runs.items():
        kind = UNTRAINED if name == UNTRAINED or name.endswith(f", {UNTRAINED}") else "run"
        rows.append(Row(name + suffix, kind, [run.cell(c.path, c.digits, show) for c in columns]))
    return rows
