"""Decoding, resizing and writing of radiographs."""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.prepared_images import Job, prepare_image
from medclip_dcl.pictures import image_file


def jpeg(width: int = 61, height: int = 37) -> bytes:
    stream = io.BytesIO()
    shades = np.linspace(0, 255, width * height).reshape(height, width).astype(np.uint8)
    Image.fromarray(shades).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def job(folder: Path, content: bytes | None, size: int = 24) -> Job:
    source = folder / "raw" / "image.jpg"
    source.parent.mkdir(exist_ok=True)
    if content is not None:
        source.write_bytes(content)
    return Job(source, folder / "set" / "a" / "image.jpg", size)


def test_prepared_image_is_the_area_average(tmp_path: Path) -> None:
    # Stripes finer than the prepared pixels: without antialiasing they would turn into false coarse stripes.
    stripes = np.tile(np.array([0, 255], np.uint8), (90, 75))
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    work = job(tmp_path, (tmp_path / "stripes.png").read_bytes(), size=25)
    assert prepare_image(work)[:2] == (90, 150)
    with Image.open(work.target) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "L", (25, 25))
        prepared = np.asarray(image).astype(float)
    # The outermost columns see half a filter.
    assert np.abs(prepared[:, 1:-1] - 127.5).max() < 6


SHADES = np.linspace(20, 180, 37 * 61).reshape(37, 61).round().astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


GREY = Image.fromarray(SHADES)
TWO = [Image.new("L", (40, 30), shade) for shade in (10, 200)]
UNUSABLE = {
    "missing": (None, "image file is missing"),
    "empty": (b"", "image file is empty"),
    "html": (b"<html>401 Unauthorized</html>", "not an image file of a known format"),
    "postscript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "not an image file of a known format",
    ),
    "truncated jpeg": (jpeg()[:400], "image cannot be decoded: it is damaged or cut off"),
    "truncated png": (encoded(GREY)[:-60], "image cannot be decoded: "),
    "constant": (encoded(Image.new("L", (50, 40), 7)), "image is blank: grey level 7 everywhere"),
    "tiny": (jpeg(61, 15), "image of 61 x 15 pixels; expected at least 16 on each side"),
    "strip": (jpeg(330, 40), "image of 330 x 40 pixels is a strip and no radiograph"),
    "two pages": (
        encoded(TWO[0], "TIFF", save_all=True, append_images=TWO[1:]),
        "image file holds 2 pictures; a radiograph is one",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_image_has_a_reason(tmp_path: Path, kind: str) -> None:
    content, reason = UNUSABLE[kind]
    work = job(tmp_path, content)
    outcome = prepare_image(work)
    assert outcome.reason.startswith(reason)
    # A blank image is blank with padding, too.
    assert prepare_image(work._replace(geometry="pad")) == outcome
    assert str(tmp_path) not in outcome.reason
    assert not work.target.parent.exists()


@pytest.mark.parametrize("pixels", [101_000_000, 200_000_000])
def test_decompression_bomb_is_not_decoded(
    tmp_path: Path, pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(encoded(Image.new("1", (1000, 8))))
    header = content.index(b"IHDR")
    content[header + 8 : header + 12] = (pixels // 1000).to_bytes(4, "big")
    content[header + 17 : header + 21] = zlib.crc32(content[header : header + 17]).to_bytes(4, "big")

    def decoded(*_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(image_file, "to_grey", decoded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = prepare_image(job(tmp_path, bytes(content))).reason
    assert reason.endswith("at most 100,000,000 pixels are read: give a smaller copy")


def test_a_large_radiograph_is_no_bomb(tmp_path: Path) -> None:
    large = Image.new("L", (9_500, 10_400))  # 98.8 million pixels, above PIL's own warning
    large.paste(200, (0, 0, 9_500, 5_200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare_image(job(tmp_path, encoded(large, compress_level=1)))[:2] == (10_400, 9_500)


def test_a_note_outlives_a_killed_preparation(tmp_path: Path) -> None:
    values = np.linspace(0, 3000, 5000).astype(np.uint16).reshape(50, 100)
    values[0, :9] = 65535
    work = job(tmp_path, encoded(Image.fromarray(values)))
    first = prepare_image(work)
    made = work.target.stat().st_mtime_ns
    assert "1 and 99 percentiles" in first.note and prepare_image(work) == first
    assert work.target.stat().st_mtime_ns == made


def test_a_finished_image_is_not_made_again(tmp_path: Path) -> None:
    work = job(tmp_path, jpeg())
    first = prepare_image(work)
    made = work.target.stat().st_mtime_ns
    # Its original is not even opened.
    work.source.write_bytes(b"x" * work.source.stat().st_size)
    assert prepare_image(work) == first and first[:2] == (37, 61)
    assert work.target.stat().st_mtime_ns == made
    assert [file.name for file in work.target.parent.iterdir()] == ["image.jpg"]
    # Nor is it missed, unless it is wanted in another size.
    work.source.unlink()
    assert prepare_image(work) == first
    assert prepare_image(work._replace(size=25)).reason == "image file is missing"


@pytest.mark.parametrize(
    ("geometry", "size"), [("stretch", (24, 24)), ("shortest", (39, 24)), ("pad", (24, 24))]
)
def test_a_geometry_is_made_and_known_again(tmp_path: Path, geometry: str, size: tuple[int, int]) -> None:
    work = job(tmp_path, jpeg())._replace(geometry=geometry)
    assert prepare_image(work)[:2] == (37, 61)
    with Image.open(work.target) as image:
        assert image.size == size
        middle = np.asarray(image)[:, 12]
    assert (middle[[0, -1]] < 8).tolist() == [geometry == "pad" or middle[0] < 8, geometry == "pad"]
    made = work.target.stat().st_mtime_ns
    prepare_image(work)
    assert work.target.stat().st_mtime_ns == made
    other = "stretch" if geometry != "stretch" else "pad"
    prepare_image(work._replace(geometry=other))
    assert work.target.stat().st_mtime_ns != made


def test_an_image_on_its_side_is_prepared_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    work = job(tmp_path, encoded(GREY, "JPEG", exif=exif))._replace(geometry="shortest")
    assert prepare_image(work)[:2] == (GREY.width, GREY.height)
    with Image.open(work.target) as image:
        assert image.height > image.width
        assert 274 not in image.getexif()


STALE: dict[str, Callable[[Job], object]] = {
    "no bytes, as after a power failure": lambda work: work.target.write_bytes(b""),
    "truncated": lambda work: work.target.write_bytes(work.target.read_bytes()[:-9]),
    "of another program": lambda work: work.target.write_bytes(encoded(GREY.resize((24, 24)), "JPEG")),
    "of another size": lambda work: prepare_image(work._replace(size=25)),
    "of another original": lambda work: (
        work.source.write_bytes(jpeg(30, 20)),
        prepare_image(work),
        work.source.write_bytes(jpeg()),
    ),
    "with another byte": lambda work: work.target.write_bytes(
        bytes([*work.target.read_bytes()[:-20], 0, *work.target.read_bytes()[-19:]])
    ),
    "of another quality": lambda work: work.target.write_bytes(
        work.target.read_bytes().replace(b"q95", b"q94")
    ),
}


@pytest.mark.parametrize("kind", STALE)
def test_a_stale_or_damaged_file_is_made_again(tmp_path: Path, kind: str) -> None:
    work = job(tmp_path, jpeg())
    prepare_image(work)
    right = work.target.read_bytes()
    STALE[kind](work)
    assert work.target.read_bytes() != right
    assert prepare_image(work)[:2] == (37, 61)
    assert work.target.read_bytes() == right


def test_failure_to_write_is_no_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    work = job(tmp_path, jpeg())
    with pytest.raises(OSError, match=f"No space left on device: '{work.target}'"):
        prepare_image(work)
    assert list(work.target.parent.iterdir()) == []
