"""Write the memory map of a prepared set from its JPEG files (see `medclip_dcl.data.memory_map`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from data_prep.command import progress
from data_prep.sources.images import ImageStageError, require_space
from medclip_dcl.data.memory_map import DESCRIPTION, PIXELS, description, open_memory_map
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.files import write_json

_AT_ONCE = 32


class _Part(NamedTuple):
    """Images that one task copies: `files` to the bytes of `target` from `offset` on."""

    target: Path
    offset: int
    files: tuple[Path, ...]
    side: int


def write_memory_map(folder: Path, pool: Executor | None = None) -> bool:
    """Write the map of a finished set: under another name, then renamed; its description is written last.

    Args:
        folder: of the set.
        pool: processes to share the work; None works in this one.

    Returns:
        False where it was there already.

    Raises:
        ImageStageError: the disk is full.
        PreparedDataError: an image of the set cannot be read, or is not of the set's size.
    """
    prepared = PreparedSet(folder)
    if has_memory_map(prepared):
        return False
    (folder / DESCRIPTION).unlink(missing_ok=True)
    described = description(prepared)
    count, side = described["images"], described["side"]
    older = (folder / PIXELS).stat().st_size if (folder / PIXELS).exists() else 0
    require_space(folder, [], further=max(0, memory_map_bytes(count, side) - older))
    temporary = folder / f".{PIXELS}.{os.getpid()}.tmp"
    offset = _write_header(temporary, count, side)
    # Not before: a killed run leaves one of the two, by which the next one knows that there was to be a map.
    (folder / PIXELS).unlink(missing_ok=True)
    files = [prepared.image_file(path) for path in prepared.table("images")["path"]]
    parts = [
        _Part(temporary, offset + first * side**2, tuple(files[first : first + _AT_ONCE]), side)
        for first in range(0, count, _AT_ONCE)
    ]
    results = pool.map(_copy, parts) if pool else map(_copy, parts)
    for _ in progress((image for done in results for image in range(done)), count, "memory map", "images"):
        pass
    _require_size(temporary, offset + memory_map_bytes(count, side))
    os.replace(temporary, folder / PIXELS)
    write_json(described, folder / DESCRIPTION)
    return True


def memory_map_bytes(images: int, side: int) -> int:
    """Bytes that the map of so many images takes, but for its header."""
    return images * side**2


def has_memory_map(prepared: PreparedSet) -> bool:
    """True if the map of this set is there, and whole."""
    try:
        return open_memory_map(prepared) is not None
    except PreparedDataError:
        return False


def _write_header(file: Path, count: int, side: int) -> int:
    """An .npy file that says what will stand in it; returns where."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, side, side)}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        return stream.tell()


def _copy(part: _Part) -> int:
    """Decode and write some images; returns how many. Not through a map: a full disk would kill the process."""
    with part.target.open("r+b") as stream:
        stream.seek(part.offset)
        try:
            stream.writelines(_decoded(part.files, part.side))
            stream.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ImageStageError(
                f"{part.target.parent}: {error.strerror}; make room and run again"
            ) from error
    return len(part.files)


def _decoded(files: Sequence[Path], side: int) -> Iterator[bytes]:
    for file in files:
        try:
            with Image.open(file, formats=("JPEG",)) as image:
                grey = image.convert("L")
        except OSError as error:
            raise PreparedDataError(f"prepared image {file} cannot be read ({error})") from error
        if grey.size != (side, side):
            raise PreparedDataError(
                f"prepared image {file}: expected {side} x {side} pixels, found {grey.size}"
            )
        yield grey.tobytes()


def _require_size(file: Path, expected: int) -> None:
    """All of it is on the disk; after a power failure the rename may outlive bytes that were not."""
    with file.open("r+b") as stream:
        os.fsync(stream.fileno())
        found = os.fstat(stream.fileno()).st_size
    if found != expected:
        raise ImageStageError(
            f"{file} has {found:,} bytes, expected {expected:,}; run the same command again"
        )
