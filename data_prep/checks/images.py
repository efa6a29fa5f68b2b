"""Checks of the image files of a prepared set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pandas as pd
from PIL import Image

from data_prep.command import progress
from data_prep.sources import images as image_files
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.table_checks import rows, some


def check_files(
    prepared: PreparedSet, images: pd.DataFrame, full: bool, pool: Executor | None
) -> tuple[list[str], dict[str, bytes]]:
    """Every image has its file, an 8-bit grey JPEG of the set's size; every file belongs to an image.

    Returns:
        problems; and by path, with `full`, the digests of the pixels that could be decoded.
    """
    root, (geometry, size) = prepared.folder / "images", prepared.fitting
    inside = images["path"].map(_stays_below).astype(bool)
    problems = some("images.parquet: paths that leave the folder images/", images["path"][~inside])
    paths = images["path"][inside].tolist()
    originals = list(rows(images[inside], ("height", "width")))
    look = partial(examine_image, size=size, geometry=geometry, full=full)
    files = [root / path for path in paths]
    results = pool.map(look, files, originals, chunksize=64) if pool else map(look, files, originals)
    examined = list(progress(results, len(files), "image files", "images")) if files else []
    defects: dict[str, list[str]] = {}
    changed = prepared.content.images
    for path, (defect, _) in zip(paths, examined, strict=True):
        if defect := defect or ("a file was changed after the set was made" if path in changed else ""):
            defects.setdefault(defect, []).append(path)
    for defect in sorted(defects):
        problems += some(f"images/: {defect}", defects[defect], len(paths))
    there = {str(PurePosixPath(file.relative_to(root))) for file in root.rglob("*") if file.is_file()}
    unknown = sorted(there - {str(PurePosixPath(path)) for path in paths})
    digests = {path: digest for path, (_, digest) in zip(paths, examined, strict=True) if digest}
    return problems + some("images/: files that are not in images.parquet", unknown), digests


def _stays_below(path: str) -> bool:
    return bool(path) and not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts


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


def examine_image(
    file: Path, original: tuple[int, int], *, size: int | None, geometry: str, full: bool
) -> tuple[str, bytes]:
    """The defect of a prepared image, "" for none; and a digest of its pixels if it is sound and was decoded.

    `original` has the height and width of its original, by images.parquet; size and geometry are the set's; `full`
    reads and decodes all of the file, not only its header and its end.
    """
    try:
        with file.open("rb") as stream, Image.open(stream) as image:
            defect = _image_defect(stream, image, original, size, geometry, full)
            if defect or not full:
                return defect, b""
            pixels = f"{image.size} ".encode() + image.tobytes()
            return "", hashlib.blake2b(pixels, digest_size=16).digest()
    except FileNotFoundError:
        return "a file is missing", b""
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        return "a file cannot be decoded", b""


def _image_defect(
    stream: BinaryIO,
    image: Image.Image,
    original: tuple[int, int],
    size: int | None,
    geometry: str,
    full: bool,
) -> str:
    if image.format != "JPEG" or image.mode != "L":
        return f"a file is not a grey JPEG but {image.format} of mode {image.mode}"
    sides = image.size if geometry != "shortest" else (min(image.size),)
    if size is not None and set(sides) != {size}:
        return f"a file does not have {size} pixels a side"
    if full:
        image.load()
    if not image_files.ends_whole(stream):
        return "a file is cut off"
    stamp = image_files.read_stamp(image.info.get("comment", b""))
    if stamp is None:
        return "a file was not written by this version of data_prep: it has no stamp"
    if stamp.geometry != geometry or size not in (None, stamp.size):
        return (
            f"a file was made with geometry {stamp.geometry} and size {stamp.size}, not as dataset.json says"
        )
    if (stamp.height, stamp.width) != original:
        return "a file was made from an original of another size than images.parquet says"
    stream.seek(0)
    if full and not image_files.is_as_written(stream.read(), stamp):
        return "a file is damaged: its bytes are not those that were written"
    return ""
