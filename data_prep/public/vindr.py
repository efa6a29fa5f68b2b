"""VinDr-CXR (Nguyen et al., Scientific Data 2022): PhysioNet's release, or the train.csv of Kaggle's competition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from data_prep.public.tables import (
    BOX,
    PublicTables,
    ReleaseFolder,
    in_common,
    read_csv,
    renamed,
    with_numbers,
)
from data_prep.sources.releases import ReleaseError

_NONE = "No finding"
_CORNERS = ("x_min", "y_min", "x_max", "y_max")
MAJORITY = 2
"""Readers, of three an image, that must name a finding of the training part (choice)."""


def read(folder: ReleaseFolder) -> PublicTables:
    """annotations_train.csv and annotations_test.csv with image_labels_*.csv, or Kaggle's train.csv."""
    parts = {split: folder.optional(f"annotations_{split}.csv") for split in ("train", "test")}
    if not any(parts.values()):
        parts = {"train": folder.table("train.csv", "annotations_train.csv")}
    tables = {split: (file, _annotations(file)) for split, file in parts.items() if file is not None}
    files, images, boxes = [], [], []
    sizes = folder.optional("train_meta.csv", "sizes.csv")
    for split, (file, table) in tables.items():
        file_of_labels = folder.optional(f"image_labels_{split}.csv")
        votes = _votes(table) if file_of_labels is None else _table_of_votes(file_of_labels)
        files += [file, *([file_of_labels] if file_of_labels else [])]
        needed = MAJORITY if (table["rad_id"] != "").any() else 1
        labels = (votes >= needed).astype("float64").drop(columns=_NONE, errors="ignore")
        images.append(labels.rename_axis("image").reset_index().assign(split=split))
        drawn = table[table["x_min"].notna()]
        if not (drawn["image_id"].isin(labels.index) & drawn["class_name"].isin(labels)).all():
            raise ReleaseError(f"{file} has boxes of images or findings without a label in {file_of_labels}")
        is_named = [
            bool(labels.at[row.image_id, row.class_name])
            for row in drawn[["image_id", "class_name"]].itertuples()
        ]
        boxes.append(drawn[np.array(is_named, dtype=bool)])
    found = pd.concat(images, ignore_index=True)
    findings = [str(name) for name in found if name not in ("image", "split")]
    labels, choices = renamed(found[findings])
    found = found[["image", "split"]].join(labels)
    drawn = pd.concat(boxes, ignore_index=True)
    drawn = drawn.rename(columns={"image_id": "image", "rad_id": "reader", "x_min": "x", "y_min": "y"})
    drawn = drawn.assign(w=drawn["x_max"] - drawn["x"], h=drawn["y_max"] - drawn["y"])
    drawn = drawn.assign(category=in_common(drawn["class_name"])).join(_sizes(sizes), on="image")
    choices.append(
        f"labels of train: named by {MAJORITY} of three readers, otherwise absent (choice); of test: consensus"
    )
    choices.append("boxes: of every reader, for findings that the label calls present")
    people = dict.fromkeys(("sex", "age"), "")
    return PublicTables(
        title="VinDr-CXR",
        files=[*files, *([sizes] if sizes else [])],
        images=found.assign(patient=found["image"], study=found["image"], view="PA", **people),
        boxes=drawn[BOX],
        choices=choices,
        names_patients=False,
    )


def _annotations(file: Path) -> pd.DataFrame:
    """image_id, class_name, rad_id ("" of a consensus), and the corners of a box or NaN."""
    table = with_numbers(read_csv(file, ("image_id", "class_name", *_CORNERS), ("rad_id",)), _CORNERS, file)
    return table if "rad_id" in table else table.assign(rad_id="")


def _votes(table: pd.DataFrame) -> pd.DataFrame:
    """Number of readers by image and finding, from a table of boxes in which an image without any says `_NONE`."""
    pairs = table.drop_duplicates(["image_id", "class_name", "rad_id"])
    return pd.crosstab(pairs["image_id"], pairs["class_name"])


def _table_of_votes(file: Path) -> pd.DataFrame:
    """As `_votes`, from a table with a row for each image and reader, and a column for each finding."""
    table = read_csv(file, ("image_id",), None)
    findings = [name for name in table.columns if name not in ("image_id", "rad_id")]
    values = with_numbers(table, findings, file)[findings]
    if not findings or not values.isin((0, 1)).all(axis=None):
        raise ReleaseError(
            f"{file}: expected columns of findings with 0 or 1, found other values; download it again"
        )
    return values.groupby(table["image_id"]).sum()


def _sizes(file: Path | None) -> pd.DataFrame:
    """Width and height of the original images, for boxes on pictures of another size; without a table of sizes none."""
    columns = ["image_width", "image_height"]
    if file is None:
        return pd.DataFrame(index=pd.Index([], dtype="str"), columns=columns, dtype="float64")
    table = read_csv(file, ("image_id",), ("width", "height", "dim1", "dim0"))
    given = ("width", "height") if "width" in table and "height" in table else ("dim1", "dim0")
    table = read_csv(file, ("image_id", *given)).drop_duplicates()
    if table["image_id"].duplicated().any():
        raise ReleaseError(f"{file}: an image has two sizes; correct the table")
    return with_numbers(table, given, file).set_index("image_id")[list(given)].set_axis(columns, axis=1)
