"""Checks of the image files of a prepared set."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from itertools import chain
from typing import Any

import pandas as pd
from PIL import Image

from data_prep.command import progress
from medclip_dcl.common.files import digest
from medclip_dcl.data.identity import IMAGE_FILES
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.data.shards import ShardIndex, StoredImages
from medclip_dcl.data.table_checks import some

# Images that a worker process reads at a time.
_PART = 64


def check_files(
    prepared: PreparedSet, tables: Mapping[str, pd.DataFrame], full: bool, pool: Executor | None
) -> tuple[list[str], dict[str, str]]:
    """Every image has its file as it was written, and every file belongs to an image; `full` reads all of them.

    Returns:
        problems; and digests by path: with `full` of the pixels that could be decoded, else of the files as written.
    """
    root = prepared.folder / "images"
    of_files = tables[IMAGE_FILES]
    written: dict[str, str] = dict(zip(of_files["path"], of_files["digest"], strict=True))
    pixels = {**written}
    paths = tables["images"]["path"].tolist()
    # Of an image that differs from what was written; "" for none.
    changed = dict(prepared.content.images)
    stored, is_sharded = prepared.stored_images(paths), ShardIndex.read(prepared.folder) is not None
    if full and paths:
        parts = [stored.part(start, start + _PART) for start in range(0, len(paths), _PART)]
        found = chain.from_iterable(pool.map(digests, parts) if pool else map(digests, parts))
        examined = dict(zip(paths, progress(found, len(paths), "image files", "images"), strict=True))
        changed |= {path: now for path, (now, _) in examined.items() if now != written.get(path)}
        pixels = {path: of_pixels for path, (_, of_pixels) in examined.items() if of_pixels}
    # Strings: a Path for each of a million files would take minutes.
    there = {
        os.path.join(place, name)[len(f"{root}/") :] for place, _, names in os.walk(root) for name in names
    }
    others = sorted(path for path in there - {*paths} if (root / path).is_file())
    missing = [path for path in paths if changed.get(path) == ""]
    altered = [place for place, path in enumerate(paths) if changed.get(path)]
    named = [*map(stored.where, altered[:3]), *altered[3:]]
    an_image = "shards/: an image" if is_sharded else "images/: a file"
    return [
        *some(f"{an_image} is missing", missing, len(paths)),
        *some(f"{an_image} was changed after the set was made", named, len(paths)),
        *some("images/: files that are not in images.parquet", others),
    ], pixels


def find_copies(images: pd.DataFrame, digests: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Images of equal digests: problems (across uses) and warnings (across patients)."""
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
    for key, group in images.groupby("digest", sort=False):
        first, other = group.iloc[0], group[group[column] != group[column].iloc[0]]
        if len(other):
            two = (f"{r['path']} ({r['use']}, patient {r['subject_id']})" for r in (first, other.iloc[0]))
            pairs[key] = " = ".join(two)
    return pairs


def digests(stored: StoredImages) -> list[tuple[str, str]]:
    """Digests of the bytes and of the pixels of each image; "" where they cannot be read."""
    return [_digests(stored, index) for index in range(len(stored))]


def _digests(stored: StoredImages, index: int) -> tuple[str, str]:
    of_bytes = ""
    try:
        content = stored[index]
        of_bytes = digest(content)
        with Image.open(io.BytesIO(content)) as image:
            pixels = f"{image.size} ".encode() + image.tobytes()
        return of_bytes, hashlib.blake2b(pixels, digest_size=16).hexdigest()
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        return of_bytes, ""
