"""Radiographs in DICOM files: hand-made ones with known grey levels, and those that come with pydicom."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.images import Job, Outcome, prepare_image
from medclip_dcl.inference import as_grey
from medclip_dcl.pictures import dicom
from medclip_dcl.pictures.grey import UnusableImageError
from medclip_dcl.pictures.image_file import read_grey

pydicom = pytest.importorskip("pydicom", reason="pip install -e '.[test]' installs pydicom")

COMPUTED_RADIOGRAPHY = "1.2.840.10008.5.1.4.1.1.1"
LITTLE_ENDIAN = "1.2.840.10008.1.2.1"
RLE = "1.2.840.10008.1.2.5"
JPEG_LOSSLESS = "1.2.840.10008.1.2.4.70"
VALUES = np.array([[0, 100, 200], [300, 400, 1000]])


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


def test_content_in_memory_is_read_like_the_file(tmp_path):
    made = write(dataset(), tmp_path)
    assert np.asarray(read_grey(io.BytesIO(made.read_bytes()))).tolist() == grey(tmp_path, dataset())


def linear(values: np.ndarray, low: float, high: float) -> list[list[int]]:
    return np.rint((255 * (values - low) / (high - low)).clip(0, 255)).astype(int).tolist()


def voi_table(first: int, entries: list[int], kind: str) -> list[Any]:
    table = pydicom.Dataset()
    table.add_new("LUTDescriptor", "US", [len(entries), first, 16])
    table.add_new("LUTData", kind, np.array(entries, "<u2").tobytes() if kind == "OW" else entries)
    return [table]


def test_without_a_window_the_images_own_range_is_shown(tmp_path: Path) -> None:
    assert grey(tmp_path, dataset()) == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES - 700)) == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES * 60, bits=16)) == linear(VALUES, 0, 1000)
    assert grey(tmp_path, dataset(VALUES // 4, bits=8)) == linear(VALUES, 0, 1000)


def test_the_window_is_in_rescaled_units(tmp_path: Path) -> None:
    # 2 v - 100; the window of DICOM's LINEAR function reaches from 299.5 to 699.5.
    made = dataset(RescaleSlope=2, RescaleIntercept=-100, WindowCenter=500, WindowWidth=401)
    expected = linear(2 * VALUES - 100, 299.5, 699.5)
    assert expected == [[0, 0, 0], [128, 255, 255]]
    assert grey(tmp_path, made) == expected


def test_a_window_wider_than_the_image_keeps_its_contrast(tmp_path: Path) -> None:
    assert grey(tmp_path, dataset(WindowCenter=850.5, WindowWidth=1701)) == linear(VALUES, 0, 1700)


def test_the_first_of_several_windows_is_taken(tmp_path: Path) -> None:
    made = dataset(WindowCenter=[150.5, 999], WindowWidth=[301, 7])
    assert grey(tmp_path, made) == linear(VALUES, 0, 300)


def test_exact_and_sigmoid_windows(tmp_path: Path) -> None:
    made = dataset(WindowCenter=300, WindowWidth=400, VOILUTFunction="LINEAR_EXACT")
    assert grey(tmp_path, made) == linear(VALUES, 100, 500)
    made = dataset(WindowCenter=300, WindowWidth=400, VOILUTFunction="SIGMOID")
    expected = 255 / (1 + np.exp(-4 * (VALUES - 300) / 400))
    np.testing.assert_allclose(grey(tmp_path, made), expected, atol=0.51)


@pytest.mark.parametrize("width", [0, -5])
def test_a_window_without_width_is_none(tmp_path: Path, width: int) -> None:
    assert grey(tmp_path, dataset(WindowCenter=500, WindowWidth=width)) == linear(VALUES, 0, 1000)


@pytest.mark.parametrize("kind", ["US", "OW"])
def test_a_table_is_taken_before_a_window(tmp_path: Path, kind: str) -> None:
    made = dataset(VALUES // 100 + 1, WindowCenter=7, WindowWidth=3)
    made.VOILUTSequence = voi_table(2, [0, 200, 400, 1000], kind)
    # Stored 1, 2, 3 / 4, 5, 11: below the table its first entry holds, above it the last.
    assert grey(tmp_path, made) == [[0, 0, 51], [102, 255, 255]]


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    inverted = (255 - np.array(linear(VALUES, 0, 1000))).tolist()
    assert grey(tmp_path, dataset(photometric="MONOCHROME1")) == inverted
    made = dataset(photometric="MONOCHROME1", WindowCenter=150.5, WindowWidth=301)
    inverted = (255 - np.array(linear(VALUES, 0, 300))).tolist()
    assert grey(tmp_path, made) == inverted


def test_padding_is_no_part_of_the_range(tmp_path: Path) -> None:
    padded = np.array([[4000, 100, 200], [300, 600, 4095]])
    shown = [[255, 0, 51], [102, 255, 255]]
    assert grey(tmp_path, dataset(padded, PixelPaddingValue=4000, PixelPaddingRangeLimit=4095)) == shown
    padded[1, 2] = 4000
    assert grey(tmp_path, dataset(padded, PixelPaddingValue=4000)) == shown
    assert set(sum(grey(tmp_path, dataset(np.full((2, 2), 5), PixelPaddingValue=5)), [])) == {0}


def test_colour_becomes_luma(tmp_path: Path) -> None:
    green = np.zeros((2, 3, 3), int)
    green[..., 1] = 255
    assert grey(tmp_path, dataset(green, "RGB", 8)) == [[150] * 3] * 2


def test_lossless_compression_changes_nothing(tmp_path: Path) -> None:
    made = dataset()
    made.compress(RLE)
    assert grey(tmp_path, made) == linear(VALUES, 0, 1000)
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    plain = np.asarray(read_grey(folder / "MR_small.dcm"))
    for kind in ("RLE", "jp2klossless", "jpeg_ls_lossless", "bigendian", "implicit"):
        np.testing.assert_array_equal(np.asarray(read_grey(folder / f"MR_small_{kind}.dcm")), plain)
    # JPEG lossless, the usual compression of radiographs, beside the same picture as RLE.
    found, expected = (read_grey(folder / f"SC_rgb_{kind}.dcm") for kind in ("jpeg_gdcm", "rle"))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


UNUSABLE: dict[str, tuple[Any, str]] = {
    "no pixels": (
        lambda: dataset(PixelData=None),
        "DICOM object without pixel data \\(Computed Radiography Image Storage\\)",
    ),
    "several frames": (
        lambda: dataset(np.arange(60).reshape(5, 3, 4)),
        "DICOM object of 5 frames; a radiograph has one",
    ),
    "too few pixels": (
        lambda: dataset(Rows=50),
        "DICOM image cannot be decoded: The number of bytes of pixel",
    ),
    "no rows": (lambda: dataset(Rows=None), "DICOM image cannot be decoded: .*Rows"),
    "too large": (
        lambda: dataset(Rows=20_000, Columns=6_000),
        "image of 6,000 x 20,000 pixels; at most 100,000,000 pixels are read",
    ),
    "palette": (
        lambda: dataset(photometric="PALETTE COLOR", bits=8),
        "DICOM image is PALETTE COLOR of 8 bits",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_cannot_be_used_has_a_reason(tmp_path: Path, kind: str) -> None:
    make, reason = UNUSABLE[kind]
    with pytest.raises(UnusableImageError, match=f"^{reason}"):
        read_grey(write(make(), tmp_path))


def test_a_compression_without_decoder_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydicom.pixels.decoders import JPEGLosslessSV1Decoder

    monkeypatch.setattr(JPEGLosslessSV1Decoder, "_available", {})
    made = dataset()
    made.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    made["PixelData"].is_undefined_length = True
    made.file_meta.TransferSyntaxUID = JPEG_LOSSLESS
    with pytest.raises(UnusableImageError, match=r"JPEG Lossless.* needs a decoder.*\[dicom\]"):
        read_grey(write(made, tmp_path))


def test_without_pydicom_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(dataset(), tmp_path)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UnusableImageError, match=r"requires pydicom: pip install -e '\.\[dicom\]'"):
        read_grey(file)


def test_nothing_about_the_patient_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    dcmread = pydicom.dcmread

    def noted(*arguments: Any, **options: Any) -> Any:
        read.append(dcmread(*arguments, **options))
        return read[-1]

    monkeypatch.setattr(pydicom, "dcmread", noted)
    read_grey(write(dataset(), tmp_path))
    assert "Rows" in read[0] and "PatientName" not in read[0]


def test_damaged_files_are_refused_and_raise_nothing_else(tmp_path: Path) -> None:
    made = dataset(WindowCenter=300, WindowWidth=400, RescaleSlope=2, RescaleIntercept=1)
    compressed = dataset()
    compressed.compress(RLE)
    contents = [write(each, tmp_path).read_bytes() for each in (made, compressed)]
    random = np.random.default_rng(3)
    refused = 0
    for trial in range(90):
        content = bytearray(contents[trial % 2])
        for at in random.integers(dicom.HEAD, len(content), size=int(random.integers(1, 9))):
            content[at] = random.integers(256)
        if trial % 3 == 0:
            del content[int(random.integers(dicom.HEAD, len(content))) :]
        file = tmp_path / "image.dcm"
        file.write_bytes(bytes(content))
        try:
            assert read_grey(file).mode == "L"
        except UnusableImageError:
            refused += 1
    assert 25 < refused < 90


def test_preparation_and_inference_see_the_same_picture(tmp_path: Path) -> None:
    shades = np.add.outer(np.arange(0, 2000, 50), np.arange(0, 2000, 40))
    file = write(dataset(shades, "MONOCHROME1"), tmp_path)
    target = tmp_path / "set" / "image.jpg"
    assert prepare_image(Job(file, target, 20)) == Outcome(height=40, width=50)
    seen = as_grey(str(file))
    assert seen.size == (50, 40) and seen.getpixel((0, 0)) == 255 and seen.getpixel((49, 39)) == 0
    with Image.open(target) as prepared:
        whole = np.asarray(seen.resize((20, 20), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(np.asarray(prepared) - whole).max() <= 3
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="image.dcm: DICOM image cannot be decoded"):
        as_grey(file)
