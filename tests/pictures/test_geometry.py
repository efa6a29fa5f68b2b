"""Images that are fitted to a square, and the way back from the square to their pixels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from medclip_dcl.pictures.geometry import GEOMETRIES, Seen, View, fit, fitted_axes
from medclip_dcl.pictures.transforms import centre_crop, scaled

BOX = (37, 21, 40, 25)
"""x, y, w, h in an original; lies in the middle square of every image below, if not wholly in the middle of that."""


def with_box(height: int, width: int) -> Image.Image:
    pixels = np.full((height, width), 30, np.uint8)
    x, y, w, h = BOX
    pixels[y : y + h, x : x + w] = 230
    return Image.fromarray(pixels)


def bright(pixels: np.ndarray) -> list[int]:
    """Left, right, upper and lower edge of what is nearer to white."""
    rows, columns = (np.flatnonzero((pixels > 130).any(axis)) for axis in (1, 0))
    return [columns[0], columns[-1] + 1, rows[0], rows[-1] + 1]


@pytest.mark.parametrize(("shape", "size"), [((67, 113), 64), ((131, 97), 200), ((90, 90), 64)])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_box_covers_the_fitted_bright_pixels(shape: tuple[int, int], geometry: str, size: int) -> None:
    fitted = np.asarray(fit(with_box(*shape), geometry, size, Image.Resampling.BILINEAR))
    rows, columns = fitted_axes(geometry, *shape, size)
    assert fitted.shape == (rows.whole, columns.whole)
    x, y, w, h = BOX
    edges = []
    for axis, length, places in ((columns, shape[1], (x, x + w)), (rows, shape[0], (y, y + h))):
        edges += [axis.before + place * axis.inside / length for place in places]
        assert axis.in_original(edges[-1], length) == pytest.approx(places[-1])
    np.testing.assert_allclose(bright(fitted), edges, atol=1)


@pytest.mark.parametrize(
    ("shape", "prepared", "size", "seen"),
    [
        ((67, 113), 64, 64, 64),
        ((67, 113), 96, 72, 60),
        ((131, 97), 200, 200, 160),
        ((131, 97), 48, 64, 64),
        ((90, 90), 200, 200, 160),
        ((90, 90), 48, 64, 64),
    ],
)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_view_says_where_a_box_lies(
    shape: tuple[int, int], geometry: str, prepared: int, size: int, seen: int
) -> None:
    fitted = fit(with_box(*shape), geometry, prepared, Image.Resampling.BILINEAR)
    shown = np.asarray(scaled(fitted, size))
    square = View(seen, size, geometry, prepared).of(*shape)
    across, down = seen / square.width, seen / square.height
    x, y, w, h = BOX
    horizontal = [(place - square.left) * across for place in (x, x + w)]
    vertical = [(place - square.top) * down for place in (y, y + h)]
    # A pixel of resampling, and the square's edges are whole pixels of the original.
    tolerance = 1 + max(across, down) / 2
    expected = np.clip([*horizontal, *vertical], 0, seen)
    np.testing.assert_allclose(bright(centre_crop(shown, seen)), expected, atol=tolerance)
    # And without its padding the image is the original.
    part = View(seen, size, geometry, prepared).shown(*shape)
    without = shown[part.slices]
    scale_x, scale_y = without.shape[1] / shape[1], without.shape[0] / shape[0]
    edges = [x * scale_x, (x + w) * scale_x, y * scale_y, (y + h) * scale_y]
    np.testing.assert_allclose(bright(without), edges, atol=1.5)


def test_what_is_seen_of_a_landscape_image() -> None:
    # 60 x 100 pixels, fitted to 30.
    assert View(30, 30).of(60, 100) == Seen(0, 60, 0, 100)
    assert View(30, 30, "shortest").of(60, 100) == Seen(0, 60, 20, 80)
    assert View(30, 30, "pad").of(60, 100) == Seen(-20, 80, 0, 100)
    # The middle 18 of 30.
    assert View(18, 30).of(60, 100) == Seen(12, 48, 20, 80)
    assert View(18, 30, "shortest").of(60, 100) == Seen(12, 48, 32, 68)
    assert View(18, 30, "pad").of(60, 100) == Seen(0, 60, 20, 80)
    # The same at another scale.
    assert View(30, 30, "pad").of(6, 10, original=(60, 100)) == Seen(-2, 8, 0, 10)
    assert Seen(-20, 80, 0, 100).within(60, 100) == Seen(0, 60, 0, 100)
    assert Seen(0, 60, 0, 100).slices_in(Seen(-20, 80, 0, 100)) == (slice(20, 80), slice(0, 100))


def test_the_shorter_side_decides() -> None:
    assert fit(Image.new("L", (20, 50)), "shortest", 10, Image.Resampling.BILINEAR).size == (10, 25)
    assert fit(Image.new("L", (20, 50)), "stretch", 10, Image.Resampling.BILINEAR).size == (10, 10)
    # A sliver keeps a pixel.
    assert fitted_axes("pad", 1, 1000, 64)[0] == (31, 1, 64)


def test_an_unknown_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="one of stretch, shortest, pad, found 'crop'"):
        fitted_axes("crop", 3, 4, 2)
