"""RSNA Pneumonia Detection Challenge (Shih et al., Radiology: Artificial Intelligence 2019); its images are NIH's."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from data_prep.public.tables import BOX, PublicTables, ReleaseFolder, read_csv, text_of, with_numbers
from data_prep.sources.releases import ReleaseError

FINDING = "Pneumonia"
SIDE = 1024


def read(folder: ReleaseFolder) -> PublicTables:
    """stage_2_train_labels.csv, and for patients pneumonia-challenge-dataset-mappings_2018.json."""
    file = folder.table("stage_2_train_labels.csv")
    table = read_csv(file, ("patientId", "x", "y", "width", "height", "Target"))
    table = with_numbers(table, ("x", "y", "width", "height", "Target"), file)
    if not table["Target"].isin((0.0, 1.0)).all():
        raise ReleaseError(f"{file}, column Target: expected 0 or 1; download it again")
    target = table.groupby("patientId", sort=False)["Target"].max()
    mapping = folder.optional("pneumonia-challenge-dataset-mappings_2018.json")
    patients = _patients(mapping) if mapping is not None else {}
    image = target.index.to_series()
    patient = image.map(patients).astype("object")
    choices = [
        f"labels: Target 1 counts as {FINDING}, Target 0 as its absence (choices); Target 0 includes images with other "
        "abnormalities",
    ]
    if mapping is None:
        choices.append(
            "patients: patientId names an image; pneumonia-challenge-dataset-mappings_2018.json has patients"
        )
    boxes = table[table["Target"] == 1].rename(columns={"patientId": "image", "width": "w", "height": "h"})
    return PublicTables(
        title="RSNA pneumonia",
        files=[file, *([mapping] if mapping else [])],
        images=pd.DataFrame(
            {
                "image": image,
                "patient": patient.where(patient.notna(), image),
                "study": image,
                **dict.fromkeys(("view", "split", "sex", "age"), ""),
                FINDING: target,
            }
        ).reset_index(drop=True),
        boxes=boxes.assign(category=FINDING, reader="", image_width=SIDE, image_height=SIDE)[BOX],
        choices=choices,
        left_out={}
        if mapping is None
        else dict.fromkeys(image[patient.isna()], f"its patient is not in {mapping.name}"),
        names_patients=mapping is not None,
        images_of=("NIH ChestX-ray14",),
    )


def _patients(file: Path) -> dict[str, str]:
    """Image of the challenge -> patient of NIH, from the name of NIH's image (00000013_005.png: patient 13)."""
    try:
        content = json.loads(text_of(file))
        return {row["subset_img_id"]: str(int(row["img_id"].split("_")[0])) for row in content}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(
            f"{file}: expected a list of subset_img_id and img_id, found another form ({error}); download it again"
        ) from error
