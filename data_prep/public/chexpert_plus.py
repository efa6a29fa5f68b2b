"""CheXpert Plus (Chambon et al., arXiv 2405.19538): CheXpert's images as PNG or DICOM files, with their reports."""

from __future__ import annotations

from typing import Any

import pandas as pd

from data_prep.public.chexpert import image_rows
from data_prep.public.release_tables import PublicTables, ReleaseFolder, image_id
from data_prep.sources.rows import SPLIT_NAMES
from data_prep.sources.source_tables import read_form, read_table, require
from medclip_dcl.common.findings import CHEXPERT

_LABELS = ("impression_fixed.json", "report_fixed.json", "findings_fixed.json")
_TEXTS = {"section_findings": "findings", "section_impression": "impression"}
_PEOPLE = {"path_to_image": "Path", "ap_pa": "AP/PA", "sex": "Sex", "age": "Age"}
_END = "section_end_of_impression"


def read(folder: ReleaseFolder) -> PublicTables:
    """df_chexpert_plus_240401.csv, and labels of the first of `_LABELS` that is there."""
    file, texts = folder.table("df_chexpert_plus_240401.csv"), [*_TEXTS.values()]
    table = read_table(file, (*_PEOPLE, *_TEXTS, _END, "split")).rename(columns=_PEOPLE | _TEXTS)
    require(table["split"], table["split"].isin(("train", "valid")), "train | valid", file)
    rows = image_rows(table, file).assign(split=table["split"].map(SPLIT_NAMES))
    labels, of_labels = pd.DataFrame(), folder.optional(*_LABELS)
    if of_labels is not None:
        form = "lines of path_to_image and CheXpert's findings, 1, 0, -1 or null"
        labels = read_form(of_labels, form, _labels, lines=True)
    copies = table[texts].join(labels.reindex(rows["image"]).set_axis(rows.index))
    # A study has one report, anonymised once for each image.
    first = copies[~rows["study"].duplicated()].set_axis(rows["study"].unique()).reindex(rows["study"])
    first.index = rows.index
    differs = (copies.ne(first) & (copies.notna() | first.notna())).groupby(rows["study"]).any()
    n_texts, n_labels = (differs[columns].any(axis=1).sum() for columns in (texts, [*labels]))
    n_end = ((table[texts] == "").all(axis=1) & (table[_END] != "")).sum()
    return PublicTables(
        title="CheXpert Plus",
        images=rows.join(first),
        left_out=dict.fromkeys(rows.loc[rows["view"] == "LATERAL", "image"], "its view is not frontal"),
        choices=[
            "reports: findings and impression of a study's first row (choice); studies whose rows have other texts: "
            f"{n_texts:,}, other labels: {n_labels:,}; rows with text in {_END} alone, not read (choice): {n_end:,}",
            f"labels: mined from reports in all splits, {of_labels.name if of_labels else 'none found'} (choice)",
            "images: of one that is there as PNG and as DICOM file, the PNG (choice)",
        ],
        images_of=("CheXpert",),
        other_endings=(".dcm",),
    )


def _labels(records: list[Any]) -> pd.DataFrame:
    table = pd.DataFrame(records).set_index("path_to_image").rename(index=image_id)
    labels = table[[name for name in CHEXPERT if name in table]].astype("float64")
    if (
        labels.empty
        or labels.index.has_duplicates
        or not labels.isin((1, 0, -1)).where(labels.notna(), True).all(axis=None)
    ):
        raise ValueError("no findings, other labels or an image twice")
    return labels
