"""Radiographs in DICOM files: hand-made ones with known grey levels, and those that come with pydicom."""

from __future__ import annotations

import io
import logging
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.prepared_images import Job, prepare_image
from medclip_dcl.pictures import dicom
from medclip_dcl.pictures.grey import DICOM, LOSSY_DICOM, UnusableImageError, kind_and_notes, notes_of
from medclip_dcl.pictures.image_file import read_grey
from medclip_dcl.use.model import as_grey

pydicom = pytest.importorskip("pydicom", reason="pip install -e '.[test]' installs pydicom")
imagecodecs = pytest.importorskip("imagecodecs", reason="pip install -e '.[test]' installs imagecodecs")

COMPUTED_RADIOGRAPHY = "1.2.840.10008.5.1.4.1.1.1"
LITTLE_ENDIAN = "1.2.840.10008.1.2.1"
BIG_ENDIAN = "1.2.840.10008.1.2.2"
DEFLATED = "1.2.840.10008.1.2.1.99"
RLE = "1.2.840.10008.1.2.5"
JPEG = "1.2.840.10008.1.2.4.50"
JPEG_EXTENDED = "1.2.840.10008.1.2.4.51"
JPEG_LOSSLESS = "1.2.840.10008.1.2.4.70"
JPEG_LS = "1.2.840.10008.1.2.4.80"
JPEG_2000 = "1.2.840.10008.1.2.4.90"
VIDEO = "1.2.840.10008.1.2.4.100"
HIGH_THROUGHPUT = "1.2.840.10008.1.2.4.201"
DAMAGED = "DICOM image cannot be decoded: it is damaged, cut off, without pixels, or compressed in a way"
VALUES = np.array([[0, 100, 200], [300, 400, 1000]])
WAVES = np.add.outer(np.sin(np.arange(43) / 9), np.cos(np.arange(37) / 7)) / 4 + 0.5


def dataset(
    values: np.ndarray = VALUES, photometric: str = "MONOCHROME2", bits: int = 12, **elements: Any
) -> Any:
    """A DICOM object with these stored values; elements that are None are deleted."""
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = LITTLE_ENDIAN
    made.SOPClassUID, made.SOPInstanceUID = COMPUTED_RADIOGRAPHY, "1.2.3"
    made.PatientName = "Nobody^Nemo"
    is_signed = values.min() < 0
    stored = values.astype((np.int16 if is_signed else np.uint16) if bits > 8 else np.uint8)
    made.set_pixel_data(stored, photometric, bits)
    for name, value in elements.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return made


def write(made: Any, folder: Path) -> Path:
    file = folder / "image.dcm"
    made.save_as(file, enforce_file_format=True)
    return file


def grey(folder: Path, made: Any) -> list[list[int]]:
    return np.asarray(read_grey(write(made, folder))).tolist()


def jpeg_2000(values: np.ndarray) -> bytes:
    return imagecodecs.jpeg2k_encode(values, codecformat="J2K", level=0, reversible=True)


def jpeg_lossless(values: np.ndarray) -> bytes:
    return imagecodecs.jpeg8_encode(values, lossless=True, bitspersample=8 * values.itemsize)


LOSSLESS: dict[str, Callable[[np.ndarray], bytes]] = {
    JPEG_LOSSLESS: jpeg_lossless,
    JPEG_LS: imagecodecs.jpegls_encode,
    JPEG_2000: jpeg_2000,
}
if hasattr(imagecodecs, "htj2k_encode"):  # since 2026; decoded by all versions
    LOSSLESS[HIGH_THROUGHPUT] = imagecodecs.htj2k_encode


def compressed(stream: bytes, syntax: str, like: np.ndarray, fragments: int = 1, **elements: Any) -> Any:
    """A DICOM object with a code stream, and the header of these values."""
    made = dataset(like, "RGB" if like.ndim == 3 else "MONOCHROME2", 8 * like.itemsize, **elements)
    made.file_meta.TransferSyntaxUID = syntax
    if "PixelData" in made:
        made.PixelData = pydicom.encaps.encapsulate([stream], fragments_per_frame=fragments)
        made["PixelData"].VR, made["PixelData"].is_undefined_length = "OB", True
    return made


def linear(values: np.ndarray, low: float, high: float) -> list[list[int]]:
    return np.rint((255 * (values - low) / (high - low)).clip(0, 255)).astype(int).tolist()


def table(first: int, entries: list[int], kind: str) -> list[Any]:
    made = pydicom.Dataset()
    made.add_new("LUTDescriptor", "US", [len(entries), first, 16])
    made.add_new("LUTData", kind, np.array(entries, "<u2").tobytes() if kind == "OW" else entries)
    return [made]


def test_without_a_window_the_range_is_shown(tmp_path: Path) -> None:
    assert grey(tmp_path, dataset()) == linear(VALUES, 0, 1000)
    in_memory = io.BytesIO(write(dataset(), tmp_path).read_bytes())
    assert np.asarray(read_grey(in_memory)).tolist() == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES - 700)) == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES * 60, bits=16)) == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES // 4, bits=8)) == linear(VALUES, 0, 1000)


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ({"WindowCenter": 850.5, "WindowWidth": 1701}, linear(VALUES, 0, 1700)),
        # 2 v - 100; the window of DICOM's LINEAR function reaches from 299.5 to 699.5.
        (
            {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 500, "WindowWidth": 401},
            linear(2 * VALUES - 100, 299.5, 699.5),
        ),
        # The first of several windows.
        ({"WindowCenter": [150.5, 999], "WindowWidth": [301, 7]}, linear(VALUES, 0, 300)),
        (
            {"WindowCenter": 300, "WindowWidth": 400, "VOILUTFunction": "LINEAR_EXACT"},
            linear(VALUES, 100, 500),
        ),
        (
            {"WindowCenter": 300, "WindowWidth": 400, "VOILUTFunction": "SIGMOID"},
            np.rint(255 / (1 + np.exp(-4 * (VALUES - 300) / 400))).tolist(),
        ),
    ],
)
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_windows_are_in_rescaled_units(
    tmp_path: Path, elements: dict[str, Any], expected: list[list[int]], photometric: str
) -> None:
    inverted = (255 - np.array(expected)).tolist()
    found = grey(tmp_path, dataset(photometric=photometric, **elements))
    assert found == (inverted if photometric == "MONOCHROME1" else expected)


@pytest.mark.parametrize(
    "window", [("500", "0"), ("500", "-5"), ("20,5", "300"), ("500", "3,0"), ("", "300"), ("500", "")]
)
def test_a_window_without_numbers_is_none(tmp_path: Path, window: tuple[str, str]) -> None:
    made = dataset()
    for name, value in zip(("WindowCenter", "WindowWidth"), window, strict=True):
        made.add_new(name, "LO", value)
    for name in ("RescaleSlope", "RescaleIntercept", "VOILUTFunction", "PixelPaddingValue", "NumberOfFrames"):
        setattr(made, name, "")
    assert grey(tmp_path, made) == linear(VALUES, 0, 1000)


def test_a_decimal_comma_of_rescaling_is_read(tmp_path: Path) -> None:
    made = with_text("RescaleSlope", "2,5")
    made.add_new("RescaleIntercept", "LO", "-10,25")
    made.WindowCenter, made.WindowWidth, made.VOILUTFunction = 500, 1000, "LINEAR_EXACT"
    assert grey(tmp_path, made) == linear(2.5 * VALUES - 10.25, 0, 1000)


@pytest.mark.parametrize("syntax", ["raw", *LOSSLESS])
def test_bits_beside_the_stored_ones_are_dropped(tmp_path: Path, syntax: str) -> None:
    for stored, high in ((VALUES | 0x8000, 11), (VALUES << 4 | 5, 15)):
        words = stored.astype(np.uint16)
        elements: dict[str, Any] = {"BitsStored": 12, "HighBit": high}
        raw = dataset(words, bits=16, **elements)
        made = raw if syntax == "raw" else compressed(LOSSLESS[syntax](words), syntax, words, **elements)
        assert grey(tmp_path, made) == linear(VALUES, 0, 1000)


def test_signed_values_of_twelve_bits(tmp_path: Path) -> None:
    signed = VALUES - 700
    words = (signed & 0xFFF).astype(np.uint16)  # the sign bit is not repeated
    elements: dict[str, Any] = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 1, "RescaleSlope": -1}
    expected = linear(-signed, -300, 700)
    assert grey(tmp_path, dataset(words, bits=16, **elements)) == expected
    for syntax in LOSSLESS:
        made = compressed(LOSSLESS[syntax](words), syntax, words, **elements)
        assert grey(tmp_path, made) == expected


@pytest.mark.parametrize("kind", ["US", "OW"])
def test_a_table_is_taken_before_a_window(tmp_path: Path, kind: str) -> None:
    made = dataset(VALUES // 100 + 1, WindowCenter=7, WindowWidth=3)
    made.VOILUTSequence = table(2, [0, 200, 400, 1000], kind)
    # Stored 1, 2, 3 / 4, 5, 11: below the table its first entry holds, above it the last.
    assert grey(tmp_path, made) == [[0, 0, 51], [102, 255, 255]]


@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("voi", [{}, {"VOILUTSequence": table(500, [0, 200, 400, 1000], "OW")}])
def test_a_table_of_stored_values_comes_before_the_others(
    tmp_path: Path, first: int, voi: dict[str, Any]
) -> None:
    """Values below the first of a table have its first entry, though they are unsigned. Oracle: pydicom."""
    made = dataset(ModalityLUTSequence=table(first, list(range(200, 900)), "OW"), **voi)
    made.ModalityLUTSequence[0].ModalityLUTType = "US"
    pixels = pydicom.pixels
    expected = pixels.apply_voi_lut(pixels.apply_modality_lut(made.pixel_array, made), made)
    low, high = (0, 1000) if voi else (expected.min(), expected.max())
    assert grey(tmp_path, made) == linear(expected.astype(int), low, high)


@pytest.mark.parametrize("per_word", [1, 2])
def test_a_table_of_bytes_has_words(tmp_path: Path, per_word: int) -> None:
    entries = np.arange(1024).astype("<u2") // 4
    made = dataset()
    made.VOILUTSequence = table(0, [0], "OW")
    made.VOILUTSequence[0].LUTDescriptor = [1024, 0, 8]
    made.VOILUTSequence[0].LUTData = entries.astype("u1" if per_word == 2 else "<u2").tobytes()
    assert grey(tmp_path, made) == (VALUES // 4 * 255 // 255).tolist()


def test_padding_is_no_part_of_the_range(tmp_path: Path) -> None:
    padded = np.array([[4000, 100, 200], [300, 600, 4095]])
    shown = [[255, 0, 51], [102, 255, 255]]
    assert grey(tmp_path, dataset(padded, PixelPaddingValue=4000, PixelPaddingRangeLimit=4095)) == shown
    padded[1, 2] = 4000
    assert grey(tmp_path, dataset(padded, PixelPaddingValue=4000)) == shown
    assert set(sum(grey(tmp_path, dataset(np.full((2, 2), 5), PixelPaddingValue=5)), [])) == {0}


DEEP = np.linspace(60, 3900, 300).round().reshape(15, 20)


def bordered(values: np.ndarray, level: int) -> np.ndarray:
    """The values within a border of as many pixels."""
    return np.pad(values, 4, constant_values=level)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: dataset(DEEP, WindowCenter=2048, WindowWidth=4096), ""),
        (lambda: dataset(DEEP, WindowCenter=128, WindowWidth=256), "8 bits over deeper values"),
        (lambda: dataset(DEEP, "MONOCHROME1", WindowCenter=127.5, WindowWidth=255), "8 bits over deeper values"),
        (lambda: dataset(DEEP / 4, bits=10, WindowCenter=128, WindowWidth=256), "8 bits over deeper values"),
        (lambda: dataset(DEEP / 16, bits=8, WindowCenter=128, WindowWidth=256), ""),
        (lambda: dataset(DEEP / 16, bits=8, WindowCenter=2048, WindowWidth=4096), "deeper values over 8 bits"),
        (lambda: dataset(DEEP / 16, bits=8, WindowCenter=500, WindowWidth=2000), ""),
        (lambda: dataset(bordered(DEEP, 0), WindowCenter=2048, WindowWidth=3000), ""),
        (lambda: dataset(bordered(DEEP, 0), WindowCenter=2048, WindowWidth=3000, RescaleSlope=8), "8 bits"),
        (lambda: dataset(DEEP, PresentationLUTShape="INVERSE"), "INVERSE contradicts MONOCHROME2"),
        (lambda: dataset(DEEP, "MONOCHROME1", PresentationLUTShape="IDENTITY"), "IDENTITY contradicts MONOCHROME1"),
        (lambda: dataset(DEEP, PresentationLUTShape="IDENTITY"), ""),
        (lambda: dataset(DEEP, "MONOCHROME1", PresentationLUTShape="INVERSE"), ""),
        (lambda: dataset(np.where(DEEP > 3880, 65535, DEEP), bits=16), "1 and 99 percentiles"),
        (lambda: dataset(np.where(DEEP > 3880, 65535, DEEP), bits=16, WindowCenter=2e3, WindowWidth=4e3), ""),
        (lambda: dataset(np.where(DEEP > 3880, 65535, DEEP), bits=16, PixelPaddingValue=65535), ""),
        (lambda: dataset(np.where(DEEP > 3800, 65535, DEEP), bits=16), ""),  # a label, which is left out
        (lambda: dataset(np.where(DEEP > 3800, 30_000 + DEEP, DEEP), bits=16), "share a tenth"),
        (lambda: dataset(DEEP, VOILUTSequence=table(0, list(range(4096)), "US")), ""),
        (lambda: dataset(DEEP, VOILUTSequence=table(0, list(range(256)), "US")), "8 bits over deeper values"),
        (lambda: dataset(DEEP / 16, VOILUTSequence=table(0, list(range(4096)), "US")), "deeper values over 8"),
        (lambda: dataset(DEEP, VOILUTSequence=table(0, [7] * 256, "US")), "black or white"),
        (
            lambda: dataset(
                bordered(DEEP, 9), PixelPaddingValue=9, VOILUTSequence=table(60, list(range(3841)), "US")
            ),
            "",
        ),
    ],
)  # fmt: skip
def test_a_doubtful_picture_gets_a_warning(tmp_path: Path, made: Callable[[], Any], words: str) -> None:
    notes = notes_of(read_grey(write(made(), tmp_path)))
    assert len(notes) == bool(words) and all(words in note for note in notes)


def test_colour_becomes_luma(tmp_path: Path) -> None:
    green = np.zeros((2, 3, 3), int)
    green[..., 1] = 255
    assert grey(tmp_path, dataset(green, "RGB", 8)) == [[150] * 3] * 2


@pytest.mark.parametrize("syntax", LOSSLESS)
@pytest.mark.parametrize("kind", ["u1", "u2", "colour"])
def test_lossless_compression_changes_nothing(tmp_path: Path, syntax: str, kind: str) -> None:
    values = (WAVES * (65535 if kind == "u2" else 255)).astype("u2" if kind == "u2" else "u1")
    if kind == "colour":
        values = np.stack([values, values[::-1], 255 - values], -1)
    made = compressed(LOSSLESS[syntax](values), syntax, values, fragments=3)
    plain = dataset(values, "RGB" if kind == "colour" else "MONOCHROME2", 8 * values.itemsize)
    assert grey(tmp_path, made) == grey(tmp_path, plain)


def item(content: bytes) -> bytes:
    content += bytes(len(content) % 2)
    return struct.pack("<HHL", 0xFFFE, 0xE000, len(content)) + content


@pytest.mark.parametrize("syntax", LOSSLESS)
def test_unusual_encapsulation_is_read(tmp_path: Path, syntax: str) -> None:
    values = (WAVES * 65535).astype("u2")
    stream = LOSSLESS[syntax](values)
    expected = grey(tmp_path, dataset(values, bits=16))
    half = len(stream) // 4 * 2
    table = item(struct.pack("<2L", 0, 8 + half))  # an entry for each fragment
    made = compressed(stream, syntax, values)
    streams = {
        "padded": item(b"") + item(stream + bytes(201)),
        "padding": item(b"") + item(stream) + item(bytes(63) + b"\xff"),
    }
    streams["table"] = table + item(stream[:half]) + item(stream[half:])
    if syntax in (JPEG_LOSSLESS, JPEG_LS):
        streams["filled"] = item(b"") + item(stream[:2] + b"\xff" * 5 + stream[2:])
    for name, content in streams.items():
        made.PixelData = content
        assert grey(tmp_path, made) == expected, name
    if syntax in (JPEG_LOSSLESS, JPEG_LS):  # cut off, and filled with zeros
        made.PixelData = item(b"") + item(stream[:-90] + bytes(90))
        with pytest.raises(UnusableImageError, match=DAMAGED):
            read_grey(write(made, tmp_path))


def test_pydicoms_own_files_are_read(tmp_path: Path) -> None:
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    plain = np.asarray(read_grey(folder / "MR_small.dcm"))
    for kind in ("RLE", "jp2klossless", "jpeg_ls_lossless", "bigendian", "implicit"):
        np.testing.assert_array_equal(np.asarray(read_grey(folder / f"MR_small_{kind}.dcm")), plain)
    # Colour by JPEG lossless, and by JPEG with YCbCr, RGB named by a marker, and RGB named by the header alone.
    found, expected = (np.asarray(read_grey(folder / f"SC_rgb_{kind}.dcm")) for kind in ("jpeg_gdcm", "rle"))
    np.testing.assert_array_equal(found, expected)
    for kind in ("jpeg_dcmtk", "dcmtk_+eb+cr"):
        found = np.asarray(read_grey(folder / f"SC_rgb_{kind}.dcm")).astype(int)
        assert np.abs(found - expected).max() <= 2
    assert read_grey(folder / "JPGExtended.dcm").getextrema() == (0, 255)


def lossy(values: np.ndarray, syntax: str) -> bytes:
    if syntax == JPEG_2000:
        return imagecodecs.jpeg2k_encode(values, codecformat="J2K", level=80, reversible=False)
    if syntax == JPEG_LS:
        return imagecodecs.jpegls_encode(values, level=3)
    return imagecodecs.jpeg8_encode(values, level=95, bitspersample=12)


@pytest.mark.parametrize("syntax", [JPEG_2000, JPEG_LS, JPEG_EXTENDED])
def test_overshoot_of_a_lossy_stream_is_clipped(tmp_path: Path, syntax: str) -> None:
    stored = 10
    values = ((WAVES * 1.6 - 0.3).clip(0, 1) * (2**stored - 1)).round().astype("u2")  # a third black or white
    values[3::5, 2::3] = values[3::5, 2::3].clip(0, 2**stored - 4)
    made = compressed(lossy(values, syntax), syntax, values, BitsStored=stored, HighBit=stored - 1)
    picture = read_grey(write(made, tmp_path))
    assert np.abs(np.asarray(picture) - np.array(linear(values.astype(int), 0, 1023))).max() <= 12
    assert kind_and_notes(picture)[0] == LOSSY_DICOM


def test_signed_overshoot_is_clipped(tmp_path: Path) -> None:
    values = ((WAVES * 1.6 - 0.3).clip(0, 1) * 1023 - 512).round().astype("i2")
    elements: dict[str, Any] = {"BitsStored": 10, "HighBit": 9, "PixelRepresentation": 1}
    made = compressed(lossy(values, JPEG_2000), JPEG_2000, values, **elements)
    assert np.abs(np.array(grey(tmp_path, made)) - linear(values.astype(int), -512, 511)).max() <= 12


def test_overlays_of_a_lossless_stream_are_masked(tmp_path: Path) -> None:
    words = (VALUES | 0x8000).astype("u2")  # under the syntax that may be lossy
    made = compressed(jpeg_2000(words), "1.2.840.10008.1.2.4.91", words, BitsStored=12, HighBit=11)
    picture = read_grey(write(made, tmp_path))
    assert np.asarray(picture).tolist() == linear(VALUES, 0, 1000) and kind_and_notes(picture) == (DICOM,)


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2", LITTLE_ENDIAN])
def test_a_data_set_without_preamble_is_read(tmp_path: Path, syntax: str) -> None:
    made = dataset()
    made.file_meta.TransferSyntaxUID = syntax
    content = write(made, tmp_path).read_bytes()
    bare = content[content.index(b"\x08\0\x16\0") :]
    assert np.asarray(read_grey(io.BytesIO(bare))).tolist() == linear(VALUES, 0, 1000)
    assert dicom.is_dicom(bare[: dicom.HEAD]) and not dicom.is_dicom(b"\x08\0\0\0" + bytes(128))


def test_deflated_data_are_read_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset()
    made.file_meta.TransferSyntaxUID = DEFLATED
    assert grey(tmp_path, made) == linear(VALUES, 0, 1000)
    monkeypatch.setattr(dicom, "_MAX_INFLATED", 2**20)
    made.PixelData = bytes(2**24)
    with pytest.raises(UnusableImageError):
        read_grey(write(made, tmp_path))


@pytest.mark.parametrize("syntax", LOSSLESS)
def test_a_contradicting_header_is_refused_before_decoding(
    tmp_path: Path, syntax: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, turned, deep = np.zeros((8, 6), "u1"), np.zeros((6, 8), "u1"), np.zeros((8, 6), "u2")
    colour = np.zeros((8, 6, 3), "u1")
    pairs = [(plain, turned), (plain, colour), (colour, plain), (plain, deep), (deep, plain)]
    streams = [(LOSSLESS[syntax](values), like) for values, like in pairs]
    for decoder in ("jpeg8_decode", "jpegls_decode", "jpeg2k_decode"):
        monkeypatch.setattr(imagecodecs, decoder, lambda *_, **__: pytest.fail("decoded"))
    for stream, like in streams:
        with pytest.raises(
            UnusableImageError, match=r"^DICOM header \(.*\) contradicts its compressed image \("
        ):
            read_grey(write(compressed(stream, syntax, like), tmp_path))


def with_text(name: str, value: Any) -> Any:
    made = dataset()
    made.add_new(name, "LO", value)
    return made


UNUSABLE: dict[str, tuple[Any, str]] = {
    "no pixels": (lambda: dataset(PixelData=None), "DICOM file lacks PixelData: it is damaged or cut off"),
    "no sign": (lambda: dataset(PixelRepresentation=None), "DICOM file lacks PixelRepresentation: "),
    "two elements": (
        lambda: dataset(BitsStored=None, Columns=None),
        "DICOM file lacks Columns, BitsStored: ",
    ),
    "no order of colours": (
        lambda: dataset(np.zeros((4, 5, 3), np.uint8), "RGB", 8, PlanarConfiguration=None),
        "DICOM file lacks PlanarConfiguration: ",
    ),
    "several frames": (
        lambda: dataset(np.arange(60).reshape(5, 3, 4)),
        "DICOM object of several frames; a radiograph has one",
    ),
    "too few pixels": (lambda: dataset(Rows=50), DAMAGED),
    "too many pixels": (
        lambda: dataset(WAVES * 99, Columns=30),
        "DICOM header has fewer rows, columns or frames than its pixel data",
    ),
    "no rows": (lambda: dataset(Rows=None), "DICOM file lacks Rows: "),
    "too large": (
        lambda: dataset(Rows=20_000, Columns=6_000),
        "image of 6,000 x 20,000 pixels; at most 100,000,000 pixels are read",
    ),
    "palette": (
        lambda: dataset(photometric="PALETTE COLOR", bits=8),
        "DICOM image is neither MONOCHROME1, MONOCHROME2 nor colour of 8 bits",
    ),
    "compressed floats": (
        lambda: compressed(b"\0\0", JPEG_2000, VALUES.astype("u2"), FloatPixelData=bytes(24), PixelData=None),
        DAMAGED,
    ),
    "no stream": (lambda: compressed(b"\0\0", JPEG_2000, VALUES.astype("u2")), DAMAGED),
    "unknown syntax": (
        lambda: compressed(b"\1\2", "1.2.840.10008.1.2.4.55", VALUES.astype("u2")),
        "DICOM image is compressed as JPEG Full Progression, ",
    ),
    "pixels elsewhere": (
        lambda: compressed(b"", "1.2.840.10008.1.2.4.94", VALUES.astype("u2"), PixelData=None),
        "DICOM image is compressed as JPIP Referenced, which is not read",
    ),
    "components of Part 2": (
        lambda: compressed(b"\1\2", "1.2.840.10008.1.2.4.93", VALUES.astype("u2")),
        "DICOM image is compressed as JPEG 2000 Part 2, ",
    ),
    "text for a slope": (
        lambda: with_text("RescaleSlope", "one"),
        "DICOM file's RescaleSlope is not one number",
    ),
    "two slopes": (
        lambda: with_text("RescaleSlope", ["1", "2"]),
        "DICOM file's RescaleSlope is not one number",
    ),
    "comma of thousands": (
        lambda: with_text("RescaleIntercept", "-1,024"),
        "DICOM file's RescaleIntercept is not",
    ),
    "no image's compression": (
        lambda: compressed(b"\0\0\1\xb3", VIDEO, VALUES.astype("u2")),
        r"DICOM image is compressed as video \(MPEG or HEVC\)",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_file_has_a_reason(tmp_path: Path, kind: str) -> None:
    make, reason = UNUSABLE[kind]
    with pytest.raises(UnusableImageError, match=f"^{reason}"):
        read_grey(write(make(), tmp_path))


def test_jpeg_xl_is_named(tmp_path: Path) -> None:
    file = write(compressed(b"\xff\x0a", VIDEO, VALUES.astype("u2")), tmp_path)
    content = file.read_bytes().replace(VIDEO.encode(), b"1.2.840.10008.1.2.4.110")  # unknown to this pydicom
    with pytest.raises(
        UnusableImageError, match="compressed as JPEG XL, which is not read; export it uncompressed"
    ):
        read_grey(io.BytesIO(content))


@pytest.mark.parametrize("syntax", [RLE, *LOSSLESS])
def test_a_cut_off_file_says_so(tmp_path: Path, syntax: str) -> None:
    values = (WAVES * 255).astype("u1")
    made = dataset(values, bits=8)
    made = (
        made.compress(RLE, encoding_plugin="pydicom") or made
        if syntax == RLE
        else compressed(LOSSLESS[syntax](values), syntax, values)
    )
    file = write(made, tmp_path)
    file.write_bytes(file.read_bytes()[:-90])
    with pytest.raises(UnusableImageError, match=DAMAGED):
        read_grey(file)


@pytest.mark.parametrize("package", ["pydicom", "imagecodecs"])
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = write(compressed(b"\0\0", JPEG_LOSSLESS, VALUES.astype("u2")), tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnusableImageError, match=rf"this DICOM file needs the package {package}: .*\[dicom\]"
    ):
        read_grey(file)


NAME = b"SECRET^NAME^1234567890123"  # as long as a UID
QUOTED: dict[str, Callable[[bytes], bytes]] = {
    "SOP class": lambda file: file.replace(COMPUTED_RADIOGRAPHY.encode(), NAME).replace(
        b"\xe0\x7f", b"\xe1\x7f"
    ),
    "transfer syntax": lambda file: file.replace(JPEG_LOSSLESS.encode(), NAME[:22]),
    "colours": lambda file: file.replace(b"MONOCHROME2", NAME[:11]),
    "window": lambda file: file.replace(b"100.5", NAME[:5]),
    "slope": lambda file: file.replace(b"1.125", NAME[:5]),
    "stream": lambda file: file.replace(b"\xff\xd8", NAME[:2]),
    "syntax and stream": lambda file: file.replace(JPEG_LOSSLESS.encode(), NAME[:22]).replace(
        b"\xff\xd8", b"  "
    ),
    "netpbm": lambda _: b"P5 " + NAME + b" 3 255\n" + NAME,
    "png": lambda _: b"\x89PNG\r\n\x1a\n" + NAME * 3,
}


@pytest.mark.parametrize("place", QUOTED)
def test_no_message_quotes_a_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = VALUES.astype("u2")
    made = compressed(jpeg_lossless(values), JPEG_LOSSLESS, values, RescaleSlope=1.125)
    made.WindowCenter, made.WindowWidth = 100.5, 300
    content = write(made, tmp_path).read_bytes()
    damaged = QUOTED[place](content)
    assert damaged != content
    said = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(said)])
    with warnings.catch_warnings(record=True) as warned:
        try:
            read_grey(io.BytesIO(damaged))
        except UnusableImageError as error:
            traceback.print_exception(error, file=said)
    # A window that is not a number is ignored, and a code stream needs no name.
    assert ("UnusableImageError" in said.getvalue()) == (place not in ("window", "transfer syntax"))
    assert "SECRET" not in said.getvalue() and not warned


def test_nothing_about_the_patient_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    dcmread = pydicom.dcmread

    def noted(*arguments: Any, **options: Any) -> Any:
        read.append(dcmread(*arguments, **options))
        return read[-1]

    monkeypatch.setattr(pydicom, "dcmread", noted)
    read_grey(write(dataset(), tmp_path))
    assert "Rows" in read[0] and "PatientName" not in read[0]


def fuzzed(contents: list[bytes], trials: int) -> int:
    """Number of damaged files that are refused; any other exception is raised."""
    random = np.random.default_rng(3)
    refused = 0
    for trial in range(trials):
        content = bytearray(contents[trial % len(contents)])
        for at in random.integers(dicom.HEAD, len(content), size=int(random.integers(1, 9))):
            content[at] = random.integers(256)
        if trial % 3 == 0:
            del content[int(random.integers(dicom.HEAD, len(content))) :]
        try:
            assert read_grey(io.BytesIO(bytes(content))).mode == "L"
        except UnusableImageError:
            refused += 1
    return refused


def test_damaged_files_are_refused_and_raise_nothing_else(tmp_path: Path) -> None:
    made = dataset(WindowCenter=300, WindowWidth=400, RescaleSlope=2, RescaleIntercept=1)
    packed = dataset()
    packed.compress(RLE, encoding_plugin="pydicom")
    assert 25 < fuzzed([write(each, tmp_path).read_bytes() for each in (made, packed)], 90) < 90


@pytest.mark.slow
@pytest.mark.parametrize("syntax", [JPEG, JPEG_EXTENDED, RLE, DEFLATED, BIG_ENDIAN, *LOSSLESS])
def test_damaged_compressed_files_are_refused(tmp_path: Path, syntax: str) -> None:
    values = (WAVES * 255).astype("u1")
    if syntax in LOSSLESS:
        made = compressed(LOSSLESS[syntax](values), syntax, values)
    elif syntax in (JPEG, JPEG_EXTENDED):
        made = compressed(imagecodecs.jpeg8_encode(values), syntax, values)
    else:
        made = dataset(values, bits=8)
        if syntax == RLE:
            made.compress(RLE, encoding_plugin="pydicom")
        made.file_meta.TransferSyntaxUID = syntax
    # CharLS takes seconds to find some damage.
    trials = 60 if syntax == JPEG_LS else 2000
    assert trials / 9 < fuzzed([write(made, tmp_path).read_bytes()], trials) < trials


CASES = {
    "colour_header_grey_stream": "DICOM header \\(256 x 224 x 3 of 8 bits\\) contradicts its compressed image",
    "colour_jpeg_under_grey_header": "DICOM header \\(256 x 224 x 1 of 8 bits\\) contradicts",
    "cut_off_compressed": DAMAGED,
    "damaged_jpeg": DAMAGED,
    "grey_header_colour_stream": "DICOM header \\(256 x 224 x 1 of 8 bits\\) contradicts",
    "name_swallowed_by_a_damaged_element": DAMAGED,
    "no_preamble": "",
    "overlay_bit_15_j2k": "",
    "overlay_bit_15_raw": "",
    "rescale_empty_with_window": "",
    "stored_12_high_bit_15": "",
    "stream_16_bit_under_8_bit_header": r"contradicts its compressed image \(256 x 224 x 1 of 16 bits",
    "voi_table_8_bit_words": "",
    "window_with_comma": "",
}
"""Files of the cases -> why they are refused, "" for those that show the true picture."""


def test_unusual_files_are_right_or_refused(real_data: Path) -> None:
    folder = real_data.parent / "cases" / "dicom"
    if not folder.is_dir():
        pytest.skip(f"no cases: {folder}")
    assert {file.stem for file in folder.glob("*.dcm")} == set(CASES)
    truth = np.asarray(Image.open(folder / "truth.png")).astype(int)
    for name, reason in CASES.items():
        file = folder / f"{name}.dcm"
        if reason:
            with pytest.raises(UnusableImageError, match=reason) as caught:
                read_grey(file)
            assert "SECRET" not in str(caught.value)
        else:
            assert np.abs(np.asarray(read_grey(file)) - truth).max() <= 16, name


def test_preparation_and_inference_see_the_same_picture(tmp_path: Path) -> None:
    shades = np.add.outer(np.arange(0, 2000, 50), np.arange(0, 2000, 40))
    file = write(dataset(shades, "MONOCHROME1"), tmp_path)
    target = tmp_path / "set" / "image.jpg"
    assert prepare_image(Job(file, target, 20))[:2] == (40, 50)
    seen = as_grey(str(file))
    assert seen.size == (50, 40) and seen.getpixel((0, 0)) == 255 and seen.getpixel((49, 39)) == 0
    with Image.open(target) as prepared:
        whole = np.asarray(seen.resize((20, 20), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(np.asarray(prepared) - whole).max() <= 3
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"image.dcm: {DAMAGED}"):
        as_grey(file)
