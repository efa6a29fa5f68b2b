"""Tables in the shape of SSD's tables 1, 3, 4 and 5, of image-report retrieval, and of a classifier's findings.

tables.yaml describes them, with the published rows; :func:`filled` adds the numbers of runs and the level of chance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from medclip_dcl.common.findings import CHEX5
from medclip_dcl.metrics.summaries import by_path
from medclip_dcl.metrics.table import ARROWS, CLASSIFICATIONS, DIRECTIONS, KS, MEAN_KS, SECTIONS, place_of
from medclip_dcl.report.contrasts import UNTRAINED
from medclip_dcl.report.draws import Estimate, TestedRun, units_of
from medclip_dcl.runs.saved import SavedResultsError, describe_checkpoint, describe_image_size, value_at

Results = Mapping[str, Any]
Show = Callable[[Any, int], str]
"""Number, decimals -> text."""

DESCRIPTIONS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")
)
NOTHING = "–"
CLASSIFIER = "finding_classification"
"""Section of results.json that only a classifier's run has."""
REPORTS = "report_retrieval"
"""Section of image-report retrieval; results of images without sentences lack it."""
PUBLISHED_COUNTS = {"boxes": 1448, "pairs": 1162, "images": 1047}
"""Boxes, image-phrase pairs and images of MS-CXR in the release."""

MEAN = "mean"
_AUC = re.compile(r"(finding_)?classification/(by_finding/(?P<finding>.+)/)?auc")


class Column(NamedTuple):
    """A number of results.json: its path in the metrics, keys joined by "/", and its decimals.

    `group` is a heading that it shares with its neighbours, `cases` the text of their number.
    """

    heading: str
    path: str = ""
    digits: int = 0
    group: str = ""
    cases: str = ""

    @property
    def section(self) -> str:
        """Section of results.json."""
        return self.path.split("/")[0]


class Cell(NamedTuple):
    """A number and its interval as text; the interval may be empty."""

    text: str
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


class Row(NamedTuple):
    """A row; ``kind``: run, untrained, counts, chance, difference, published, plain, text (words), or divider."""

    label: str
    kind: str
    cells: Sequence[Cell] = ()


@dataclass
class Table:
    """A table for the templates, with a note and the paper's rows below; `corner` is the heading of the labels.

    If the paper's rows are of another data set (`is_folded`), HTML shows them on demand, other formats not at all.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    note: str = ""
    published: list[Row] = field(default_factory=list)
    is_folded: bool = False
    corner: str = ""

    @property
    def shown(self) -> list[Row]:
        """All rows but folded ones."""
        if self.is_folded or not self.published:
            return self.rows
        return [*self.rows, Row("published, not rerun; MIMIC-CXR/MS-CXR", "divider"), *self.published]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings above the headings, with their numbers of columns; none where no column has one."""
        names = [column.group for column in self.columns]
        return [(name, len(list(of))) for name, of in groupby(names)] if any(names) else []

    @property
    def headings(self) -> list[str]:
        """Headings of the columns; equal ones with that of their group."""
        headings = [column.heading for column in self.columns]
        if len(set(headings)) == len(headings):
            return headings
        return [f"{c.group}: {c.heading}" if c.group else c.heading for c in self.columns]


def is_of_classifier(results: Results) -> bool:
    """The results are those of a classifier of findings."""
    return CLASSIFIER in results["metrics"]


def is_measured(results: Results, section: str) -> bool:
    """The evaluation gave numbers: the set has labels, boxes or reports."""
    if section == CLASSIFIER:
        return is_of_classifier(results)
    return value_at(results["metrics"], f"{section}/{SECTIONS[section].first}") is not None


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
        f"{dataset['images']:,} test images "
        + (
            f"of {dataset['patients']:,} patients"
            if units_of(results) == "patients"
            else "(the set names no patients)"
        ),
    ]
    n_boxes = (counts.get("grounding") or {}).get("boxes")
    if localised := (counts.get("localisation") or {}).get("cases"):
        words.append(f"{localised:,} findings with boxes or masks")
        n_boxes = n_boxes or None
    if n_boxes is not None:
        words.append(f"{n_boxes:,} boxes" if n_boxes else "no boxes")
    return ", ".join(words)


def facts_of(results: Results) -> dict[str, Any]:
    """The network of a test, and how it saw the images."""
    return {
        "checkpoint": describe_checkpoint(results["checkpoint"]),
        "weights": results["checkpoint"]["weights"],
        "images shown at": describe_image_size(results),
        "precision": results["precision"],
        "medclip_dcl": results["versions"].get("medclip_dcl"),
    }


def facts_table(title: str, facts: Sequence[tuple[str, Mapping[str, Any]]], note: str = "") -> Table:
    """A row for each label and its facts, which have the same names."""
    rows = [Row(label, "text", [Cell(str(x or NOTHING)) for x in one.values()]) for label, one in facts]
    return Table(title, [Column(name) for name in facts[0][1]], rows, note)


def chance_levels(results: Results) -> dict[str, float]:
    """Path in the metrics -> expectation of a model without skill, from the counts.

    Accuracy: of the commoner label. The unsigned CNR and the mIoU have none: it depends on the model.
    """
    found: dict[str, float] = {"grounding/cnr_signed": 0.0, "grounding/by_pair/cnr_signed": 0.0}
    for section in CLASSIFICATIONS:
        averaged: dict[str, list[float]] = defaultdict(list)
        bands = (results["counts"].get(section) or {}).get("bands", {})
        for finding, cases in (results["counts"].get(section) or {}).get("by_finding", {}).items():
            path, n = f"{section}/by_finding/{finding}", cases["positives"] + cases["negatives"]
            if n and value_at(results["metrics"], f"{path}/auc") is not None:
                for x in SECTIONS[section].numbers:
                    if x.chance is not None:
                        found[f"{path}/{x.name}"] = level = x.chance(**cases)
                        averaged[x.name].append(level)
                        averaged[f"{bands.get(finding)}/{x.name}"].append(level)
        found |= {f"{section}/{name}": sum(levels) / len(levels) for name, levels in averaged.items()}
    by_chance = (results["counts"].get(REPORTS) or {}).get("by_chance", {})
    tasks = {f"{REPORTS}/{task}": levels for task, levels in by_chance.items()}
    if n_boxes := (results["counts"].get("retrieval") or {}).get("boxes"):
        recalls = {f"R@{k}": min(1.0, k / n_boxes) for k in KS}
        tasks["retrieval"] = dict.fromkeys(DIRECTIONS, recalls | {"MedR": (n_boxes + 1) / 2})
    for prefix, levels in tasks.items():
        found |= {f"{prefix}/{d}/{name}": level for d in DIRECTIONS for name, level in levels[d].items()}
        found[f"{prefix}/recall"] = sum(levels[d][f"R@{k}"] for d in DIRECTIONS for k in MEAN_KS) / 6
        found[f"{prefix}/medr"] = sum(levels[d]["MedR"] for d in DIRECTIONS) / 2
    return found


def headline(results: Results) -> list[tuple[str, str, int, float]]:
    """Label, path, decimals and value of each measured number of the page's head."""
    columns = [column_of(one, arrow=False) for one in DESCRIPTIONS["headline"]]
    found = ((one.heading, one.path, one.digits, value_at(results["metrics"], one.path)) for one in columns)
    return [one for one in found if one[-1] is not None]


def column_of(described: str | list[Any], prefix: str = "", arrow: bool = True) -> Column:
    """Column of a number: its path below `prefix`, and decimals and heading where they are not the declared ones."""
    own: list[Any] = described if isinstance(described, list) else [described]
    path = f"{prefix}/{own[0]}".removeprefix("/")
    place = place_of(path)
    assert place is not None, path
    declared: list[Any] = [own[0], place.number.digits, place.number.heading]
    _, digits, heading = own + declared[len(own) :]
    return Column(heading + ARROWS[place.number.higher_is_better] * arrow, path, digits)


def number(value: Any, digits: int) -> str:
    """A number with its decimals; a dash for None; ranks without decimals where they are whole."""
    if value is None:
        return NOTHING
    text = f"{value:,.1f}".removesuffix(".0") if digits == 0 else f"{value:.{digits}f}"
    return text.replace("-", "−" if text.strip("-0.") else "")


def interval_cell(found: Estimate, digits: int, show: Show = number) -> Cell:
    """A number with its interval; where that is None, with the number of its patients, if that is known."""
    value, n = found.value, found.n_patients
    if value is None or pd.isna(found.low):
        return Cell(show(value, digits), "" if None in (value, n) else f"(n = {n})")
    return Cell(show(value, digits), f"[{show(found.low, digits)}, {show(found.high, digits)}]")


def signed(value: Any, digits: int) -> str:
    """A number as `number` has it, with its sign, unless all its digits are 0."""
    text = number(value, digits)
    is_zero = not any(character in "123456789" for character in text)
    return text if is_zero or text.startswith("−") else f"+{text}"


class Shown(NamedTuple):
    """Results of a run, and the intervals of its numbers by their paths."""

    results: Results
    intervals: Mapping[str, Estimate]

    def estimate(self, path: str) -> Estimate:
        """A number with its interval, if it has one, else from results.json."""
        return self.intervals.get(path) or Estimate(value_at(self.results["metrics"], path), None, None)

    def cell(self, path: str, digits: int) -> Cell:
        return interval_cell(self.estimate(path), digits)

    @property
    def aucs(self) -> dict[str, Estimate]:
        paths = [path[1:] for path, _ in by_path(self.results["metrics"], "")]
        return aucs({path: self.estimate(path) for path in paths if _AUC.fullmatch(path)})


def aucs(numbers: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """AUC of each finding that has one, after their mean, from numbers by path."""
    matches = {path: _AUC.fullmatch(path) for path, one in numbers.items() if one.value is not None}
    found = {match["finding"] or MEAN: numbers[path] for path, match in matches.items() if match}
    return dict(sorted(found.items(), key=lambda item: item[0] != MEAN))


def shown(runs: Mapping[str, TestedRun]) -> tuple[dict[str, Shown], dict[str, SavedResultsError]]:
    """Runs with their intervals, and why some have none."""
    found, problems = {}, {}
    for name, run in runs.items():
        intervals: Mapping[str, Estimate] = {}
        try:
            intervals = run.intervals
        except SavedResultsError as error:
            problems[name] = error
        found[name] = Shown(run.tested, intervals)
    return found, problems


def filled(runs: Mapping[str, Shown]) -> list[Table]:
    """Tables of what was measured in any of the runs (by the name of the row), which share protocol and cases."""
    measured = {}
    for section in SECTIONS:
        if of_runs := [run.results for run in runs.values() if is_measured(run.results, section)]:
            measured[section] = of_runs[0]
    found = (_table(description, measured, runs) for description in DESCRIPTIONS["tables"])
    return [table for table in found if table.columns]


def other_tables(runs: Mapping[str, Results]) -> list[Table]:
    """A table for each section of results.json that no table describes, such as a user's evaluation."""
    found = []
    names = dict.fromkeys(name for results in runs.values() for name in results["metrics"])
    for name in [name for name in names if name not in SECTIONS]:
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
    """A row for each finding or category, the runs that measured the section beside each other."""
    found = []
    for described in DESCRIPTIONS["details"]:
        section = described["section"]
        of_runs = {name: run for name, run in runs.items() if is_measured(run.results, section)}
        if of_runs and _cases(next(iter(of_runs.values())).results, section, described["by"]):
            found.append(_detail_table(described, f"{section}/{described['by']}", of_runs))
    return found + _wordings(runs)


def _wordings(runs: Mapping[str, Shown]) -> list[Table]:
    """NEG of each negative prompt, and whether the training reports say it."""
    first, words = next(iter(runs.values())).results, DESCRIPTIONS["wordings"]
    known, rows = first.get("prompts_in_training"), []
    notes = {words["note"]: True, words["unknown"]: known is None}
    for finding, pair in first["protocol"].get("classification", {}).get("prompts", {}).items():
        texts, end = pair["negative"], f"by_finding/{finding}"
        paths = {"together": f"classification/{end}/neg"}
        if isinstance(texts, str):
            paths = {texts: paths["together"]}
        else:
            paths |= {x: f"prompts/{end}/neg_{x}" for x in ("lowest", "median")}
            paths |= {text: f"prompts/{end}/wordings/{text}" for text in texts}
            notes[words["again"]] = "prompts" not in first["metrics"]
        for text, path in paths.items():
            seen = NOTHING if known is None or text not in texts else "yes" if text in known else "no"
            cells = [*(run.cell(path, 3) for run in runs.values()), Cell(seen)]
            rows.append(Row(f"{finding}: {text}", "plain", cells))
    columns = [*map(Column, runs), Column(words["column"])]
    return [Table(words["title"], columns, rows, " ".join(x for x in notes if notes[x]))] if rows else []


def _detail_table(described: Mapping[str, Any], prefix: str, runs: Mapping[str, Shown]) -> Table:
    section, _, by = prefix.partition("/")
    first = next(iter(runs.values()))
    levels = chance_levels(first.results)
    names = _cases(first.results, section, by)
    # Behind the described numbers those that were declared later, if a run has them.
    later = [x.name for x in SECTIONS[section].numbers if x.family]
    paths = {x: [f"{prefix}/{name}/{x}" for name in names] for x in later}
    has_value = [
        x
        for x in later
        if any(run.estimate(one).value is not None for run in runs.values() for one in paths[x])
    ]
    metrics = [*described["metrics"], *has_value]

    def columns_of(numbers: Sequence[Any], name: str = "*") -> list[Column]:
        return [column_of(one, f"{prefix}/{name}", arrow=False) for one in numbers]

    rows = []
    for name, cases in names.items():
        before = [first.cell(x.path, x.digits) for x in columns_of(described["before"], name)]
        cells = [run.cell(x.path, x.digits) for run in runs.values() for x in columns_of(metrics, name)]
        after = [number(levels.get(x.path), x.digits) for x in columns_of(described["chance"], name)]
        rows.append(Row(name, "plain", [Cell(cases), *before, *cells, *map(Cell, after)]))
    if section == "grounding":
        chance = [
            Cell(number(levels.get(f"{section}/{x.path.rpartition('/')[2]}"), 0)) for x in columns_of(metrics)
        ]
        rows.append(Row("chance level", "chance", [Cell(""), *chance * len(runs)]))
    columns = [Column(described["cases"]), *(Column(x.heading) for x in columns_of(described["before"]))]
    columns += [Column(x.heading, group=run) for run in runs for x in columns_of(metrics)]
    columns += [Column(x.heading) for x in columns_of(described["chance"])]
    return Table(described["title"], columns, rows, described["note"])


def _table(
    description: Mapping[str, Any], measured: Mapping[str, Results], runs: Mapping[str, Shown]
) -> Table:
    """A described table with the columns of the measured sections."""
    first = next(iter(runs.values())).results
    prefix = description.get("prefix", "")
    counts = {section: _counts(results, section) for section, results in measured.items()}
    described = _columns(description, measured)
    columns = [column for column in described if column.section in measured]

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

    rows = _rows_of_runs(columns, runs)
    for variant, key in variants.items():
        inner = [c._replace(path=c.path.replace(prefix, f"{prefix}/{key}", 1)) for c in columns]
        rows += _rows_of_runs(inner, runs, f", {variant}")
    if any(column.cases for column in columns):
        cells = [Cell(column.cases.format_map(counts[column.section])) for column in columns]
        rows.append(Row(description.get("cases", "positive / negative cases"), "counts", cells))
    # A run may lack a section, such as retrieval of reports, and its counts.
    levels = {path: level for run in runs.values() for path, level in chance_levels(run.results).items()}
    if any(column.path in levels for column in columns):
        cells = [Cell(number(levels.get(column.path), column.digits)) for column in columns]
        rows.append(Row("chance level", "chance", cells))

    # The paper's AUC and ACC are those of CheX5.
    is_chex5 = list(_cases(first, "classification", "by_finding")) == list(CHEX5)
    comparable = [column for column in columns if column.section != "classification" or is_chex5]
    published = []
    for name, values in description.get("published", {}).items() if comparable else ():
        of_paper = dict(zip(described, values, strict=False))
        texts = [(of_paper[column] if column in comparable else None, column.digits) for column in columns]
        published.append(Row(name, "published", [Cell(number(*one)) for one in texts]))

    names = list(dict.fromkeys(column.section for column in columns))
    listed = ", ".join([*names[:-2], " and ".join(names[-2:])])
    listed = listed.replace("classification", "zero-shot classification").capitalize()
    title, is_folded = description["title"].format(sections=listed), bool(unlike_published(first))
    return _without_empty(Table(title, columns, rows, " ".join(notes), published, is_folded))


def _without_empty(table: Table) -> Table:
    """A table without the columns in which no row but counts and chance has a value; its note names them."""
    rows = [row.cells for row in table.shown if row.kind not in ("counts", "chance", "divider")]
    used = [any(cells[place].text != NOTHING for cells in rows) for place in range(len(table.columns))]
    left_out = [column for column, is_used in zip(table.columns, used, strict=True) if not is_used]
    if not left_out:
        return table
    table.note = f"{table.note} {left_out_note(left_out)}".lstrip()
    table.columns = list(compress(table.columns, used))
    table.rows, table.published = (
        [row._replace(cells=list(compress(row.cells, used))) for row in of]
        for of in (table.rows, table.published)
    )
    return table


def left_out_note(numbers: Sequence[Column]) -> str:
    """Sentence on numbers that nothing measured, with their cases; "" for none."""
    named = ", ".join(f"{one.heading} ({one.cases})" if one.cases else one.heading for one in numbers)
    return f"Left out, without a value: {named}." if named else ""


def _columns(description: Mapping[str, Any], measured: Mapping[str, Results]) -> list[Column]:
    """All columns of a described table, also of sections that were not measured."""
    prefix = description.get("prefix", "")
    if "findings" in description:
        name, cases = description["findings"], _cases(measured.get(prefix, {}), prefix, "by_finding")
        columns = [Column(f, f"{prefix}/by_finding/{f}/{name}", 3, cases=n) for f, n in cases.items()]
        return [*columns, Column("average", f"{prefix}/{name}", 3)]
    described = description["columns"]
    spans = description.get("groups", [["", len(described), ""]])
    groups = [(name, cases) for name, n_columns, cases in spans for _ in range(n_columns)]
    return [
        column_of(one, prefix)._replace(group=group, cases=cases)
        for one, (group, cases) in zip(described, groups, strict=True)
    ]


def _counts(results: Results, section: str) -> Mapping[str, Any]:
    """Counts of a measured section, its choice of reports, and the cuts of its bands."""
    protocol = results["protocol"].get(section, {})
    cuts = dict(zip(("head", "tail"), protocol.get("bands", (0.1, 0.01)), strict=True))
    bands = results["counts"][section].get("bands", {}).items()
    in_words = ", ".join(f"{finding} ({band})" for finding, band in bands)
    words = {"selection": protocol.get("reports", "all"), "bands": in_words, **cuts}
    return {**results["counts"][section], **words}


def _cases(results: Results, section: str, by: str) -> dict[str, str]:
    """Finding or category -> its number of cases, of findings that of positive and negative ones."""
    counts = results.get("counts", {}).get(section, {})
    if by != "by_finding":
        return {name: f"{n:,}" for name, n in (counts.get(by) or counts.get(f"boxes_{by}", {})).items()}
    findings = results.get("metrics", {}).get(section, {}).get(by, {})
    counts = counts.get(by, {})
    return {f: "{positives} / {negatives}".format(**counts[f]) if f in counts else NOTHING for f in findings}


def _rows_of_runs(columns: Sequence[Column], runs: Mapping[str, Shown], suffix: str = "") -> list[Row]:
    rows = []
    for name, run in runs.items():
        kind = UNTRAINED if name == UNTRAINED or name.endswith(f", {UNTRAINED}") else "run"
        rows.append(Row(name + suffix, kind, [run.cell(c.path, c.digits) for c in columns]))
    return rows
