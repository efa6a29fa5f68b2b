"""Checks of the tables of a prepared set, alone and against each other; a problem is a line without content of reports.

`PreparedSet.table` refuses what `damage` finds; `medclip-dcl check` lists it with the `contradictions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

USES = ("train", "validate", "test", "grounding", "excluded")

_KEYS = {
    "images": ["dicom_id"],
    "studies": ["study_id"],
    "sentences": ["sentence_id"],
    "labels": ["study_id"],
    "cases": ["dicom_id", "finding"],
    "classes": ["sentence_id"],
}
_VALUES: dict[str, dict[str, Sequence[Any]]] = {
    **dict.fromkeys(("images", "studies"), {"use": USES, "official_split": USES[:3]}),
    "cases": {"use": ("validate", "test"), "label": (0, 1)},
}
# Table -> every value of the first one's column must be in the second one.
REFERENCES = {
    "reports": ("reports", "sentence_id", "sentences"),
    "classes": ("sentences", "sentence_id", "classes"),
    **{name: (name, "dicom_id", "images") for name in ("cases", "boxes", "masks", "image_classes")},
}
# Rounding may bring a log p of 0 so far above it; LanguageModelClassProbability takes as much.
_LARGEST_LOG_P = 1e-4


def some(what: str, cases: Iterable[Any], total: int | None = None) -> list[str]:
    """A problem with its number of cases and the first of them; none without cases."""
    cases = [" ".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in cases]
    of_total = "" if total is None else f" of {total:,}"
    return [f"{what}: {len(cases):,}{of_total} (first: {', '.join(cases[:3])})"] if cases else []


def rows(frame: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The key columns of each row."""
    return frame[list(keys)].itertuples(index=False, name=None)


def damage(name: str, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Problems of a table, beside those of `REFERENCES`, by which training or evaluation fails or leaves out rows."""
    frame, file, problems = tables[name], f"{name}.parquet", []
    if key := _KEYS.get(name):
        problems += some(f"{file}: duplicate {' and '.join(key)}", rows(frame[frame.duplicated(key)], key))
    for column, known in _VALUES.get(name, {}).items():
        unknown = sorted(set(frame[column]) - set(known))
        problems += some(f"{file}: unknown {column}, expected {', '.join(map(str, known))}", unknown)
    if name == "labels":
        given = frame.drop(columns="study_id")
        is_known = (given.isna() | given.isin([-1.0, 0.0, 1.0])).all(axis=1)
        problems += some(f"{file}: labels other than 1, 0, -1", frame.loc[~is_known, "study_id"])
    if "class_id" in frame:
        problems += some(f"{file}: class_id below 0", frame.loc[frame["class_id"] < 0, "class_id"])
    return problems + (lost(name, *REFERENCES[name], tables) if name in REFERENCES else [])


def lost(name: str, first: str, column: str, other: str, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """A problem of a table, one of these two: values of the first one's column that the other one lacks."""
    if first not in tables or other not in tables:
        return []
    missing = tables[first].loc[~tables[first][column].isin(tables[other][column]), column].unique()
    what = f"that is not in {other}.parquet" if name == first else f"of {first}.parquet without a row"
    return some(f"{name}.parquet: {column} {what}", missing)


def contradictions(tables: Mapping[str, pd.DataFrame], cases: pd.DataFrame) -> list[str]:
    """Problems of readable tables with each other: of patients' uses, of boxes, and of other cases than `cases`."""
    images, problems = tables["images"], []
    for name in ("images", "studies"):
        if name in tables:
            used = tables[name][tables[name]["use"] != "excluded"]
            # Patients may be in both test and grounding.
            uses = used["use"].replace("grounding", "test").groupby(used["subject_id"]).nunique()
            problems += some(f"{name}.parquet: patients with two uses", uses.index[uses > 1])
    if "boxes" in tables:
        phrased = tables["boxes"].loc[tables["boxes"]["phrase"] != "", "dicom_id"]
        # A set that names the readers of its boxes has phrases in all parts of its official split.
        elsewhere = images["dicom_id"].isin([] if "reader" in tables["boxes"] else phrased)
        elsewhere &= images["use"] != "grounding"
        what = "images.parquet: images with a box with a phrase whose use is not grounding"
        problems += some(what, images.loc[elsewhere, "dicom_id"])
        boxes = tables["boxes"].merge(images[["dicom_id", "height", "width"]], on="dicom_id")
        # Comparisons with NaN are false. Clipping a corner may leave a rounding error.
        inside = (boxes[["x", "y"]] >= 0).all(axis=1) & (boxes[["w", "h"]] > 0).all(axis=1)
        inside &= boxes["x"] + boxes["w"] <= boxes["width"] + 1e-6
        inside &= boxes["y"] + boxes["h"] <= boxes["height"] + 1e-6
        what = "boxes.parquet: boxes that are not inside their image"
        problems += some(what, boxes["dicom_id"][~inside], len(boxes))
    both = cases.merge(tables["cases"], how="outer", indicator="place")
    differing = both[both["place"] != "both"].drop_duplicates(["dicom_id", "finding"])
    what = "cases.parquet: cases that contradict labels.parquet and images.parquet"
    return problems + some(what, rows(differing, ["dicom_id", "finding"]), len(tables["cases"]))


def score_problem(scores: pd.DataFrame) -> str:
    """The first problem of the sentence scores of a language model, "" for none; NaN is allowed."""
    log_p = scores["log_p"]
    is_bad = scores["sentence_id"].duplicated() | np.isinf(log_p) | (log_p > _LARGEST_LOG_P)
    if not is_bad.any():
        return ""
    first = scores[is_bad].iloc[0]
    return (
        "expected one row for each sentence, and finite natural logarithms of probabilities (NaN only for an empty "
        f"sentence; -log p needs its sign changed), found others in {int(is_bad.sum()):,} of {len(scores):,} rows "
        f"(first: sentence_id {int(first['sentence_id'])}, log_p {first['log_p']:g})"
    )
