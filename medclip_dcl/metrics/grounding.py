"""Visual grounding: agreement of a heat map of region-sentence cosines with the radiologist's box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

_PIXELS_PER_BLOCK = 2**17
_NEAR = 1e-3
_SMALL_VARIANCE = 1e-9


def default_thresholds(dtype: torch.dtype = torch.float32) -> Float[Tensor, "threshold"]:
    """The 41 thresholds -1, -0.95, ..., 1 of the mean IoU (SSD, section 3.2), each the nearest number in ``dtype``."""
    return (torch.arange(-20, 21, dtype=torch.float64) / 20).to(dtype)


class Rectangle(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of an image."""

    top: int
    bottom: int
    left: int
    right: int

    def within(self, top: int, bottom: int, left: int, right: int) -> Rectangle | None:
        """Intersection with a part of the image, relative to its upper left corner; None if it is empty."""
        found = Rectangle(
            max(self.top, top) - top,
            min(self.bottom, bottom) - top,
            max(self.left, left) - left,
            min(self.right, right) - left,
        )
        return found if found.top < found.bottom and found.left < found.right else None


def box_bounds(
    x: float | int,
    y: float | int,
    width: float | int,
    height: float | int,
    *,
    image_height: int,
    image_width: int,
) -> Rectangle:
    """Pixels of an image inside a box: edges are clipped to the image and rounded, and less than a pixel counts as one.

    Args:
        x: left edge, pixels of the image; ``y`` the upper edge.
        width: of the box, pixels; ``height`` likewise.
        image_height: rows of the image; ``image_width`` its columns.

    Raises:
        ValueError: an edge that is not finite, or the box touches no pixel of the image.
    """
    if all(map(math.isfinite, (x, y, width, height))):
        left, right = max(x, 0), min(x + width, image_width)
        top, bottom = max(y, 0), min(y + height, image_height)
        if left < right and top < bottom:
            return Rectangle(*_whole_pixels(top, bottom), *_whole_pixels(left, right))
    raise ValueError(
        f"box (x={x:g}, y={y:g}, w={width:g}, h={height:g}): expected one that covers a pixel of the"
        f" {image_width} x {image_height} image"
    )


def _whole_pixels(first: float | int, last: float | int) -> tuple[int, int]:
    rounded = round(first), round(last)
    return rounded if rounded[0] < rounded[1] else (math.floor(first), math.ceil(last))


def contrast_to_noise_ratio(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"], signed: bool = False
) -> Float[Tensor, ""]:
    """Contrast between the heat map inside and outside the box, in units of its standard deviation.

    ``CNR = |mean_in - mean_out| / sqrt(var_in + var_out)`` with population variances (SSD, section 3.2; Boecking et al.
    2022). The signed CNR is negative for a heat map that avoids the box.

    Args:
        heat_map: region-sentence cosines; NaN where the model saw nothing (ignored).
        mask: True inside the box.
        signed: keep the sign of the difference.

    Returns:
        A scalar. NaN where it is undefined: a constant map, or nothing inside or nothing outside the box.
        Infinite where both sides are constant and differ.

    Raises:
        ValueError: the shapes differ.
    """
    _require_one_image(heat_map, mask)
    mask = mask.bool()  # integers would index
    is_defined = ~heat_map.isnan()
    (mean_in, variance_in), (mean_out, variance_out) = (
        _mean_and_variance(heat_map[side & is_defined]) for side in (mask, ~mask)
    )
    ratio = (mean_in - mean_out) / (variance_in + variance_out).sqrt()
    return (ratio if signed else ratio.abs()).to(heat_map.dtype)


def mean_iou(
    heat_map: Float[Tensor, "height width"],
    mask: Bool[Tensor, "height width"],
    thresholds: Float[Tensor, "threshold"] | None = None,
) -> Float[Tensor, ""]:
    """Overlap of the thresholded heat map with the box, averaged over thresholds.

    IoU of ``heat_map > t`` with ``mask`` for each t (SSD, section 3.2).

    Args:
        heat_map: region-sentence cosines in [-1, 1]; NaN where the model saw nothing (ignored).
        mask: True inside the box.
        thresholds: strictly ascending; default -1, -0.95, ..., 1. Compared in the heat map's precision.

    Raises:
        ValueError: the box covers no pixel that the heat map defines; thresholds are empty, NaN or not ascending;
            the shapes differ.
    """
    _require_one_image(heat_map, mask)
    if thresholds is None:
        thresholds = default_thresholds(heat_map.dtype)
    is_ascending = bool((thresholds.diff() > 0).all()) and not thresholds.isnan().any()
    if thresholds.ndim != 1 or not len(thresholds) or not is_ascending:
        raise ValueError(f"thresholds: expected a vector that ascends strictly, found {thresholds.tolist()}")
    inside, everywhere = _exceedance_counts(heat_map, mask, thresholds.to(heat_map))
    n_box = inside[0]
    if n_box == 0:
        raise ValueError(
            "mean_iou: the box covers no pixel that the heat map defines; check the box and the heat map's NaN"
        )
    return _iou(inside, everywhere).mean().to(heat_map.dtype)


def overlaps(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]
) -> tuple[Float[Tensor, "threshold"], Float[Tensor, "threshold"]]:
    """IoU and Dice of ``heat_map > threshold`` with a mask, at each of :func:`default_thresholds`.

    Args:
        heat_map: region-sentence cosines; NaN where the model saw nothing (ignored).
        mask: True inside; both are 0 if the model saw none of its pixels.
    """
    inside, everywhere = _exceedance_counts(heat_map, mask, default_thresholds(heat_map.dtype).to(heat_map))
    iou = _iou(inside, everywhere)
    return iou, 2 * iou / (1 + iou)


def highest(heat_map: Float[Tensor, "height width"]) -> Bool[Tensor, "height width"]:
    """Pixels of the max, equal within rounding (1e-6); NaN, where the model saw nothing, is none of them."""
    return heat_map >= heat_map.nan_to_num(-torch.inf).max() - 1e-6


class Agreement(NamedTuple):
    """Signed contrast-to-noise ratio, mean IoU, pointing game (`pointing_hit`) and area of one region of a heat map."""

    cnr_signed: float
    miou: float
    hit: float
    area: float


class BoxedHeatMap:
    """:func:`contrast_to_noise_ratio` and :func:`mean_iou` of one heat map, without NaN, with several boxes.

    Sums over the whole map are computed once, which halves the time; those outside a box follow by subtraction.
    """

    def __init__(self, heat_map: Float[Tensor, "height width"]) -> None:
        self.heat_map = heat_map
        self._thresholds = default_thresholds(heat_map.dtype).to(heat_map.device)
        values = heat_map.reshape(-1)
        self._origin = values[0].double()
        self._total, self._highest = self._no_sums(), highest(heat_map)
        self._levels = torch.empty(heat_map.shape, dtype=torch.uint8, device=heat_map.device)
        size = _block_size(values)
        for block, levels in zip(values.split(size), self._levels.view(-1).split(size), strict=True):
            levels.copy_(_n_exceeded(block, self._thresholds))
            self._total += self._sums(block, levels)

    def agreement(self, boxes: Sequence[Rectangle]) -> Agreement:
        """Agreement with the union of boxes, each inside the heat map."""
        inside, n_highest = self._no_sums(), 0
        for part in disjoint_parts(boxes):
            place = slice(part.top, part.bottom), slice(part.left, part.right)
            inside += self._sums(self.heat_map[place].reshape(-1), self._levels[place].reshape(-1))
            n_highest += int(self._highest[place].sum())
        (n_in, sum_in, square_in), (n_out, sum_out, square_out) = (
            sums[:3].tolist() for sums in (inside, self._total - inside)
        )
        pointed = n_highest / int(self._highest.sum()), n_in / (n_in + n_out)
        if not n_out:
            return Agreement(*self._by_mask(boxes), *pointed)
        mean_in, mean_out = sum_in / n_in, sum_out / n_out
        variance = square_in / n_in - mean_in**2 + square_out / n_out - mean_out**2
        if not variance > _SMALL_VARIANCE * float(self._total[2] / self._total[0]):
            # Nearly constant on both sides: the difference of sums is rounding error.
            return Agreement(*self._by_mask(boxes), *pointed)
        iou = _iou(_at_least(inside[3:]), _at_least(self._total[3:]))
        return Agreement((mean_in - mean_out) / variance**0.5, float(iou.mean()), *pointed)

    def _no_sums(self) -> Float[Tensor, "sum"]:
        return torch.zeros(3 + len(self._thresholds) + 1, dtype=torch.float64, device=self.heat_map.device)

    def _sums(self, values: Float[Tensor, "pixel"], levels: UInt8[Tensor, "pixel"]) -> Float[Tensor, "sum"]:
        """Number, sum and squares about the origin, and the number of pixels that exceed 0, 1, ... thresholds."""
        shifted = values.to(torch.float64, copy=True).sub_(self._origin)
        counts = torch.bincount(levels, minlength=len(self._thresholds) + 1).double()
        return torch.cat([torch.stack([counts.sum(), shifted.sum(), shifted @ shifted]), counts])

    def _by_mask(self, boxes: Sequence[Rectangle]) -> tuple[float, float]:
        mask = torch.zeros(self.heat_map.shape, dtype=torch.bool, device=self.heat_map.device)
        for box in boxes:
            mask[box.top : box.bottom, box.left : box.right] = True
        ratio = contrast_to_noise_ratio(self.heat_map, mask, signed=True)
        return float(ratio), float(mean_iou(self.heat_map, mask))


def disjoint_parts(boxes: Sequence[Rectangle]) -> list[Rectangle]:
    """Disjoint rectangles with the same union as the boxes."""
    rows = sorted({edge for box in boxes for edge in (box.top, box.bottom)})
    columns = sorted({edge for box in boxes for edge in (box.left, box.right)})
    cells = (Rectangle(*row, *column) for row in pairwise(rows) for column in pairwise(columns))
    return [
        cell
        for cell in cells
        if any(
            box.top <= cell.top
            and cell.bottom <= box.bottom
            and box.left <= cell.left
            and cell.right <= box.right
            for box in boxes
        )
    ]


def _block_size(values: Float[Tensor, "pixel"]) -> int:
    """Pixels that fit into a CPU's cache, which halves the time."""
    return _PIXELS_PER_BLOCK if values.device.type == "cpu" else max(1, len(values))


def _mean_and_variance(values: Float[Tensor, "pixel"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """In float64 about the first value, so that equal values have a variance of exactly 0; NaN for no pixel."""
    origin = values[:1].double().sum()
    shifted = values.double() - origin
    return origin + shifted.mean(), (shifted - shifted.mean()).square().mean()


def _exceedance_counts(
    heat_map: Float[Tensor, "height width"],
    mask: Bool[Tensor, "height width"],
    thresholds: Float[Tensor, "threshold"],
) -> tuple[Int[Tensor, "level"], Int[Tensor, "level"]]:
    """Pixels that exceed at least 0, 1, ..., T thresholds: inside the box, and everywhere."""
    levels = len(thresholds) + 1
    counts = torch.zeros(2 * levels, dtype=torch.int64, device=heat_map.device)
    values, inside = heat_map.flatten(), mask.flatten()
    if (is_nan := values.isnan()).any():
        values, inside = values[~is_nan], inside[~is_nan]
    size = _block_size(values)
    for block, is_in in zip(values.split(size), inside.split(size), strict=True):
        exceeded = _n_exceeded(block, thresholds)
        # Pixels inside are counted in the upper half.
        counts += torch.bincount(exceeded.add_(is_in, alpha=levels).int(), minlength=2 * levels)
    outside, within = counts.view(2, levels)
    return _at_least(within), _at_least(outside + within)


def _iou(inside: Tensor, everywhere: Tensor) -> Float[Tensor, "threshold"]:
    """IoU at each threshold, from the pixels that exceed at least 0, 1, ... of them; 0 of nothing with nothing."""
    intersection, above = inside[1:].double(), everywhere[1:]
    return intersection / (above + inside[0] - intersection).clamp(min=1)


def _at_least(counts: Tensor) -> Tensor:
    """Pixels of each level or a higher one."""
    return counts.flip(0).cumsum(0).flip(0)


def _n_exceeded(
    values: Float[Tensor, "pixel"], thresholds: Float[Tensor, "threshold"]
) -> Shaped[Tensor, "pixel"]:
    """Number of the ascending thresholds below each value, as integers of any dtype.

    Between evenly spaced thresholds arithmetic is up to four times as fast as a search, which decides near thresholds.
    """
    steps = thresholds.double().diff()
    is_even = len(steps) > 0 and bool(((steps / steps.mean() - 1).abs() < _NEAR / 10 / len(steps)).all())
    if not is_even or values.dtype not in (torch.float32, torch.float64):
        # bucketize puts a value equal to a threshold below it: the comparison is `>`.
        return torch.bucketize(values, thresholds, out_int32=True)
    places = (values - thresholds[0]).mul_(1 / float(steps.mean()))
    above = places.ceil()
    # The distance from the middle between two thresholds.
    near = places.sub_(above).add_(0.5).abs_().ge(0.5 - _NEAR).nonzero().flatten()
    found = above.clamp_(0, len(thresholds))
    if len(near):
        found[near] = torch.bucketize(values[near], thresholds).to(found)
    return found


def _require_one_image(heat_map: Tensor, mask: Tensor) -> None:
    if heat_map.shape != mask.shape or heat_map.ndim != 2:
        raise ValueError(
            "heat_map and mask: expected (height, width) of one image, found"
            f" {tuple(heat_map.shape)} and {tuple(mask.shape)}"
        )
