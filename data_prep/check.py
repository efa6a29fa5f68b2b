"""Verify a prepared data set and show what it holds, beside what was published.

    python -m data_prep.check --data SET [--full]

Every table is compared with the format, with the fingerprint that was taken when the set was made, and with the other
tables; every image file must be there and whole, with the header, size and making of the set; a memory map must be of
this set, whole, and hold the pixels of the images, of which some are compared. --full decodes all images, compares
their checksums and all of the map, and finds pictures that stand under several names: a warning where they are of
several patients, a problem where they serve several purposes. The page goes to standard output, problems last; the exit
status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
from PIL import Image

from data_prep.command import available_cores, progress, run_command, worker_processes
from data_prep.sources import images as image_files
from data_prep.sources import tables
from data_prep.sources.preparation import case_lines, positive
from data_prep.sources.releases import SPLITS
from medclip_dcl.data.memory_map import DESCRIPTION, PIXELS, MemoryMap, open_memory_map
from medclip_dcl.data.prepared import (
    TABLES,
    USES,
    PreparedDataError,
    PreparedSet,
    case_table,
    labelled_findings,
)

PUBLISHED = {
    "images": ("images of the release", 377_110),
    "studies": ("studies", 227_835),
    "patients": ("patients", 65_379),
    "train": ("official split: train images", 368_960),
    "validate": ("official split: validate images", 2_991),
    "test": ("official split: test images", 5_159),
}
"""Counts of MIMIC-CXR-JPG as its authors give them, by the keys of counts["release"]."""

PUBLISHED_FRONTAL = 234_073
"""Frontal images with reports (SSD, section 3.2: "a subset of 234,073")."""

PUBLISHED_MS_CXR = {
    "boxes": ("boxes", 1_448),
    "images": ("images with a box", 1_047),
    "image_sentence_pairs": ("image-sentence pairs", 1_162),
}
"""Counts of MS-CXR, by the keys of counts["ms_cxr"]."""

ALWAYS = ("images", "sentences", "reports", "labels", "cases")
"""Tables that every set has."""

MAP_SAMPLE = 64
"""Rows of the memory map that are compared with their images where not all are."""

_NOT_IN_FINGERPRINT = ("log_p",)

Tables = Mapping[str, pd.DataFrame]


class CheckFailed(PreparedDataError):
    """The set has problems; they were printed."""


def check_set(folder: Path, full: bool = False, pool: Executor | None = None) -> tuple[str, list[str]]:
    """Verify a prepared set.

    Args:
        folder: of the set.
        full: decode every image instead of reading its header, and compare it with the memory map.
        pool: processes that share the images, or None.

    Returns:
        the page, and the problems found; each names what is wrong, how often, and the first cases.

    Raises:
        PreparedDataError: there is no finished set of this format.
    """
    prepared = PreparedSet(folder)
    found, problems = _read_tables(prepared)
    for check in (_fingerprint, _unique, _references, _patients, _uses, _boxes, _cases, _truth):
        problems += check(prepared, found)
    problems += _counts(prepared, found)
    problems += _model_files(prepared, found)
    page = _page(prepared, found)
    if "images" in found:
        of_files, digests = _image_files(prepared, found["images"], full, pool)
        of_pictures, warnings = _pictures(found["images"], digests)
        problems += of_files + of_pictures
        problems += _memory_map(prepared, found["images"], full, pool)
        page = "\n".join([page, *(f"  warning    {warning}" for warning in warnings)])
    return page, problems


def _read_tables(prepared: PreparedSet) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The tables that are there and right, and what is wrong with the others."""
    found, problems = {}, []
    for name in TABLES:
        if name not in _NOT_IN_FINGERPRINT and (prepared.has(name) or name in ALWAYS):
            try:
                found[name] = prepared.table(name)
            except PreparedDataError as error:
                problems.append(str(error))
    # Cases of format version 1 are derived: what is wrong with the labels is said once.
    return found, list(dict.fromkeys(problems))


def _some(what: str, cases: Collection[Any], total: int | None = None) -> list[str]:
    """A problem with its number of cases and the first of them; none without cases."""
    if len(cases) == 0:
        return []
    first = ", ".join(str(case) for case in list(cases)[:3])
    return [f"{what}: {len(cases):,}{'' if total is None else f' of {total:,}'} (first: {first})"]


def _fingerprint(prepared: PreparedSet, found: Tables) -> list[str]:
    expected = prepared.info.get("fingerprint")
    if any(name not in found for name in ALWAYS):
        return []
    if tables.fingerprint(found) == expected:
        return []
    return [
        f"fingerprint: the tables are not those that were written when the set was made (expected {expected}, found "
        f"{tables.fingerprint(found)}); a table was changed, added or removed"
    ]


def _counts(prepared: PreparedSet, found: Tables) -> list[str]:
    """What dataset.json counts is what the tables and rejects.csv hold."""
    if any(name not in found for name in ALWAYS):
        return []
    said, there = prepared.info.get("counts", {}), tables.count(found)
    problems = _some(
        "dataset.json: counts that are not those of the tables",
        [name for name, number in there.items() if said.get(name, number) != number],
    )
    try:
        rejects = _read_rejects(prepared.folder / "rejects.csv")
    except (OSError, ValueError, KeyError) as error:
        return [*problems, f"rejects.csv cannot be read ({error})"]
    kinds = {kind: int((rejects["kind"] == kind).sum()) for kind in ("image", "report", "box")}
    if said.get("rejects", kinds) != kinds:
        problems.append(
            f"rejects.csv: expected the rows that dataset.json counts ({said['rejects']}), found {kinds}"
        )
    return problems


def _read_rejects(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype=str, keep_default_na=False)[["kind", "id", "reason"]]


def _unique(_: PreparedSet, found: Tables) -> list[str]:
    keys = {
        "images": ["dicom_id"],
        "studies": ["study_id"],
        "sentences": ["sentence_id"],
        "reports": ["study_id", "position"],
        "labels": ["study_id"],
        "cases": ["dicom_id", "finding"],
        "classes": ["sentence_id"],
    }
    problems = []
    for name, key in keys.items():
        if name in found:
            twice = found[name][found[name].duplicated(key)]
            cases = [" ".join(map(str, row)) for row in twice[key].itertuples(index=False)]
            problems += _some(f"{name}.parquet: rows whose {' and '.join(key)} stand before", cases)
    for name, column in (("images", "path"), ("sentences", "text")):
        if name in found:
            twice = found[name][found[name][column].duplicated()]
            problems += _some(
                f"{name}.parquet: rows whose {column} stands before", twice[keys[name][0]].tolist()
            )
    return problems


def _references(prepared: PreparedSet, found: Tables) -> list[str]:
    """Rows that refer to nothing, and what nothing refers to."""
    problems: list[str] = []
    people = found.get("studies", found.get("images"))

    def orphans(table: str, column: str, known: Collection[Any], where: str) -> list[str]:
        if table not in found:
            return []
        values = found[table][column]
        lost = values[~values.isin(known)].drop_duplicates()
        return _some(f"{table}.parquet: {column} that is not in {where}", lost.tolist())

    if people is not None:
        where = "studies.parquet" if "studies" in found else "images.parquet"
        for table in ("reports", "labels"):
            problems += orphans(table, "study_id", set(people["study_id"]), where)
        if "labels" in found:
            lost = people[~people["study_id"].isin(found["labels"]["study_id"])]["study_id"].drop_duplicates()
            problems += _some("labels.parquet: studies that have no row", lost.tolist())
    if "images" in found:
        for table in ("cases", "boxes", "image_classes"):
            problems += orphans(table, "dicom_id", set(found["images"]["dicom_id"]), "images.parquet")
    if "sentences" in found and "reports" in found:
        ids = set(found["sentences"]["sentence_id"])
        problems += orphans("reports", "sentence_id", ids, "sentences.parquet")
        reports = found["reports"]
        n_reports = (
            reports.groupby("sentence_id")["study_id"].nunique().reindex(found["sentences"]["sentence_id"])
        )
        wrong = found["sentences"][n_reports.fillna(0).to_numpy() != found["sentences"]["n_reports"]]
        problems += _some(
            "sentences.parquet: n_reports is not what reports.parquet counts", wrong["sentence_id"].tolist()
        )
    return problems


def _patients(prepared: PreparedSet, found: Tables) -> list[str]:
    """Patients are apart by purpose, images and studies belong to one patient."""
    problems: list[str] = []
    for name in ("images", "studies"):
        if name in found:
            used = found[name][found[name]["use"] != "excluded"]
            # Test beside grounding is the one pair that may be.
            purposes = used["use"].replace("grounding", "test").groupby(used["subject_id"]).nunique()
            problems += _some(
                f"{name}.parquet: patients of two purposes", purposes.index[purposes > 1].tolist()
            )
            patients = found[name].groupby("study_id")["subject_id"].nunique()
            problems += _some(
                f"{name}.parquet: studies of two patients", patients.index[patients > 1].tolist()
            )
    return problems


def _uses(_: PreparedSet, found: Tables) -> list[str]:
    """Uses are known; what trains or is evaluated has a report or a box."""
    problems: list[str] = []
    for name in ("images", "studies"):
        if name in found:
            problems += _some(
                f"{name}.parquet: use that is none of {', '.join(USES)}",
                sorted(set(found[name]["use"]) - set(USES)),
            )
            problems += _some(
                f"{name}.parquet: official_split that is none of {', '.join(SPLITS)}",
                sorted(set(found[name]["official_split"]) - set(SPLITS)),
            )
            if "reports" in found:
                key = "dicom_id" if name == "images" else "study_id"
                frame = found[name]
                silent = ~frame["study_id"].isin(found["reports"]["study_id"]) & (frame["use"] != "excluded")
                if name == "images" and "boxes" in found:
                    silent &= ~frame["dicom_id"].isin(found["boxes"]["dicom_id"])
                problems += _some(
                    f"{name}.parquet: neither a sentence nor a box, and yet not excluded",
                    frame.loc[silent, key].tolist(),
                )
    if "images" in found and "boxes" in found:
        boxed = found["images"]["dicom_id"].isin(found["boxes"]["dicom_id"])
        wrong = found["images"][boxed & (found["images"]["use"] != "grounding")]
        problems += _some(
            "images.parquet: images with a box whose use is not grounding", wrong["dicom_id"].tolist()
        )
    return problems


def _boxes(_: PreparedSet, found: Tables) -> list[str]:
    if "boxes" not in found or "images" not in found:
        return []
    boxes = found["boxes"].merge(found["images"][["dicom_id", "height", "width"]], on="dicom_id")
    sides = boxes[["x", "y", "w", "h"]]
    # Comparisons with NaN are false. A rounding error of the clipped corner is no pixel.
    inside = (sides[["x", "y"]] >= 0).all(axis=1) & (sides[["w", "h"]] > 0).all(axis=1)
    inside &= boxes["x"] + boxes["w"] <= boxes["width"] + 1e-6
    inside &= boxes["y"] + boxes["h"] <= boxes["height"] + 1e-6
    wrong = boxes[~inside]
    nameless = boxes[(boxes["phrase"].str.strip() == "") | (boxes["category"].str.strip() == "")]
    return [
        *_some(
            "boxes.parquet: boxes that are not inside their image", wrong["dicom_id"].tolist(), len(boxes)
        ),
        *_some("boxes.parquet: boxes without phrase or category", nameless["dicom_id"].tolist(), len(boxes)),
    ]


def _cases(prepared: PreparedSet, found: Tables) -> list[str]:
    """Cases are what the labels say, in their use; without the option "balanced", all of them."""
    if any(name not in found for name in ("cases", "images", "labels")):
        return []
    cases = found["cases"]
    labels = found["labels"].drop_duplicates("study_id")
    images = found["images"].drop_duplicates("dicom_id")
    problems = _some(
        "cases.parquet: findings that labels.parquet does not label",
        sorted(set(cases["finding"]) - set(labelled_findings(labels))),
    )
    every = case_table(images, labels)
    key = ["dicom_id", "finding"]
    beside = cases.merge(every, on=key, how="left", suffixes=("", "_expected"))
    wrong = beside[(beside["label"] != beside["label_expected"]) | (beside["use"] != beside["use_expected"])]
    problems += _some(
        "cases.parquet: cases that labels.parquet and images.parquet do not give",
        [" ".join(row) for row in wrong[key].itertuples(index=False)],
        len(cases),
    )
    if prepared.info.get("options", {}).get("cases", "all") == "all":
        lacking = every.merge(cases[key], on=key, how="left", indicator=True).query("_merge == 'left_only'")
        problems += _some(
            "cases.parquet: cases that labels.parquet gives are missing",
            [" ".join(row) for row in lacking[key].itertuples(index=False)],
            len(every),
        )
    given = found["labels"].drop(columns="study_id")
    wrong_labels = found["labels"][~(given.isna() | given.isin([-1.0, 0.0, 1.0])).all(axis=1)]
    return problems + _some(
        "labels.parquet: labels that are none of 1, 0, -1", wrong_labels["study_id"].tolist()
    )


def _truth(_: PreparedSet, found: Tables) -> list[str]:
    if "classes" not in found or "sentences" not in found:
        return []
    ids = found["sentences"]["sentence_id"]
    return _some(
        "classes.parquet: sentences without a class", ids[~ids.isin(found["classes"]["sentence_id"])].tolist()
    )


def _model_files(prepared: PreparedSet, found: Tables) -> list[str]:
    """Scores and embeddings can be read and cover all sentences."""
    if "sentences" not in found:
        return []
    problems = []
    readers: dict[str, Callable[[str], Any]] = {
        "log_p": prepared.log_p,
        "text_embedding": prepared.text_embedding,
    }
    for kind, read in readers.items():
        for name in _names(prepared, kind):
            try:
                table = read(name)
            except PreparedDataError as error:
                problems.append(str(error))
                continue
            ids = pd.Series(table["sentence_id"] if kind == "log_p" else table.sentence_id)
            extra = ids[~ids.isin(found["sentences"]["sentence_id"])].tolist()
            problems += _some(f"{kind}/{name}.parquet: rows of unknown sentences", extra)
            if kind == "log_p":
                scored = table[table["n_tokens"] > 0]
                # Reading refused what is infinite or above 0.
                problems += _some(
                    f"{kind}/{name}.parquet: sentences with word pieces whose log_p is NaN",
                    scored.loc[scored["log_p"].isna(), "sentence_id"].tolist(),
                )
    return problems


def _names(prepared: PreparedSet, kind: str) -> list[str]:
    files = (prepared.folder / kind).glob("*.parquet")
    return sorted(file.stem for file in files if not file.name.startswith("."))


# --- Images ------------------------------------------------------------------------------------------------------


def _image_files(
    prepared: PreparedSet, images: pd.DataFrame, full: bool, pool: Executor | None
) -> tuple[list[str], dict[str, bytes]]:
    """Every image's file is there, an 8-bit grey JPEG of the set's size; and no file is of no image.

    Returns:
        problems; and by path, with `full`, the digests of the pixels that could be decoded.
    """
    root = prepared.folder / "images"
    leaving = [path for path in images["path"] if not _stays_below(path)]
    problems = _some("images.parquet: paths that leave the folder images/", leaving)
    paths = [path for path in images["path"] if _stays_below(path)]
    options = prepared.info.get("options", {})
    look = partial(
        examine_image, size=options.get("size"), geometry=options.get("geometry", "stretch"), full=full
    )
    files = [root / path for path in paths]
    sizes = images.loc[images["path"].map(_stays_below).astype(bool), ["height", "width"]]
    originals = list(sizes.itertuples(index=False, name=None))
    results = pool.map(look, files, originals, chunksize=64) if pool else map(look, files, originals)
    examined = list(progress(results, len(files), "image files", "images")) if files else []
    reasons = [reason for reason, _ in examined]
    digests = {path: digest for path, (_, digest) in zip(paths, examined, strict=True) if digest}
    for reason in sorted(set(reasons) - {""}):
        of_reason = [path for path, why in zip(paths, reasons, strict=True) if why == reason]
        problems += _some(f"images/: {reason}", of_reason, len(paths))
    known = {str(PurePosixPath(path)) for path in paths}
    there = {str(PurePosixPath(file.relative_to(root))) for file in _files(root)}
    return problems + _some("images/: files that are not in images.parquet", sorted(there - known)), digests


def _pictures(images: pd.DataFrame, digests: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Pictures that stand under several names: problems (of several purposes) and warnings (of several patients)."""
    images = images.drop_duplicates("path")
    # As for patients, test beside grounding may be.
    images = images.assign(
        digest=images["path"].map(digests), purpose=images["use"].replace("grounding", "test")
    )
    images = images[images["digest"].notna() & images["digest"].duplicated(keep=False)]
    of_purposes = _pairs(images[images["use"] != "excluded"], "purpose")
    of_patients = _pairs(images[~images["digest"].isin(of_purposes)], "subject_id")
    what = "images/: the same picture, pixel by pixel, under several names"
    return (
        _some(
            f"{what}, for several purposes; leave all but one out of the source", list(of_purposes.values())
        ),
        _some(f"{what}, of several patients", list(of_patients.values())),
    )


def _pairs(images: pd.DataFrame, column: str) -> dict[Any, str]:
    """For each picture that stands under several values of a column, two paths that differ in it."""
    several = images[images.groupby("digest")[column].transform("nunique") > 1]
    pairs = {}
    for digest, group in several.groupby("digest", sort=False):
        first = group.iloc[0]
        other = group[group[column] != first[column]].iloc[0]
        pairs[digest] = " = ".join(
            f"{row['path']} ({row['use']}, patient {row['subject_id']})" for row in (first, other)
        )
    return pairs


def _stays_below(path: str) -> bool:
    return bool(path) and not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts


def _files(root: Path) -> Iterator[Path]:
    return (file for file in root.rglob("*") if file.is_file())


def examine_image(
    file: Path, original: tuple[int, int], *, size: int | None, geometry: str, full: bool
) -> tuple[str, bytes]:
    """What is wrong with a prepared image, "" for nothing; and a digest of the pixels of a sound one that was decoded.

    Args:
        file: the JPEG.
        original: height and width of its original, by images.parquet.
        size: pixels of its sides, of the shorter one for geometry "shortest"; None where the set does not say.
        geometry: how it was fitted, by dataset.json.
        full: read and decode all of it, not only its header and its end.
    """
    try:
        with file.open("rb") as stream, Image.open(stream) as image:
            if problem := _image_problem(stream, image, original, size, geometry, full):
                return problem, b""
            if not full:
                return "", b""
            pixels = f"{image.size} ".encode() + image.tobytes()
            return "", hashlib.blake2b(pixels, digest_size=16).digest()
    except FileNotFoundError:
        return "a file is missing", b""
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        return "a file cannot be decoded", b""


def _image_problem(
    stream: BinaryIO,
    image: Image.Image,
    original: tuple[int, int],
    size: int | None,
    geometry: str,
    full: bool,
) -> str:
    if image.format != "JPEG" or image.mode != "L":
        return f"a file is no grey JPEG but {image.format} of mode {image.mode}"
    is_square = geometry != "shortest"
    if size is not None and (min(image.size) != size or (is_square and max(image.size) != size)):
        return f"a file has not {size} pixels a side"
    if full:
        image.load()
    if not image_files.ends_whole(stream):
        return "a file is cut off"
    stamp = image_files.read_stamp(image.info.get("comment", b""))
    if problem := _stamp_problem(stamp, original, size, geometry):
        return problem
    stream.seek(0)
    if full and stamp is not None and not image_files.is_as_written(stream.read(), stamp):
        return "a file is damaged: its bytes are not those that were written"
    return ""


def _stamp_problem(
    stamp: image_files.Stamp | None, original: tuple[int, int], size: int | None, geometry: str
) -> str:
    if stamp is None:
        return "a file does not say how it was prepared: something else wrote it, or an old version of this program"
    if stamp.geometry != geometry or stamp.size != (stamp.size if size is None else size):
        return (
            f"a file was made with geometry {stamp.geometry} and size {stamp.size}, not as dataset.json says"
        )
    if (stamp.height, stamp.width) != original:
        return "a file is of an original of another size than images.parquet says"
    return ""


# --- The memory map ----------------------------------------------------------------------------------------------


def _memory_map(prepared: PreparedSet, images: pd.DataFrame, full: bool, pool: Executor | None) -> list[str]:
    """Where there is a memory map it is of this set, whole, and each row holds the pixels of its image."""
    pixels, said = prepared.folder / PIXELS, prepared.folder / DESCRIPTION
    if pixels.exists() and not said.exists():
        return [
            f"{PIXELS}: there is no {DESCRIPTION} beside it, so it was not finished and nothing reads it; run the "
            "command that prepared the set again with --memory_map, or delete it"
        ]
    try:
        memory_map = open_memory_map(prepared)
    except PreparedDataError as error:
        return [str(error)]
    if memory_map is None:
        return []
    expected = np.load(pixels, mmap_mode="r")
    if pixels.stat().st_size != expected.offset + expected.nbytes:
        return [
            f"{PIXELS}: expected {expected.offset + expected.nbytes:,} bytes, found {pixels.stat().st_size:,}; "
            f"{_MAP_ADVICE}"
        ]
    paths = images["path"].tolist()
    last = len(paths) - 1
    rows = range(len(paths)) if full else np.unique(np.linspace(0, last, MAP_SAMPLE).astype(int)).tolist()
    files = [prepared.image_file(paths[row]) for row in rows]
    look = partial(row_differs, memory_map)
    results = pool.map(look, rows, files, chunksize=64) if pool else map(look, rows, files)
    differ = list(progress(results, len(rows), "memory map", "images"))
    wrong = [paths[row] for row, is_other in zip(rows, differ, strict=True) if is_other]
    return _some(f"{PIXELS}: rows that are not the pixels of their image; {_MAP_ADVICE}", wrong, len(rows))


_MAP_ADVICE = f"delete {DESCRIPTION} and run the command that prepared the set again with --memory_map"


def row_differs(memory_map: MemoryMap, row: int, file: Path) -> bool:
    """True if a row holds other pixels than its image; False where the image cannot be decoded (`examine_image`)."""
    try:
        with Image.open(file, formats=("JPEG",)) as image:
            pixels = np.asarray(image.convert("L"))
    except OSError:
        return False
    return not np.array_equal(memory_map[row], pixels)


# --- The page ----------------------------------------------------------------------------------------------------


def _page(prepared: PreparedSet, found: Tables) -> str:
    info = prepared.info
    lines = [
        f"{prepared.folder}: {info.get('source', 'unknown source')}"
        + (" (digital phantom: no patient data)" if prepared.is_phantom else ""),
        f"  format {prepared.format_version}, fingerprint {info.get('fingerprint')}",
        "  options "
        + ", ".join(f"{name} {_value(value)}" for name, value in sorted(info.get("options", {}).items())),
        "",
    ]
    lines += _contents(found)
    if all(name in found for name in ALWAYS):
        lines += case_lines(tables.count(found))
    lines += _model_lines(prepared)
    if (prepared.folder / PIXELS).is_file():
        lines.append(f"  memory map {(prepared.folder / PIXELS).stat().st_size:,} bytes")
    lines += ["", *_beside_published(info, found), *_rejects(prepared.folder / "rejects.csv")]
    return "\n".join(lines)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _contents(found: Tables) -> list[str]:
    lines = []
    for name in ("images", "studies"):
        if name in found and len(found[name]):
            frame = found[name]
            uses = ", ".join(f"{use} {int((frame['use'] == use).sum()):,}" for use in USES)
            lines.append(f"  {name:<10} {len(frame):,} ({uses})")
            by_use = frame.groupby("use")["subject_id"].nunique()
            uses = ", ".join(f"{use} {int(by_use.get(use, 0)):,}" for use in USES)
            lines.append(f"  {'patients':<10} {frame['subject_id'].nunique():,} ({uses})")
    if "reports" in found and "sentences" in found:
        reports = found["reports"]
        parts = reports.groupby("section")["study_id"].nunique()
        sections = ", ".join(f"{name} {int(n):,}" for name, n in parts.items())
        lines.append(f"  {'reports':<10} {reports['study_id'].nunique():,} ({sections})")
        lines.append(f"  {'sentences':<10} {len(reports):,}, of which {len(found['sentences']):,} distinct")
    if "boxes" in found:
        boxes = found["boxes"]
        pairs = len(boxes[["dicom_id", "phrase"]].drop_duplicates())
        lines.append(
            f"  {'boxes':<10} {len(boxes):,} on {boxes['dicom_id'].nunique():,} images; {pairs:,} image-sentence pairs"
        )
    return lines


def _model_lines(prepared: PreparedSet) -> list[str]:
    lines = []
    for kind in ("log_p", "text_embedding"):
        if names := _names(prepared, kind):
            lines.append(f"  {kind:<10} {', '.join(names)}")
    return lines


def _beside_published(info: Mapping[str, Any], found: Tables) -> list[str]:
    """Counts of the source beside those that its authors give, where the source is MIMIC-CXR."""
    counts = info.get("counts", {})
    if not str(info.get("source", "")).startswith("mimic-cxr") or info.get("phantom"):
        return []
    rows: list[tuple[str, Any, int]] = []
    release = counts.get("release", {"images": counts.get("images_in_release")})
    rows += [(what, release.get(key), number) for key, (what, number) in PUBLISHED.items()]
    if "images" in found and "reports" in found:
        with_report = found["images"]["study_id"].isin(found["reports"]["study_id"])
        rows.append(("frontal images with a report", int(with_report.sum()), PUBLISHED_FRONTAL))
    in_file = counts.get("ms_cxr", {})
    if "boxes" in found:
        rows += [
            (f"MS-CXR: {what}", in_file.get(key), number) for key, (what, number) in PUBLISHED_MS_CXR.items()
        ]
        rows.append(("MS-CXR: boxes in this set", len(found["boxes"]), PUBLISHED_MS_CXR["boxes"][1]))
    lines = [f"  {'':<34}{'here':>10}{'published':>12}"]
    for what, here, number in rows:
        shown = "not counted" if here is None else f"{here:,}"
        note = "" if here is None or here == number else "   differs"
        lines.append(f"  {what:<34}{shown:>10}{number:>12,}{note}")
    if counts.get("boxes_outside_subset"):
        lines.append(f"  {counts['boxes_outside_subset']:,} boxes lie outside the subset that was asked for")
    return [*lines, ""]


def _rejects(file: Path) -> list[str]:
    """How many were left out, by kind and reason."""
    try:
        rejects = _read_rejects(file)
        rows = Counter(zip(rejects["kind"], rejects["reason"].map(_without_numbers), strict=True))
    except (OSError, ValueError, KeyError) as error:
        return [f"  left out   {file.name} cannot be read ({error})"]
    if not rows:
        return ["  left out   nothing"]
    return [
        "  left out",
        *(f"  {count:>8,} {kind:<7} {reason}" for (kind, reason), count in sorted(rows.items())),
    ]


def _without_numbers(reason: str) -> str:
    """Reasons that differ in their numbers only are one reason."""
    return "".join("n" if character.isdigit() else character for character in reason).replace("nn", "n")


def check(folder: Path, full: bool, workers: int) -> None:
    """Print the page and the problems.

    Raises:
        CheckFailed: there are problems.
    """
    with worker_processes(workers) as pool:
        page, problems = check_set(folder, full, pool)
    print(page)
    print()
    if not problems:
        by_headers = not full and (folder / "images").is_dir()
        sampled = ", the memory map by a sample" if (folder / PIXELS).is_file() else ""
        print(
            "no problem found"
            + (
                f" (image files by their headers and ends{sampled}; --full reads all of them)"
                if by_headers
                else ""
            )
        )
        return
    print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for problem in problems:
        print(f"  - {problem}")
    raise CheckFailed(
        f"{folder}: {len(problems)} problems, see above; prepare the set again into a new folder"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.check", description="Verify a prepared data set."
    )
    parser.add_argument("--data", type=Path, required=True, metavar="SET", help="prepared data set")
    parser.add_argument(
        "--full",
        action="store_true",
        help="decode every image, compare its checksum, compare all of a memory map, and find the same picture under "
        "several names",
    )
    parser.add_argument(
        "--workers", type=positive, default=available_cores(), help="processes (as many as there are cores)"
    )
    options = parser.parse_args(arguments)
    try:
        check(options.data, options.full, options.workers)
    except CheckFailed as error:
        raise SystemExit(1) from error


if __name__ == "__main__":
    run_command(main)
