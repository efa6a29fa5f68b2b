"""Fit radiographs to the square input of a model, and map places in it back to the original.

stretch     resize both sides to the same length (choice: SSD, section 3.2, resizes to 512 x 512 and says no more)
shortest    resize the shorter side; evaluation sees the middle square, training crops anywhere
pad         resize the longer side, and pad to a square with black
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from medclip_dcl.common.errors import check_choice

GEOMETRIES = ("stretch", "shortest", "pad")


class Axis(NamedTuple):
    """One axis of a fitted image of `whole` pixels: `before` pixels of padding, then `inside` of the original."""

    before: int
    inside: int
    whole: int

    def in_original(self, place: float, length: int) -> float:
        """Map a coordinate of the fitted image to an original of `length` pixels.

        Negative, or more than `length`, in the padding.
        """
        return length * (place - self.before) / self.inside


def fitted_axes(geometry: str, height: int, width: int, size: int) -> tuple[Axis, Axis]:
    """Rows and columns of an image of height x width fitted to `size` pixels."""
    check_choice("geometry", geometry, GEOMETRIES)
    if geometry == "stretch":
        return Axis(0, size, size), Axis(0, size, size)
    measure = min(height, width) if geometry == "shortest" else max(height, width)
    # The longer side is cut to whole pixels, as torchvision and transformers do.
    whole = int if geometry == "shortest" else round
    rows, columns = (max(1, whole(size * length / measure)) for length in (height, width))
    if geometry == "shortest":
        return Axis(0, rows, rows), Axis(0, columns, columns)
    return Axis((size - rows) // 2, rows, size), Axis((size - columns) // 2, columns, size)


def fit(image: Image.Image, geometry: str, size: int, resample: Image.Resampling) -> Image.Image:
    """Fit an image in mode "L" to `size` pixels (the shorter side for "shortest"), antialiased; padding is black."""
    rows, columns = fitted_axes(geometry, image.height, image.width, size)
    inside = (columns.inside, rows.inside)
    fitted = image if image.size == inside else image.resize(inside, resample)
    if inside == (columns.whole, rows.whole):
        return fitted
    padded = Image.new("L", (columns.whole, rows.whole), 0)
    padded.paste(fitted, (columns.before, rows.before))
    return padded


class Seen(NamedTuple):
    """The rectangle of an image that a model sees, in the image's pixels; it reaches into the padding."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    def within(self, height: int, width: int) -> Seen:
        """The part inside an image of that size."""
        return Seen(max(0, self.top), min(height, self.bottom), max(0, self.left), min(width, self.right))

    @property
    def slices(self) -> tuple[slice, slice]:
        """Index of the rectangle in an array of the image."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def slices_in(self, outer: Seen) -> tuple[slice, slice]:
        """Index of the rectangle in an array of `outer`, which contains it."""
        top, left = outer.top, outer.left
        return Seen(self.top - top, self.bottom - top, self.left - left, self.right - left).slices


@dataclass(frozen=True)
class View:
    """The part of each image that a model sees in evaluation: the middle square of the fitted image, or all of it.

    Attributes:
        seen: side of that square, in pixels of the scaled image.
        size: side of the scaled image in pixels; the shorter side for "shortest".
        geometry: from `GEOMETRIES`.
        prepared: size to which images were fitted before they were scaled to `size`; None for the same.
    """

    seen: int = 1
    size: int = 1
    geometry: str = "stretch"
    prepared: int | None = None

    def of(self, height: int, width: int, original: tuple[int, int] | None = None) -> Seen:
        """The visible rectangle of an image of height x width pixels, or of a resized copy of an `original`."""
        size = self._fitted_to
        edges: list[int] = []
        for axis, length in zip(
            fitted_axes(self.geometry, *(original or (height, width)), size), (height, width), strict=True
        ):
            shown = round(axis.whole * self.size / size)
            first = (shown - self.seen) // 2
            places = (place * axis.whole / shown for place in (first, first + self.seen))
            edges += (round(axis.in_original(place, length)) for place in places)
        return Seen(*edges)

    def shown(self, height: int, width: int, sizes: tuple[int | float, int | float] | None = None) -> Seen:
        """The rectangle of the scaled image, of the view's size or `sizes`, that shows the original without padding."""
        edges: list[int] = []
        axes = fitted_axes(self.geometry, height, width, self._fitted_to)
        for axis, size in zip(axes, sizes or (self.size, self.size), strict=True):
            scale = size / self._fitted_to
            first = round(axis.before * scale)
            edges += (first, first + max(1, round(axis.inside * scale)))
        return Seen(*edges)

    @property
    def _fitted_to(self) -> int:
        # Stretching does not depend on the intermediate size.
        return self.size if self.prepared is None or self.geometry == "stretch" else self.prepared

    def __str__(self) -> str:
        if self.seen != self.size:
            return f"middle {self.seen} x {self.seen} of {self.size} x {self.size} pixels"
        return {"stretch": "whole image", "shortest": "middle square", "pad": "whole image, padded"}[
            self.geometry
        ]
