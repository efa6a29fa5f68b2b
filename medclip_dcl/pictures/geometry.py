"""From the rectangle of a radiograph to the square that a model sees, and back.

stretch     both sides become equal, whatever the aspect ratio was (SSD, section 3.2)
shortest    the shorter side becomes that long; evaluation sees the middle square, training crops anywhere
pad         the longer side becomes that long, black strips make a square of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from medclip_dcl.errors import UserError

GEOMETRIES = ("stretch", "shortest", "pad")


def check_geometry(geometry: str) -> str:
    """The geometry, if it is one.

    Raises:
        ValueError: it is not.
    """
    if geometry not in GEOMETRIES:
        raise UserError(f"geometry must be one of {', '.join(GEOMETRIES)}, got {geometry!r}")
    return geometry


class Axis(NamedTuple):
    """One axis of a fitted image: `inside` of its `whole` pixels show the original, `before` of them is padding."""

    before: int
    inside: int
    whole: int

    def in_original(self, place: float, length: int) -> float:
        """The place in an original of so many pixels of a place in the fitted image, both counted from their edges.

        Negative, or more than `length`, where padding lies.
        """
        return length * (place - self.before) / self.inside


def fitted_axes(geometry: str, height: int, width: int, size: int) -> tuple[Axis, Axis]:
    """Rows and columns of an image of height x width that is fitted to `size` pixels."""
    check_geometry(geometry)
    if geometry == "stretch":
        return Axis(0, size, size), Axis(0, size, size)
    measure = min(height, width) if geometry == "shortest" else max(height, width)
    rows, columns = (max(1, round(size * length / measure)) for length in (height, width))
    if geometry == "shortest":
        return Axis(0, rows, rows), Axis(0, columns, columns)
    return Axis((size - rows) // 2, rows, size), Axis((size - columns) // 2, columns, size)


def fit(image: Image.Image, geometry: str, size: int, resample: Image.Resampling) -> Image.Image:
    """The image at `size` pixels, antialiased; padding is black.

    Args:
        image: in mode "L".
        geometry: from `GEOMETRIES`.
        size: of both sides; of the shorter one for "shortest".
        resample: the filter.
    """
    rows, columns = fitted_axes(geometry, image.height, image.width, size)
    inside = (columns.inside, rows.inside)
    fitted = image if image.size == inside else image.resize(inside, resample)
    if inside == (columns.whole, rows.whole):
        return fitted
    padded = Image.new("L", (columns.whole, rows.whole), 0)
    padded.paste(fitted, (columns.before, rows.before))
    return padded


class Seen(NamedTuple):
    """What a model sees of an image, in the image's pixels; beyond its edges where padding is seen."""

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
        """The part that lies in an image of that size."""
        return Seen(max(0, self.top), min(height, self.bottom), max(0, self.left), min(width, self.right))

    def counted_from(self, corner: Seen) -> Seen:
        """The same rectangle, its place counted from another's upper left corner."""
        top, left = corner.top, corner.left
        return Seen(self.top - top, self.bottom - top, self.left - left, self.right - left)

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns, to index an array with."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True)
class View:
    """The part of each image that the evaluations see: the middle square of the fitted image, or all of it.

    Attributes:
        seen: side of that square, in pixels of the image as it is shown.
        size: at which images are shown: of both sides, of the shorter one for "shortest".
        geometry: how they were fitted; from `GEOMETRIES`.
        prepared: size to which they were fitted before they were scaled to `size`; None for the same.
    """

    seen: int = 1
    size: int = 1
    geometry: str = "stretch"
    prepared: int | None = None

    def of(self, height: int, width: int, original: tuple[int, int] | None = None) -> Seen:
        """What is seen of an image, in its pixels.

        Args:
            height: of the image, in the pixels that are asked for; `width` likewise.
            original: height and width that decided how it was fitted; None where these are they.
        """
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
        """Where an original stands in the image as it is shown, that is, without padding.

        Args:
            height: of the original; `width` likewise.
            sizes: at which it is shown, by rows and by columns; None for the view's.
        """
        edges: list[int] = []
        axes = fitted_axes(self.geometry, height, width, self._fitted_to)
        for axis, size in zip(axes, sizes or (self.size, self.size), strict=True):
            scale = size / self._fitted_to
            first = round(axis.before * scale)
            edges += (first, first + max(1, round(axis.inside * scale)))
        return Seen(*edges)

    @property
    def _fitted_to(self) -> int:
        # Stretched images are the same whichever sizes they had in between.
        return self.size if self.prepared is None or self.geometry == "stretch" else self.prepared

    def __str__(self) -> str:
        if self.seen != self.size:
            return f"middle {self.seen} x {self.seen} of {self.size} x {self.size} pixels"
        return {"stretch": "whole image", "shortest": "middle square", "pad": "whole image, padded"}[
            self.geometry
        ]
