"""Write a phantom in the raw layout of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0.

files/pXX/pXXXXXXXX/sXXXXXXXX/<dicom_id>.jpg, files/pXX/pXXXXXXXX/sXXXXXXXX.txt
mimic-cxr-2.0.0-{metadata,split,chexpert,negbio}.csv.gz, patients.csv.gz (as MIMIC-IV's)
MS_CXR_Local_Alignment_v1.0.0.{json,csv}
phantom_truth/   options.json (written first); classes.csv, sentences.csv, image_classes.csv;
                 phantom.json (written last)
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.command import progress, worker_processes
from data_prep.phantom.catalogue import Catalogue, catalogue
from data_prep.phantom.drawing import Box, degraded, draw_frontal, draw_lateral
from data_prep.phantom.findings import CATEGORIES, FindingClass, StudyState
from data_prep.phantom.people import PATIENT_COLUMNS, PATIENTS_FILE, SEXES, draw_sex, patient_rows
from data_prep.phantom.reports import Report, chexpert_labels, choose_wording, negbio_labels, write_report
from data_prep.phantom.studies import PlannedStudy, draw_state, plan_studies
from medclip_dcl.errors import UserError
from medclip_dcl.files import write_bytes
from medclip_dcl.findings import CHEXPERT

GENERATOR_VERSION = 1
"""Increased with every change that gives another phantom for the same options."""

LEAST_STUDIES = 20
LEAST_SIZE = 64
MOST_SIZE = 4096

TRUTH = "phantom_truth"
MARKER = "phantom.json"
_STARTED = "options.json"

_CHUNK = 8
_SECOND_FRONTAL = 0.07
_LATERAL = {"PA": 0.18, "AP": 0.02}
_PORTABLE = 0.38
_PORTABLE_WITH_TUBES = 0.8
# Height over width of the images: square ones, and the portrait and landscape formats of real detectors.
_SHAPES = ((1.0, 0.30), (1.21, 0.36), (0.82, 0.26), (1.1, 0.08))
_QUALITY = 88

# Streams of random numbers of a study: (seed, study, stream); drawing has its own, see `drawing`.
_STATE, _REPORT, _IMAGES, _LABELS, _PHRASES, _DEGRADED = 10, 11, 12, 13, 14, 16

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


class PhantomError(UserError):
    """A phantom cannot be written with these options into this folder."""


@dataclass(frozen=True)
class Options:
    """Options that determine the contents of a phantom.

    Images of test patients of `degraded_sex` (F or M) are dim and grainy: a gap between groups that an evaluation must
    find.
    """

    studies: int
    seed: int
    size: int = 512
    degraded_sex: str | None = None

    def check(self) -> None:
        """Raise PhantomError for an invalid value."""
        if self.studies < LEAST_STUDIES:
            raise PhantomError(
                f"--studies is {self.studies}; at least {LEAST_STUDIES} are needed for three splits by patient"
            )
        if self.studies > 2_000_000:
            raise PhantomError(f"--studies is {self.studies:,}; at most 2,000,000 fit into the identifiers")
        if self.seed < 0:
            raise PhantomError(f"--seed is {self.seed}; it must be 0 or more")
        if self.degraded_sex not in (None, *SEXES):
            raise PhantomError(f"--degraded_sex is {self.degraded_sex}; it must be {' or '.join(SEXES)}")
        if not LEAST_SIZE <= self.size <= MOST_SIZE:
            raise PhantomError(f"--size is {self.size} px; it must be from {LEAST_SIZE} to {MOST_SIZE}")


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
    """The data of a study for the tables."""

    planned: PlannedStudy
    date: str
    time: str
    images: tuple[ImageRecord, ...]
    chexpert: dict[str, float]
    negbio: dict[str, float]
    holding: tuple[int, ...]
    said: tuple[int, ...]
    boxes: list[BoxRecord] = field(default_factory=list)


def write_phantom(folder: Path, options: Options, workers: int = 1) -> bool:
    """Write a phantom, or what is missing of it.

    Files that are there and whole are kept; every file is written under another name and renamed. The folder is
    the same, byte by byte, for the same options, regardless of the number of workers and of interruptions.

    Args:
        folder: of the release; made if missing.
        options: contents of the phantom.
        workers: processes that draw.

    Returns:
        True if anything was written; False for a finished phantom with these options.

    Raises:
        PhantomError: an invalid option; a folder with a phantom of other options, or with other files.
    """
    options.check()
    if workers < 1:
        raise PhantomError(f"--workers is {workers}; at least 1 is needed")
    if _is_finished(folder, options):
        return False
    for leftover in list(folder.rglob(".*.tmp")):
        leftover.unlink()
    truth = folder / TRUTH
    truth.mkdir(parents=True, exist_ok=True)
    _write_json(truth / _STARTED, _described(options))
    planned = plan_studies(options.studies, options.seed)
    records = list(_write_studies(folder, options, planned, workers))
    _write_tables(folder, records)
    years = [(record.planned.subject_id, int(record.date[:4])) for record in records]
    _write_gzip_csv(folder / PATIENTS_FILE, PATIENT_COLUMNS, patient_rows(options.seed, years))
    _write_truth(truth, records)
    _write_json(truth / MARKER, _described(options))
    return True


def _described(options: Options) -> dict[str, object]:
    # Named only where asked for: the marker of other phantoms is that of before.
    named = {name: value for name, value in asdict(options).items() if value is not None}
    return {"phantom": True, "generator_version": GENERATOR_VERSION, **named}


def _is_finished(folder: Path, options: Options) -> bool:
    """True if the folder holds this phantom already; any other content is refused."""
    if folder.exists() and not folder.is_dir():
        raise PhantomError(f"{folder} is a file; name a folder for --output")
    for name in (MARKER, _STARTED):
        file = folder / TRUTH / name
        if not file.is_file():
            continue
        found = json.loads(file.read_text())
        asked = _described(options)
        differing = [
            f"{key}: {found.get(key)!r} there, {asked.get(key)!r} asked for"
            for key in {**asked, **found}
            if found.get(key) != asked.get(key)
        ]
        if differing:
            raise PhantomError(
                f"{folder} holds a phantom with other options ({'; '.join(differing)}); "
                "name another folder for --output, or delete that one"
            )
        # A phantom of an earlier version lacks its patients.
        return name == MARKER and (folder / PATIENTS_FILE).is_file()
    # Left by a run that was killed before options.json had its name.
    begun = [folder / TRUTH, *(folder / TRUTH).glob(f".{_STARTED}.*.tmp")]
    if folder.is_dir() and any(file not in begun for file in folder.rglob("*")):
        raise PhantomError(
            f"{folder} is not empty and does not hold a phantom; name a new or empty folder for --output"
        )
    return False


def _write_studies(
    folder: Path, options: Options, planned: Sequence[PlannedStudy], workers: int
) -> Iterator[StudyRecord]:
    chunks = [planned[k : k + _CHUNK] for k in range(0, len(planned), _CHUNK)]
    work = functools.partial(_write_chunk, folder, options)
    with worker_processes(workers) as pool:
        results = map(work, chunks) if pool is None else pool.map(work, chunks)
        yield from progress((r for chunk in results for r in chunk), len(planned), "phantom", "studies")


def _write_chunk(folder: Path, options: Options, planned: Sequence[PlannedStudy]) -> list[StudyRecord]:
    return [write_study(folder, options, study) for study in planned]


def write_study(folder: Path, options: Options, planned: PlannedStudy) -> StudyRecord:
    """Write the pictures and the report of one study and return its rows for the tables."""
    classes, seed = catalogue(), (options.seed, planned.index)
    state = draw_state(classes, _stream(seed, _STATE), planned.test_number)
    images = _plan_images(options, planned, state)
    report = write_report(
        classes,
        state,
        images[0].view,
        any(not image.is_frontal for image in images),
        planned.split == "test",
        _stream(seed, _REPORT),
    )
    study_folder = Path(images[0].path).parent
    write_bytes(report.text.encode(), folder / f"{study_folder}.txt", durable=False)
    boxes = []
    for number, image in enumerate(images):
        boxes += _write_image(folder, seed, planned, state, report, image, number, options.degraded_sex)
    date, time = _date_and_time(seed)
    chexpert = chexpert_labels(report.statements)
    return StudyRecord(
        planned=planned,
        date=date,
        time=time,
        images=images,
        chexpert=chexpert,
        negbio=negbio_labels(chexpert, _stream(seed, _LABELS)),
        holding=tuple(c.class_id for c in classes.holding(state)),
        said=tuple(s.finding.class_id for s in report.statements),
        boxes=boxes,
    )


def _stream(seed: tuple[int, int], stream: int) -> np.random.Generator:
    return np.random.default_rng([*seed, stream])


def _plan_images(options: Options, planned: PlannedStudy, state: StudyState) -> tuple[ImageRecord, ...]:
    """A frontal image, sometimes a second and sometimes a lateral one, each with its own format."""
    rng = _stream((options.seed, planned.index), _IMAGES)
    portable = rng.random() < (
        _PORTABLE_WITH_TUBES
        if not catalogue().groups["intensive_care"].isdisjoint(state.kinds)
        else _PORTABLE
    )
    views = ["AP" if portable else "PA"]
    if rng.random() < _SECOND_FRONTAL:
        views.append("AP" if rng.random() < 0.5 else "PA")
    if rng.random() < _LATERAL[views[0]]:
        views.append(str(rng.choice(("LATERAL", "LL", ""), p=(0.6, 0.37, 0.03))))
    subject = f"p{planned.subject_id}"
    parent = f"files/{subject[:3]}/{subject}/s{planned.study_id}"
    images = []
    for view in views:
        words = rng.integers(0, 1 << 32, 5, dtype=np.uint64)
        dicom_id = "-".join(f"{int(word):08x}" for word in words)
        ratio = rng.choice([s for s, _ in _SHAPES], p=[p for _, p in _SHAPES]) * rng.uniform(0.985, 1.015)
        longer = options.size * rng.uniform(0.94, 1.06)
        rows, columns = (longer, longer / ratio) if ratio > 1 else (longer * ratio, longer)
        images.append(ImageRecord(dicom_id, f"{parent}/{dicom_id}.jpg", view, round(rows), round(columns)))
    return tuple(images)


def _write_image(
    folder: Path,
    seed: tuple[int, int],
    planned: PlannedStudy,
    state: StudyState,
    report: Report,
    image: ImageRecord,
    number: int,
    degraded_sex: str | None,
) -> list[BoxRecord]:
    """Draw an image unless it is complete on disk; images with boxes are always drawn, for their boxes."""
    file = folder / image.path
    has_boxes = planned.split == "test" and image.is_frontal and any(f.category for f in state.findings)
    if not has_boxes and _is_whole_jpeg(file):
        return []
    if image.is_frontal:
        picture = draw_frontal(
            seed, state.findings, image.view, state.low_volumes, number, image.rows, image.columns
        )
    else:
        picture = draw_lateral(seed, state.findings, state.low_volumes, number, image.rows, image.columns)
    if not _is_whole_jpeg(file):
        pixels, buffer = picture.pixels, io.BytesIO()
        if planned.split == "test" and draw_sex(seed[0], planned.subject_id) == degraded_sex:
            pixels = degraded(pixels, np.random.default_rng([*seed, _DEGRADED, number]))
        Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
        write_bytes(buffer.getvalue(), file, durable=False)
    if not has_boxes:
        return []
    rng = np.random.default_rng([*seed, _PHRASES, number])
    records = []
    for finding in state.findings:
        phrase = _phrase(finding, report, rng)
        if finding.category:
            records += [
                BoxRecord(image.dicom_id, finding.category, phrase, b)
                for b in picture.boxes[finding.class_id]
            ]
    return records


def _phrase(finding: FindingClass, report: Report, rng: np.random.Generator) -> str:
    """The phrase of a finding's boxes: the report's sentence, or other words for it, without the full stop."""
    said = [s.wording.text for s in report.statements if s.finding == finding]
    other = choose_wording(finding, rng, unseen=True).text
    text = said[0] if said and rng.random() < 0.6 else other
    return text.removesuffix(".")


def _date_and_time(seed: tuple[int, int]) -> tuple[str, str]:
    """Shifted into the future, as the release does."""
    rng = _stream(seed, 15)
    year, month, day = rng.integers(2110, 2201), rng.integers(1, 13), rng.integers(1, 29)
    hour, minute, second = rng.integers(0, 24), rng.integers(0, 60), rng.integers(0, 60)
    return f"{year}{month:02d}{day:02d}", f"{hour}{minute:02d}{second:02d}.{rng.integers(0, 1000):03d}"


def _write_tables(folder: Path, records: Sequence[StudyRecord]) -> None:
    pairs = [(record, image) for record in records for image in record.images]
    name = "mimic-cxr-2.0.0"
    _write_gzip_csv(folder / f"{name}-metadata.csv.gz", METADATA_COLUMNS, (_metadata(r, i) for r, i in pairs))
    _write_gzip_csv(
        folder / f"{name}-split.csv.gz",
        SPLIT_COLUMNS,
        ([i.dicom_id, r.planned.study_id, r.planned.subject_id, r.planned.split] for r, i in pairs),
    )
    for labeller in ("chexpert", "negbio"):
        rows = (
            [r.planned.subject_id, r.planned.study_id, *(getattr(r, labeller).get(c, "") for c in CHEXPERT)]
            for r in records
        )
        _write_gzip_csv(folder / f"{name}-{labeller}.csv.gz", LABEL_COLUMNS, rows)
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
    _write_json(folder / "MS_CXR_Local_Alignment_v1.0.0.json", value)
    rows = (
        [b.dicom_id, b.category, b.phrase, shown[b.dicom_id].path, *b.box]
        + [shown[b.dicom_id].columns, shown[b.dicom_id].rows]
        for b in boxes
    )
    write_bytes(_csv_bytes(BOX_COLUMNS, rows), folder / "MS_CXR_Local_Alignment_v1.0.0.csv", durable=False)


def _write_truth(truth: Path, records: Sequence[StudyRecord]) -> None:
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


def _is_whole_jpeg(file: Path) -> bool:
    """True if the file exists and has both ends of a JPEG."""
    content = file.read_bytes() if file.is_file() else b""
    return content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")


def _write_json(file: Path, value: object) -> None:
    write_bytes((json.dumps(value, indent=2) + "\n").encode(), file)


def _csv_bytes(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def _write_gzip_csv(file: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    # No time stamp, so that runs give the same bytes.
    write_bytes(gzip.compress(_csv_bytes(columns, rows), mtime=0), file)
