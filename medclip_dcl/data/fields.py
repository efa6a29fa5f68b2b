"""Fields of sentences and images that an objective asks for by name, from the tables of a prepared data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from medclip_dcl.errors import UserError
from medclip_dcl.findings import CHEXPERT
from medclip_dcl.prepared import PreparedDataError, PreparedSet, report_embedding

SENTENCE_FIELDS = {"log_p": "log_p", "rho": "classes", "sentence_share": "classes", "class_id": "classes"}
"""Fields of anchors (sentences) by name -> the table that they stand in."""

IMAGE_FIELDS = {"labels": "labels", "text_embedding": "text_embedding", "image_classes": "image_classes"}
"""Fields of candidates (images) by name -> the table that they stand in."""


def check_fields(of_sentences: Sequence[str], of_images: Sequence[str]) -> None:
    """Refuse a field that the objective asks for and no table has.

    Raises:
        ValueError: names it, and what there is.
    """
    for kind, names, there in (
        ("sentences", of_sentences, SENTENCE_FIELDS),
        ("images", of_images, IMAGE_FIELDS),
    ):
        if unknown := [name for name in names if name not in there]:
            raise UserError(
                f"the objective asks for a field {unknown[0]!r} of {kind}, but {kind} have {sorted(there)}"
            )


def sentence_fields(prepared: PreparedSet, names: Sequence[str], log_p: str | None = None) -> pd.DataFrame:
    """Columns of the sentence tables, by sentence_id.

    Args:
        prepared: the set.
        names: of `SENTENCE_FIELDS`.
        log_p: which scores; None for the only ones.

    Raises:
        PreparedDataError: the table is not there; names the command that makes it.
    """
    columns = {}
    for name in names:
        frame = prepared.log_p(log_p) if name == "log_p" else prepared.table(SENTENCE_FIELDS[name])
        columns[name] = frame.set_index("sentence_id")[name]
    return pd.DataFrame(columns)


def image_fields(
    prepared: PreparedSet,
    names: Sequence[str],
    images: pd.DataFrame,
    text_embedding: str | None = None,
) -> dict[str, Tensor]:
    """Fields of images by name, (image, ...) in the order of `images`.

    labels: (image, 14), the CheXpert columns of the study, NaN where the labeller says nothing. text_embedding:
    (image, dim), the mean of the report's sentence embeddings. image_classes: (image, class), 1 where the class is true
    of the image.

    Args:
        prepared: the set.
        names: of `IMAGE_FIELDS`.
        images: rows of images.parquet, of studies with a report.
        text_embedding: which embeddings; None for the only ones.

    Raises:
        PreparedDataError: the table is not there, or says nothing about any of the images.
    """
    fields = {}
    for name in names:
        if name == "labels":
            fields[name] = _labels(prepared, images)
        elif name == "text_embedding":
            fields[name] = _report_embeddings(prepared, images, text_embedding)
        else:
            fields[name] = _image_classes(prepared, images)
    return fields


def _labels(prepared: PreparedSet, images: pd.DataFrame) -> Tensor:
    # A few studies of the release have no row: as good as a row of blanks.
    rows = prepared.table("labels").set_index("study_id")[list(CHEXPERT)].reindex(images["study_id"])
    if not rows.notna().any(axis=None):
        raise PreparedDataError(
            f"{prepared.folder}: labels.parquet has no CheXpert label for any of {len(rows)} images, and the objective "
            "compares studies by their labels; prepare the set from a release with mimic-cxr-2.0.0-chexpert.csv"
        )
    return torch.tensor(rows.to_numpy(), dtype=torch.float32)


def _report_embeddings(prepared: PreparedSet, images: pd.DataFrame, name: str | None) -> Tensor:
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(images["study_id"])]
    found = report_embedding(prepared.text_embedding(name), reports)
    return torch.from_numpy(found.embedding)[np.searchsorted(found.study_id, images["study_id"].to_numpy())]


def _image_classes(prepared: PreparedSet, images: pd.DataFrame) -> Tensor:
    table = prepared.table("image_classes")
    classes = int(max(table["class_id"].max(), prepared.table("classes")["class_id"].max())) + 1
    row_of = pd.Series(np.arange(len(images)), index=images["dicom_id"])
    table = table[table["dicom_id"].isin(row_of.index)]
    found = torch.zeros(len(images), classes, dtype=torch.uint8)
    row, column = row_of[table["dicom_id"]].to_numpy(), table["class_id"].to_numpy(copy=True)
    found[torch.from_numpy(row), torch.from_numpy(column)] = 1
    return found
