"""Decode the JPEG, JPEG-LS and JPEG 2000 code streams of DICOM files with imagecodecs.

imagecodecs (libjpeg-turbo, CharLS, OpenJPEG; permissive licences) raises on damage and decodes lossless JPEG as well.
GDCM, the usual decoder of lossless JPEG, ends the process by a C++ exception at some 3% of damaged streams.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Num

from medclip_dcl.pictures.grey import UnusableImageError

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_2000 = b"\xff\x4f\xff\x51"  # in a JP2 file after its boxes
_JPEG_LS = 0xF7
# Codes of start-of-frame markers; C4, C8 and CC are others.
_FRAMES = {*range(0xC0, 0xD0), _JPEG_LS} - {0xC4, 0xC8, 0xCC}
_LOSSLESS = {0xC3, 0xC7, 0xCB, 0xCF}


def decode(dataset: Dataset, stream: bytes) -> tuple[Num[np.ndarray, "row column *sample"], int, bool]:
    """Samples of an image (three as RGB or luma), their bits, and if lossy; its header must agree with DICOM's."""
    import imagecodecs

    marker, *found, bits, is_lossy = _header(stream)
    expected = [dataset.Rows, dataset.Columns, dataset.SamplesPerPixel]
    allocated, photometric = dataset.BitsAllocated, dataset.PhotometricInterpretation
    if found != expected or bits > allocated or bits <= 8 < dataset.BitsStored:
        of_file, of_stream = (" x ".join(map(str, size)) for size in (expected, found))
        raise UnusableImageError(
            f"DICOM header ({of_file} of {allocated} bits) contradicts its compressed image ({of_stream} of {bits} "
            "bits; rows x columns x samples); export the image again"
        )
    if marker in _FRAMES - _LOSSLESS - {_JPEG_LS}:
        is_named = any(name in stream[:1024] for name in (b"JFIF", b"\0\x0eAdobe"))
        space = "RGB" if photometric == "RGB" and not is_named else None
        return imagecodecs.jpeg8_decode(stream, colorspace=space), bits, True
    others = {0: imagecodecs.jpeg2k_decode, _JPEG_LS: imagecodecs.jpegls_decode}
    samples = others.get(marker, imagecodecs.jpeg8_decode)(stream)
    is_luma_first = samples.ndim == 3 and photometric.startswith("YBR_FULL")
    return samples[..., 0] if is_luma_first else samples, bits, is_lossy


def _header(stream: bytes) -> tuple[int, int, int, int, int, bool]:
    """Code of the start-of-frame marker (0 for JPEG 2000), rows, columns, samples, bits, True for lossy ones."""
    if not stream.startswith(_JPEG):
        start = stream.index(_JPEG_2000)
        right, bottom, left, top, samples, depth = struct.unpack_from(">4I16xHB", stream, start + 8)
        wavelet = stream[_segment(stream, start + 2, {0x52}) + 13]  # of the coding style; 0: 9-7
        return 0, bottom - top, right - left, samples, 1 + (depth & 0x7F), wavelet == 0
    # libjpeg would fill with grey what is missing.
    if _JPEG_END not in stream.rstrip(b"\0\xff ")[-16:]:
        raise ValueError("no end marker")
    start = _segment(stream, len(_JPEG), _FRAMES)
    bits, rows, columns, samples = struct.unpack_from(">BHHB", stream, start + 4)
    scan = _segment(stream, start, {0xDA})
    near = stream[scan + 5 + 2 * stream[scan + 4]]  # in JPEG-LS
    is_lossy = near > 0 if stream[start + 1] == _JPEG_LS else stream[start + 1] not in _LOSSLESS
    return stream[start + 1], rows, columns, samples, bits, is_lossy


def _segment(stream: bytes, start: int, codes: Container[int]) -> int:
    """Where the first marker with one of the codes stands, from the marker at `start` on; fill bytes precede any."""
    while (code := stream[start + 1]) not in codes:
        start += 1 if code == 0xFF else 2 + int.from_bytes(stream[start + 2 : start + 4], "big")
    return start
