"""Write a phantom in the raw layout of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0.

files/pXX/pXXXXXXXX/sXXXXXXXX/<dicom_id>.jpg, files/pXX/pXXXXXXXX/sXXXXXXXX.txt
mimic-cxr-2.0.0-{metadata,split,chexpert,negbio}.csv.gz, patients.csv.gz (as MIMIC-IV's)
MS_CXR_Local_Alignment_v1.0.0.{json,csv}
phantom_truth/   options.json (written first); classes.csv, sentences.csv, image_classes.csv;
                 phantom.json (written last)
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.command import progress, worker_processes
from data_prep.phantom.catalogue import catalogue
from data_prep.phantom.dial import dialled_rates
from data_prep.phantom.drawing import degraded, draw_frontal, draw_lateral
from data_prep.phantom.findings import FindingClass, StudyState
from data_prep.phantom.options import Options, PhantomError
from data_prep.phantom.people import PATIENT_COLUMNS, PATIENTS_FILE, draw_sex, patient_rows
from data_prep.phantom.rates import Rates
from data_prep.phantom.reports import (
    Report,
    chexpert_labels,
    choose_wording,
    negbio_labels,
    true_labels,
    write_report,
)
from data_prep.phantom.studies import PlannedStudy, draw_state, plan_studies
from data_prep.phantom.tables import (
    BoxRecord,
    ImageRecord,
    StudyRecord,
    reached,
    write_gzip_csv,
    write_json,
    write_tables,
    write_truth,
)
from medclip_dcl.common.files import write_bytes

GENERATOR_VERSION = 1
"""Increased with every change that gives another phantom for the same options."""

TRUTH = "phantom_truth"
MARKER = "phantom.json"
_STARTED = "options.json"
REACHED = "reached"
"""Entry of the marker of a phantom with other rates: what came of them."""

_SECOND_FRONTAL = 0.07
_LATERAL = {"PA": 0.18, "AP": 0.02}
_PORTABLE = 0.38
_PORTABLE_WITH_TUBES = 0.8
# Height over width of the images: square ones, and the portrait and landscape formats of real detectors.
_SHAPES = ((1.0, 0.30), (1.21, 0.36), (0.82, 0.26), (1.1, 0.08))
_QUALITY = 88

# Streams of random numbers of a study: (seed, study, stream); drawing has its own, see `drawing`.
_STATE, _REPORT, _IMAGES, _LABELS, _PHRASES, _DEGRADED = 10, 11, 12, 13, 14, 16


def write_phantom(folder: Path, options: Options, workers: int = 1) -> bool:
    """Write a phantom, or what is missing of it.

    Files that are there and whole are kept; every file is written under another name and renamed. The folder is
    the same, byte by byte, for the same options, regardless of the number of workers and of interruptions.
    Returns False for a finished phantom with these options.
    """
    options.check()
    if _is_finished(folder, options):
        return False
    rates = dialled_rates(catalogue(), options)
    for leftover in list(folder.rglob(".*.tmp")):
        leftover.unlink()
    truth = folder / TRUTH
    truth.mkdir(parents=True, exist_ok=True)
    write_json(truth / _STARTED, _described(options))
    planned = plan_studies(options.studies, options.seed)
    records = list(_write_studies(folder, options, rates, planned, workers))
    write_tables(folder, records)
    years = [(record.planned.subject_id, int(record.date[:4])) for record in records]
    write_gzip_csv(folder / PATIENTS_FILE, PATIENT_COLUMNS, patient_rows(options.seed, years))
    write_truth(truth, records)
    of_rates = {} if rates is None else {REACHED: reached(records)}
    write_json(truth / MARKER, {**_described(options), **of_rates})
    return True


def summary(folder: Path) -> list[str]:
    """Lines about what the rates of a finished phantom came to; none for one with the catalogue's rates."""
    marker = json.loads((folder / TRUTH / MARKER).read_text())
    if REACHED not in marker:
        return []
    found = marker[REACHED]
    asked = {name: marker[name] for name in ("false_negatives", "rare_findings") if name in marker}
    low, median, high = found["quartiles"]
    shares = ", ".join(f"{column} {share:.2%}" for column, share in found["findings"].items())
    return [
        f"asked for: {', '.join(f'{name} {value:g}' for name, value in asked.items())}",
        f"share of false negatives (rho) over {found['anchors']:,} training anchors: mean "
        f"{found['false_negatives']:.3f}, quartiles {low:.3f}, {median:.3f}, {high:.3f}",
        f"share of training studies: {shares}",
    ]


def _described(options: Options) -> dict[str, object]:
    return {"phantom": True, "generator_version": GENERATOR_VERSION, **options.named()}


def _is_finished(folder: Path, options: Options) -> bool:
    """True if the folder holds this phantom already; any other content is refused."""
    if folder.exists() and not folder.is_dir():
        raise PhantomError(f"{folder} is a file; name a folder for --output")
    for name in (MARKER, _STARTED):
        file = folder / TRUTH / name
        if not file.is_file():
            continue
        found = json.loads(file.read_text())
        found.pop(REACHED, None)
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
        return name == MARKER
    # Left by a run that was killed before options.json had its name.
    begun = [folder / TRUTH, *(folder / TRUTH).glob(f".{_STARTED}.*.tmp")]
    if folder.is_dir() and any(file not in begun for file in folder.rglob("*")):
        raise PhantomError(
            f"{folder} is not empty and does not hold a phantom; name a new or empty folder for --output"
        )
    return False


def _write_studies(
    folder: Path, options: Options, rates: Rates | None, planned: Sequence[PlannedStudy], workers: int
) -> Iterator[StudyRecord]:
    write = functools.partial(write_study, folder, options, rates)
    with worker_processes(workers) as pool:
        records = pool.map(write, planned, chunksize=8) if pool else map(write, planned)
        yield from progress(records, len(planned), "phantom", "studies")


def write_study(folder: Path, options: Options, rates: Rates | None, planned: PlannedStudy) -> StudyRecord:
    """Write the pictures and the report of one study and return its rows for the tables."""
    classes, seed = catalogue(), (options.seed, planned.index)
    state = draw_state(classes, _stream(seed, _STATE), planned.test_number, rates)
    images = _plan_images(options, planned, state)
    report = write_report(
        classes,
        state,
        images[0].view,
        any(not image.is_frontal for image in images),
        planned.split == "test",
        _stream(seed, _REPORT),
        None if rates is None or planned.split == "test" else rates.normal,
    )
    study_folder = Path(images[0].path).parent
    write_bytes(report.text.encode(), folder / f"{study_folder}.txt", durable=False)
    boxes = []
    for number, image in enumerate(images):
        boxes += _write_image(folder, seed, planned, state, report, image, number, options.degraded_sex)
    date, time = _date_and_time(seed)
    holding = classes.holding(state)
    of_report = rates is None or planned.split == "train"
    chexpert = chexpert_labels(report.statements) if of_report else true_labels(classes, holding)
    return StudyRecord(
        planned=planned,
        date=date,
        time=time,
        images=images,
        chexpert=chexpert,
        negbio=negbio_labels(chexpert, _stream(seed, _LABELS)),
        holding=tuple(c.class_id for c in holding),
        said=tuple(s.finding.class_id for s in report.statements),
        anchors=tuple({s.wording.text: s.finding.class_id for s in report.statements}.values()),
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


def _is_whole_jpeg(file: Path) -> bool:
    """True if the file exists and has both ends of a JPEG."""
    content = file.read_bytes() if file.is_file() else b""
    return content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")
