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
_BITS_PER_SAMPLE, _SAMPLE_FORMAT = 258, 339
# Mode of PIL and SampleFormat of a TIFF file (unsigned 1, signed 2) -> numbers for which the mode stands.
_NUMBERS = {("L", 2): np.int8, ("I", 1): np.uint32}
_ORIENTATION = 274
_WITH_ORIENTATION = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
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

RULES = {"8 bits": 2, "deeper than 8 bits": 3, "DICOM": 4, "DICOM lossy beyond BitsStored": 4}
"""Version of the rules for each kind of image file, raised whenever the same file gives another picture."""

EIGHT_BITS, DEEPER, DICOM, LOSSY_DICOM = RULES

_NOTES = "medclip_dcl notes"
_ROBUST = "hot or burnt-in pixels: black and white are the 1 and 99 percentiles of its grey levels"
_CROWDED = "most of its pixels share a tenth of its grey levels (burnt-in, a border?), so that it shows hardly anything"


class UnusableImageError(UserError):
    """An image cannot be used; the message says why."""


def with_notes(grey: Image.Image, kind: str, *notes: str) -> Image.Image:
    """The image with the kind of its file and warnings about how it was read; empty ones are left out."""
    grey.info[_NOTES] = (kind, *filter(None, notes))
    return grey


def kind_and_notes(grey: Image.Image) -> tuple[str, ...]:
    """The kind of an image's file, and warnings about how it was read; they quote nothing of the file."""
    noted = grey.info.get(_NOTES)
    # Texts in a file have the same place.
    return noted if isinstance(noted, tuple) else (EIGHT_BITS,)


def notes_of(grey: Image.Image) -> tuple[str, ...]:
    """The warnings alone."""
    return kind_and_notes(grey)[1:]


def require_readable_size(width: int, height: int) -> None:
    """Refuse an image of more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise UnusableImageError(
            f"image of {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} pixels are read: give a smaller copy"
        )


def to_grey(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8-bit grey.

    Colours, palettes and CMYK become luma (ITU-R 601); transparency is ignored. Deeper images are scaled linearly from
    their own minimum and maximum (MIMIC-CXR-JPG was equalised by its histogram after that). A TIFF file whose header
    says that white is zero is inverted; other formats have no such header. The Exif orientation is applied.
    """
    grey = _eight_bit_grey(image)
    turn = _TURNS.get(orientation(image))
    if turn is None:
        return grey
    turned = grey.transpose(turn)
    for name in _WITH_ORIENTATION:  # else it would be turned again when it is read again
        turned.info.pop(name, None)
    return turned


def orientation(image: Image.Image) -> int:
    """Exif orientation of a picture; 1 is upright."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGED:
        return 1


def _eight_bit_grey(image: Image.Image) -> Image.Image:
    if not is_deep(image):
        image.load()
        return image if image.mode == "L" else image.convert("L")
    if len(image.getbands()) > 1:
        _require_full_range(image)
        return with_notes(image.convert("L"), DEEPER)
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    if tags:
        values = values.view(_NUMBERS.get((image.mode, tags.get(_SAMPLE_FORMAT, (1,))[0]), values.dtype))
    low, high, note = shown_range(values)
    grey = eight_bits(values, low, high)
    # PIL inverts such files of at most 8 bits, but not deeper ones.
    if tags.get(_PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO:
        grey = 255 - grey
    return with_notes(Image.fromarray(grey), DEEPER, note)


def is_deep(image: Image.Image) -> bool:
    """True for samples of more than 8 bits or with a sign, whatever the mode in which PIL gives them."""
    tags, stream = getattr(image, "tag_v2", {}), getattr(image, "fp", None)
    if image.format == "JPEG2000" and stream:
        stream.seek(0)
        content = stream.read()
        return content[content.index(b"\xff\x4f\xff\x51") + 42] & 0x7F > 7  # Ssiz of the first samples
    packing = str([tile.args for tile in getattr(image, "tile", ())])  # none once the image is decoded
    is_packed = ";16" in packing or packing.endswith(", 65535)]")  # PNG, PPM
    is_deep_tiff = max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8 or tags.get(_SAMPLE_FORMAT, (1,))[0] == 2
    return image.mode in ("I", "F") or image.mode.startswith("I;16") or is_packed or is_deep_tiff


def _require_full_range(image: Image.Image) -> None:
    """Refuse colour of 16 bits of which the upper 8, all that PIL gives, show hardly anything."""
    is_planar = image.format == "TIFF" and ";16" not in str(getattr(image, "tile", [])[:1] or ";16")
    # PIL takes half of each word of uncompressed planes, and turns white to black in JPEG 2000.
    is_garbled = is_planar or image.format == "JPEG2000"
    pixels = np.sum([image.getchannel(band).histogram() for band in image.getbands() if band != "A"], axis=0)
    if is_garbled or not pixels[8192 >> 8 : 255].any():
        raise UnusableImageError(
            "colour of 16 bits in JPEG 2000, in separate planes or of values below 8,192 is not read; save it as grey"
        )


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

    They are the minimum and maximum without a border (`_without_borders`) or, where the middle 98% of the pixels fill
    less than a tenth of that range, the 1 and 99 percentiles (choice).
    """
    finite_range(values)
    levels, pixels = np.unique(values, return_counts=True)
    if counts is not None:
        pixels = np.bincount(np.searchsorted(levels, values), counts)
    levels, pixels = _without_borders(levels.astype(np.float64), pixels)
    low, high = float(levels[0]), float(levels[-1])
    shares = np.percentile(levels, (1, 5, 95, 99), weights=pixels, method="inverted_cdf")
    first, fifth, last_but_four, last = map(float, shares)
    spread, tenth = last_but_four - fifth, (high - low) / 10
    if 0 < last - first < tenth:
        return first, last, _ROBUST
    if levels.size > 2:  # without both ends, which may be a border
        quarters = np.percentile(levels[1:-1], (25, 75), weights=pixels[1:-1], method="inverted_cdf")
        spread = min(spread, np.ptp(quarters))
    return low, high, _CROWDED if spread < tenth else ""


def _without_borders(
    levels: Num[np.ndarray, "level"], pixels: Num[np.ndarray, "level"]
) -> tuple[Num[np.ndarray, "shown"], Num[np.ndarray, "shown"]]:
    """Ascending levels and their pixels without a border, a label or 'no data', far from the others (choice)."""
    total = pixels.sum()
    while levels.size > 2:
        below, above = levels[1] - levels[0], levels[-1] - levels[-2]
        end, rest = (0, slice(1, None)) if below > above else (-1, slice(-1))
        is_apart = max(below, above) > (levels[-1] - levels[0]) / 2 and pixels[end] > max(1, total / 100)
        if not is_apart or pixels[rest].sum() < total / 3:
            break
        levels, pixels = levels[rest], pixels[rest]
    return levels, pixels


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
