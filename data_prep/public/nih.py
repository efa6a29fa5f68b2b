"""NIH ChestX-ray14 (Wang et al., CVPR 2017), and its relabels by radiologists (Majkowska et al., Radiology 2020)."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from data_prep.public.release_tables import BOX, PublicTables, ReleaseFolder, image_id, with_numbers
from data_prep.sources.finding_names import in_common, known_names, listed, names_of, renamed
from data_prep.sources.source_tables import OWN_FILE, read_table, require, text_of
from data_prep.sources.spellings import as_spelled
from medclip_dcl.common.errors import UserError

FINDINGS, RELABELLED = names_of("NIH ChestX-ray14"), names_of("NIH ChestX-ray14, relabelled")
BOX_SIDE = 1024
"""Boxes are in pixels of the release's images, 1024 x 1024."""

_PEOPLE = {
    "Patient ID": "patient",
    "Patient Age": "age",
    "Patient Gender": "sex",
    "Patient Sex": "sex",
    "View Position": "view",
}


def read(folder: ReleaseFolder) -> PublicTables:
    """The release's Data_Entry_2017_v2020.csv, BBox_List_2017.csv, train_val_list.txt and test_list.txt."""
    entry = folder.table("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
    table = read_table(entry, ("Image Index", "Finding Labels", "Patient ID"), [*_PEOPLE])
    images = _images(table)
    labels, choices = _labels(table["Finding Labels"], entry)
    left_out = {}
    train, test = (folder.optional(name) for name in ("train_val_list.txt", "test_list.txt"))
    if train is not None and test is not None:
        in_train, in_test = (map(image_id, text_of(file).split()) for file in (train, test))
        split_of = dict.fromkeys(as_spelled(in_train, images["image"]), "train")
        tested = dict.fromkeys(as_spelled(in_test, images["image"]), "test")
        if both := split_of.keys() & tested.keys():
            raise UserError(
                f"{train} and {test}: expected each image in one of them, found {min(both)} in both; {OWN_FILE}"
            )
        images["split"] = images["image"].map(split_of | tested).fillna("")
        unlisted = images.loc[images["split"] == "", "image"]
        left_out = dict.fromkeys(unlisted, "its name is in neither train_val_list.txt nor test_list.txt")
    else:
        choices.append("split: drawn, since train_val_list.txt or test_list.txt is missing")
    boxed = folder.optional("BBox_List_2017.csv")
    return PublicTables(
        title="NIH ChestX-ray14",
        images=images.join(labels),
        boxes=None if boxed is None else _boxes(boxed),
        left_out=left_out,
        choices=choices,
    )


_FOUR = "four_findings_expert_labels"
_RELABELS = {
    split: tuple(f"{_FOUR}{between}{name}_labels.csv" for between in "/_") + (f"{name}_labels.csv",)
    for split, name in (("validate", "validation"), ("test", "test"))
}
"""In Google's folder; renamed, as copies of it have them; or alone."""


def _labels(cells: pd.Series, file: Path) -> tuple[pd.DataFrame, list[str]]:
    """Labels by names with "|" between them, and what was chosen."""
    named = known_names(cells.str.split("|"), ("", "No Finding", *FINDINGS), f"{file}, column Finding Labels")
    labels, choices = listed(named, len(cells), FINDINGS, ("", "No Finding"))
    is_empty = cells.str.strip(" |") == ""
    is_both = labels.any(axis=1) & labels.index.isin(named.index[named == "No Finding"])
    require(cells, ~(is_both | bool(is_empty.all())), "names of findings, or 'No Finding' alone", file)
    choices.append("labels: mined from reports; a finding that is not listed counts as absent (choice)")
    if is_empty.any():
        choices.append(
            f"labels: {is_empty.sum():,} of {len(cells):,} images have an empty cell and are not labelled"
        )
    labels.loc[is_empty] = math.nan
    return labels, choices


def read_relabels(folder: ReleaseFolder) -> PublicTables:
    """Google's relabels of four findings: one table with ``Set Id``, or test_labels.csv and validation_labels.csv.

    Another test_labels.csv, in all_findings_expert_labels, has other findings.
    """
    one = folder.optional("google2019_nih-chest-xray-labels.csv")
    parts = {"": one} if one else {split: folder.table(*names) for split, names in _RELABELS.items()}
    files = [*parts.values()]
    columns = ("Image Index", *RELABELLED, *(("Set Id",) if one else ()))
    table = pd.concat(
        [read_table(file, columns, [*_PEOPLE]).assign(split=split) for split, file in parts.items()],
        ignore_index=True,
    )
    split = table["split"]
    if one:
        split = table["Set Id"].str.lower().str[:3].map({"val": "validate", "tes": "test"})
    said = table[list(RELABELLED)].apply(lambda column: column.str.upper())
    if split.isna().any() or not said.isin(("YES", "NO", "")).all(axis=None):
        raise UserError(
            f"{' or '.join(map(str, files))}: expected labels of YES, NO or empty, and a Set Id of validation or test; "
            f"{OWN_FILE}"
        )
    labels, choices = renamed(said.apply(lambda column: column.map({"YES": 1.0, "NO": 0.0})))
    return PublicTables(
        title="NIH ChestX-ray14, relabelled by radiologists",
        images=_images(table).assign(split=split).join(labels),
        choices=[*choices, "labels: majority of radiologists; an empty cell is not labelled"],
        images_of=("NIH ChestX-ray14",),
    )


def _images(table: pd.DataFrame) -> pd.DataFrame:
    """Images by `PublicTables`, without split."""
    table = table.rename(columns=_PEOPLE)
    image = table["Image Index"].map(image_id)
    # 00000013_005: patient 13, the sixth image.
    patient = table.get("patient", image.str.partition("_")[0]).str.lstrip("0")
    people = [name for name in ("view", "sex", "age") if name in table]
    return table[people].assign(image=image, patient=patient, split="")


def _boxes(file: Path) -> pd.DataFrame:
    # The header's "Bbox [x,y,w,h],,," splits at its commas, and the rows have no cells for its last three.
    names = {"Bbox [x": "x", "h]": "h"}
    table = read_table(file, ("Image Index", "Finding Label", "Bbox [x", "y", "w", "h]")).rename(
        columns=names
    )
    table = with_numbers(table, ("x", "y", "w", "h"), file)
    findings = known_names(table["Finding Label"], FINDINGS, f"{file}, column Finding Label")
    table = table.assign(image=table["Image Index"].map(image_id), category=in_common(findings))
    return table.assign(reader="", image_width=BOX_SIDE, image_height=BOX_SIDE)[BOX]
