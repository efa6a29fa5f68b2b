"""All images of a prepared set in one file, read without decoding: an option beside the JPEG files, equal to them.

``memory_map.npy`` holds the grey levels, uint8 (image, side, side), in the order of images.parquet;
``memory_map.json``, written last, says of which set: a map that belongs to another is refused, never read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

PIXELS = "memory_map.npy"
DESCRIPTION = "memory_map.json"


class MemoryMap:
    """Grey levels by row of images.parquet. Each process opens the file at its first look.

    Args:
        file: of uint8 (image, side, side).
        side: of the images, in pixels.
    """

    def __init__(self, file: Path, side: int) -> None:
        self.file, self.side = file, side
        self._pixels: np.ndarray | None = None

    def __getitem__(self, row: int) -> UInt8[np.ndarray, "side side"]:
        if self._pixels is None:
            self._pixels = np.load(self.file, mmap_mode="r")
        return np.asarray(self._pixels[row])

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be sent to a loader process as a copy of the whole file.
        return {**self.__dict__, "_pixels": None}


def description(prepared: PreparedSet) -> dict[str, Any]:
    """What `DESCRIPTION` says of the map of a set."""
    images = len(prepared.table("images"))
    return {
        "images": images,
        "side": prepared.info.get("options", {}).get("size"),
        "fingerprint": prepared.info.get("fingerprint"),
    }


def open_memory_map(prepared: PreparedSet) -> MemoryMap | None:
    """The memory map of a set, None where it has none.

    Raises:
        PreparedDataError: there is one, but of another set, or not whole.
    """
    file, said = prepared.folder / PIXELS, prepared.folder / DESCRIPTION
    if not said.is_file():
        return None
    again = (
        f"delete {said}, or make the map again by running the command that prepared the set with --memory_map"
    )
    try:
        found = json.loads(said.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreparedDataError(f"{said} is not JSON ({error}); {again}") from error
    expected = description(prepared)
    if found != expected:
        raise PreparedDataError(
            f"{said} is of another set: {_words(found)}, expected {_words(expected)}; {again}"
        )
    try:
        shape, kind = _header(file)
    except (OSError, ValueError) as error:
        raise PreparedDataError(f"{file} cannot be read ({error}); {again}") from error
    right = (expected["images"], expected["side"], expected["side"])
    if shape != right or kind != np.uint8:
        raise PreparedDataError(f"{file} holds {kind} {shape}, expected uint8 {right}; {again}")
    return MemoryMap(file, expected["side"])


def _header(file: Path) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type; a file shorter than these say is a ValueError."""
    mapped = np.load(file, mmap_mode="r")
    return mapped.shape, mapped.dtype


def _words(described: Any) -> str:
    if not isinstance(described, dict):
        return repr(described)[:80]
    return ", ".join(f"{name} {value}" for name, value in sorted(described.items()))
