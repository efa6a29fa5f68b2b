"""Tables of a phantom: those of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0, and the truth."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.phantom.catalogue import Catalogue, catalogue
from data_prep.phantom.drawing import Box
from data_prep.phantom.findings import CATEGORIES
from data_prep.phantom.studies import PlannedStudy
from medclip_dcl.common.files import write_bytes
from medclip_dcl.common.findings import CHEXPERT

METADATA_COLUMNS = (
    *(
        "dicom_id",
        "subject_id",
        "study_id",
        "PerformedProcedureStepDescription",
        "ViewPosition",
        "Rows",
        "Columns",
    ),
    *("StudyDate", "StudyTime", "ProcedureCodeSequence_CodeMeaning", "ViewCodeSequence_CodeMeaning"),
    "PatientOrientationCodeSequence_CodeMeaning",
)
SPLIT_COLUMNS = ("dicom_id", "study_id", "subject_id", "split")
LABEL_COLUMNS = ("subject_id", "study_id", *CHEXPERT)
BOX_COLUMNS = [
    "dicom_id",
    "category_name",
    "label_text",
    "path",
    "x",
    "y",
    "w",
    "h",
    "image_width",
    "image_height",
]
_VIEW_CODES = {
    "AP": "antero-posterior",
    "PA": "postero-anterior",
    "LATERAL": "lateral",
    "LL": "left lateral",
    "": "",
}


@dataclass(frozen=True)
class ImageRecord:
    """One picture of a study."""

    dicom_id: str
    path: str
    view: str
    rows: int
    columns: int

    @property
    def is_frontal(self) -> bool:
        return self.view in ("AP", "PA")


@dataclass(frozen=True)
class BoxRecord:
    """One box with its phrase."""

    dicom_id: str
    category: str
    phrase: str
    box: Box


@dataclass(frozen=True)
class StudyRecord:
    """The data of a study for the tables: classes that hold, of all sentences, and of the distinct ones."""

    planned: PlannedStudy
    date: str
    time: str
    images: tuple[ImageRecord, ...]
    chexpert: dict[str, float]
    negbio: dict[str, float]
    holding: tuple[int, ...]
    said: tuple[int, ...]
    anchors: tuple[int, ...]
    boxes: list[BoxRecord] = field(default_factory=list)


def write_tables(folder: Path, records: Sequence[StudyRecord]) -> None:
    pairs = [(record, image) for record in records for image in record.images]
    name = "mimic-cxr-2.0.0"
    write_gzip_csv(folder / f"{name}-metadata.csv.gz", METADATA_COLUMNS, (_metadata(r, i) for r, i in pairs))
    write_gzip_csv(
        folder / f"{name}-split.csv.gz",
        SPLIT_COLUMNS,
        ([i.dicom_id, r.planned.study_id, r.planned.subject_id, r.planned.split] for r, i in pairs),
    )
    for labeller in ("chexpert", "negbio"):
        rows = (
            [r.planned.subject_id, r.planned.study_id, *(getattr(r, labeller).get(c, "") for c in CHEXPERT)]
            for r in records
        )
        write_gzip_csv(folder / f"{name}-{labeller}.csv.gz", LABEL_COLUMNS, rows)
    _write_boxes(folder, records)


def _metadata(record: StudyRecord, image: ImageRecord) -> list[object]:
    has_lateral = any(not i.is_frontal for i in record.images)
    is_portable = record.images[0].view == "AP"
    procedure = (
        "CHEST (PORTABLE AP)"
        if is_portable
        else "CHEST (PA AND LAT)"
        if has_lateral
        else "CHEST (SINGLE VIEW)"
    )
    return [
        image.dicom_id,
        record.planned.subject_id,
        record.planned.study_id,
        procedure,
        image.view,
        image.rows,
        image.columns,
        record.date,
        record.time,
        procedure,
        _VIEW_CODES[image.view],
        "" if is_portable else "Erect",
    ]


def _write_boxes(folder: Path, records: Sequence[StudyRecord]) -> None:
    shown = {i.dicom_id: i for record in records for i in record.images}
    boxes = [box for record in records for box in record.boxes]
    numbers = {dicom_id: n for n, dicom_id in enumerate(dict.fromkeys(b.dicom_id for b in boxes))}
    value = {
        "info": {"description": "boxes of a digital phantom (no patients) in the layout of MS-CXR v1.0.0"},
        "images": [
            {
                "id": n,
                "file_name": f"{dicom_id}.jpg",
                "path": shown[dicom_id].path,
                "width": shown[dicom_id].columns,
                "height": shown[dicom_id].rows,
            }
            for dicom_id, n in numbers.items()
        ],
        "annotations": [
            {
                "id": n,
                "image_id": numbers[b.dicom_id],
                "category_id": CATEGORIES.index(b.category),
                "bbox": list(b.box),
                "label_text": b.phrase,
            }
            for n, b in enumerate(boxes)
        ],
        "categories": [{"id": n, "name": name} for n, name in enumerate(CATEGORIES)],
    }
    write_json(folder / "MS_CXR_Local_Alignment_v1.0.0.json", value)
    rows = (
        [b.dicom_id, b.category, b.phrase, shown[b.dicom_id].path, *b.box]
        + [shown[b.dicom_id].columns, shown[b.dicom_id].rows]
        for b in boxes
    )
    write_bytes(_csv_bytes(BOX_COLUMNS, rows), folder / "MS_CXR_Local_Alignment_v1.0.0.csv", durable=False)


def write_truth(truth: Path, records: Sequence[StudyRecord]) -> None:
    classes = catalogue()
    write_bytes(_csv_bytes(*_class_table(classes, records)), truth / "classes.csv", durable=False)
    write_bytes(_csv_bytes(("text", "class_id"), classes.sentences()), truth / "sentences.csv", durable=False)
    rows = ([i.dicom_id, c] for r in records for i in r.images for c in r.holding)
    write_bytes(_csv_bytes(("dicom_id", "class_id"), rows), truth / "image_classes.csv", durable=False)


def _class_table(
    classes: Catalogue, records: Sequence[StudyRecord]
) -> tuple[tuple[str, ...], Iterator[list[object]]]:
    """rho and mention_share over frontal training images, sentence_share over sentences of training reports."""
    holds: Counter[int] = Counter()
    mentioned: Counter[int] = Counter()
    sentences: Counter[int] = Counter()
    images = 0
    for record in records:
        if record.planned.split != "train":
            continue
        frontal = sum(image.is_frontal for image in record.images)
        images += frontal
        sentences.update(record.said)
        holds.update({c: frontal for c in record.holding})
        mentioned.update({c: frontal for c in set(record.said)})
    total = sum(sentences.values())
    rows = (
        [c.class_id, c.name, holds[c.class_id] / images]
        + [sentences[c.class_id] / total, mentioned[c.class_id] / images]
        for c in classes.classes
    )
    return ("class_id", "name", "rho", "sentence_share", "mention_share"), rows


def reached(records: Sequence[StudyRecord]) -> dict[str, Any]:
    """Realised rates of the training studies of a phantom.

    Returns:
        anchors: number of distinct sentences of each report, added up; false_negatives: the mean of their rho, and
        quartiles; findings: CheXpert column -> share of the studies of which it is true.
    """
    classes = catalogue()
    training = [record for record in records if record.planned.split == "train"]
    rho = np.array([row[2] for row in _class_table(classes, training)[1]])
    of_anchors = rho[[c for record in training for c in record.anchors]]
    stating = {
        column: {c.class_id for c in classes.classes if c.labels.get(column) == 1.0} for column in CHEXPERT
    }
    return {
        "anchors": len(of_anchors),
        "false_negatives": round(float(of_anchors.mean()), 4),
        "quartiles": np.quantile(of_anchors, (0.25, 0.5, 0.75)).round(4).tolist(),
        "findings": {
            column: round(float(np.mean([not ids.isdisjoint(record.holding) for record in training])), 4)
            for column, ids in stating.items()
            if ids
        },
    }


def write_json(file: Path, value: object) -> None:
    write_bytes((json.dumps(value, indent=2) + "\n").encode(), file)


def _csv_bytes(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def write_gzip_csv(file: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    # No time stamp, so that runs give the same bytes.
    write_bytes(gzip.compress(_csv_bytes(columns, rows), mtime=0), file)
