"""NIH ChestX-ray14 (Wang et al., CVPR 2017), and its relabels by radiologists (Majkowska et al., Radiology 2020)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_prep.public.tables import (
    BOX,
    PublicTables,
    ReleaseFolder,
    image_id,
    in_common,
    listed,
    read_csv,
    renamed,
    text_of,
    with_numbers,
)
from data_prep.sources.releases import ReleaseError

FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion", "Emphysema", "Fibrosis", "Hernia"),
    *("Infiltration", "Mass", "Nodule", "Pleural_Thickening", "Pneumonia", "Pneumothorax"),
)
RELABELLED = ("Fracture", "Pneumothorax", "Airspace opacity", "Nodule or mass")
BOX_SIDE = 1024
"""Boxes are in pixels of the release's images, 1024 x 1024."""

_PEOPLE = ("Patient ID", "Patient Age", "Patient Gender", "Patient Sex", "View Position")


def read(folder: ReleaseFolder) -> PublicTables:
    """The release's Data_Entry_2017_v2020.csv, BBox_List_2017.csv, train_val_list.txt and test_list.txt."""
    entry = folder.table("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
    table = read_csv(entry, ("Image Index", "Finding Labels", "Patient ID"), _PEOPLE)
    found = table["Finding Labels"].map(
        lambda text: [name.strip() for name in text.split("|") if name.strip() not in ("", "No Finding")]
    )
    images = _images(table)
    labels, choices = listed(images["image"], found, FINDINGS)
    choices.append("labels: mined from reports; a finding that is not listed counts as absent (choice)")
    files, left_out = [entry], {}
    lists = {"train": folder.optional("train_val_list.txt"), "test": folder.optional("test_list.txt")}
    if all(lists.values()):
        for split, file in lists.items():
            assert file is not None
            files.append(file)
            is_listed = images["image"].isin({image_id(line) for line in text_of(file).split()})
            if (is_listed & (images["split"] != "")).any():
                raise ReleaseError(f"{file} and {files[-2]} have images in common; download them again")
            images.loc[is_listed, "split"] = split
        unlisted = images.loc[images["split"] == "", "image"]
        left_out = dict.fromkeys(unlisted, "its name is in neither train_val_list.txt nor test_list.txt")
    else:
        choices.append("split: drawn, since train_val_list.txt or test_list.txt is missing")
    boxes = None
    if (boxed := folder.optional("BBox_List_2017.csv")) is not None:
        files.append(boxed)
        boxes = _boxes(boxed)
    return PublicTables(
        title="NIH ChestX-ray14",
        files=files,
        images=images.join(labels),
        boxes=boxes,
        left_out=left_out,
        choices=choices,
    )


def read_relabels(folder: ReleaseFolder) -> PublicTables:
    """Google's relabels of four findings: one table with ``Set Id``, or test_labels.csv and validation_labels.csv."""
    one = folder.optional("google2019_nih-chest-xray-labels.csv")
    parts = (
        {"": one}
        if one is not None
        else {
            "validate": folder.table("validation_labels.csv"),
            "test": folder.table("test_labels.csv"),
        }
    )
    tables = []
    for split, file in parts.items():
        table = read_csv(file, ("Image Index", *RELABELLED), (*_PEOPLE, "Set Id"))
        if split == "":
            if "Set Id" not in table:
                raise ReleaseError(
                    f"{file}: expected a column Set Id, found none; is it the table of another version?"
                )
            table["split"] = (
                table["Set Id"].str.lower().map({"val": "validate", "validation": "validate", "test": "test"})
            )
        else:
            table["split"] = split
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    said = table[list(RELABELLED)].apply(lambda column: column.str.upper())
    if table["split"].isna().any() or not said.isin(("YES", "NO", "")).all(axis=None):
        raise ReleaseError(
            f"{' or '.join(map(str, parts.values()))}: expected labels of YES, NO or empty, and a Set Id of "
            "validation or test; is it the table of another version?"
        )
    labels, choices = renamed(said.apply(lambda column: column.map({"YES": 1.0, "NO": 0.0})))
    images = _images(table).assign(split=table["split"])
    return PublicTables(
        title="NIH ChestX-ray14, relabelled by radiologists",
        files=list(parts.values()),
        images=images.join(labels),
        choices=[*choices, "labels: majority of radiologists; an empty cell is not labelled"],
        images_of=("NIH ChestX-ray14",),
    )


def _images(table: pd.DataFrame) -> pd.DataFrame:
    """Images by `PublicTables`, without split."""
    image = table["Image Index"].map(image_id)
    empty = pd.Series("", index=table.index)
    sex = table.get("Patient Gender", table.get("Patient Sex", empty))
    patient = table.get("Patient ID", empty)
    return pd.DataFrame(
        {
            "image": image,
            # 00000013_005: patient 13, the sixth image.
            "patient": patient.where(patient != "", image.str.split("_").str[0]).str.lstrip("0"),
            "study": image,
            "view": table.get("View Position", empty),
            "split": "",
            "sex": sex,
            "age": table.get("Patient Age", empty),
        }
    )


def _boxes(file: Path) -> pd.DataFrame:
    # The header's "Bbox [x,y,w,h],,," splits at its commas, and the rows have no cells for its last three.
    names = {"Bbox [x": "x", "h]": "h"}
    table = read_csv(file, ("Image Index", "Finding Label", "Bbox [x", "y", "w", "h]")).rename(columns=names)
    table = with_numbers(table, ("x", "y", "w", "h"), file)
    table = table.assign(image=table["Image Index"].map(image_id), category=in_common(table["Finding Label"]))
    return table.assign(reader="", image_width=BOX_SIDE, image_height=BOX_SIDE)[BOX]
