"""PadChest-GR (de Castro et al., NEJM AI 2025): sentences of PadChest's reports with boxes of two readers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data_prep.public.padchest import NOT_FINDINGS
from data_prep.public.release_tables import BOX, PublicTables, ReleaseFolder, image_id
from data_prep.sources import finding_names
from data_prep.sources.rows import SPLIT_NAMES
from data_prep.sources.source_tables import read_form, read_table, require

_READERS = {"boxes": "1", "extra_boxes": "2"}
_BEYOND = 1e-3  # of a side: boxes that were drawn up to an edge; they are cut
_FORM = "studies of StudyID, ImageID and findings (sentence_en, sentence_es, abnormal, boxes, labels)"
_COLUMNS = {"PatientID": "patient", "split": "split", "PatientSex_DICOM": "sex", "PatientAge": "age"}


def read(folder: ReleaseFolder, language: str = "en") -> PublicTables:
    """grounded_reports_20240819.json, in this language, and master_table.csv (or .zip)."""
    file = folder.table("grounded_reports_20240819.json")
    of_table = folder.table("master_table.csv", "master_table.csv.zip", "master_table.zip")
    table = read_table(of_table, ("StudyID", "ImageID", *_COLUMNS, "label"))
    table = table.rename(columns={"StudyID": "study", "ImageID": "image", **_COLUMNS})
    require(table["split"], table["split"].isin(SPLIT_NAMES), "train | validation | test", of_table)
    for name in ("image", "patient", "split"):
        is_one = table.groupby("study")[name].transform("nunique") == 1
        require(table[name], is_one, "one value for each study", of_table)
    studies, found = read_form(file, _FORM, partial(_read, language=language))
    rows = studies.merge(table.drop_duplicates("study"), "left", ["study", "image"]).drop(columns="label")
    require(rows["image"], rows["split"].notna(), f"studies and images of {of_table.name}", file)
    rows["image"] = rows["image"].map(image_id)
    has_text, is_positive = found["text"] != "", found["section"] == "positive"
    n_boxes, said = found["boxes"].map(len), found[has_text].groupby("image")[["section", "text"]]
    boxes, n_cut = _boxes(found[is_positive], file)
    places = dict(zip(rows["study"], rows.index, strict=True))
    of_sentences = found[is_positive].set_index("study")["labels"].explode().dropna()
    named = pd.concat([table.set_index("study")["label"], of_sentences]).rename(places)
    named = _names(named[named.index.isin(rows.index)])
    others = ", ".join(sorted({*named} - NOT_FINDINGS - {*finding_names.names_of("PadChest")})) or "none"
    labels, choices = finding_names.listed(
        named.map(finding_names.with_parents({*named})).explode(), len(rows), (), NOT_FINDINGS
    )
    return PublicTables(
        title="PadChest-GR",
        images=rows.assign(view="FRONTAL", split=rows["split"].map(SPLIT_NAMES)).join(labels),
        boxes=boxes,
        sentences={str(image): [*of.itertuples(index=False, name=None)] for image, of in said},
        language=language,
        choices=[
            *choices,
            "labels: of radiologists, and above them in PadChest's tree; a finding that no row or positive sentence of "
            f"the study lists is absent (choice); findings that PadChest does not list: {others}",
            f"sentences ({language}): negative {(~is_positive).sum():,}, positive {is_positive.sum():,}, of which "
            f"without a box {(is_positive & (n_boxes == 0)).sum():,}; without text {(~has_text).sum():,}",
            f"boxes: {len(boxes):,}, category by the first label (choice); cut at the image's edge: {n_cut:,}; of "
            f"negative sentences, not used: {n_boxes[~is_positive].sum():,}",
        ],
        images_of=("PadChest",),
    )


def _read(records: list[Any], language: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The studies, and their sentences with labels and boxes, as (reader, x1, y1, x2, y2)."""
    studies, rows = [], []
    for study in records:
        studies.append((name := str(study["StudyID"]), image := str(study["ImageID"])))
        for finding in study["findings"] or ():
            labels, is_positive = finding.get("labels") or [], finding["abnormal"]
            if not (isinstance(is_positive, bool) and finding_names.is_list_of_names(labels)):
                raise TypeError(
                    f"study {name}: abnormal is not true or false, or labels are not a list of names"
                )
            drawn = [(reader, box) for key, reader in _READERS.items() for box in finding.get(key) or ()]
            boxes = [
                (reader, float(x1), float(y1), float(x2), float(y2)) for reader, (x1, y1, x2, y2) in drawn
            ]
            text = " ".join((finding.get(f"sentence_{language}") or "").split())
            rows.append(
                (name, image_id(image), "positive" if is_positive else "negative", text, labels, boxes)
            )
    columns = ["study", "image", "section", "text", "labels", "boxes"]
    return pd.DataFrame(studies, columns=columns[:2]), pd.DataFrame(rows, columns=columns)


def _boxes(sentences: pd.DataFrame, file: Path) -> tuple[pd.DataFrame, int]:
    """Boxes as shares of the image, and the number of those that were cut to it."""
    drawn = sentences.explode("boxes").dropna(subset="boxes")
    shares = np.array([box[1:] for box in drawn["boxes"]], dtype="float64").reshape(-1, 4)
    beyond = np.maximum(-shares, shares - 1).max(axis=1, initial=0)
    require(drawn["study"], beyond <= _BEYOND + 1e-9, "boxes in shares of the image's sides, 0 to 1", file)
    x1, y1, x2, y2 = shares.clip(0, 1).T
    category = finding_names.in_common(_names(drawn["labels"].map(lambda labels: [*labels, "unlabelled"][0])))
    boxes = drawn.assign(category=category, reader=[box[0] for box in drawn["boxes"]], phrase=drawn["text"])
    boxes = boxes.assign(x=x1, y=y1, w=x2 - x1, h=y2 - y1, image_width=1.0, image_height=1.0)
    return boxes[[*BOX, "phrase"]].reset_index(drop=True), int((beyond > 0).sum())


def _names(labels: pd.Series) -> pd.Series:
    """Labels as PadChest spells them; others keep their own names."""
    known = {finding_names.plain_finding(name): name for name in finding_names.names_of("PadChest")}
    return labels.map(
        {
            name: known.get(finding_names.plain_finding(name), " ".join(name.split()))
            for name in labels.unique()
        }
    )
