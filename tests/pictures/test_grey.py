"""Grey levels of pictures of every mode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from medclip_dcl.pictures.grey import (
    DEEPER,
    UnusableImageError,
    eight_bits,
    kind_and_notes,
    notes_of,
    to_grey,
)
from medclip_dcl.pictures.image_file import read_grey
from medclip_dcl.pictures.inputs import ImageWarning, as_grey

RAMP = np.arange(12).reshape(3, 4)
FULL_RAMP = np.array([[0, 23, 46, 70], [93, 116, 139, 162], [185, 209, 232, 255]], np.uint8)


@pytest.mark.parametrize("kind", ["<u2", ">u2", "int32", "float32"])
def test_deep_images_are_scaled_from_their_range(kind: str) -> None:
    image = Image.fromarray((RAMP * 300 + 1000).astype(kind))
    grey = to_grey(image)
    assert grey.mode == "L"
    np.testing.assert_array_equal(np.asarray(grey), FULL_RAMP)
    assert not np.asarray(to_grey(Image.fromarray(np.full((3, 5), 4000, kind)))).any()


def radiograph(kind: str, hot: int = 0, level: float = 65535.0) -> np.ndarray:
    """10,000 pixels of 0 to 3,000, the last `hot` of them burnt in."""
    values = np.linspace(0, 3000, 10_000)
    values[len(values) - hot :] = level
    return values.astype(kind).reshape(80, 125)


@pytest.mark.parametrize("kind", ["uint16", "int32", "float32"])
def test_a_few_hot_pixels_do_not_turn_it_black(kind: str) -> None:
    plain = to_grey(Image.fromarray(radiograph(kind)))
    assert not notes_of(plain)
    for hot, level in ((1, 65535), (15, 65535), (100, 65535), (15, 40_000), (15, -60_000)):
        if kind == "uint16" and level < 0:
            continue
        image = Image.fromarray(radiograph(kind, hot, level))
        grey = to_grey(image)
        assert np.abs(np.asarray(grey, int) - np.asarray(plain))[:72].max() <= 6, (hot, level)
        assert "1 and 99 percentiles" in notes_of(grey)[0]
        with pytest.warns(ImageWarning, match="image: hot or burnt-in pixels"):
            as_grey(image)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (
            np.where(radiograph("uint16") < 2600, radiograph("uint16"), 20_000 + radiograph("uint16")),
            "share a tenth",
        ),
        (radiograph("uint16", 7000), "share a tenth"),  # hardly a picture within its border
        (radiograph("uint16", 15, 10_000), ""),
        (radiograph("uint16", 15, 20_000), "share a tenth"),
        (np.where(radiograph("uint16") > 2990, 3000, 0).astype(np.uint16), "share a tenth"),
        (np.full((80, 125), 700, np.uint16), ""),
    ],
)
def test_other_images_keep_their_range(values: np.ndarray, note: str) -> None:
    grey = to_grey(Image.fromarray(values))
    expected = eight_bits(values, float(values.min()), float(values.max()))
    np.testing.assert_array_equal(np.asarray(grey), expected)
    assert len(notes_of(grey)) == bool(note) and all(note in text for text in notes_of(grey))


@pytest.mark.parametrize(("kind", "level"), [("uint16", 65535), ("int32", -9999), ("float32", -3.4e38)])
@pytest.mark.parametrize("share", [101, 501, 3100, 6600])
def test_a_border_is_left_out(kind: str, level: float, share: int) -> None:
    values = radiograph(kind, share, level)
    grey = np.asarray(to_grey(Image.fromarray(values)))
    picture = values.ravel()[:-share]
    np.testing.assert_array_equal(
        grey.ravel()[:-share], eight_bits(picture, float(picture.min()), float(picture.max()))
    )
    assert set(grey.ravel()[-share:]) == {255 if level > 0 else 0} and not notes_of(
        to_grey(Image.fromarray(values))
    )


def test_borders_at_both_ends_are_left_out() -> None:
    values = radiograph("uint16") // 2 + 25_000
    values[0], values[-1] = 0, 65535
    expected = eight_bits(values, float(values[1:-1].min()), float(values[1:-1].max()))
    np.testing.assert_array_equal(np.asarray(to_grey(Image.fromarray(values))), expected)


@pytest.mark.parametrize("byteorder", "<>")
def test_tiff_numbers_unlike_their_mode(byteorder: str, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    shades = FULL_RAMP.astype(int)
    signed, unsigned = (shades - 128).astype(np.int8), (shades * 16843009).astype(np.uint32)
    for values in (signed, unsigned, shades.astype(np.int32) - 99):
        if values is unsigned and byteorder == ">":  # unknown to PIL, and refused
            continue
        tifffile.imwrite(tmp_path / "a.tif", values, byteorder=byteorder)
        grey = read_grey(tmp_path / "a.tif")
        assert np.asarray(grey).tolist() == FULL_RAMP.tolist() and kind_and_notes(grey) == (DEEPER,)


@pytest.mark.parametrize("bands", [2, 3, 4])
def test_colour_of_sixteen_bits_needs_them(bands: int) -> None:
    codecs = pytest.importorskip("imagecodecs")
    full = np.repeat(FULL_RAMP[..., None].astype(np.uint16) * 257, bands, axis=2)
    if bands != 3:
        full[..., -1] = 65535  # opaque
    grey = read_grey(io.BytesIO(codecs.png_encode(full)))
    assert np.asarray(grey).tolist() == FULL_RAMP.tolist() and kind_and_notes(grey) == (DEEPER,)
    dark, labelled = full // 17, np.where(full < 65535, full // 17, 65535).astype(np.uint16)
    # White of more than 8 bits in JPEG 2000 becomes black in PIL.
    white = codecs.jpeg2k_encode(np.kron(full, np.ones((8, 8, 1), np.uint16)), level=0, reversible=True)
    for content in (*map(codecs.png_encode, (dark, labelled, full // 257)), white):
        with pytest.raises(UnusableImageError, match="below 8,192"):
            read_grey(io.BytesIO(content))


def test_planes_of_sixteen_bits_are_refused(tmp_path: Path) -> None:
    planes = np.repeat(FULL_RAMP[None].astype(np.uint16) * 257, 3, axis=0)
    for compression in (None, "deflate"):
        pytest.importorskip("tifffile").imwrite(
            tmp_path / "a.tif", planes, photometric="rgb", planarconfig="separate", compression=compression
        )
        if compression:
            assert np.asarray(read_grey(tmp_path / "a.tif")).tolist() == FULL_RAMP.tolist()
        else:
            with pytest.raises(UnusableImageError, match="separate planes"):
                read_grey(tmp_path / "a.tif")


def test_a_note_is_ours_and_not_the_files(tmp_path: Path) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("medclip_dcl notes", "Nobody^Nemo")
    Image.fromarray(FULL_RAMP).save(tmp_path / "a.png", pnginfo=texts)
    assert notes_of(read_grey(tmp_path / "a.png")) == ()


def test_eight_bits_keep_their_values() -> None:
    shades = (RAMP * 3 + 40).astype(np.uint8)
    grey = Image.fromarray(shades)
    palette = Image.fromarray(255 - shades).convert("P")
    palette.putpalette([value for shade in range(256) for value in [255 - shade] * 3])
    transparent = Image.merge("RGBA", [grey, grey, grey, Image.new("L", grey.size, 7)])
    grey_alpha = Image.merge("LA", [grey, Image.new("L", grey.size, 7)])
    for image in (grey, grey.convert("RGB"), transparent, grey_alpha, palette):
        np.testing.assert_array_equal(np.asarray(to_grey(image)), shades)


def test_cmyk_is_ink_and_not_light() -> None:
    assert to_grey(Image.new("RGB", (1, 1), (0, 255, 0))).getpixel((0, 0)) == 150
    ink = np.zeros((1, 3, 4), np.uint8)
    ink[0, :, 3] = 0, 100, 255  # black ink
    assert np.asarray(to_grey(Image.fromarray(ink, "CMYK"))).tolist() == [[255, 155, 0]]


def test_one_bit_is_black_and_white() -> None:
    assert np.asarray(to_grey(Image.fromarray(RAMP > 5))).tolist() == [[0] * 4, [0, 0, 255, 255], [255] * 4]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_tiff_where_white_is_zero_is_inverted(kind: type, tmp_path: Path) -> None:
    shades: np.ndarray = FULL_RAMP.astype(kind) * (1 if kind is np.uint8 else 257)
    seen = {}
    for white_is_zero in (0, 1):
        Image.fromarray(shades).save(tmp_path / "a.tiff")
        content = (tmp_path / "a.tiff").read_bytes()
        # Tag 262 (short, one value): 1, black is zero, where PIL wrote it.
        entry = b"\x06\x01\x03\x00\x01\x00\x00\x00"
        assert content.count(entry) == 1
        at = content.index(entry) + len(entry)
        (tmp_path / "a.tiff").write_bytes(content[:at] + bytes([white_is_zero]) + content[at + 1 :])
        with Image.open(tmp_path / "a.tiff") as image:
            seen[white_is_zero] = np.asarray(to_grey(image))
    np.testing.assert_array_equal(seen[1], FULL_RAMP)
    np.testing.assert_array_equal(seen[0], 255 - FULL_RAMP)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_undefined_grey_levels_are_refused(value: float) -> None:
    pixels = np.full((3, 5), 7, np.float32)
    pixels[1, 2] = value
    with pytest.raises(UnusableImageError, match="NaN or infinite"):
        to_grey(Image.fromarray(pixels))


@pytest.mark.parametrize("kind", [np.int16, np.uint16, np.int32, np.float64])
def test_grey_levels_outside_the_range_are_clipped(kind: type) -> None:
    values: np.ndarray = np.array([0, 99, 100, 151, 201, 300, 32000], kind)
    assert eight_bits(values, 100.0, 200.0).tolist() == [0, 0, 0, 130, 255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "tiff"])
def test_a_picture_is_turned_as_its_orientation_says(tmp_path: Path, ending: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    file = tmp_path / f"a.{ending}"
    # Eight pixels for each shade, so that JPEG keeps them.
    shades = np.kron(FULL_RAMP, np.ones((8, 8), np.uint8))
    Image.fromarray(shades).save(file, exif=exif, quality=100)
    # Where row 0 and column 0 of the file stand in the picture (TIFF 6.0, page 36).
    upright = {
        1: shades,
        2: shades[:, ::-1],
        3: shades[::-1, ::-1],
        4: shades[::-1],
        5: shades.T,
        6: shades[::-1].T,
        7: shades[::-1, ::-1].T,
        8: shades.T[::-1],
    }[orientation]
    picture = read_grey(file)
    np.testing.assert_array_equal(np.asarray(to_grey(picture)), np.asarray(picture))
    seen = np.asarray(picture).astype(int)
    assert seen.shape == upright.shape
    assert np.abs(seen - upright).max() <= 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_damaged_orientation_is_none() -> None:
    image = Image.fromarray(FULL_RAMP)
    image.info["exif"] = b"Exif\0\0II*\0\x08\0\0\0\xff\xff"
    np.testing.assert_array_equal(np.asarray(to_grey(image)), FULL_RAMP)


def test_other_trouble_than_damage_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    image = Image.new("L", (3, 2))
    monkeypatch.setattr(image, "getexif", fails)
    with pytest.raises(MemoryError):
        to_grey(image)
