"""VinDr-CXR (Nguyen et al., Scientific Data 2022): PhysioNet's release, or the train.csv of Kaggle's competition."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_prep.public.release_tables import BOX, PublicTables, ReleaseFolder, with_numbers
from data_prep.sources.finding_names import in_common, known_names, names_of, renamed
from data_prep.sources.source_tables import OWN_FILE, read_table
from data_prep.sources.spellings import as_spelled
from medclip_dcl.common.errors import UserError

_KNOWN = names_of("VinDr-CXR")
_NONE = "No finding"
_CORNERS = ("x_min", "y_min", "x_max", "y_max")
READERS = 3
"""Of each image of the training part, of whom more than half must name a finding (choice)."""


def read(folder: ReleaseFolder) -> PublicTables:
    """annotations_train.csv and annotations_test.csv with image_labels_*.csv, or Kaggle's train.csv."""
    names = {"train": ("annotations_train.csv", "train.csv"), "test": ("annotations_test.csv",)}
    parts, boxes, said = [], [], []
    for split, file in folder.tables(names).items():
        table = read_table(file, ("image_id", "class_name", *_CORNERS), ("rad_id",))
        table = with_numbers(table.assign(rad_id=table.get("rad_id", "")), _CORNERS, file)
        table["class_name"] = known_names(table["class_name"], _KNOWN, f"{file}, column class_name")
        of_labels = folder.optional(f"image_labels_{split}.csv")
        votes = _votes(table) if of_labels is None else _table_of_votes(of_labels)
        readers = votes.groupby(level="image_id").size()
        labels = (votes.groupby(level="image_id").mean() > 0.5).astype("float64")
        labels = labels.drop(columns=_NONE, errors="ignore")
        if split == "train" and (n_few := (readers < READERS).sum()):
            said = [
                f"labels of train: {n_few:,} of {len(readers):,} images have fewer than {READERS} readers"
            ]
        table["image_id"] = as_spelled(table["image_id"], labels.index)
        parts.append(labels.rename_axis("image").reset_index().assign(split=split))
        drawn = table[table["x_min"].notna() & (table["class_name"] != _NONE)]
        named = labels.stack().reindex(pd.MultiIndex.from_frame(drawn[["image_id", "class_name"]]))
        if named.isna().any():
            raise UserError(f"{file} has boxes of images or findings without a label in {of_labels}")
        boxes.append(drawn[named.to_numpy() == 1])
    images = pd.concat(parts, ignore_index=True)
    labels, choices = renamed(images.drop(columns=["image", "split"]))
    sizes = folder.optional("train_meta.csv", "sizes.csv")
    drawn = pd.concat(boxes, ignore_index=True)
    drawn = drawn.rename(columns={"image_id": "image", "rad_id": "reader", "x_min": "x", "y_min": "y"})
    drawn = drawn.assign(w=drawn["x_max"] - drawn["x"], h=drawn["y_max"] - drawn["y"])
    drawn = drawn.assign(category=in_common(drawn["class_name"]))
    drawn = drawn.join(_sizes(sizes, images["image"]), on="image")
    return PublicTables(
        title="VinDr-CXR",
        images=images[["image", "split"]].assign(view="PA").join(labels),
        boxes=drawn[BOX],
        choices=[
            *choices,
            "labels of train: named by more than half of an image's readers, otherwise absent (choice); of test: "
            "consensus",
            *said,
            "boxes: of every reader, for findings that the label calls present",
        ],
    )


def _votes(table: pd.DataFrame) -> pd.DataFrame:
    """0 or 1 by image and reader, and finding, from a table of boxes in which an image without any says `_NONE`."""
    return pd.crosstab([table["image_id"], table["rad_id"]], table["class_name"]).clip(upper=1)


def _table_of_votes(file: Path) -> pd.DataFrame:
    """As `_votes`, from a table with a row for each image and reader, and a column for each finding."""
    table = read_table(file, ("image_id",), None)
    table = table.assign(rad_id=table.get("rad_id", ""))
    findings = [name for name in table.columns if name not in ("image_id", "rad_id")]
    values = with_numbers(table, findings, file)[findings]
    if not findings or not values.isin((0, 1)).all(axis=None):
        raise UserError(f"{file}: expected columns of findings with 0 or 1, found other values; {OWN_FILE}")
    values.columns = known_names(pd.Series(findings), _KNOWN, f"{file}, its columns")
    return values.groupby([table["image_id"], table["rad_id"]]).max()


def _sizes(file: Path | None, images: pd.Series) -> pd.DataFrame:
    """Width and height of the original images, for boxes on pictures of another size; without a table of sizes none."""
    columns = ["image_width", "image_height"]
    if file is None:
        return pd.DataFrame(index=pd.Index([], dtype="str"), columns=columns, dtype="float64")
    table = read_table(file, ("image_id",), ("width", "height", "dim1", "dim0")).drop_duplicates()
    given = ["width", "height"] if {"width", "height"} <= {*table} else ["dim1", "dim0"]
    if not {*given} <= {*table} or table["image_id"].duplicated().any():
        raise UserError(f"{file}: expected image_id, width and height, one row an image; correct the table")
    table = with_numbers(table, given, file).set_index(pd.Index(as_spelled(table["image_id"], images)))
    return table[given].set_axis(columns, axis=1)
