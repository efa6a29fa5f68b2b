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
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.optimize import brentq

from data_prep.command import progress, worker_processes
from data_prep.phantom import release_tables, reports
from data_prep.phantom.catalogue import catalogue
from data_prep.phantom.dial import dialled_rates
from data_prep.phantom.drawing import degraded, draw_frontal, draw_lateral
from data_prep.phantom.findings import FindingClass, StudyState
from data_prep.phantom.options import Options, Phantom
from data_prep.phantom.people import PATIENT_COLUMNS, PATIENTS_FILE, draw_sex, patient_rows
from data_prep.phantom.rates import Rates
from data_prep.phantom.studies import PlannedStudy, draw_state, plan_studies
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_bytes
from medclip_dcl.runs.saved import read_json

GENERATOR_VERSION = 1
"""Increased with every change that gives another phantom for the same options."""

TRUTH = "phantom_truth"
MARKER = "phantom.json"
_STARTED = "options.json"

_SECOND_FRONTAL = 0.07
_LATERAL = {"PA": 0.18, "AP": 0.02}
_PORTABLE = 0.38
_PORTABLE_WITH_TUBES = 0.8
# Height over width of the images: square ones, and the portrait and landscape formats of real detectors.
_SHAPES = ((1.0, 0.30), (1.21, 0.36), (0.82, 0.26), (1.1, 0.08))
_QUALITY = 88

# Streams of random numbers of a study: (seed, study, stream); drawing has its own, see `drawing`.
_STATE, _REPORT, _IMAGES, _LABELS, _PHRASES, _DEGRADED, _ASIDES = 10, 11, 12, 13, 14, 16, 17


def write_phantom(folder: Path, options: Options, workers: int = 1) -> bool:
    """Write a phantom, or what is missing of it, always the same bytes; False for a finished one with these options."""
    if _is_finished(folder, options):
        return False
    rates, planned = dialled_rates(catalogue(), options), plan_studies(options.studies, options.seed)
    write = functools.partial(write_study, folder, options, rates, aside_chance(options, rates, planned))
    for leftover in list(folder.rglob(".*.tmp")):
        leftover.unlink()
    truth = folder / TRUTH
    truth.mkdir(parents=True, exist_ok=True)
    release_tables.write_json(truth / _STARTED, _described(options))
    with worker_processes(workers) as pool:
        written = pool.map(write, planned, chunksize=8) if pool else map(write, planned)
        records = list(progress(written, len(planned), "phantom", "studies"))
    release_tables.write_tables(folder, records)
    years = [(record.planned.subject_id, int(record.date[:4])) for record in records]
    release_tables.write_gzip_csv(folder / PATIENTS_FILE, PATIENT_COLUMNS, patient_rows(options.seed, years))
    release_tables.write_truth(truth, records)
    release_tables.write_json(truth / MARKER, _described(options))
    return True


def _described(options: Options) -> dict[str, object]:
    return {"phantom": True, "generator_version": GENERATOR_VERSION, **options.named()}


def _is_finished(folder: Path, options: Options) -> bool:
    """True if the folder holds this phantom already; any other content is refused."""
    asked = _described(options)
    for name in (MARKER, _STARTED):
        file = folder / TRUTH / name
        if not file.is_file():
            continue
        found = read_json(file, f"delete {folder}")
        if found != asked:
            raise UserError(
                f"--output {folder}: expected a phantom with {asked}, found one with {found}; name another folder, or "
                "delete that one"
            )
        return name == MARKER
    # Hidden files may be left by a run that was killed before options.json had its name.
    if any(file.is_file() and not file.name.startswith(".") for file in folder.rglob("*")):
        raise UserError(f"--output {folder}: expected a new or empty folder, or a phantom; found other files")
    return False


def aside_chance(options: Options, rates: Rates | None, planned: list[PlannedStudy]) -> float:
    """Chance of an aside that gives the asked share of singletons among the sentences of training reports."""
    if (asked := options.singletons) is None:
        return 0.0
    written = (_reported(options, rates, 0.0, study)[2] for study in planned if study.split == "train")
    texts = (text for report in written for text in {s.wording.text for s in report.statements})
    counts = np.array([*Counter(texts).values()])

    def share(chance: float) -> float:
        return float(chance + (1 - chance) * np.average(chance ** (counts - 1.0), weights=counts))

    if share(0) > asked:
        raise UserError(f"--singletons: expected {share(0):.3f} or more with these options, found {asked:g}")
    return float(brentq(lambda chance: share(chance) - asked, 0, 1))


def _reported(
    options: Options, rates: Rates | None, asides: float, planned: PlannedStudy
) -> tuple[StudyState, tuple[release_tables.ImageRecord, ...], reports.Report]:
    classes, seed = catalogue(), (options.seed, planned.index)
    state = draw_state(classes, _stream(seed, _STATE), planned.test_number, rates)
    images = _plan_images(options, planned, state)
    report = reports.write_report(
        classes,
        state,
        images[0].view,
        any(not image.is_frontal for image in images),
        planned.split == "test",
        _stream(seed, _REPORT),
        None if rates is None or planned.split == "test" else rates.normal,
        None if planned.split == "test" else (asides, _stream(seed, _ASIDES)),
    )
    return state, images, report


def write_study(
    folder: Path, options: Options, rates: Rates | None, asides: float, planned: PlannedStudy
) -> release_tables.StudyRecord:
    """Write the pictures and the report of one study and return its rows for the tables; `asides`: `aside_chance`."""
    classes, seed = catalogue(), (options.seed, planned.index)
    state, images, report = _reported(options, rates, asides, planned)
    study_folder = Path(images[0].path).parent
    write_bytes(report.text.encode(), folder / f"{study_folder}.txt", durable=False)
    boxes = [box for image in images for box in _write_image(folder, options, planned, state, report, image)]
    date, time = _date_and_time(seed)
    holding = classes.holding(state)
    of_report = rates is None or planned.split == "train"
    chexpert = (
        reports.chexpert_labels(report.statements) if of_report else reports.true_labels(classes, holding)
    )
    return release_tables.StudyRecord(
        planned=planned,
        date=date,
        time=time,
        images=images,
        chexpert=chexpert,
        negbio=reports.negbio_labels(chexpert, _stream(seed, _LABELS)),
        holding=tuple(c.class_id for c in holding),
        said=tuple((s.wording.text, s.finding.class_id) for s in report.statements),
        boxes=boxes,
    )


def _stream(seed: tuple[int, int], stream: int) -> np.random.Generator:
    return np.random.default_rng([*seed, stream])


def _plan_images(
    options: Options, planned: PlannedStudy, state: StudyState
) -> tuple[release_tables.ImageRecord, ...]:
    """A frontal image, sometimes a second and sometimes a lateral one, each with its own format."""
    rng = _stream((options.seed, planned.index), _IMAGES)
    has_tubes = not catalogue().groups["intensive_care"].isdisjoint(state.kinds)
    portable = rng.random() < (_PORTABLE_WITH_TUBES if has_tubes else _PORTABLE)
    views = ["AP" if portable else "PA"]
    if rng.random() < _SECOND_FRONTAL:
        views.append("AP" if rng.random() < 0.5 else "PA")
    if rng.random() < _LATERAL[views[0]]:
        views.append(str(rng.choice(("LATERAL", "LL", ""), p=(0.6, 0.37, 0.03))))
    subject = f"p{planned.subject_id}"
    parent = f"files/{subject[:3]}/{subject}/s{planned.study_id}"
    images = []
    for number, view in enumerate(views):
        words = rng.integers(0, 1 << 32, 5, dtype=np.uint64)
        dicom_id = "-".join(f"{int(word):08x}" for word in words)
        ratio = rng.choice([s for s, _ in _SHAPES], p=[p for _, p in _SHAPES]) * rng.uniform(0.985, 1.015)
        longer = options.size * rng.uniform(0.94, 1.06)
        rows, columns = (longer, longer / ratio) if ratio > 1 else (longer * ratio, longer)
        path = f"{parent}/{dicom_id}.jpg"
        images.append(release_tables.ImageRecord(number, dicom_id, path, view, round(rows), round(columns)))
    return tuple(images)


def _write_image(
    folder: Path,
    options: Options,
    planned: PlannedStudy,
    state: StudyState,
    report: reports.Report,
    image: release_tables.ImageRecord,
) -> list[release_tables.BoxRecord]:
    """Draw an image unless it is complete on disk; images with boxes are always drawn, for their boxes."""
    file, seed = folder / image.path, (options.seed, planned.index)
    is_test, content = planned.split == "test", file.read_bytes() if file.is_file() else b""
    is_whole = content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")  # the ends of a JPEG
    has_boxes = is_test and image.is_frontal and any(f.category for f in state.findings)
    if is_whole and not has_boxes:
        return []
    if image.is_frontal:
        picture = draw_frontal(
            seed, state.findings, image.view, state.low_volumes, image.number, image.rows, image.columns
        )
    else:
        picture = draw_lateral(
            seed, state.findings, state.low_volumes, image.number, image.rows, image.columns
        )
    if not is_whole:
        pixels, buffer = picture.pixels, io.BytesIO()
        if is_test and draw_sex(options.seed, planned.subject_id) == options.degraded_sex:
            pixels = degraded(pixels, np.random.default_rng([*seed, _DEGRADED, image.number]))
        Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
        write_bytes(buffer.getvalue(), file, durable=False)
    if not has_boxes:
        return []
    rng = np.random.default_rng([*seed, _PHRASES, image.number])
    # A phrase for each finding, also for those without boxes.
    phrases = [_phrase(f, report, rng) for f in state.findings]
    return [
        release_tables.BoxRecord(
            image.dicom_id, f.category, phrase, image.path, *box, image.columns, image.rows
        )
        for f, phrase in zip(state.findings, phrases, strict=True)
        if f.category
        for box in picture.boxes[f.class_id]
    ]


def _phrase(finding: FindingClass, report: reports.Report, rng: np.random.Generator) -> str:
    """The phrase of a finding's boxes: the report's sentence, or other words for it, without the full stop."""
    said = [s.wording.text for s in report.statements if s.finding == finding]
    other = reports.choose_wording(finding, rng, unseen=True).text
    text = said[0] if said and rng.random() < 0.6 else other
    return text.removesuffix(".")


def _date_and_time(seed: tuple[int, int]) -> tuple[str, str]:
    """Shifted into the future, as the release does."""
    rng = _stream(seed, 15)
    year, month, day = rng.integers(2110, 2201), rng.integers(1, 13), rng.integers(1, 29)
    hour, minute, second = rng.integers(0, 24), rng.integers(0, 60), rng.integers(0, 60)
    return f"{year}{month:02d}{day:02d}", f"{hour}{minute:02d}{second:02d}.{rng.integers(0, 1000):03d}"


def run(options: Phantom) -> None:
    """Write a phantom, or say that it is finished."""
    if write_phantom(options.output, options, options.workers):
        print(f"{options.output}: {options.studies:,} studies written (a phantom: no patients)")
    else:
        print(f"{options.output}: finished already with these options, nothing to do")
