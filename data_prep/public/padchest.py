"""PadChest (Bustos et al., Medical Image Analysis 2020): 16-bit PNG files, 174 findings and 19 diagnoses."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd

from data_prep.public.tables import PublicTables, ReleaseFolder, image_id, listed, read_csv
from data_prep.sources.releases import ReleaseError

VIEWS = {"PA": "PA", "AP": "AP", "AP_horizontal": "AP"}
_NAMES = ("PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv", "chest_x_ray_images_labels_160K.csv")
_UNUSABLE = ("exclude", "suboptimal study")
_NOT_FINDINGS = {"normal", "unchanged", "", *_UNUSABLE}


def read(folder: ReleaseFolder) -> PublicTables:
    """The table of 160,861 images; those with labels by physicians are the test split."""
    file = folder.table(*_NAMES)
    columns = ("ImageID", "StudyID", "PatientID", "Projection", "MethodLabel", "Labels")
    table = read_csv(file, (*columns, "PatientSex_DICOM", "PatientBirth", "StudyDate_DICOM"))
    image = table["ImageID"].map(image_id)
    stated = pd.Series([_labels(text, file) for text in table["Labels"]], index=table.index)
    is_read = table["MethodLabel"] == "Physician"
    view = table["Projection"].map(VIEWS)
    # The first that holds. Patients of the test split have no image in training.
    reasons = {
        "Projection is EXCLUDE": table["Projection"] == "EXCLUDE",
        "its view is not frontal": view.isna(),
        "it has no labels": stated.map(len) == 0,
        **{f"labelled {name!r}": _has(stated, name) for name in _UNUSABLE},
        "labelled by a network, of a patient of the test split": (
            ~is_read & table["PatientID"].isin(table.loc[is_read, "PatientID"])
        ),
    }
    reason = pd.Series(np.select(list(reasons.values()), list(reasons), ""), table.index)
    labels, choices = listed(stated.where(reason == ""), (), _NOT_FINDINGS)
    # "unchanged" compares with an earlier image: what is not listed may be there.
    labels = labels.mask((labels == 0) & _has(stated, "unchanged").to_numpy()[:, None])
    born, taken = (
        pd.to_numeric(table[name].str[:4], errors="coerce") for name in ("PatientBirth", "StudyDate_DICOM")
    )
    return PublicTables(
        title="PadChest",
        images=pd.DataFrame(
            {
                "image": image,
                "patient": table["PatientID"],
                "study": table["StudyID"],
                "view": view.fillna(table["Projection"]),
                "split": is_read.map({True: "test", False: "train"}),
                "sex": table["PatientSex_DICOM"],
                "age": (taken - born).map("{:.0f}".format, na_action="ignore").fillna(""),
            }
        ).join(labels),
        left_out={name: why for name, why in zip(image, reason, strict=True) if why},
        choices=[
            *choices,
            "labels: a finding that is not listed counts as absent (choice), and as not labelled beside 'unchanged'",
            "split: labels by physicians are test (choice), the others train",
        ],
    )


def _has(stated: pd.Series, name: str) -> pd.Series:
    return stated.map(lambda names: name in names)


def _labels(text: str, file: Path) -> list[str]:
    """Names in a Python list; [] for an empty cell and "nan", as the release writes it."""
    if text in ("", "nan"):
        return []
    try:
        names = ast.literal_eval(text)
        return list(dict.fromkeys(" ".join(name.split()) for name in names))
    except (ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{file}, column Labels: expected a list of names, found {text[:80]!r}") from error
