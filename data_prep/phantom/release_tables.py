"""Tables of a phantom: those of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0, and the truth."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_prep.phantom.catalogue import Catalogue, catalogue
from data_prep.phantom.findings import CATEGORIES
from data_prep.phantom.studies import PlannedStudy
from medclip_dcl.common.files import write_bytes
from medclip_dcl.common.findings import CHEXPERT

BOXES = "MS_CXR_Local_Alignment_v1.0.0"
CLASS_COLUMNS = ("class_id", "name", "rho", "sentence_share", "mention_share")
LABEL_COLUMNS = ("subject_id", "study_id", *CHEXPERT)
_VIEW_CODES = {"AP": "antero-posterior", "PA": "postero-anterior", "LATERAL": "lateral", "LL": "left lateral"}


@dataclass(frozen=True)
class ImageRecord:
    """One picture of a study, with its number there."""

    number: int
    dicom_id: str
    path: str
    view: str
    rows: int
    columns: int

    @property
    def is_frontal(self) -> bool:
        return self.view in ("AP", "PA")


class BoxRecord(NamedTuple):
    """One box with its phrase, in the columns of MS-CXR's table."""

    dicom_id: str
    category_name: str
    label_text: str
    path: str
    x: int
    y: int
    w: int
    h: int
    image_width: int
    image_height: int


@dataclass(frozen=True)
class StudyRecord:
    """The data of a study for the tables; `holding` are classes that hold, `said` sentences with their class."""

    planned: PlannedStudy
    date: str
    time: str
    images: tuple[ImageRecord, ...]
    chexpert: dict[str, float]
    negbio: dict[str, float]
    holding: tuple[int, ...]
    said: tuple[tuple[str, int], ...]
    boxes: list[BoxRecord]


def write_tables(folder: Path, records: Sequence[StudyRecord]) -> None:
    pairs = [(record, image) for record in records for image in record.images]
    name = "mimic-cxr-2.0.0"
    metadata = [_metadata(record, image) for record, image in pairs]
    rows_of_images = (list(row.values()) for row in metadata)
    write_gzip_csv(folder / f"{name}-metadata.csv.gz", list(metadata[0]), rows_of_images)
    write_gzip_csv(
        folder / f"{name}-split.csv.gz",
        ("dicom_id", "study_id", "subject_id", "split"),
        ([i.dicom_id, r.planned.study_id, r.planned.subject_id, r.planned.split] for r, i in pairs),
    )
    for labeller in ("chexpert", "negbio"):
        rows = (
            [r.planned.subject_id, r.planned.study_id, *(getattr(r, labeller).get(c, "") for c in CHEXPERT)]
            for r in records
        )
        write_gzip_csv(folder / f"{name}-{labeller}.csv.gz", LABEL_COLUMNS, rows)
    _write_boxes(folder, [box for record in records for box in record.boxes])


def _metadata(record: StudyRecord, image: ImageRecord) -> dict[str, object]:
    has_lateral = any(not i.is_frontal for i in record.images)
    is_portable = record.images[0].view == "AP"
    views = "PORTABLE AP" if is_portable else "PA AND LAT" if has_lateral else "SINGLE VIEW"
    procedure = f"CHEST ({views})"
    return {
        "dicom_id": image.dicom_id,
        "subject_id": record.planned.subject_id,
        "study_id": record.planned.study_id,
        "PerformedProcedureStepDescription": procedure,
        "ViewPosition": image.view,
        "Rows": image.rows,
        "Columns": image.columns,
        "StudyDate": record.date,
        "StudyTime": record.time,
        "ProcedureCodeSequence_CodeMeaning": procedure,
        "ViewCodeSequence_CodeMeaning": _VIEW_CODES.get(image.view, ""),
        "PatientOrientationCodeSequence_CodeMeaning": "" if is_portable else "Erect",
    }


def _write_boxes(folder: Path, boxes: Sequence[BoxRecord]) -> None:
    images = {box.dicom_id: box for box in boxes}
    numbers = {dicom_id: n for n, dicom_id in enumerate(images)}
    value = {
        "info": {"description": "boxes of a digital phantom (no patients) in the layout of MS-CXR v1.0.0"},
        "images": [
            {
                "id": n,
                "file_name": f"{dicom_id}.jpg",
                "path": images[dicom_id].path,
                "width": images[dicom_id].image_width,
                "height": images[dicom_id].image_height,
            }
            for dicom_id, n in numbers.items()
        ],
        "annotations": [
            {
                "id": n,
                "image_id": numbers[b.dicom_id],
                "category_id": CATEGORIES.index(b.category_name),
                "bbox": [b.x, b.y, b.w, b.h],
                "label_text": b.label_text,
            }
            for n, b in enumerate(boxes)
        ],
        "categories": [{"id": n, "name": name} for n, name in enumerate(CATEGORIES)],
    }
    write_json(folder / f"{BOXES}.json", value)
    write_bytes(_csv_bytes(BoxRecord._fields, boxes), folder / f"{BOXES}.csv", durable=False)


def write_truth(truth: Path, records: Sequence[StudyRecord]) -> None:
    classes, said = catalogue(), (sentence for record in records for sentence in record.said)
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]] = {
        "classes": (CLASS_COLUMNS, _class_rows(classes, records)),
        "sentences": (("text", "class_id"), dict.fromkeys([*classes.sentences(), *said])),
        "image_classes": (
            ("dicom_id", "class_id"),
            ((i.dicom_id, c) for r in records for i in r.images for c in r.holding),
        ),
    }
    for name, (columns, rows) in tables.items():
        write_bytes(_csv_bytes(columns, rows), truth / f"{name}.csv", durable=False)


def _class_rows(classes: Catalogue, records: Sequence[StudyRecord]) -> list[list[object]]:
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
        said = [class_id for _, class_id in record.said]
        sentences.update(said)
        holds.update({c: frontal for c in record.holding})
        mentioned.update({c: frontal for c in set(said)})
    total = sum(sentences.values())
    return [
        [c.class_id, c.name, holds[c.class_id] / images]
        + [sentences[c.class_id] / total, mentioned[c.class_id] / images]
        for c in classes.classes
    ]


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
