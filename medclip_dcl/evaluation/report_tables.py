"""Tables in the shape of SSD's tables 1, 3, 4 and 5, with the paper's own rows for reference, and a classifier's.

A :class:`Layout` says which numbers of results.json stand in which column; :func:`filled` puts runs into it. The run
report and the comparison of runs share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from medclip_dcl.evaluation.intervals import Interval
from medclip_dcl.evaluation.saved_results import value_at

Results = Mapping[str, Any]

RUN, UNTRAINED, PUBLISHED, PLAIN = "run", "untrained", "published", "plain"
NOTHING = "–"
CLASSIFIER = "finding_classification"
"""Section of results.json that a classifier's run has, and no other."""
PUBLISHED_NOTE = "published, not rerun; MIMIC-CXR/MS-CXR"

_BIOVIL, _LSE_NL, _DCL_LM = "BioViL", "LSE+NL", "DCL, η_LM"

PUBLISHED_1: dict[str, tuple[float | int, ...]] = {
    _BIOVIL: (0.78, 0.62, 1.14, 0.17, 0.25, 148),
    _LSE_NL: (0.79, 0.65, 1.40, 0.19, 0.29, 115),
    "Remove by CheX5": (0.86, 0.71, 1.37, 0.19, 0.29, 113),
    "Resample by text": (0.82, 0.71, 1.37, 0.19, 0.30, 111),
    "Remove by text": (0.84, 0.72, 1.39, 0.19, 0.30, 112),
    "Reweight by text": (0.84, 0.69, 1.40, 0.19, 0.29, 113),
    "DCL, η = .05": (0.80, 0.72, 1.46, 0.19, 0.30, 104),
    "DCL, η = .1": (0.85, 0.72, 1.45, 0.19, 0.29, 111),
    _DCL_LM: (0.86, 0.72, 1.49, 0.20, 0.30, 104),
}
"""SSD, table 1: AUC, ACC, CNR, mIoU, Recall, MedR."""

PUBLISHED_3: dict[str, tuple[float | int, ...]] = {
    _BIOVIL: (0.752, 0.887, 0.914, 0.768, 0.594, 0.783),
    _LSE_NL: (0.888, 0.876, 0.798, 0.853, 0.526, 0.788),
    _DCL_LM: (0.884, 0.889, 0.913, 0.861, 0.760, 0.862),
}
"""SSD, table 3: AUC of cardiomegaly, edema, pleural effusion, pneumonia, pneumothorax, average."""

PUBLISHED_4: dict[str, tuple[float | int, ...]] = {
    _BIOVIL: (1.142, 0.174),
    _LSE_NL: (1.400, 0.190),
    _DCL_LM: (1.486, 0.195),
}
"""SSD, table 4: CNR, mIoU."""

PUBLISHED_5: dict[str, tuple[float | int, ...]] = {
    _BIOVIL: (0.07, 0.26, 0.40, 151, 0.08, 0.26, 0.40, 146),
    _LSE_NL: (0.09, 0.29, 0.44, 123, 0.10, 0.32, 0.49, 107),
    _DCL_LM: (0.10, 0.31, 0.48, 106, 0.10, 0.33, 0.50, 102),
}
"""SSD, table 5: R@10, R@50, R@100, MedR from image to text, then from text to image."""

_TOO_FEW = f"{NOTHING}: too few positive or negative cases; the average is over the findings with a number."
_CHEX5_ORDER = ["Cardiomegaly", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax"]


class Cell(NamedTuple):
    """A number as it is shown, and its interval, if any."""

    text: str
    interval: str = ""


class Row(NamedTuple):
    """A row of a table; ``kind`` is run, untrained, published, difference, counts or plain."""

    label: str
    kind: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table as it is shown.

    Attributes:
        title: above it.
        columns: headings, the column of labels excluded.
        rows: in their order.
        note: below it.
        groups: headings above spans of columns, the column of labels excluded.
        dividers: kind of row -> line above the first row of that kind.
    """

    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)
    dividers: Mapping[str, str] = field(default_factory=lambda: {PUBLISHED: PUBLISHED_NOTE})


class Column(NamedTuple):
    """A number of results.json: its path in the metrics, keys joined by "/", and how many decimals are shown."""

    heading: str
    path: str
    digits: int


@dataclass(frozen=True)
class Layout:
    """A table before runs are put into it.

    Attributes:
        title: above it.
        columns: which numbers it shows.
        published: row -> numbers of the paper, None where it has none.
        variants: name -> paths of the numbers that stand in the columns in rows of their own.
        counts: label and texts of a row that counts cases, if any.
        groups: headings above spans of columns.
        note: below it.
    """

    title: str
    columns: list[Column]
    published: Mapping[str, Sequence[float | int | None]]
    variants: Mapping[str, list[str]] = field(default_factory=dict)
    counts: tuple[str, list[str]] | None = None
    groups: list[tuple[str, int]] = field(default_factory=list)
    note: str = ""


def is_of_classifier(results: Results) -> bool:
    """The results are those of a classifier of findings, not of an image-text model."""
    return CLASSIFIER in results["metrics"]


def layouts(results: Results) -> list[Layout]:
    """Tables 1, 3, 4 and 5 for runs that were tested as these results were; of a classifier, its own by finding."""
    if is_of_classifier(results):
        return _layouts_by_finding(results)
    return [_layout_1(), _layout_3(results), _layout_4(results), _layout_5(results)]


def number(value: Any, digits: int) -> str:
    """A number with so many decimals; a dash for None; ranks that are whole or halves as they are."""
    if value is None:
        return NOTHING
    if digits == 0:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:.{digits}f}"


def filled(
    layout: Layout,
    runs: Mapping[str, Results],
    intervals: Mapping[str, Mapping[str, Interval]] | None = None,
    show: Callable[[Any, int], str] = number,
) -> Table:
    """The table of some runs, in their order, then of their variants, then the published rows.

    Args:
        layout: which numbers.
        runs: name of the row -> results.json.
        intervals: name of the row -> path -> interval, shown beside the number.
        show: value, decimals -> text.
    """
    intervals = intervals or {}
    paths = {"": [column.path for column in layout.columns], **layout.variants}
    rows = []
    for variant, of_columns in paths.items():
        for name, results in runs.items():
            cells = [
                _cell(results, intervals.get(name, {}), path, column.digits, show)
                for path, column in zip(of_columns, layout.columns, strict=True)
            ]
            rows.append(Row(f"{name}, {variant}" if variant else name, kind_of(name), cells))
    if layout.counts:
        rows.append(Row(layout.counts[0], "counts", [Cell(text) for text in layout.counts[1]]))
    for name, values in layout.published.items():
        digits = (column.digits for column in layout.columns)
        cells = [Cell(show(value, places)) for value, places in zip(values, digits, strict=True)]
        rows.append(Row(name, PUBLISHED, cells))
    return Table(
        layout.title, [column.heading for column in layout.columns], rows, layout.note, layout.groups
    )


def by_category(
    runs: Mapping[str, Results], intervals: Mapping[str, Mapping[str, Interval]] | None = None
) -> Table | None:
    """Grounding by category of box, the runs beside each other; None without boxes."""
    counts = next(iter(runs.values()))["counts"].get("grounding", {}).get("boxes_by_category", {})
    if not counts:
        return None
    rows = []
    for category, n_boxes in counts.items():
        cells = [Cell(f"{n_boxes:,}")]
        for name, results in runs.items():
            cells += [
                _cell(results, (intervals or {}).get(name, {}), path, 2, number)
                for path in _paths(f"grounding/by_category/{category}", _GROUNDING)
            ]
        rows.append(Row(category, PLAIN, cells))
    groups = [("", 1), *((run, 3) for run in runs)]
    return Table(
        "Grounding by category", ["boxes", *["CNR", "signed CNR", "mIoU"] * len(runs)], rows, groups=groups
    )


def kind_of(name: str) -> str:
    """Whether a row is a run's or an untrained network's, by its name."""
    return UNTRAINED if name == UNTRAINED or name.endswith(f", {UNTRAINED}") else RUN


_GROUNDING = ("cnr", "cnr_signed", "miou")
_RETRIEVAL = [
    f"{direction}/{name}"
    for direction in ("image_to_text", "text_to_image")
    for name in ("R@10", "R@50", "R@100", "MedR")
]


def _layouts_by_finding(results: Results) -> list[Layout]:
    """A classifier's AUC, average precision and accuracy."""
    titles = {"auc": "AUC", "average_precision": "average precision", "acc": "accuracy"}
    notes = {"average_precision": "Without skill the average precision is the share of positive cases."}
    return [
        Layout(
            title=f"Classification of findings, {title}",
            columns=_by_finding(results, CLASSIFIER, name),
            published={},
            counts=_cases_by_finding(results, CLASSIFIER),
            note=" ".join([_TOO_FEW, *([notes[name]] if name in notes else [])]),
        )
        for name, title in titles.items()
    ]


def _by_finding(results: Results, section: str, name: str) -> list[Column]:
    """A column for each finding, and one for the average."""
    findings = results["metrics"].get(section, {}).get("by_finding", {})
    columns = [Column(finding, f"{section}/by_finding/{finding}/{name}", 3) for finding in findings]
    return [*columns, Column("average", f"{section}/{name}", 3)]


def _cases_by_finding(results: Results, section: str) -> tuple[str, list[str]]:
    findings = results["metrics"].get(section, {}).get("by_finding", {})
    counts = results["counts"].get(section, {}).get("by_finding", {})
    cases = [
        f"{counts[f]['positives']} / {counts[f]['negatives']}" if f in counts else NOTHING for f in findings
    ]
    return "positive / negative cases", [*cases, ""]


def _layout_1() -> Layout:
    return Layout(
        title="Table 1. Zero-shot classification, grounding and retrieval",
        columns=[
            Column("AUC ↑", "classification/auc", 2),
            Column("ACC ↑", "classification/acc", 2),
            Column("CNR ↑", "grounding/cnr", 2),
            Column("signed CNR ↑", "grounding/cnr_signed", 2),
            Column("mIoU ↑", "grounding/miou", 2),
            Column("Recall ↑", "retrieval/recall", 2),
            Column("MedR ↓", "retrieval/medr", 0),
        ],
        published={name: (*row[:3], None, *row[3:]) for name, row in PUBLISHED_1.items()},
        groups=[("Classification", 2), ("Grounding", 3), ("Retrieval", 2)],
        note="The signed CNR (not in the paper) tells a heat map that avoids the box from one that finds it.",
    )


def _layout_3(results: Results) -> Layout:
    findings = list(results["metrics"].get("classification", {}).get("by_finding", {}))
    return Layout(
        title="Table 3. Zero-shot classification, AUC",
        columns=_by_finding(results, "classification", "auc"),
        published=PUBLISHED_3 if findings == _CHEX5_ORDER else {},
        counts=_cases_by_finding(results, "classification"),
        note=_TOO_FEW,
    )


def _layout_4(results: Results) -> Layout:
    boxes = results["counts"].get("grounding", {})
    headings = ("CNR ↑", "signed CNR ↑", "mIoU ↑")
    return Layout(
        title="Table 4. Visual grounding",
        columns=[
            Column(heading, path, 3)
            for heading, path in zip(headings, _paths("grounding", _GROUNDING), strict=True)
        ],
        published={name: (row[0], None, row[1]) for name, row in PUBLISHED_4.items()},
        variants={"per image-phrase pair": _paths("grounding/by_pair", _GROUNDING)},
        note=f"Averaged over {boxes.get('boxes', 0):,} boxes on {boxes.get('images', 0):,} images.",
    )


def _layout_5(results: Results) -> Layout:
    counts = results["counts"].get("retrieval", {})
    headings = ["R@10 ↑", "R@50 ↑", "R@100 ↑", "MedR ↓"] * 2
    return Layout(
        title="Table 5. Cross-modal retrieval",
        columns=[
            Column(heading, path, 0 if "MedR" in heading else 2)
            for heading, path in zip(headings, _paths("retrieval", _RETRIEVAL), strict=True)
        ],
        published=PUBLISHED_5,
        variants={"duplicate-tolerant": _paths("retrieval/tolerant", _RETRIEVAL)},
        groups=[("Image to text (box to phrase)", 4), ("Text to image (phrase to box)", 4)],
        note=f"{counts.get('boxes', 0):,} boxes, {counts.get('phrases', 0):,} distinct phrases; correct is the paired"
        " item only, or, duplicate-tolerant, every item with the same phrase.",
    )


def _paths(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"{prefix}/{name}" for name in names]


def _cell(
    results: Results,
    intervals: Mapping[str, Interval],
    path: str,
    digits: int,
    show: Callable[[Any, int], str],
) -> Cell:
    found = intervals.get(path)
    interval = ""
    if found is not None and found.low is not None:
        interval = f"[{show(found.low, digits)}, {show(found.high, digits)}]"
    return Cell(show(value_at(results["metrics"], path), digits), interval)
