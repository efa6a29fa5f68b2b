"""PadChest (Bustos et al., Medical Image Analysis 2020): 16-bit PNG files, 174 findings and 19 diagnoses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from data_prep.public.release_tables import PublicTables, ReleaseFolder, image_id
from data_prep.sources.cells import value_of_cell
from data_prep.sources.finding_names import is_list_of_names, known_names, listed, names_of, with_parents
from data_prep.sources.source_tables import is_placeholder, read_table, require

VIEWS = {"PA": "PA", "AP": "AP", "AP_horizontal": "AP"}
_PROJECTIONS = (*VIEWS, "L", "COSTAL", "EXCLUDE", "UNK")
_METHODS = ("Physician", "RNN_model")
_NAMES = ("PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv", "chest_x_ray_images_labels_160K.csv")
_UNUSABLE = ("exclude", "suboptimal study")
_TOP = ("radiological finding", "differential diagnosis")
NOT_FINDINGS = {"normal", "unchanged", "", *_UNUSABLE, *_TOP}


def read(folder: ReleaseFolder) -> PublicTables:
    """The table of 160,861 images; those with labels by physicians are the test split."""
    file = folder.table(*_NAMES)
    columns = ("ImageID", "StudyID", "PatientID", "Projection", "MethodLabel", "Labels")
    table = read_table(file, (*columns, "PatientSex_DICOM", "PatientBirth", "StudyDate_DICOM"), ("Report",))
    image, reports = table["ImageID"].map(image_id), table.get("Report", pd.Series(dtype="str")).str.strip()
    cells = pd.Series(table["Labels"].unique())
    is_missing = is_placeholder(cells) | (cells == "")
    of_cell = dict(zip(cells, cells.mask(is_missing, "[]").map(value_of_cell), strict=True))
    is_list = table["Labels"].map({cell: is_list_of_names(value) for cell, value in of_cell.items()})
    require(table["Labels"], is_list, "a list of names", file)
    names = table["Labels"].map(of_cell)
    stated = known_names(names, ("", *names_of("PadChest"), *_TOP), f"{file}, column Labels")
    for column, known in (("MethodLabel", _METHODS), ("Projection", _PROJECTIONS)):
        require(table[column], table[column].isin(known), " | ".join(known), file)
    is_read = table["MethodLabel"] == "Physician"
    view = table["Projection"].map(VIEWS)
    # The first that holds. Patients of the test split have no image in training.
    has = {name: table.index.isin(stated.index[stated == name]) for name in (*_UNUSABLE, "unchanged")}
    reasons: dict[str, Any] = {
        "Projection is EXCLUDE": table["Projection"] == "EXCLUDE",
        "its view is not frontal": view.isna(),
        "it has no labels": ~table.index.isin(stated.index),
        **{f"labelled {name!r}": has[name] for name in _UNUSABLE},
        "labelled by a network, of a patient of the test split": (
            ~is_read & table["PatientID"].isin(table.loc[is_read, "PatientID"])
        ),
    }
    reason = pd.Series(np.select(list(reasons.values()), list(reasons), ""), table.index)
    used = stated[stated.index.isin(reason.index[reason == ""])]
    labels, choices = listed(used.map(with_parents(used.unique())).explode(), len(table), (), NOT_FINDINGS)
    # "unchanged" compares with an earlier image: what is not listed may be there.
    labels = labels.mask((labels == 0) & has["unchanged"][:, None])
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
                "age": (taken - born).map("{:.0f}".format).replace("nan", ""),
                **({"report": reports.mask(is_placeholder(reports), "")} if len(reports) else {}),
            }
        ).join(labels),
        language="es",
        left_out={name: why for name, why in zip(image, reason, strict=True) if why},
        choices=[
            *choices,
            "labels: a finding counts as present beside those below it in PadChest's tree (tuberculosis sequelae as "
            "Tuberculosis: choice); one that is not listed as absent (choice), and as not labelled beside 'unchanged'",
            "split: labels by physicians are test (choice), the others train",
        ],
    )
