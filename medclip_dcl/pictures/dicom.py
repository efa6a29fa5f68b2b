"""Read radiographs in DICOM files as 8-bit grey images. Needs the extra ``dicom`` (pydicom and imagecodecs).

No message quotes a file: a damaged one may have the patient's name where a number or a UID is expected.
"""

from __future__ import annotations

import io
import logging
import re
import zlib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Num, UInt8
from PIL import Image

from medclip_dcl.common.errors import needs_extra
from medclip_dcl.pictures import code_stream, grey

if TYPE_CHECKING:
    from pydicom.dataset import Dataset
    from pydicom.uid import UID

_PREAMBLE = 128
_MAGIC = b"DICM"
HEAD = _PREAMBLE + len(_MAGIC)
"""Leading bytes of a file that identify DICOM."""

# An element of group 2 or 8 with its VR or a short length: a data set without the preamble.
_BARE = re.compile(rb"[\x02\x08]\0.\0(?:[A-Z]{2}|[^\0]\0\0\0)", re.DOTALL)

# What is beyond is cut off.
_MAX_INFLATED = 2 * grey.MAX_PIXELS + 2**24
_MIN_WINDOW = 1
_MONOCHROME = ("MONOCHROME1", "MONOCHROME2")
_SHAPES = ("IDENTITY", "INVERSE")

_MAX_CUT_OFF = 0.5
"""Share of the pixels, and of their distinct values, beyond a window or table that gets no warning (choice)."""
_NARROW = (
    "its window or table leaves most of its pixels black or white: is it one of 8 bits over deeper values?"
)
_WIDE = "its window or table is more than ten times the range of its pixels: is it one of deeper values over 8 bits?"

_NOT_READ = {
    "1.2.840.10008.1.2.4.11": "JPEG XL",
    "1.2.840.10008.1.2.4.10": "video (MPEG or HEVC)",
    "1.2.840.10008.1.2.4.92": "JPEG 2000 Part 2",
    "1.2.840.10008.1.2.4.93": "JPEG 2000 Part 2",
}
"""Beginning of transfer syntaxes that are hardly read -> name, beside those that `_unread` takes from pydicom."""

_REQUIRED = ["SamplesPerPixel", "PhotometricInterpretation", "Rows", "Columns", "BitsAllocated"]
_REQUIRED_OF_INTEGERS = ["BitsStored", "PixelRepresentation", "PixelData"]

# No other element is read, so that names and dates of patients enter neither memory nor messages.
_ELEMENTS = """
    SOPClassUID SamplesPerPixel PhotometricInterpretation PlanarConfiguration NumberOfFrames Rows Columns BitsAllocated
    BitsStored HighBit PixelRepresentation PixelPaddingValue PixelPaddingRangeLimit WindowCenter WindowWidth
    VOILUTFunction VOILUTSequence PresentationLUTShape RescaleIntercept RescaleSlope ModalityLUTSequence PixelData
    FloatPixelData DoubleFloatPixelData
"""


def is_dicom(head: bytes) -> bool:
    """True if a file that begins with these `HEAD` bytes is DICOM, with or without the preamble of Part 10."""
    return head[_PREAMBLE:HEAD] == _MAGIC or _BARE.match(head) is not None


def read_dicom(file: io.BufferedReader | io.BytesIO) -> Image.Image:
    """Read a DICOM file as it is displayed: brighter where more X-rays were absorbed.

    Stored values pass through the modality transformation (rescale slope and intercept, or its table) and the first VOI
    transformation (table, else window), whose range becomes 0..255. Without a VOI transformation, or with a window that
    is not a number or narrower than 1, the image's own range without padding becomes 0..255, or a robust one
    (`medclip_dcl.pictures.grey.shown_range`). MONOCHROME1 is inverted, whatever Presentation LUT Shape says. Colour
    becomes luma. Overlays, shutters and pixel spacing are ignored. The result has the mode "L", and `notes_of` it.
    """
    # Its warnings quote the file's content.
    logging.getLogger("pydicom").propagate = False
    unread = ""
    try:
        dataset = _read(file)
        unread = _unread(dataset.file_meta.TransferSyntaxUID)
        if int(dataset.get("NumberOfFrames") or 1) != 1:
            raise grey.UnusableImageError("DICOM object of several frames; a radiograph has one")
        _require_elements(dataset)
        grey.require_readable_size(int(dataset.Columns), int(dataset.Rows))
        return _picture(dataset)
    except ImportError as error:
        raise grey.UnusableImageError(needs_extra("this DICOM file", error.name, "dicom")) from error
    except Exception as error:
        if isinstance(error, grey.UnusableImageError) or not unread:
            raise
        raise grey.UnusableImageError(
            f"DICOM image is compressed as {unread}, which is not read; export it uncompressed or as JPEG 2000"
        ) from None


def _unread(syntax: UID) -> str:
    """Name of a transfer syntax whose images are hardly read; "" for the others."""
    from pydicom import uid

    read = uid.UncompressedTransferSyntaxes + uid.RLETransferSyntaxes + uid.JPEGTransferSyntaxes
    read += uid.JPEGLSTransferSyntaxes + uid.JPEG2000TransferSyntaxes
    name = "" if syntax in read else syntax.name if syntax.is_valid else "an unknown syntax"
    return next((known for beginning, known in _NOT_READ.items() if syntax.startswith(beginning)), name)


def _read(file: io.BufferedReader | io.BytesIO) -> Dataset:
    """The elements of `_ELEMENTS`, with the transfer syntax in `file_meta`."""
    import pydicom
    from pydicom import uid

    file.seek(HEAD if file.read(HEAD)[_PREAMBLE:] == _MAGIC else 0)
    meta = pydicom.filereader.read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2)
    syntax = meta.get("TransferSyntaxUID")
    if syntax == uid.DeflatedExplicitVRLittleEndian:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(), _MAX_INFLATED)
        tags = [pydicom.tag.Tag(name) for name in _ELEMENTS.split()]
        dataset = pydicom.filereader.read_dataset(io.BytesIO(content), False, True, specific_tags=tags)
        dataset.file_meta = pydicom.dataset.FileMetaDataset()
        syntax = uid.ExplicitVRLittleEndian
    else:
        file.seek(0)
        dataset = pydicom.dcmread(file, force=True, specific_tags=_ELEMENTS.split())
    guesses = {(True, True): uid.ImplicitVRLittleEndian, (False, True): uid.ExplicitVRLittleEndian}
    guess = guesses.get(dataset.original_encoding, uid.ExplicitVRBigEndian)
    dataset.file_meta.TransferSyntaxUID = syntax or guess
    return dataset


def _require_elements(dataset: Dataset) -> None:
    """Refuse a data set without an element that its pixels need, by name."""
    from pydicom.uid import UncompressedTransferSyntaxes

    is_float = "FloatPixelData" in dataset or "DoubleFloatPixelData" in dataset
    needed = [*_REQUIRED, *(() if is_float else _REQUIRED_OF_INTEGERS)]
    syntax = dataset.file_meta.TransferSyntaxUID
    if dataset.get("SamplesPerPixel") == 3 and syntax in UncompressedTransferSyntaxes:
        needed.append("PlanarConfiguration")
    missing = [name for name in needed if dataset.get(name) in (None, "", b"")]
    if missing == needed or (missing and _unread(syntax)):
        raise ValueError("no image")
    if missing:
        raise grey.UnusableImageError(
            f"DICOM file lacks {', '.join(missing)}: it is damaged or cut off, or was exported without; export it again"
        )


def _picture(dataset: Dataset) -> Image.Image:
    stored, kind = _stored(dataset)
    photometric = dataset.PhotometricInterpretation
    if dataset.SamplesPerPixel == 3 and stored.dtype == np.uint8:
        return grey.with_notes(grey.to_grey(Image.fromarray(np.ascontiguousarray(stored))), kind)
    if stored.ndim != 2 or photometric not in _MONOCHROME:
        raise grey.UnusableImageError(f"DICOM image is neither {', '.join(_MONOCHROME)} nor colour of 8 bits")
    shades, note = _shades(dataset, stored)
    is_inverted = photometric == "MONOCHROME1"
    shape = dataset.get("PresentationLUTShape")
    contradiction = ""
    if shape in _SHAPES and shape != _SHAPES[is_inverted]:  # PS3.3 C.11.6
        contradiction = (
            f"Presentation LUT Shape {shape} contradicts {photometric}, which is taken: lungs must be dark"
        )
    return grey.with_notes(
        Image.fromarray(255 - shades if is_inverted else shades), kind, note, contradiction
    )


def _stored(dataset: Dataset) -> tuple[Num[np.ndarray, "row column *sample"], str]:
    """Stored values of the pixels (colour as RGB or luma), and the kind of the file."""
    from pydicom import uid
    from pydicom.encaps import generate_fragments
    from pydicom.pixels import pixel_array
    from pydicom.pixels.utils import get_expected_length

    # pydicom decodes no compression but RLE here: it would take GDCM where that is installed.
    syntax = dataset.file_meta.TransferSyntaxUID
    is_plain = syntax in uid.UncompressedTransferSyntaxes
    if is_plain and "PixelData" not in dataset:
        return pixel_array(dataset), grey.DICOM
    data = dataset["PixelData"]
    if syntax == uid.RLELossless:
        values = pixel_array(dataset, correct_unused_bits=False, decoding_plugin="pydicom")
    elif data.is_undefined_length or not is_plain:
        _, *fragments = generate_fragments(data.value)  # after the offset table
        values, bits, is_lossy = code_stream.decode(dataset, b"".join(fragments))
        kind = grey.LOSSY_DICOM if is_lossy and bits > dataset.BitsStored else grey.DICOM
        return _aligned(dataset, values, bits, kind == grey.LOSSY_DICOM), kind
    else:
        expected = get_expected_length(dataset)
        # Padding is zeros; anything else in place of a row would show as a sheared image.
        if len(data.value[expected:].strip(b"\0")) >= max(1, expected // dataset.Rows):
            raise grey.UnusableImageError(
                "DICOM header has fewer rows, columns or frames than its pixel data"
            )
        values = pixel_array(dataset, correct_unused_bits=False)
    return _aligned(dataset, values, dataset.BitsAllocated), grey.DICOM


def _aligned(
    dataset: Dataset, words: Num[np.ndarray, "*shape"], bits: int, is_lossy: bool = False
) -> Num[np.ndarray, "*shape"]:
    """The numbers in the stored bits of words of `bits`, without the overlays in the others."""
    stored, high = min(dataset.BitsStored, bits), dataset.get("HighBit")
    if high not in range(stored, bits):
        high = stored - 1
    # Overshoot in place of overlays; but signed values in an unsigned stream may lack the repeated sign.
    if is_lossy and high + 1 < bits and words.dtype.kind == "ui"[dataset.PixelRepresentation]:
        least = -dataset.PixelRepresentation << high
        words = words.clip(least, least + (2 << high) - 1)
    words = words.astype(f"{'ui'[dataset.PixelRepresentation]}{words.itemsize}", copy=False)
    unused = 8 * words.itemsize - stored
    return words << (unused + stored - 1 - high) >> unused if unused else words


def _shades(
    dataset: Dataset, stored: Num[np.ndarray, "row column"]
) -> tuple[UInt8[np.ndarray, "row column"], str]:
    """Grey levels before MONOCHROME1 is inverted, and a warning about them."""
    if stored.dtype.kind == "f" or stored.dtype.itemsize > 2:
        return _transformed(dataset, stored, stored, None)
    # A look-up table: the transformations are pointwise, and there are far fewer values than pixels.
    present, counts = np.unique(stored, return_counts=True)
    low = int(present[0])
    table, note = _transformed(dataset, np.arange(low, int(present[-1]) + 1), present, counts)
    # By rows, since indices of a whole image take 4 times its memory.
    return np.stack([table[row.astype(np.int32) - low] for row in stored]), note


def _transformed(
    dataset: Dataset,
    stored: Num[np.ndarray, "*shape"],
    present: Num[np.ndarray, "*value"],
    counts: Num[np.ndarray, "*value"] | None,
) -> tuple[UInt8[np.ndarray, "*shape"], str]:
    """Grey levels of stored values, and a warning; `present` are those in the image, in `counts` pixels or one each."""
    values = _rescaled(dataset, stored)
    is_shown = _is_no_padding(dataset, present)
    present, counts = _rescaled(dataset, present[is_shown]), None if counts is None else counts[is_shown]
    mapped, shown = (_by_table(dataset, "VOILUTSequence", each) for each in (values, present))
    if mapped and shown:
        low, high = grey.finite_range(mapped[1])
        return grey.eight_bits(mapped[0], low, high), _doubt((shown[0] - low) / max(high - low, 1), counts)
    centre, width = _number(dataset, "WindowCenter"), _number(dataset, "WindowWidth")
    if centre is None or width is None or width < _MIN_WINDOW:
        low, high, note = grey.shown_range(present, counts)
        return grey.eight_bits(values, low, high), note
    note = _doubt((present - centre) / width + 0.5, counts)
    function = dataset.get("VOILUTFunction") or "LINEAR"
    if function == "SIGMOID":
        return grey.eight_bits(1 / (1 + np.exp(-4 * (values - centre) / width)), 0.0, 1.0), note
    if function == "LINEAR":  # PS3.3 C.11.2.1.2
        centre, width = centre - 0.5, max(width - 1, 1e-6)
    return grey.eight_bits((values - centre) / width + 0.5, 0.0, 1.0), note


def _doubt(shades: Num[np.ndarray, "*value"], counts: Num[np.ndarray, "*value"] | None) -> str:
    """A warning about values, in `counts` pixels or one each, that become black up to 0 and white from 1 on."""
    is_cut_off = (shades <= 0) | (shades >= 1)
    # Of the pixels alone, a dark border may have as many.
    cut_off = min(is_cut_off.mean(), np.average(is_cut_off, weights=counts))
    return _NARROW if cut_off > _MAX_CUT_OFF else _WIDE if 0 < np.ptp(shades) < 1 / 10 else ""


def _rescaled(dataset: Dataset, values: Num[np.ndarray, "*shape"]) -> Num[np.ndarray, "*shape"]:
    """Stored values after the modality transformation."""
    if mapped := _by_table(dataset, "ModalityLUTSequence", values):
        return mapped[0]
    numbers = []
    for name in ("RescaleSlope", "RescaleIntercept"):
        try:
            # Anonymisers leave both elements empty. A comma is decimal, unless it may stand for thousands.
            numbers.append(float(re.sub(r",(?!\d{3}$)", ".", str(dataset.get(name) or 0))))
        except ValueError:
            raise grey.UnusableImageError(f"DICOM file's {name} is not one number; export it again") from None
    return values * (numbers[0] or 1.0) + numbers[1]


def _by_table(
    dataset: Dataset, name: str, values: Num[np.ndarray, "*shape"]
) -> tuple[Num[np.ndarray, "*shape"], Num[np.ndarray, "entry"]] | None:
    """Values mapped by a sequence's first look-up table, and its entries; None without a table."""
    items = dataset.get(name)
    if not items or not items[0].get("LUTDescriptor") or not items[0].get("LUTData"):
        return None
    (count, first, bits), data = items[0].LUTDescriptor, items[0].LUTData
    count = count or 1 << 16
    word = "<u2" if dataset.original_encoding[1] else ">u2"
    entries = np.frombuffer(data, word) if isinstance(data, bytes) else np.array(data, word)
    if bits <= 8 and entries.size < count:
        # PS3.3 C.11.2.1.1 allows words of one or two entries.
        entries = entries.view(np.uint8)
    if entries.size < count:
        raise ValueError("too few entries")
    # Unsigned values, as of a table before this one, have nothing below 0.
    return entries[(values - np.int64(first)).clip(0, count - 1).astype(np.intp)], entries[:count]


def _number(dataset: Dataset, name: str) -> float | None:
    """The first number of an element; None without one."""
    value = dataset.get(name)
    try:
        number = float(value if isinstance(value, (float, int, str, bytes)) else value[0])
    except (TypeError, ValueError, IndexError):
        return None
    return number if np.isfinite(number) else None


def _is_no_padding(dataset: Dataset, values: Num[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """False for padding beyond the detector's edges, unless all values are padding."""
    padding, limit = (_number(dataset, name) for name in ("PixelPaddingValue", "PixelPaddingRangeLimit"))
    if padding is None:
        return np.ones(values.shape, bool)
    # An element of the other sign has the same 16 bits.
    ends = np.array([padding, padding if limit is None else limit], np.int64).astype(values.dtype)
    is_kept = (values < ends.min()) | (values > ends.max())
    return is_kept if is_kept.any() else ~is_kept
