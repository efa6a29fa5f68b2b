"""Identity of a prepared set: digests of its tables and image files, and the fingerprint of its content.

The digests are written with the set. Opening it hashes the tables again (60 MB for MIMIC-CXR), and an image only if its
size differs or it is newer than dataset.json. A copy that changes times thus has every image hashed once: dataset.json
then gets the time of the newest one, or a file in the user's cache does. Of a set in shards, these are compared in the
same way, and one that differs is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from medclip_dcl.common.command_line import progress_bar
from medclip_dcl.common.files import digest, digest_of_file, file_states
from medclip_dcl.data.shards import FOLDER, TIMES, ShardIndex

IMAGE_FILES = "image_files"
IMAGE_DIGESTS = ["dicom_id", "subject_id", "use", "digest", "original", "patient", "family"]
"""Columns that identify images; original: height, width and bytes of the original file; patient: digest of the source's
name of the patient, None where it names none; family: `PreparedSet.family`."""
_THREADS = 16
# Seconds of hashing after which its progress is shown.
_LONG = 2


class Content(NamedTuple):
    """Fingerprint of a set now; tables by name and images by path that have changed, with digests ("": missing)."""

    fingerprint: str
    tables: dict[str, str]
    images: dict[str, str]


def describe(folder: Path, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Entries of dataset.json that identify a set whose tables have just been written.

    The fingerprint is that of the tables' rows in their order, the digests of images among them, and depends neither
    on compression nor on names of folders.
    """
    content = (part for name in sorted(tables) for part in (f"{name}\n", tables[name].to_csv(index=False)))
    return {
        "fingerprint": digest(*map(str.encode, content)),
        "digests": {name: digest_of_file(folder / f"{name}.parquet") for name in tables},
    }


def current_content(folder: Path, info: Mapping[str, Any], tables: dict[str, str]) -> Content:
    """Content of a set now; `info` is its dataset.json, `tables` are those that have changed.

    Raises:
        UserError: a shard is not as it was written.
    """
    images, index = {}, ShardIndex.read(folder)
    if index is not None:
        times = (folder / FOLDER / TIMES, _stamps(folder / "dataset.json")[1].with_suffix(".json"))
        index.require_sound(info["digests"].get(IMAGE_FILES, ""), times)
    elif IMAGE_FILES in info["digests"] and IMAGE_FILES not in tables:
        images = _changed_images(folder)
    fingerprint = str(info.get("fingerprint"))
    if tables or images:
        fingerprint = digest(json.dumps([fingerprint, tables, images], sort_keys=True).encode())
    return Content(fingerprint, tables, images)


def _changed_images(folder: Path) -> dict[str, str]:
    files = pd.read_parquet(folder / f"{IMAGE_FILES}.parquet")
    written = dict(zip(files["path"], zip(files["bytes"], files["digest"], strict=True), strict=True))
    stamps = _stamps(folder / "dataset.json")
    since = max(stamp.stat().st_mtime_ns for stamp in stamps if stamp.exists())

    states = file_states([f"{folder}/images/{path}" for path in written])
    # Files that are missing, newer or of another size.
    times = {
        path: time
        for path, (size, time) in sorted(zip(written, states, strict=True))
        if size != written[path][0] or time > since
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda path: digest_of_file(folder / "images" / path), times)
        shown = {"desc": f"{folder}: comparing images with other times", "unit": " images", "delay": _LONG}
        now = dict(zip(times, progress_bar(iterable=digests, total=len(times), **shown), strict=True))
    changed = {path: found for path, found in now.items() if found != written[path][1]}
    for stamp in stamps if times and not changed else ():
        with suppress(OSError):  # a set of another user, or read-only
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
            os.utime(stamp, ns=(max(times.values()),) * 2)
            break
    return changed


def _stamps(file: Path) -> tuple[Path, Path]:
    """Files whose time says until when images were compared: dataset.json, and one in the user's cache."""
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "medclip_dcl")
    return file, cache / digest(str(file.resolve()).encode(), file.read_bytes())
