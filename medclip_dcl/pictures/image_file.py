"""Read image files, from JPEG to DICOM, as 8-bit grey images."""

from __future__ import annotations

import io
import re
import stat
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from medclip_dcl.pictures.dicom import HEAD, is_dicom, read_dicom
from medclip_dcl.pictures.grey import MAX_PIXELS, UnusableImageError, require_readable_size, to_grey

FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "JPEG2000", "GIF", "WEBP", "PPM")
"""Formats read besides DICOM. PIL has more, some of which start other programs."""

IMAGE_ENDING = r"(?i:\.(?:a?png|jpe?g|jpe|jfif|tiff?|bmp|jp[2cfx]|j2[ck]|gif|webp|p[bfgnp]m|dcm|dicom))"
ENDINGS = re.compile(f"{IMAGE_ENDING}+$")
"""Endings of files in these formats or DICOM, one or several (.dcm.png)."""


def read_grey(file: Path | io.BufferedReader | io.BytesIO) -> Image.Image:
    """Read an image file as 8-bit grey (`medclip_dcl.pictures.grey.to_grey`, `medclip_dcl.pictures.dicom.read_dicom`).

    The file is a path or a seekable stream, which stays open.
    """
    if isinstance(file, Path):
        mode = file.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would be waited for
            raise UnusableImageError("a pipe, socket or device, not a file")
        with file.open("rb") as stream:
            return read_grey(stream)
    head = file.read(HEAD)
    if not head:
        raise UnusableImageError("image file is empty")
    file.seek(0)
    kind, damage = "image", "damaged or cut off"
    if is_dicom(head):
        kind, damage = (
            "DICOM image",
            "damaged, cut off, without pixels, or compressed in a way that is not read",
        )
    try:
        with warnings.catch_warnings():
            # PIL warns of its own limit of pixels, and of damage that does not matter here; pydicom's warnings quote
            # the file's content.
            warnings.simplefilter("ignore")
            if is_dicom(head):
                return read_dicom(file)
            with Image.open(file, formats=FORMATS) as image:
                _require_one_picture(image)
                return to_grey(image)
    except (UnusableImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise UnusableImageError("not an image file of a known format") from error
    except Image.DecompressionBombError as error:
        raise UnusableImageError(
            f"image is too large; at most {MAX_PIXELS:,} pixels are read: give a smaller copy"
        ) from error
    # Damaged files make PIL and pydicom raise almost any exception. Its text may quote the file.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UnusableImageError(f"{kind} cannot be decoded: it is {damage}") from None


def _require_one_picture(image: Image.Image) -> None:
    require_readable_size(*image.size)
    pictures = getattr(image, "n_frames", 1)
    if pictures != 1:
        raise UnusableImageError(f"image file holds {pictures} pictures; a radiograph is one")
