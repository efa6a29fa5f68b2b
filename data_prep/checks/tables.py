"""Checks of the tables of a prepared set against the format, dataset.json and each other."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from medclip_dcl.data.prepared import TABLES, PreparedDataError, PreparedSet, case_table
from medclip_dcl.data.table_checks import damage, rows, some

ALWAYS = ("images", "image_files", "sentences", "reports", "labels", "cases")
"""Tables that every set has."""

Tables = Mapping[str, pd.DataFrame]


def read_tables(prepared: PreparedSet) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The readable tables of the right format, and the problems of the others."""
    found, problems = {}, []
    for name in TABLES:
        if prepared.has(name) or name in ALWAYS:
            try:
                found[name] = prepared.unchecked_table(name)
            except PreparedDataError as error:
                problems.append(str(error))
    return found, problems


def table_problems(prepared: PreparedSet, found: Tables) -> list[str]:
    """Problems of the tables of a set, all of them readable."""
    changed = ", ".join(prepared.content.tables)
    problems = [f"changed, added or removed after the set was made: {changed}"] if changed else []
    problems += [problem for name in found for problem in damage(name, found)]
    return [*problems, *_uses(found), *_boxes(found), *_cases(prepared, found)]


def _uses(found: Tables) -> list[str]:
    """Uses separate patients, and boxes are on images for grounding."""
    problems: list[str] = []
    for name in ("images", "studies"):
        if name in found:
            used = found[name][found[name]["use"] != "excluded"]
            # Patients may be in both test and grounding.
            uses = used["use"].replace("grounding", "test").groupby(used["subject_id"]).nunique()
            problems += some(f"{name}.parquet: patients with two uses", uses.index[uses > 1])
    if "boxes" in found:
        images = found["images"]
        phrased = found["boxes"].loc[found["boxes"]["phrase"] != "", "dicom_id"]
        elsewhere = images["dicom_id"].isin(phrased) & (images["use"] != "grounding")
        what = "images.parquet: images with a box with a phrase whose use is not grounding"
        problems += some(what, images.loc[elsewhere, "dicom_id"])
    return problems


def _boxes(found: Tables) -> list[str]:
    if "boxes" not in found:
        return []
    boxes = found["boxes"].merge(found["images"][["dicom_id", "height", "width"]], on="dicom_id")
    # Comparisons with NaN are false. Clipping a corner may leave a rounding error.
    inside = (boxes[["x", "y"]] >= 0).all(axis=1) & (boxes[["w", "h"]] > 0).all(axis=1)
    inside &= boxes["x"] + boxes["w"] <= boxes["width"] + 1e-6
    inside &= boxes["y"] + boxes["h"] <= boxes["height"] + 1e-6
    return some(
        "boxes.parquet: boxes that are not inside their image", boxes["dicom_id"][~inside], len(boxes)
    )


def _cases(prepared: PreparedSet, found: Tables) -> list[str]:
    """The cases follow from the images and their labels."""
    images, labels = (found[name].drop_duplicates() for name in ("images", "labels"))
    expected = case_table(images, labels, prepared.info["options"].get("cases", "all"))
    both = expected.merge(found["cases"], how="outer", indicator="place")
    differing = both[both["place"] != "both"].drop_duplicates(["dicom_id", "finding"])
    what = "cases.parquet: cases that contradict labels.parquet and images.parquet"
    return some(what, rows(differing, ["dicom_id", "finding"]), len(found["cases"]))


def score_problems(prepared: PreparedSet) -> list[str]:
    """Scores and embeddings are readable and cover all sentences."""
    problems = []
    for kind, read in (("log_p", prepared.log_p), ("text_embedding", prepared.text_embedding)):
        for name in prepared.models(kind):
            try:
                read(name)
            except PreparedDataError as error:
                problems.append(str(error))
    return problems
