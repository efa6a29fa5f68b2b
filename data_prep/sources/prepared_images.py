"""Radiographs of a release, resized once: 8-bit grey JPEG files of one size under the release's relative paths.

`medclip_dcl.pictures` reads the originals (16 bits, DICOM, colour, Exif) and has the ways to make a square of a
rectangle. JPEG sources are decoded in full: in PIL's draft mode an image would come out up to four grey levels off what
the same picture gives as PNG or DICOM.
"""

from __future__ import annotations

import io
import re
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from medclip_dcl.common.files import digest, files_below, write_bytes
from medclip_dcl.pictures.geometry import fit
from medclip_dcl.pictures.grey import EIGHT_BITS, RULES, UnusableImageError, kind_and_notes, orientation
from medclip_dcl.pictures.image_file import ENDINGS, read_grey

QUALITY = 95
"""JPEG quality of the prepared images."""

FILTER = "bilinear"
"""Antialiased: the triangle filter grows with the reduction."""

MIN_SIDE = 16
"""Pixels; an image with a shorter side is a thumbnail or an icon."""

MAX_TIMES_LONGER = 8
"""One side than the other; a film of a whole spine is 3 times as long as wide."""

# Comment of a prepared file: how and from what it was made, and its checksum with zeros in the checksum's place.
_STAMP = re.compile(
    rb"(?P<made>medclip_dcl \d+( (?P<kind>[^;]+))?; .*; "
    rb"from (?P<width>\d+) x (?P<height>\d+) pixels, (?P<bytes>\d+) bytes)"
    rb"(; note (?P<note>.*))?(?P<crc>; crc [0-9a-f]{8})"
)
_NO_CRC = b"; crc 00000000"


class Job(NamedTuple):
    """One image to prepare; `size` is its side in pixels, the shorter one for geometry "shortest"."""

    source: Path
    target: Path
    size: int
    geometry: str = "stretch"


class Outcome(NamedTuple):
    """Size of the original in pixels, or why the image cannot be used; bytes of both files, digest of the prepared.

    `note` is a warning about how the original was read, `kind` one of `RULES`.
    """

    height: int = 0
    width: int = 0
    reason: str = ""
    bytes: int = 0
    digest: str = ""
    original_bytes: int = 0
    note: str = ""
    kind: str = EIGHT_BITS


def listed_files(folder: Path) -> list[Path]:
    """Files below a folder, sorted; folders that are not readable and repeated ones are told."""
    found = files_below(folder)
    for error in found.closed:
        print(
            f"warning: {error.filename} is not readable ({error.strerror}): its files are missing",
            file=sys.stderr,
        )
    if found.repeated:
        first, number = found.repeated[0], len(found.repeated)
        print(
            f"note: folders that are linked more than once are read once: {number:,} (first: {first})",
            file=sys.stderr,
        )
    return found.files


def image_files(folder: Path) -> list[Path]:
    """`listed_files` with the ending of an image."""
    return [file for file in listed_files(folder) if ENDINGS.search(file.name)]


def size_of(file: Path) -> tuple[int, int, int]:
    """Width and height of a file's upright picture, and its Exif orientation; 0, 0, 1 where it cannot be read."""
    try:
        with Image.open(file) as image:
            turn = orientation(image)
            width, height = image.size[::-1] if 5 <= turn <= 8 else image.size
            return width, height, turn
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0, 0, 1


def prepare_image(job: Job) -> Outcome:
    """Prepare one image, unless it was prepared from the same file, or one that is gone, in the same way before."""
    try:
        size_of_file = job.source.stat().st_size
        finished = _finished(job, size_of_file)
        if finished is not None:
            return finished
        grey = read_grey(job.source)
    except FileNotFoundError:
        return _finished(job, None) or Outcome(reason="image file is missing")
    except UnusableImageError as error:
        return Outcome(reason=str(error))
    except OSError as error:
        return Outcome(reason=f"image file cannot be read: {error.strerror}")
    width, height = grey.size
    if max(width, height) > MAX_TIMES_LONGER * min(width, height):
        return Outcome(reason=f"image of {width} x {height} pixels is a strip and no radiograph")
    if min(width, height) < MIN_SIDE:
        return Outcome(
            reason=f"image of {width} x {height} pixels; expected at least {MIN_SIDE} on each side"
        )
    prepared = fit(grey, job.geometry, job.size, Image.Resampling.BILINEAR)
    seen = prepared if job.geometry != "pad" else grey
    # A row that differs within itself tells most images from blank ones, without a look at all pixels.
    row = seen.height // 2
    if _is_blank(seen.crop((0, row, seen.width, row + 1))) and _is_blank(seen):
        return Outcome(reason=f"image is blank: grey level {seen.getpixel((0, 0))} everywhere")
    kind, *notes = kind_and_notes(grey)
    outcome = Outcome(height, width, note="; ".join(notes), kind=kind)
    note = f"; note {outcome.note}".encode() if outcome.note else b""
    content = _write(prepared, job.target, _making(job, outcome, size_of_file) + note)
    return _with_files(outcome, content, size_of_file)


def _is_blank(grey: Image.Image) -> bool:
    darkest, brightest = grey.getextrema()
    return darkest == brightest


def _with_files(outcome: Outcome, content: bytes, size_of_file: int) -> Outcome:
    return outcome._replace(bytes=len(content), digest=digest(content), original_bytes=size_of_file)


def _checksum(content: bytes) -> bytes:
    return f"; crc {zlib.crc32(content):08x}".encode()


def _making(job: Job, outcome: Outcome, size_of_file: int) -> bytes:
    """First part of the stamp, which tells a finished image from a stale one."""
    made = f"{job.geometry} {job.size} {FILTER} q{QUALITY}"
    original = f"from {outcome.width} x {outcome.height} pixels, {size_of_file} bytes"
    kind = "" if outcome.kind == EIGHT_BITS else f" {outcome.kind}"
    return f"medclip_dcl {RULES.get(outcome.kind)}{kind}; {made}; {original}".encode()


def _finished(job: Job, size_of_file: int | None) -> Outcome | None:
    """The outcome of an image that is already prepared, undamaged, and made in this way; else None.

    The size of the original is not compared where it is None.
    """
    try:
        content = job.target.read_bytes()
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            stamp = _STAMP.fullmatch(image.info.get("comment", b""))
    except OSError:
        # Not there, or no JPEG (UnidentifiedImageError is one as well).
        return None
    if stamp is None or _checksum(content.replace(stamp["crc"], _NO_CRC, 1)) != stamp["crc"]:
        return None
    note, kind = ((stamp[name] or b"").decode() for name in ("note", "kind"))
    height, width = int(stamp["height"]), int(stamp["width"])
    outcome = Outcome(height, width, note=note, kind=kind or EIGHT_BITS)
    size_of_file = int(stamp["bytes"]) if size_of_file is None else size_of_file
    if stamp["made"] != _making(job, outcome, size_of_file):
        return None
    return _with_files(outcome, content, size_of_file)


def _write(prepared: Image.Image, target: Path, making: bytes) -> bytes:
    """Write a JPEG file atomically, with what it was made from and its checksum in the comment; its content."""
    encoded = io.BytesIO()
    prepared.save(encoded, format="JPEG", quality=QUALITY, comment=making + _NO_CRC)
    content = encoded.getvalue()
    content = content.replace(_NO_CRC, _checksum(content), 1)
    write_bytes(content, target, durable=False)  # a rerun checks every image
    return content
