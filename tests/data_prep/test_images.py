"""Decoding, resizing and writing of radiographs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import images as image_files
from data_prep.images import Job, Outcome, prepare_image, to_grey


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


def test_a_prepared_image_is_the_area_average_of_the_original_at_the_new_size(tmp_path: Path) -> None:
    # Stripes finer than the prepared pixels: without antialiasing they would turn into false coarse stripes.
    stripes = np.tile(np.array([0, 255], np.uint8), (90, 75))
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    work = job(tmp_path, (tmp_path / "stripes.png").read_bytes(), size=25)
    assert prepare_image(work) == Outcome(height=90, width=150)
    with Image.open(work.target) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "L", (25, 25))
        prepared = np.asarray(image).astype(float)
    # The outermost columns see half a filter.
    assert np.abs(prepared[:, 1:-1] - 127.5).max() < 6


def test_both_sides_are_stretched(tmp_path: Path) -> None:
    shades = np.zeros((40, 100), np.uint8)
    shades[:20, :50] = 200
    stream = io.BytesIO()
    Image.fromarray(shades).save(stream, "PNG")
    work = job(tmp_path, stream.getvalue(), size=32)
    prepare_image(work)
    with Image.open(work.target) as image:
        prepared = np.asarray(image)
    assert prepared[:14, :14].min() > 190
    assert prepared[18:].max() < 10
    assert prepared[:, 18:].max() < 10


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "image file is missing"),
        (b"", "image file is empty"),
        (b"<html>401 Unauthorized</html>", "not an image file of a known format"),
        (jpeg()[:400], "image cannot be decoded: image file is truncated"),
    ],
)
def test_an_image_that_cannot_be_used_has_a_reason(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    work = job(tmp_path, content)
    outcome = prepare_image(work)
    assert outcome.reason.startswith(reason)
    assert str(tmp_path) not in outcome.reason
    assert not work.target.parent.exists()


def test_a_finished_image_is_not_made_again(tmp_path: Path) -> None:
    work = job(tmp_path, jpeg())
    first = prepare_image(work)
    work.target.write_bytes(b"finished")
    assert prepare_image(work) == first == Outcome(height=37, width=61)
    assert work.target.read_bytes() == b"finished"
    assert [file.name for file in work.target.parent.iterdir()] == ["image.jpg"]


def test_failure_to_write_is_no_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        prepare_image(job(tmp_path, jpeg()))


RAMP = np.arange(12).reshape(3, 4)
FULL_RAMP = np.array([[0, 23, 46, 70], [93, 116, 139, 162], [185, 209, 232, 255]], np.uint8)


@pytest.mark.parametrize("kind", ["<u2", ">u2", "int32", "float32"])
def test_more_than_eight_bits_are_scaled_from_their_own_range(kind: str) -> None:
    image = Image.fromarray((RAMP * 300 + 1000).astype(kind))
    grey = to_grey(image)
    assert grey.mode == "L"
    np.testing.assert_array_equal(np.asarray(grey), FULL_RAMP)


def test_eight_bits_keep_their_values() -> None:
    shades = (RAMP * 3 + 40).astype(np.uint8)
    grey = Image.fromarray(shades)
    palette = Image.fromarray(255 - shades).convert("P")
    palette.putpalette([value for shade in range(256) for value in [255 - shade] * 3])
    transparent = Image.merge("RGBA", [grey, grey, grey, Image.new("L", grey.size, 7)])
    for image in (grey, grey.convert("RGB"), transparent, palette):
        np.testing.assert_array_equal(np.asarray(to_grey(image)), shades)


@pytest.mark.parametrize("value", [0.0, 4000.0, np.nan])
def test_a_constant_or_undefined_deep_image_is_black(value: float) -> None:
    image = Image.fromarray(np.full((3, 5), value, np.float32))
    assert np.asarray(to_grey(image)).tolist() == [[0] * 5] * 3


def test_colour_becomes_luma() -> None:
    assert to_grey(Image.new("RGB", (1, 1), (0, 255, 0))).getpixel((0, 0)) == 150
