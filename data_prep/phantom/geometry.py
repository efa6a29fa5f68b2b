"""The body frame of the phantom: coordinates, smooth shapes, noise and strokes on a small grid.

Images are drawn on a grid of at most `GRID` pixels and enlarged afterwards. Body coordinates are isotropic: ``x``
is 0 at the midline and grows towards the patient's left (the image's right), ``y`` is 0 above the lung apices and
about 1 below the diaphragm; one unit is roughly the height of the chest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

GRID = 208
"""Longer side of the grid on which everything but the grain is drawn, px."""

Field = Float32[np.ndarray, "row column"]
Line = Float32[np.ndarray, "_ 2"] | Sequence[tuple[float, float]]
"""Points (x, y) in body coordinates."""


def smooth_step(values: Field, width: float) -> Field:
    """0 where values are negative, 1 where positive, with a soft edge of about 5 widths (cubic)."""
    t = values * np.float32(0.2 / width)
    t += np.float32(0.5)
    np.maximum(t, np.float32(0), out=t)
    np.minimum(t, np.float32(1), out=t)
    slope = t * np.float32(-2)
    slope += np.float32(3)
    slope *= t
    slope *= t
    return slope


def bump(values: Field, width: float) -> Field:
    """Gaussian of height 1."""
    t = values * np.float32(1 / width)
    t *= t
    np.negative(t, out=t)
    return np.exp(t, out=t)


class Frame:
    """A grid of `height` x `width` pixels with their body coordinates.

    `scale` body units fit into the grid's shorter side; the body is rotated by `angle` (rad) and shifted by `shift`
    (body units right, down).
    """

    def __init__(
        self,
        height: int,
        width: int,
        scale: float = 1.0,
        angle: float = 0.0,
        shift: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.height, self.width = height, width
        self._unit = min(height, width) / scale
        self._cos, self._sin = math.cos(angle), math.sin(angle)
        self._shift = shift
        columns = ((np.arange(width, dtype=np.float32) + 0.5 - width / 2) / self._unit - shift[0])[None, :]
        rows = ((np.arange(height, dtype=np.float32) + 0.5 - height / 2) / self._unit - shift[1])[:, None]
        self.x: Field = (self._cos * columns + self._sin * rows).astype(np.float32)
        self.y: Field = (-self._sin * columns + self._cos * rows + 0.5).astype(np.float32)
        self.d: Field = np.abs(self.x)

    def pixels(self, points: Float32[np.ndarray, "point 2"]) -> Float32[np.ndarray, "point 2"]:
        """Grid coordinates (column, row) of body coordinates (x, y)."""
        x, y = points[:, 0], points[:, 1] - 0.5
        column = (self._cos * x - self._sin * y + self._shift[0]) * self._unit + self.width / 2
        row = (self._sin * x + self._cos * y + self._shift[1]) * self._unit + self.height / 2
        return np.stack([column, row], 1).astype(np.float32)

    def side(self, sign: int) -> Field:
        """Distance from the midline towards one side (-1: the patient's right), negative on the other side."""
        return self.x * np.float32(sign)

    def ellipse(self, x: float, y: float, radius_x: float, radius_y: float, angle: float = 0.0) -> Field:
        """Squared elliptic radius: 1 on the ellipse, less inside."""
        dx, dy = self.x - np.float32(x), self.y - np.float32(y)
        if angle:
            c, s = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            dx, dy = c * dx + s * dy, c * dy - s * dx
        return np.square(dx * np.float32(1 / radius_x)) + np.square(dy * np.float32(1 / radius_y))

    def noise(self, rng: np.random.Generator, cell: float) -> Field:
        """Smooth noise of unit variance whose blobs are about `cell` body units wide."""
        size = max(cell * self._unit, 1.0)
        rows, columns = max(3, round(self.height / size) + 1), max(3, round(self.width / size) + 1)
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        field = np.asarray(
            Image.fromarray(values).resize((self.width, self.height), Image.Resampling.BICUBIC)
        )
        return (field / np.float32(max(float(field.std()), 1e-6))).astype(np.float32)

    def strokes(
        self, lines: Sequence[Line], widths: float | Sequence[float], values: float | Sequence[float] = 1.0
    ) -> Field:
        """Draw poly-lines in body coordinates; of crossing lines the later one is seen.

        Args:
            widths: of each line or of all, body units.
            values: of each line or of all, in [0, 1].
        """
        factor = 2  # drawn larger, for smooth edges
        picture = Image.new("L", (self.width * factor, self.height * factor))
        pen = ImageDraw.Draw(picture)
        # All points at once: there are hundreds of lines in an image.
        points = self.pixels(np.concatenate(list(lines)).astype(np.float32)) * factor
        ends = np.cumsum([len(line) for line in lines]).tolist()
        thicknesses = np.broadcast_to(widths, len(lines)) * self._unit * factor
        # A line cannot be thinner than a pixel, but fainter.
        levels = np.rint(255 * np.asarray(values) * np.minimum(1.0, thicknesses)).astype(int).tolist()
        whole = np.maximum(1, np.rint(thicknesses)).astype(int).tolist()
        for start, end, thickness, level in zip([0, *ends], ends, whole, levels, strict=False):
            joint = "curve" if thickness > 3 else None
            pen.line(points[start:end].ravel().tolist(), fill=level, width=thickness, joint=joint)
        return np.asarray(picture.reduce(factor), dtype=np.float32) / np.float32(255)

    def stroke(self, points: Sequence[tuple[float, float]], width: float) -> Field:
        """One smooth line through points in body coordinates, height 1."""
        return self.strokes([spline(points)], width)


def spline(points: Sequence[tuple[float, float]], steps: int = 12) -> Float32[np.ndarray, "point 2"]:
    """Catmull-Rom curve through the points."""
    p = np.array([points[0], *points, points[-1]], dtype=np.float32)
    t = np.linspace(0, 1, steps, endpoint=False, dtype=np.float32)[:, None]
    pieces = []
    for a, b, c, d in zip(p, p[1:], p[2:], p[3:], strict=False):
        pieces.append(
            0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
        )
    return np.concatenate([*pieces, p[-1:]]).astype(np.float32)


def blur(field: Field, radius: float) -> Field:
    """Gaussian blur by `radius` grid pixels."""
    return gaussian_filter(field, radius, mode="nearest", truncate=2.5).astype(np.float32)
