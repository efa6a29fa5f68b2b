"""Read radiographs in DICOM files as 8-bit grey images. Needs the extra ``dicom`` (pydicom and GDCM's decoders)."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from medclip_dcl.pictures.grey import (
    UnusableImageError,
    eight_bits,
    finite_range,
    require_readable_size,
    to_grey,
)

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

INSTALL = "pip install -e '.[dicom]'"

_PREAMBLE = 128
_MAGIC = b"DICM"
HEAD = _PREAMBLE + len(_MAGIC)
"""Leading bytes of a file that identify DICOM."""

_LEAST_WINDOW = 1
_MONOCHROME = ("MONOCHROME1", "MONOCHROME2")

# No other element is read, so that names and dates of patients enter neither memory nor messages.
_ELEMENTS = (
    "SOPClassUID",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PlanarConfiguration",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "PixelPaddingValue",
    "PixelPaddingRangeLimit",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "VOILUTSequence",
    "RescaleIntercept",
    "RescaleSlope",
    "ModalityLUTSequence",
    "ExtendedOffsetTable",
    "ExtendedOffsetTableLengths",
    "PixelData",
    "FloatPixelData",
    "DoubleFloatPixelData",
)


def is_dicom(head: bytes) -> bool:
    """True if a file that begins with these `HEAD` bytes is DICOM."""
    return head[_PREAMBLE:HEAD] == _MAGIC


def read_dicom(file: io.BufferedReader | io.BytesIO) -> Image.Image:
    """Read a DICOM file as it is displayed: brighter where more X-rays were absorbed.

    Stored values pass through the modality transformation (rescale slope and intercept, or its table) and the first VOI
    transformation (table, else window), whose range becomes 0..255. Without a VOI transformation, or with a window
    narrower than 1, the image's own range without padding becomes 0..255. MONOCHROME1 is inverted. Colour becomes luma.
    Overlays, shutters and pixel spacing are ignored.

    Args:
        file: content of a file for which `is_dicom` is true.

    Returns:
        the image in mode "L", rows x columns of the file.

    Raises:
        UnusableImageError: no pixel data, several frames, too large, a compression that no installed package decodes
            (the message says what to install); or pydicom is missing.
        Exception: almost any, of damaged content; `medclip_dcl.pictures.image_file.read_grey` turns it into a reason.
    """
    try:
        import pydicom
    except ImportError as error:
        raise UnusableImageError(f"it is a DICOM file, which requires pydicom: {INSTALL}") from error
    dataset = pydicom.dcmread(file, specific_tags=list(_ELEMENTS))
    _require_one_picture(dataset)
    _require_decoder(dataset)
    return _picture(dataset)


def _require_one_picture(dataset: Dataset) -> None:
    if not any(name in dataset for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        kind = dataset["SOPClassUID"].value.name if "SOPClassUID" in dataset else "of unknown kind"
        raise UnusableImageError(f"DICOM object without pixel data ({kind})")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        raise UnusableImageError(f"DICOM object of {frames} frames; a radiograph has one")
    require_readable_size(int(dataset.Columns), int(dataset.Rows))


def _require_decoder(dataset: Dataset) -> None:
    from pydicom.pixels import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return
    try:
        is_decodable = get_decoder(syntax).is_available
    except NotImplementedError as error:
        raise UnusableImageError(f"DICOM compression {syntax.name} is not that of an image") from error
    if not is_decodable:
        raise UnusableImageError(
            f"DICOM compression {syntax.name} needs a decoder that is not installed: {INSTALL}"
        )


def _picture(dataset: Dataset) -> Image.Image:
    from pydicom.pixels import pixel_array

    stored = pixel_array(dataset)
    photometric = dataset.PhotometricInterpretation
    if stored.ndim == 3 and stored.dtype == np.uint8:
        return to_grey(Image.fromarray(np.ascontiguousarray(stored)))
    if stored.ndim != 2 or photometric not in _MONOCHROME:
        raise UnusableImageError(
            f"DICOM image is {photometric} of {stored.dtype.itemsize * 8} bits; expected {', '.join(_MONOCHROME)}, or "
            "colour of 8 bits"
        )
    grey = _shades(dataset, stored)
    return Image.fromarray(255 - grey if photometric == "MONOCHROME1" else grey)


def _shades(dataset: Dataset, stored: Num[np.ndarray, "row column"]) -> UInt8[np.ndarray, "row column"]:
    """Grey levels before MONOCHROME1 is inverted."""
    if stored.dtype.kind == "f" or stored.dtype.itemsize > 2:
        return _transformed(dataset, stored)
    # A look-up table: the transformations are pointwise, and there are far fewer values than pixels.
    low, high = int(stored.min()), int(stored.max())
    table = _transformed(dataset, np.arange(low, high + 1), present=np.unique(stored))
    return table[stored.astype(np.int32) - low]


def _transformed(
    dataset: Dataset, stored: Num[np.ndarray, "*shape"], present: Num[np.ndarray, "value"] | None = None
) -> UInt8[np.ndarray, "*shape"]:
    """Grey levels of stored values; `present` are those in the image, None for `stored`."""
    from pydicom.pixels import apply_modality_lut, apply_voi, apply_windowing

    values = apply_modality_lut(stored, dataset)
    if _has_table(dataset):
        entries = dataset.VOILUTSequence[0].LUTDescriptor
        every = int(entries[1]) + np.arange(int(entries[0]) or 1 << 16)
        return eight_bits(apply_voi(values, dataset), *finite_range(apply_voi(every, dataset)))
    if _has_window(dataset):
        with np.errstate(over="ignore"):
            ends = apply_windowing(np.array([-1e30, 1e30]), dataset)
            return eight_bits(apply_windowing(values, dataset), *finite_range(ends))
    shown = _without_padding(dataset, stored if present is None else present)
    return eight_bits(values, *finite_range(apply_modality_lut(shown, dataset)))


def _has_table(dataset: Dataset) -> bool:
    tables = dataset.get("VOILUTSequence")
    return bool(tables) and tables[0].get("LUTDescriptor") is not None and bool(tables[0].get("LUTData"))


def _has_window(dataset: Dataset) -> bool:
    centre, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    return centre is not None and width is not None and float(width) >= _LEAST_WINDOW


def _first(value: Any) -> Any:
    """The value, or the first of several; None if there are none."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return next(iter(value), None)
    return value


def _without_padding(dataset: Dataset, stored: Num[np.ndarray, "*shape"]) -> Num[np.ndarray, "value"]:
    """The values without padding beyond the detector's edges, unless all are padding."""
    values, padding = stored.reshape(-1), dataset.get("PixelPaddingValue")
    if padding is None:
        return values
    limit = dataset.get("PixelPaddingRangeLimit")
    ends = sorted((int(padding), int(padding if limit is None else limit)))
    kept = values[(values < ends[0]) | (values > ends[1])]
    return kept if kept.size else values
