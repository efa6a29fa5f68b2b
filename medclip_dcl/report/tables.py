"""Tables in the shape of SSD's tables 1, 3, 4 and 5, those of image-report retrieval, and a classifier's.

A :class:`Layout` says which numbers of results.json stand in which column; :func:`filled` puts runs into it, the level
of chance below them, and the paper's own rows where the set is the paper's (:func:`unlike_published`). The run report
and the comparison of runs share them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from medclip_dcl.report.intervals import Interval
from medclip_dcl.report.saved_results import value_at

Results = Mapping[str, Any]

RUN, UNTRAINED, PUBLISHED, PLAIN, CHANCE = "run", "untrained", "published", "plain", "chance"
NOTHING = "–"
TABLE_3 = "Table 3. Zero-shot classification, AUC"
TABLE_4 = "Table 4. Visual grounding"
CLASSIFIER = "finding_classification"
"""Section of results.json that a classifier's run has, and no other."""
REPORTS = "report_retrieval"
"""Section of the retrieval of images and reports; runs that were tested before there was one do not have it."""
PUBLISHED_NOTE = "published, not rerun; MIMIC-CXR/MS-CXR"
PUBLISHED_COUNTS = {"boxes": 1448, "pairs": 1162, "images": 1047}
"""Of MS-CXR, on which the paper's rows were measured: boxes, image-phrase pairs, images."""

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
_ABOUT_CNR = (
    "The signed CNR (not in the paper) tells a heat map that avoids the box from one that finds it; without its sign"
    " the CNR lies above 0 by chance too."
)
_CHEX5_ORDER = ["Cardiomegaly", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax"]


class Cell(NamedTuple):
    """A number as it is shown, and its interval, if any."""

    text: str
    interval: str = ""


class Row(NamedTuple):
    """A row of a table; ``kind`` is run, untrained, published, difference, counts, chance or plain."""

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
        folded: published rows of another set, which are shown on demand only, where the format can.
    """

    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)
    dividers: Mapping[str, str] = field(default_factory=lambda: {PUBLISHED: PUBLISHED_NOTE})
    folded: list[Row] = field(default_factory=list)


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


def is_measured(results: Results, section: str) -> bool:
    """The evaluation found numbers: there were labels, boxes or reports."""
    return value_at(results["metrics"], f"{section}/{_A_NUMBER[section]}") is not None


def layouts(runs: Sequence[Results]) -> list[Layout]:
    """Tables of what was measured of any of some runs that were tested alike; of a classifier, its own by finding."""
    results = runs[0]
    if is_of_classifier(results):
        return _layouts_by_finding(results)
    measured = {section for section in _A_NUMBER if any(is_measured(run, section) for run in runs)}
    with_reports = next((run for run in runs if is_measured(run, REPORTS)), results)
    found = {
        "classification": [_layout_3(results)],
        "grounding": [_layout_4(results)],
        "retrieval": [_layout_5(results)],
        REPORTS: [_layout_reports(with_reports, *task) for task in _TASKS],
    }
    of_sections = [layout for section, parts in found.items() if section in measured for layout in parts]
    return [*([_layout_1(results, measured)] if measured - {REPORTS} else []), *of_sections]


def unlike_published(results: Results) -> str:
    """Why the paper's rows, of MIMIC-CXR and MS-CXR, cannot stand beside these results; "" where they can."""
    dataset, counts = results["dataset"], results["counts"].get("grounding") or {}
    if dataset.get("phantom"):
        return "this set is a phantom"
    if not str(dataset.get("source")).startswith("mimic-cxr"):
        return f"this set is {dataset.get('source')}"
    if "grounding" not in results["counts"]:
        return "its boxes were not evaluated"
    same = {name for name, count in PUBLISHED_COUNTS.items() if counts.get(name) == count}
    if "boxes" not in same or len(same) < 2:
        pairs = f"{counts.get('pairs') or 0:,} image-phrase pairs on {counts.get('images') or 0:,} images"
        return f"this set has {counts.get('boxes') or 0:,} boxes, {pairs}"
    return ""


def why_left_out(results: Results) -> str:
    """One line for the reader where published rows are not shown; "" where they are."""
    reason = unlike_published(results)
    if not reason or is_of_classifier(results):
        return ""
    boxes, pairs, images = (f"{PUBLISHED_COUNTS[name]:,}" for name in ("boxes", "pairs", "images"))
    return (
        f"Published rows are of MIMIC-CXR with MS-CXR ({boxes} boxes, {pairs} image-phrase pairs on {images} images);"
        f" {reason}: the numbers do not compare."
    )


def data_in_words(results: Results) -> str:
    """The tested set by what it is: its name and source, and how many images and boxes were tested."""
    dataset, counts = results["dataset"], results["counts"]
    source = str(dataset.get("source"))
    if "grounding" in counts and unlike_published(results) and source.startswith("mimic-cxr"):
        source = f"in the layout of {source}"
    name = f"{dataset['folder']} ({source})" if dataset.get("folder") else source
    words = []
    if "images" in dataset:
        words.append(f"{dataset['images']:,} test images of {dataset['patients']:,} patients")
    n_boxes = (counts.get("grounding") or {}).get("boxes")
    if n_boxes is not None:
        words.append(f"{n_boxes:,} boxes" if n_boxes else "no boxes")
    return ", ".join([name, *words])


def chance_levels(results: Results) -> dict[str, float]:
    """Path in the metrics -> what a model that knows nothing is expected to reach; from the counts.

    Accuracy: of the commoner label. No level where it depends on the model, as that of the unsigned CNR and the mIoU.
    """
    found: dict[str, float] = {"grounding/cnr_signed": 0.0, "grounding/by_pair/cnr_signed": 0.0}
    for section in ("classification", CLASSIFIER):
        of_findings: dict[str, list[float]] = {}
        for finding, cases in (results["counts"].get(section) or {}).get("by_finding", {}).items():
            path, n = f"{section}/by_finding/{finding}", cases["positives"] + cases["negatives"]
            if value_at(results["metrics"], f"{path}/auc") is not None and n:
                levels = {
                    "auc": 0.5,
                    "acc": max(cases.values()) / n,
                    "average_precision": cases["positives"] / n,
                }
                for name, level in levels.items():
                    found[f"{path}/{name}"] = level
                    of_findings.setdefault(name, []).append(level)
        found |= {f"{section}/{name}": sum(values) / len(values) for name, values in of_findings.items()}
    n_boxes = (results["counts"].get("retrieval") or {}).get("boxes")
    if n_boxes:
        alike = {**{f"R@{k}": min(1.0, k / n_boxes) for k in _KS}, "MedR": (n_boxes + 1) / 2}
        found |= _retrieval_levels("retrieval", dict.fromkeys(_DIRECTIONS, alike))
    for task, levels in (results["counts"].get(REPORTS) or {}).get("by_chance", {}).items():
        found |= _retrieval_levels(f"{REPORTS}/{task}", levels)
    return found


def _retrieval_levels(prefix: str, levels: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {f"{prefix}/{d}/{name}": level for d in _DIRECTIONS for name, level in levels[d].items()}
    recalls = [levels[direction][f"R@{k}"] for direction in _DIRECTIONS for k in _KS]
    found[f"{prefix}/recall"] = sum(recalls) / len(recalls)
    found[f"{prefix}/medr"] = sum(levels[direction]["MedR"] for direction in _DIRECTIONS) / len(_DIRECTIONS)
    return found


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
    """The table of some runs, in their order, then of their variants, counts, chance, then the published rows.

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
    # Any run that has the section knows its counts.
    levels = {path: level for results in runs.values() for path, level in chance_levels(results).items()}
    if any(column.path in levels for column in layout.columns):
        cells = [Cell(show(levels.get(column.path), column.digits)) for column in layout.columns]
        rows.append(Row("chance level", CHANCE, cells))
    published = []
    for name, values in layout.published.items():
        digits = (column.digits for column in layout.columns)
        cells = [Cell(show(value, places)) for value, places in zip(values, digits, strict=True)]
        if all(value is None for value in values):
            continue  # AUC and ACC of other findings than the paper's
        published.append(Row(name, PUBLISHED, cells))
    is_like = not unlike_published(next(iter(runs.values())))
    return Table(
        layout.title,
        [column.heading for column in layout.columns],
        [*rows, *(published if is_like else [])],
        layout.note,
        layout.groups,
        folded=[] if is_like else published,
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
    rows.append(
        Row("chance level", CHANCE, [Cell(""), *[Cell(NOTHING), Cell("0"), Cell(NOTHING)] * len(runs)])
    )
    groups = [("", 1), *((run, 3) for run in runs)]
    return Table(
        "Grounding by category", ["boxes", *["CNR", "signed CNR", "mIoU"] * len(runs)], rows, groups=groups
    )


def by_finding(
    runs: Mapping[str, Results], intervals: Mapping[str, Mapping[str, Interval]] | None = None
) -> Table:
    """Zero-shot classification with a row for each finding, the runs beside each other."""
    first = next(iter(runs.values()))
    levels = chance_levels(first)
    _, cases = _cases_by_finding(first, "classification")
    rows = []
    findings = first["metrics"]["classification"]["by_finding"]
    for finding, of_finding in zip(findings, cases[:-1], strict=True):  # the last is that of the average
        path = f"classification/by_finding/{finding}"
        cells = [Cell(of_finding)]
        for name, results in runs.items():
            cells += [
                _cell(results, (intervals or {}).get(name, {}), number_path, 3, number)
                for number_path in _paths(path, ("auc", "acc"))
            ]
        rows.append(Row(finding, PLAIN, [*cells, Cell(number(levels.get(f"{path}/acc"), 3))]))
    headings = ["positive / negative cases", *["AUC", "ACC"] * len(runs), "ACC by chance"]
    groups = [("", 1), *((run, 2) for run in runs), ("", 1)]
    note = "AUC by chance is 0.5; ACC, the share of the commoner label."
    return Table("Zero-shot classification by finding", headings, rows, f"{_TOO_FEW} {note}", groups)


def kind_of(name: str) -> str:
    """Whether a row is a run's or an untrained network's, by its name."""
    return UNTRAINED if name == UNTRAINED or name.endswith(f", {UNTRAINED}") else RUN


_GROUNDING = ("cnr", "cnr_signed", "miou")
_KS = (10, 50, 100)
_DIRECTIONS = ("image_to_text", "text_to_image")
_RETRIEVAL = [
    f"{direction}/{name}" for direction in _DIRECTIONS for name in (*(f"R@{k}" for k in _KS), "MedR")
]
_A_NUMBER = {
    "classification": "auc",
    "grounding": "miou",
    "retrieval": "recall",
    REPORTS: "image_report/recall",
}
"""Section -> a number that it has wherever it has any."""
_TASKS = (("image_report", "reports", "Report"), ("image_sentence", "sentences", "Sentence"))


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


def _layout_1(results: Results, measured: Collection[str]) -> Layout:
    """The columns of what was measured."""
    columns = [
        Column("AUC ↑", "classification/auc", 2),
        Column("ACC ↑", "classification/acc", 2),
        Column("CNR ↑", "grounding/cnr", 2),
        Column("signed CNR ↑", "grounding/cnr_signed", 2),
        Column("mIoU ↑", "grounding/miou", 2),
        Column("Recall ↑", "retrieval/recall", 2),
        Column("MedR ↓", "retrieval/medr", 0),
    ]
    section = [column.path.split("/")[0] for column in columns]
    shown = [place for place, name in enumerate(section) if name in measured]
    published = {name: [*row[:3], None, *row[3:]] for name, row in PUBLISHED_1.items()}
    if not is_of_chex5(results):
        published = {name: [None, None, *row[2:]] for name, row in published.items()}
    counts = results["counts"]
    cases = {
        "classification": f"{counts.get('classification', {}).get('images', 0):,} images",
        "grounding": f"{counts.get('grounding', {}).get('boxes', 0):,} boxes",
        "retrieval": f"{counts.get('retrieval', {}).get('boxes', 0):,} candidates",
    }
    parts = {name: section.count(name) for name in cases if name in measured}
    names = [*list(parts)[:-2], " and ".join(list(parts)[-2:])]
    return Layout(
        title=f"Table 1. {', '.join(names).replace('classification', 'zero-shot classification').capitalize()}",
        columns=[columns[place] for place in shown],
        published={name: [row[place] for place in shown] for name, row in published.items()},
        counts=("tested on", [cases[section[place]] for place in shown]),
        groups=[(name.capitalize(), span) for name, span in parts.items()],
        note=_ABOUT_CNR if "grounding" in measured else "",
    )


def is_of_chex5(results: Results) -> bool:
    """The findings of the zero-shot classification are CheX5's, as in the paper's tables."""
    return list(results["metrics"].get("classification", {}).get("by_finding", {})) == _CHEX5_ORDER


def _layout_3(results: Results) -> Layout:
    return Layout(
        title=TABLE_3 if is_of_chex5(results) else "Zero-shot classification, AUC",
        columns=_by_finding(results, "classification", "auc"),
        published=PUBLISHED_3 if is_of_chex5(results) else {},
        counts=_cases_by_finding(results, "classification"),
        note=_TOO_FEW,
    )


def _layout_4(results: Results) -> Layout:
    boxes = results["counts"].get("grounding", {})
    headings = ("CNR ↑", "signed CNR ↑", "mIoU ↑")
    return Layout(
        title=TABLE_4,
        columns=[
            Column(heading, path, 3)
            for heading, path in zip(headings, _paths("grounding", _GROUNDING), strict=True)
        ],
        published={name: (row[0], None, row[1]) for name, row in PUBLISHED_4.items()},
        variants={"per image-phrase pair": _paths("grounding/by_pair", _GROUNDING)},
        note=f"{_ABOUT_CNR} Averaged over {boxes.get('boxes', 0):,} boxes on {boxes.get('images', 0):,} images.",
    )


def _layout_5(results: Results) -> Layout:
    counts = results["counts"].get("retrieval", {})
    return Layout(
        title="Table 5. Cross-modal retrieval",
        columns=_retrieval_columns("retrieval"),
        published=PUBLISHED_5,
        variants={"duplicate-tolerant": _paths("retrieval/tolerant", _RETRIEVAL)},
        counts=("candidates", [f"{counts.get('boxes', 0):,}"] * 8),
        groups=[("Image to text (box to phrase)", 4), ("Text to image (phrase to box)", 4)],
        note=f"{counts.get('boxes', 0):,} boxes, {counts.get('phrases', 0):,} distinct phrases; correct is the paired"
        " item only, or, duplicate-tolerant, every item with the same phrase.",
    )


def _layout_reports(results: Results, task: str, texts: str, name: str) -> Layout:
    """Retrieval of reports, or of sentences, for images, and the other way round."""
    counts = results["counts"].get(REPORTS, {})
    n_images, n_texts = counts.get("images", 0), counts.get(texts, 0)
    reports = results["protocol"].get(REPORTS, {}).get("reports", "all")
    variants = {}
    note = f"{counts.get('reports', 0):,} reports ({reports}) of {counts.get('patients', 0):,} patients"
    if task == "image_report":
        note += (
            f", of which {counts.get('distinct_reports', 0):,} differ; a report's score is the mean over its distinct"
            " sentences. Correct is the image's own report, or any image of the report's study"
        )
        if counts.get("distinct_reports") != counts.get("reports"):
            variants["duplicate-tolerant"] = _paths(f"{REPORTS}/{task}/tolerant", _RETRIEVAL)
            note += "; duplicate-tolerant, also what has a report of the same sentences"
        note += "."
    else:
        note += (
            ". Correct is any sentence of the image's report, and any image whose report holds the sentence."
        )
    return Layout(
        title=f"{name} retrieval",
        columns=_retrieval_columns(f"{REPORTS}/{task}"),
        published={},
        variants=variants,
        counts=("candidates", [f"{n:,}" for n in (n_texts, n_images) for _ in range(4)]),
        groups=[(f"Image to {name.lower()}", 4), (f"{name} to image", 4)],
        note=note,
    )


def _retrieval_columns(prefix: str) -> list[Column]:
    headings = ["R@10 ↑", "R@50 ↑", "R@100 ↑", "MedR ↓"] * 2
    return [
        Column(heading, path, 0 if "MedR" in heading else 2)
        for heading, path in zip(headings, _paths(prefix, _RETRIEVAL), strict=True)
    ]


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
