"""PadChest (Bustos et al., Medical Image Analysis 2020): 16-bit PNG files, 174 findings and 19 diagnoses."""

from __future__ import annotations

import ast
from pathlib import Path

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
    table = read_csv(file, columns, ("PatientSex_DICOM", "PatientBirth", "StudyDate_DICOM"))
    image = table["ImageID"].map(image_id)
    stated = pd.Series([_labels(text, file) for text in table["Labels"]], index=table.index)
    is_read = table["MethodLabel"] == "Physician"
    # Patients of the test split have no image in training: their rows labelled by a network are left out.
    in_both = ~is_read & table["PatientID"].isin(table.loc[is_read, "PatientID"])
    reasons = {
        "Projection is EXCLUDE": table["Projection"] == "EXCLUDE",
        "its view is not frontal": ~table["Projection"].isin(VIEWS),
        "it has no labels": stated.map(len) == 0,
        **{f"labelled {name!r}": stated.map(lambda names, name=name: name in names) for name in _UNUSABLE},
        "labelled by a network, of a patient of the test split": in_both,
    }
    left_out: dict[str, str] = {}
    for reason, holds in reasons.items():
        left_out = {**dict.fromkeys(image[holds], reason), **left_out}
    is_used = ~image.isin(left_out)
    findings = stated.where(is_used, "").map(lambda names: [one for one in names if one not in _NOT_FINDINGS])
    labels, choices = listed(image, findings)
    # "unchanged" compares with an earlier image: what is not listed may be there.
    is_unchanged = stated.map(lambda names: "unchanged" in names).to_numpy()
    labels = labels.mask((labels == 0) & is_unchanged[:, None])
    birth = pd.to_numeric(table.get("PatientBirth", ""), errors="coerce")
    year = pd.to_numeric(
        table.get("StudyDate_DICOM", pd.Series("", index=table.index)).str[:4], errors="coerce"
    )
    age = (year - birth).map(lambda years: "" if pd.isna(years) else f"{years:.0f}")
    return PublicTables(
        title="PadChest",
        files=[file],
        images=pd.DataFrame(
            {
                "image": image,
                "patient": table["PatientID"],
                "study": table["StudyID"],
                "view": table["Projection"].map(VIEWS).fillna(table["Projection"]),
                "split": is_read.map({True: "test", False: "train"}),
                "sex": table.get("PatientSex_DICOM", ""),
                "age": age,
            }
        ).join(labels),
        left_out=left_out,
        choices=[
            *choices,
            "labels: a finding that is not listed counts as absent (choice), and as not labelled beside 'unchanged'",
            "split: labels by physicians are test (choice), the others train",
        ],
    )


def _labels(text: str, file: Path) -> list[str]:
    """Names in a Python list; [] for an empty cell and "nan", as the release writes it."""
    if text in ("", "nan"):
        return []
    try:
        names = ast.literal_eval(text)
        return list(dict.fromkeys(" ".join(name.split()) for name in names))
    except (ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise ReleaseError(f"{file}, column Labels: expected a list of names, found {text[:80]!r}") from error
