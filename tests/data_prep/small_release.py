"""A release in the layout of MIMIC-CXR-JPG, small enough to know by heart: twelve images of seven patients."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from medclip_dcl.common.findings import CHEXPERT

WIDTH, HEIGHT = 34, 21


def dicom(number: int) -> str:
    return f"{number:08x}-00000000-00000000-00000000-0000000{number % 10}"


# dicom number -> patient, study, view, official split
IMAGES = {
    1: (10000001, 50000001, "PA", "train"),
    2: (10000001, 50000001, "LATERAL", "train"),
    3: (10000001, 50000001, "AP", "train"),
    4: (10000001, 50000002, "AP", "train"),
    5: (10000002, 50000003, "PA", "validate"),
    6: (10000003, 50000004, "AP", "test"),
    7: (10000004, 50000005, "AP", "train"),  # patient with a box in image 7, none in image 8
    8: (10000004, 50000006, "PA", "train"),
    9: (10000005, 50000007, "AP", "test"),  # patient with a box in image 9, none in image 10
    10: (10000005, 50000008, "PA", "test"),
    11: (10000006, 50000009, "PA", "validate"),  # patient with a box
    12: (20000007, 50000010, "PA", "train"),
}
TITLE = "                                 FINAL REPORT\n"
REPORTS = {
    50000001: TITLE
    + " FINDINGS: \n \n Heart size is\n normal.  No effusion.\n \n IMPRESSION:  1. No effusion. 2. ___.\n",
    50000002: TITLE + " IMPRESSION:  No effusion.\n",
    50000010: TITLE + " Portable film.\n \n Lungs are clear.\n",
}
BOXES = {7: (1, 2, 10, 5), 9: (-4, 15, 20, 30), 11: (0, 0, 34, 21)}
# study -> Cardiomegaly, Edema
LABELS = {
    50000003: (1, 0),
    50000004: (0, -1),
    50000007: (1, None),
    50000008: (0, 1),
    50000009: (1, 1),
    50000001: (1, 1),
}


def table(file: Path, frame: pd.DataFrame) -> None:
    file.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))


def image_path(raw: Path, number: int) -> Path:
    patient, study, _, _ = IMAGES[number]
    return raw / f"files/p{str(patient)[:2]}/p{patient}/s{study}/{dicom(number)}.jpg"


def report_path(raw: Path, study: int) -> Path:
    patient = next(patient for patient, of, _, _ in IMAGES.values() if of == study)
    return raw / f"files/p{str(patient)[:2]}/p{patient}/s{study}.txt"


def write_release(folder: Path) -> Path:
    """Write the release, with MS-CXR's file beside it (``boxes.json``)."""
    folder.mkdir()
    rows = pd.DataFrame(
        [(dicom(n), *of) for n, of in IMAGES.items()],
        columns=["dicom_id", "subject_id", "study_id", "ViewPosition", "split"],
    )
    table(
        folder / "mimic-cxr-2.0.0-metadata.csv.gz",
        rows.assign(Rows=HEIGHT, Columns=WIDTH).drop(columns="split"),
    )
    table(folder / "mimic-cxr-2.0.0-split.csv.gz", rows[["dicom_id", "study_id", "subject_id", "split"]])
    labels = pd.DataFrame({"study_id": list(LABELS)}).reindex(columns=["subject_id", "study_id", *CHEXPERT])
    labels["Cardiomegaly"], labels["Edema"] = zip(*LABELS.values(), strict=True)
    table(folder / "mimic-cxr-2.0.0-chexpert.csv.gz", labels.astype({"Edema": float}))
    for number, (_, study, _, _) in IMAGES.items():
        image_path(folder, number).parent.mkdir(parents=True, exist_ok=True)
        shades = np.linspace(0, 20 * number, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint8)
        Image.fromarray(shades).save(image_path(folder, number))
        report = REPORTS.get(study, TITLE + f" FINDINGS:  Heart size is normal.\n View {number} of ___.\n")
        report_path(folder, study).write_text(report)
    content = {
        "images": [
            {
                "id": n,
                "file_name": f"{dicom(n)}.jpg",
                "path": str(image_path(Path(), n)),
                "width": WIDTH,
                "height": HEIGHT,
            }
            for n in BOXES
        ],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 5, "bbox": list(box), "label_text": f"effusion {n}"}
            for n, box in BOXES.items()
        ],
        "categories": [{"id": 5, "name": "Pleural Effusion"}],
    }
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder
