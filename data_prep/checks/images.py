"""Checks of the image files of a prepared set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
from PIL import Image

from data_prep.command import progress
from medclip_dcl.common.files import digest_of_file
from medclip_dcl.data.identity import IMAGE_FILES
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.table_checks import some


def check_files(
    prepared: PreparedSet, tables: Mapping[str, pd.DataFrame], full: bool, pool: Executor | None
) -> tuple[list[str], dict[str, bytes]]:
    """Every image has its file, an 8-bit grey JPEG of the set's size as it was written; every file belongs to an image.

    Returns:
        problems; and by path, with `full`, the digests of the pixels that could be decoded.
    """
    root, (geometry, size) = prepared.folder / "images", prepared.fitting
    paths = tables["images"]["path"].tolist()
    look = partial(examine_image, size=size, geometry=geometry, full=full)
    files = [root / path for path in paths]
    results = pool.map(look, files, chunksize=64) if pool else map(look, files)
    examined = list(progress(results, len(files), "image files", "images")) if files else []
    written = tables[IMAGE_FILES].set_index("path")["digest"].to_dict() if IMAGE_FILES in tables else {}
    changed = set(prepared.content.images)
    defects: dict[str, list[str]] = {}
    for path, (defect, now, _) in zip(paths, examined, strict=True):
        is_changed = path in changed or (full and written.get(path, now) != now)
        if defect := defect or ("a file was changed after the set was made" if is_changed else ""):
            defects.setdefault(defect, []).append(path)
    problems = []
    for defect in sorted(defects):
        problems += some(f"images/: {defect}", defects[defect], len(paths))
    there = {str(PurePosixPath(file.relative_to(root))) for file in root.rglob("*") if file.is_file()}
    unknown = sorted(there - {str(PurePosixPath(path)) for path in paths})
    digests = {path: pixels for path, (_, _, pixels) in zip(paths, examined, strict=True) if pixels}
    return problems + some("images/: files that are not in images.parquet", unknown), digests


def find_copies(images: pd.DataFrame, digests: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Images with equal pixels: problems (across uses) and warnings (across patients)."""
    images = images.drop_duplicates("path")
    images = images.assign(
        digest=images["path"].map(digests),
        # As for patients, test and grounding may share.
        purpose=images["use"].replace("grounding", "test"),
    ).dropna(subset="digest")
    across_uses = _pairs(images[images["use"] != "excluded"], "purpose")
    across_patients = _pairs(images[~images["digest"].isin(across_uses)], "subject_id")
    what = "images/: identical pixels in several files"
    return (
        some(f"{what} with different uses; leave all but one out of the source", across_uses.values()),
        some(f"{what} of different patients", across_patients.values()),
    )


def _pairs(images: pd.DataFrame, column: str) -> dict[Any, str]:
    """For each digest with several values of a column, two images that differ in it."""
    pairs = {}
    for digest, group in images.groupby("digest", sort=False):
        first, other = group.iloc[0], group[group[column] != group[column].iloc[0]]
        if len(other):
            two = (f"{r['path']} ({r['use']}, patient {r['subject_id']})" for r in (first, other.iloc[0]))
            pairs[digest] = " = ".join(two)
    return pairs


def examine_image(file: Path, *, size: int | None, geometry: str, full: bool) -> tuple[str, str, bytes]:
    """The defect of a prepared image, "" for none; with `full` the digests of its bytes and of its pixels.

    Size and geometry are the set's; `full` reads and decodes the whole file, not its header alone.
    """
    try:
        with Image.open(file) as image:
            if image.format != "JPEG" or image.mode != "L":
                return f"a file is not a grey JPEG but {image.format} of mode {image.mode}", "", b""
            sides = image.size if geometry != "shortest" else (min(image.size),)
            if size is not None and set(sides) != {size}:
                return f"a file does not have {size} pixels a side", "", b""
            if not full:
                return "", "", b""
            pixels = f"{image.size} ".encode() + image.tobytes()
            return "", digest_of_file(file), hashlib.blake2b(pixels, digest_size=16).digest()
    except FileNotFoundError:
        return "a file is missing", "", b""
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        return "a file cannot be decoded", "", b""
