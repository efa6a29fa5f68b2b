"""Convert images to 8-bit grey, by the same rules in data preparation and inference."""

from __future__ import annotations

import struct

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from medclip_dcl.common.errors import UserError

MAX_PIXELS = 100_000_000
"""Larger images are refused before they are decoded, as decompression bombs; radiographs have at most a quarter."""

_BLOCK = 2**20  # pixels
_WHITE_IS_ZERO = 0
_PHOTOMETRIC_INTERPRETATION = 262
_ORIENTATION = 274
# Exif orientation -> transposition that turns the image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# PIL's exceptions for a damaged Exif block; the image itself may be intact.
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error)


_NOTES = "medclip_dcl notes"
_ROBUST = "hot or burnt-in pixels: black and white are the 1 and 99 percentiles of its grey levels"
_CROWDED = (
    "90% of its pixels share a tenth of its grey levels (burnt-in pixels?), so that it shows hardly anything"
)


class UnusableImageError(UserError):
    """An image cannot be used; the message says why."""


def with_notes(grey: Image.Image, *notes: str) -> Image.Image:
    """The image with warnings about how it was read, for `notes_of`; empty ones are left out."""
    grey.info[_NOTES] = tuple(filter(None, notes))
    return grey


def notes_of(grey: Image.Image) -> tuple[str, ...]:
    """Warnings about how an image was read; they quote nothing of the file."""
    notes = grey.info.get(_NOTES)
    # Texts in a file have the same place.
    return notes if isinstance(notes, tuple) else ()


def require_readable_size(width: int, height: int) -> None:
    """Refuse an image of more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise UnusableImageError(
            f"image of {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} pixels are read: give a smaller copy"
        )


def to_grey(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8-bit grey.

    Colours, palettes and CMYK become luma (ITU-R 601); transparency is ignored. Deeper images are scaled linearly from
    their own minimum and maximum, as MIMIC-CXR-JPG was made from DICOM. A TIFF file whose header says that white is
    zero is inverted; other formats have no such header. The Exif orientation is applied.
    """
    grey = _eight_bit_grey(image)
    turn = _TURNS.get(orientation(image))
    return grey if turn is None else grey.transpose(turn)


def orientation(image: Image.Image) -> int:
    """Exif orientation of a picture; 1 is upright."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGED:
        return 1


def _eight_bit_grey(image: Image.Image) -> Image.Image:
    if image.mode == "L":
        image.load()
        return image
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image.convert("L")
    values = np.asarray(image)
    low, high, note = shown_range(values)
    grey = eight_bits(values, low, high)
    # PIL inverts such files of at most 8 bits, but not deeper ones.
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO:
        grey = 255 - grey
    return with_notes(Image.fromarray(grey), note)


def finite_range(values: Num[np.ndarray, "*shape"]) -> tuple[float, float]:
    """Minimum and maximum of grey levels."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise UnusableImageError("some of its grey levels are NaN or infinite")
    return low, high


def shown_range(
    values: Num[np.ndarray, "*shape"], counts: Num[np.ndarray, "*shape"] | None = None
) -> tuple[float, float, str]:
    """The levels that become black and white, and a warning or ""; values stand for one pixel, or for `counts`.

    They are the minimum and maximum or, where the middle 98% of the pixels fill less than a tenth of that range, the 1
    and 99 percentiles (choice).
    """
    low, high = finite_range(values)
    if counts is None and values.dtype.kind in "iu":  # several times as fast as the percentiles of the pixels
        values, counts = np.unique(values, return_counts=True)
    shares = np.percentile(values, (1, 5, 95, 99), weights=counts, method="inverted_cdf")
    first, fifth, last_but_four, last = map(float, shares)
    tenth = (high - low) / 10
    if 0 < last - first < tenth:
        return first, last, _ROBUST
    return low, high, _CROWDED if last_but_four - fifth < tenth else ""


def eight_bits(values: Num[np.ndarray, "*shape"], low: float, high: float) -> UInt8[np.ndarray, "*shape"]:
    """Map finite values in [low, high] linearly to 0..255, clipped outside; all 0 unless low < high."""
    if not low < high:
        return np.zeros(values.shape, np.uint8)
    if values.size > _BLOCK:
        # Copies of a whole image as indices or float64 would take gigabytes.
        blocks = np.array_split(values.reshape(-1), -(-values.size // _BLOCK))
        return np.concatenate([eight_bits(block, low, high) for block in blocks]).reshape(values.shape)
    if values.dtype.kind in "iu" and values.dtype.itemsize <= 2:
        # A look-up table: there are far fewer levels than pixels.
        limits = np.iinfo(values.dtype)
        table = _scaled(np.arange(limits.min, limits.max + 1), low, high)
        return table[values.astype(np.int32) - limits.min]
    return _scaled(values, low, high)


def _scaled(values: Num[np.ndarray, "*shape"], low: float, high: float) -> UInt8[np.ndarray, "*shape"]:
    shares = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.rint(shares.clip(0, 255)).astype(np.uint8)
