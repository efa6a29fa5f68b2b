"""Tables of the run report, in the shape of SSD's tables 1, 3, 4 and 5, with the paper's own rows for reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Results = Mapping[str, Any]

RUN, UNTRAINED, PUBLISHED, PLAIN = "run", "untrained", "published", "plain"
NOTHING = "–"

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


class Row(NamedTuple):
    """A row of a table; ``kind`` is run, untrained, published, counts or plain."""

    label: str
    kind: str
    cells: list[str]


@dataclass(frozen=True)
class Table:
    """A table as it is shown; ``groups`` are headings above spans of columns, the column of labels excluded."""

    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)


def table_1(runs: Mapping[str, Results]) -> Table:
    """All three evaluations at a glance."""

    def values(results: Results) -> list[Any]:
        found = results["metrics"]
        return [
            *_path(found, "classification", ("auc", "acc")),
            *_path(found, "grounding", ("cnr", "cnr_signed", "miou")),
            *_path(found, "retrieval", ("recall", "medr")),
        ]

    published = {name: (*row[:3], None, *row[3:]) for name, row in PUBLISHED_1.items()}
    return Table(
        title="Table 1. Zero-shot classification, grounding and retrieval",
        columns=["AUC ↑", "ACC ↑", "CNR ↑", "signed CNR ↑", "mIoU ↑", "Recall ↑", "MedR ↓"],
        rows=_rows(runs, values, published, (2, 2, 2, 2, 2, 2, 0)),
        groups=[("Classification", 2), ("Grounding", 3), ("Retrieval", 2)],
        note="The signed CNR (not in the paper) tells a heat map that avoids the box from one that finds it.",
    )


def table_3(runs: Mapping[str, Results]) -> Table:
    """AUC of each finding, with the number of cases."""
    findings = list(next(iter(runs.values()))["metrics"].get("classification", {}).get("by_finding", {}))

    def values(results: Results) -> list[Any]:
        found = results["metrics"].get("classification", {})
        by_finding = found.get("by_finding", {})
        return [*(by_finding.get(finding, {}).get("auc") for finding in findings), found.get("auc")]

    order = ["Cardiomegaly", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax"]
    table = Table(
        title="Table 3. Zero-shot classification, AUC",
        columns=[*findings, "average"],
        rows=_rows(runs, values, PUBLISHED_3 if findings == order else {}, (3,) * (len(findings) + 1)),
        note=f"{NOTHING}: too few positive or negative cases; the average is over the findings with a number.",
    )
    counts = next(iter(runs.values()))["counts"].get("classification", {}).get("by_finding", {})
    cases = [
        f"{counts[f]['positives']} / {counts[f]['negatives']}" if f in counts else NOTHING for f in findings
    ]
    table.rows.insert(len(runs), Row("positive / negative cases", "counts", [*cases, ""]))
    return table


def table_4(runs: Mapping[str, Results]) -> Table:
    """Grounding over boxes."""

    def values(results: Results) -> list[Any]:
        return _path(results["metrics"], "grounding", ("cnr", "cnr_signed", "miou"))

    published = {name: (row[0], None, row[1]) for name, row in PUBLISHED_4.items()}
    boxes = next(iter(runs.values()))["counts"].get("grounding", {})
    table = Table(
        title="Table 4. Visual grounding",
        columns=["CNR ↑", "signed CNR ↑", "mIoU ↑"],
        rows=_rows(runs, values, published, (3, 3, 3)),
        note=f"Averaged over {boxes.get('boxes', 0):,} boxes on {boxes.get('images', 0):,} images.",
    )
    by_pair = [
        Row(
            f"{name}, per image-phrase pair",
            _kind(name),
            [
                number(value, 3)
                for value in _path(
                    results["metrics"].get("grounding", {}), "by_pair", ("cnr", "cnr_signed", "miou")
                )
            ],
        )
        for name, results in runs.items()
    ]
    table.rows[len(runs) : len(runs)] = by_pair
    return table


def table_4_by_category(runs: Mapping[str, Results]) -> Table | None:
    """Grounding by category of box: this run's numbers beside the untrained network's; None without boxes."""
    counts = next(iter(runs.values()))["counts"].get("grounding", {}).get("boxes_by_category", {})
    if not counts:
        return None
    rows = []
    for category, n_boxes in counts.items():
        cells = [f"{n_boxes:,}"]
        for other in runs.values():
            found = other["metrics"].get("grounding", {}).get("by_category", {})
            cells += [number(value, 2) for value in _path(found, category, ("cnr", "cnr_signed", "miou"))]
        rows.append(Row(category, PLAIN, cells))
    groups = [("", 1), *((run, 3) for run in runs)]
    return Table(
        "Grounding by category", ["boxes", *["CNR", "signed CNR", "mIoU"] * len(runs)], rows, groups=groups
    )


def table_5(runs: Mapping[str, Results]) -> Table:
    """Retrieval in both directions, and with duplicates accepted."""
    parts = ("R@10", "R@50", "R@100", "MedR")

    def values(results: Results, tolerant: bool = False) -> list[Any]:
        found = results["metrics"].get("retrieval", {})
        found = found.get("tolerant", {}) if tolerant else found
        return [*_path(found, "image_to_text", parts), *_path(found, "text_to_image", parts)]

    digits = (2, 2, 2, 0, 2, 2, 2, 0)
    counts = next(iter(runs.values()))["counts"].get("retrieval", {})
    table = Table(
        title="Table 5. Cross-modal retrieval",
        columns=["R@10 ↑", "R@50 ↑", "R@100 ↑", "MedR ↓"] * 2,
        rows=_rows(runs, values, PUBLISHED_5, digits),
        groups=[("Image to text (box to phrase)", 4), ("Text to image (phrase to box)", 4)],
        note=f"{counts.get('boxes', 0):,} boxes, {counts.get('phrases', 0):,} distinct phrases; correct is the paired"
        " item only, or, duplicate-tolerant, every item with the same phrase.",
    )
    tolerant = [
        Row(f"{name}, duplicate-tolerant", _kind(name), _cells(values(results, tolerant=True), digits))
        for name, results in runs.items()
    ]
    table.rows[len(runs) : len(runs)] = tolerant
    return table


def number(value: Any, digits: int) -> str:
    """A number with so many decimals; a dash for None; ranks that are whole or halves as they are."""
    if value is None:
        return NOTHING
    if digits == 0:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:.{digits}f}"


def _rows(
    runs: Mapping[str, Results],
    values: Any,
    published: Mapping[str, Sequence[float | int | None]],
    digits: Sequence[int],
) -> list[Row]:
    """This run, the untrained network, then the published rows."""
    rows = [Row(name, _kind(name), _cells(values(results), digits)) for name, results in runs.items()]
    return rows + [Row(name, PUBLISHED, _cells(row, digits)) for name, row in published.items()]


def _kind(name: str) -> str:
    return UNTRAINED if name == UNTRAINED else RUN


def _cells(values: Sequence[Any], digits: Sequence[int]) -> list[str]:
    return [number(value, places) for value, places in zip(values, digits, strict=True)]


def _path(found: Mapping[str, Any], section: str, names: Sequence[str]) -> list[Any]:
    part = found.get(section) or {}
    return [part.get(name) for name in names]
