"""Visual grounding: how well a heat map of region-sentence cosines agrees with the radiologist's box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor
from torchmetrics import Metric

_PIXELS_PER_BLOCK = 2**17
_NEAR = 1e-3
_SMALL_VARIANCE = 1e-9


def default_thresholds(dtype: torch.dtype = torch.float32) -> Float[Tensor, "threshold"]:
    """The 41 thresholds -1, -0.95, ..., 1 of the mean IoU (SSD, section 3.2), each the nearest number in ``dtype``."""
    return (torch.arange(-20, 21, dtype=torch.float64) / 20).to(dtype)


class Rectangle(NamedTuple):
    """Rows and columns of an image: from top to bottom and from left to right, the second of each excluded."""

    top: int
    bottom: int
    left: int
    right: int

    def within(self, top: int, bottom: int, left: int, right: int) -> Rectangle | None:
        """What lies in a part of the image, counted from the part's upper left corner; None for nothing."""
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
    """Rows and columns of an image inside a box.

    Edges are rounded to whole pixels and clipped to the image.

    Args:
        x: left edge, pixels of the image; ``y`` the upper edge.
        width: of the box, pixels; ``height`` likewise.
        image_height: rows of the image; ``image_width`` its columns.

    Raises:
        ValueError: an edge that is no number, or no pixel of the image lies inside the box.
    """
    if not all(map(math.isfinite, (x, y, width, height))):
        raise ValueError(f"box (x={x:g}, y={y:g}, w={width:g}, h={height:g}) has an edge that is no number")
    left, right = max(round(x), 0), min(round(x + width), image_width)
    top, bottom = max(round(y), 0), min(round(y + height), image_height)
    if left >= right or top >= bottom:
        raise ValueError(
            f"box (x={x:g}, y={y:g}, w={width:g}, h={height:g}) covers no pixel of the"
            f" {image_width} x {image_height} image; boxes are in pixels of the original image"
        )
    return Rectangle(top, bottom, left, right)


def box_mask(
    x: float | int,
    y: float | int,
    width: float | int,
    height: float | int,
    *,
    image_height: int,
    image_width: int,
) -> Bool[Tensor, "image_height image_width"]:
    """Pixels of an image inside a box; arguments and errors of :func:`box_bounds`."""
    top, bottom, left, right = box_bounds(
        x, y, width, height, image_height=image_height, image_width=image_width
    )
    mask = torch.zeros(image_height, image_width, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def contrast_to_noise_ratio(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"], signed: bool = False
) -> Float[Tensor, ""]:
    """How far the heat map inside the box stands out from the heat map outside it.

    CNR = |mean_in - mean_out| / sqrt(var_in + var_out) with population variances (SSD, section 3.2; Boecking et al.
    2022). Without the absolute value a heat map that avoids the box is told apart from one that finds it.

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
    _require_same_shape(heat_map, mask)
    (mean_in, variance_in), (mean_out, variance_out) = _moments(heat_map, mask)
    ratio = (mean_in - mean_out) / (variance_in + variance_out).sqrt()
    return (ratio if signed else ratio.abs()).to(heat_map.dtype)


def mean_iou(
    heat_map: Float[Tensor, "height width"],
    mask: Bool[Tensor, "height width"],
    thresholds: Float[Tensor, "threshold"] | None = None,
) -> Float[Tensor, ""]:
    """Overlap of the thresholded heat map with the box, averaged over thresholds.

    IoU of ``heat_map > t`` with ``mask`` for each t (SSD, section 3.2). One pass: pixels are binned by the
    number of thresholds they exceed, and cumulative counts give all intersections at once.

    Args:
        heat_map: region-sentence cosines in [-1, 1]; NaN where the model saw nothing (ignored).
        mask: True inside the box.
        thresholds: strictly ascending; default -1, -0.95, ..., 1. Compared in the heat map's precision.

    Raises:
        ValueError: the box covers no pixel that the heat map defines; thresholds are empty, NaN or not ascending;
            the shapes differ.
    """
    _require_same_shape(heat_map, mask)
    if thresholds is None:
        thresholds = default_thresholds(heat_map.dtype)
    _require_ascending(thresholds)
    inside, everywhere = _exceedance_counts(heat_map, mask, thresholds.to(heat_map))
    n_box = inside[0]
    if n_box == 0:
        raise ValueError(
            "mean_iou: the box covers no pixel that the heat map defines; check the box and the heat map's NaN"
        )
    intersection, above = inside[1:], everywhere[1:]
    iou = intersection.double() / (above + n_box - intersection).double()
    return iou.mean().to(heat_map.dtype)


class ContrastToNoiseRatio(Metric):
    """Mean contrast-to-noise ratio over boxes; a box whose ratio is undefined is left out (see ``n_undefined``)."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    n_boxes: Tensor
    n_undefined: Tensor

    def __init__(self, signed: bool = False) -> None:
        super().__init__()
        self.signed = signed
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_boxes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("n_undefined", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]) -> None:
        """Add one box."""
        value = contrast_to_noise_ratio(heat_map, mask, signed=self.signed)
        if value.isfinite():
            self.total += value
            self.n_boxes += 1
        else:
            self.n_undefined += 1

    def compute(self) -> Float[Tensor, ""]:
        """The mean over boxes so far, of all processes; NaN without any."""
        return (self.total / self.n_boxes).float()


class MeanIoU(Metric):
    """Mean over boxes of :func:`mean_iou`."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    n_boxes: Tensor

    def __init__(self, thresholds: Float[Tensor, "threshold"] | None = None) -> None:
        super().__init__()
        self.thresholds = default_thresholds() if thresholds is None else thresholds
        _require_ascending(self.thresholds)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_boxes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]) -> None:
        """Add one box."""
        self.total += mean_iou(heat_map, mask, self.thresholds)
        self.n_boxes += 1

    def compute(self) -> Float[Tensor, ""]:
        """The mean over boxes so far, of all processes; NaN without any."""
        return (self.total / self.n_boxes).float()


class Agreement(NamedTuple):
    """Signed contrast-to-noise ratio and mean IoU of one region of a heat map."""

    cnr_signed: float
    miou: float


class BoxedHeatMap:
    """One heat map against several boxes: the whole map is looked at once, and then each box alone.

    Gives :func:`contrast_to_noise_ratio` and :func:`mean_iou` at the default thresholds: what lies outside a box is
    what lies everywhere without what lies inside. Of a large image that takes half the time.

    Args:
        heat_map: region-sentence cosines; NaN where the model saw nothing (ignored).
    """

    def __init__(self, heat_map: Float[Tensor, "height width"]) -> None:
        self.heat_map = heat_map
        self._thresholds = default_thresholds(heat_map.dtype).to(heat_map.device)
        values = heat_map.reshape(-1)
        self._origin = values[0].double()
        self._total = self._no_sums()
        self._has_nan = bool(values.sum().isnan())
        if self._has_nan:
            return
        self._levels = torch.empty(heat_map.shape, dtype=torch.uint8, device=heat_map.device)
        size = _block_size(values)
        for block, levels in zip(values.split(size), self._levels.view(-1).split(size), strict=True):
            levels.copy_(_n_exceeded(block, self._thresholds))
            self._total += self._sums(block, levels)

    def agreement(self, boxes: Sequence[Rectangle]) -> Agreement:
        """Of the union of boxes; CNR is NaN or infinite where :func:`contrast_to_noise_ratio` is.

        Raises:
            ValueError: no box, or a box that reaches beyond the heat map.
        """
        height, width = self.heat_map.shape
        for box in boxes:
            if not (0 <= box.top < box.bottom <= height and 0 <= box.left < box.right <= width):
                raise ValueError(
                    f"{box} is empty or reaches beyond the heat map of {height} x {width} pixels"
                )
        if not boxes:
            raise ValueError("the agreement of a heat map with no box is not defined")
        if self._has_nan:
            return self._by_mask(boxes)
        inside = self._no_sums()
        for part in disjoint_parts(boxes):
            place = slice(part.top, part.bottom), slice(part.left, part.right)
            inside += self._sums(self.heat_map[place].reshape(-1), self._levels[place].reshape(-1))
        (n_in, sum_in, square_in), (n_out, sum_out, square_out) = (
            sums[:3].tolist() for sums in (inside, self._total - inside)
        )
        if not n_out:
            return self._by_mask(boxes)
        mean_in, mean_out = sum_in / n_in, sum_out / n_out
        variance = square_in / n_in - mean_in**2 + square_out / n_out - mean_out**2
        if not variance > _SMALL_VARIANCE * float(self._total[2] / self._total[0]):
            return self._by_mask(
                boxes
            )  # nearly constant on both sides: the difference of sums is all rounding
        n_inside, above = inside[0], _at_least(self._total[3:])[1:]
        intersection = _at_least(inside[3:])[1:]
        iou = intersection / (above + n_inside - intersection)
        return Agreement((mean_in - mean_out) / variance**0.5, float(iou.mean()))

    def _no_sums(self) -> Float[Tensor, "sum"]:
        return torch.zeros(3 + len(self._thresholds) + 1, dtype=torch.float64, device=self.heat_map.device)

    def _sums(self, values: Float[Tensor, "pixel"], levels: UInt8[Tensor, "pixel"]) -> Float[Tensor, "sum"]:
        """Number, sum and squares about the origin, and the number of pixels that exceed 0, 1, ... thresholds."""
        shifted = values.to(torch.float64, copy=True).sub_(self._origin)
        counts = torch.bincount(levels, minlength=len(self._thresholds) + 1).double()
        return torch.cat([torch.stack([counts.sum(), shifted.sum(), shifted @ shifted]), counts])

    def _by_mask(self, boxes: Sequence[Rectangle]) -> Agreement:
        mask = torch.zeros(self.heat_map.shape, dtype=torch.bool, device=self.heat_map.device)
        for box in boxes:
            mask[box.top : box.bottom, box.left : box.right] = True
        ratio = contrast_to_noise_ratio(self.heat_map, mask, signed=True)
        return Agreement(float(ratio), float(mean_iou(self.heat_map, mask)))


def disjoint_parts(boxes: Sequence[Rectangle]) -> list[Rectangle]:
    """Rectangles that cover what the boxes cover, none of it twice."""
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


Moments = tuple[Float[Tensor, ""], Float[Tensor, ""]]


def _blocks(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]
) -> Iterator[tuple[Float[Tensor, "pixel"], Bool[Tensor, "pixel"]]]:
    """The pixels that the heat map defines, with their part of the mask, in pieces that fit into a CPU's cache.

    Several passes over a large image cost several times as much as those over its pieces. A GPU takes it whole.
    """
    values, inside = heat_map.reshape(-1), mask.reshape(-1)
    # A sum is the fastest look for NaN; infinities of both signs only cost the slower way.
    if values.sum().isnan():
        is_defined = ~values.isnan()
        values, inside = values[is_defined], inside[is_defined]
    size = _block_size(values)
    yield from zip(values.split(size), inside.split(size), strict=True)


def _block_size(values: Float[Tensor, "pixel"]) -> int:
    return _PIXELS_PER_BLOCK if values.device.type == "cpu" else max(1, len(values))


def _moments(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]
) -> tuple[Moments, Moments]:
    """Population mean and variance inside and outside the mask in float64; both NaN where there is no pixel.

    Taken about the first value of each side, so that equal values have a variance of exactly 0.
    """
    sides = (_Moments(heat_map.device), _Moments(heat_map.device))
    for values, inside in _blocks(heat_map, mask):
        n_inside = int(inside.count_nonzero())
        sides[0].add(values, inside, n_inside)
        sides[1].add(values, ~inside, len(values) - n_inside)
    return sides[0].mean_and_variance(), sides[1].mean_and_variance()


class _Moments:
    """Sums of values about the first of them."""

    def __init__(self, device: torch.device) -> None:
        self._n = 0
        self._origin = self._sum = self._square = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, values: Float[Tensor, "pixel"], selected: Bool[Tensor, "pixel"], n_selected: int) -> None:
        if not n_selected:
            return
        if not self._n:
            self._origin = values[selected.view(torch.uint8).argmax()].double()
        shifted = values.to(torch.float64, copy=True).sub_(self._origin)
        if n_selected < len(values):
            shifted.masked_fill_(~selected, 0.0)  # several times as fast as picking the selected
        self._n += n_selected
        self._sum = self._sum + shifted.sum()
        self._square = self._square + shifted @ shifted

    def mean_and_variance(self) -> Moments:
        mean = self._sum / self._n
        return self._origin + mean, (self._square / self._n - mean * mean).clamp(min=0.0)


def _exceedance_counts(
    heat_map: Float[Tensor, "height width"],
    mask: Bool[Tensor, "height width"],
    thresholds: Float[Tensor, "threshold"],
) -> tuple[Int[Tensor, "level"], Int[Tensor, "level"]]:
    """Pixels that exceed at least 0, 1, ..., T thresholds: inside the box, and everywhere."""
    levels = len(thresholds) + 1
    counts = torch.zeros(2 * levels, dtype=torch.int64, device=heat_map.device)
    for values, inside in _blocks(heat_map, mask):
        exceeded = _n_exceeded(values, thresholds)
        # Pixels inside are counted apart, in the upper half.
        counts += torch.bincount(exceeded.add_(inside, alpha=levels).int(), minlength=2 * levels)
    outside, within = counts.view(2, levels)
    return _at_least(within), _at_least(outside + within)


def _at_least(counts: Tensor) -> Tensor:
    """Pixels of each level or a higher one."""
    return counts.flip(0).cumsum(0).flip(0)


def _n_exceeded(
    values: Float[Tensor, "pixel"], thresholds: Float[Tensor, "threshold"]
) -> Shaped[Tensor, "pixel"]:
    """How many of the ascending thresholds lie below each value; whole numbers, of whatever type.

    Where the thresholds are evenly spaced, the place between them is arithmetic, up to four times as fast as a search;
    only values so near to a threshold that rounding might decide are searched for.
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


def _require_same_shape(heat_map: Tensor, mask: Tensor) -> None:
    if heat_map.shape != mask.shape or heat_map.ndim != 2:
        raise ValueError(
            "heat_map and mask must be (height, width) of one image:"
            f" found {tuple(heat_map.shape)} and {tuple(mask.shape)}"
        )


def _require_ascending(thresholds: Tensor) -> None:
    if thresholds.ndim != 1 or len(thresholds) == 0:
        raise ValueError(f"thresholds must be a non-empty vector: found shape {tuple(thresholds.shape)}")
    if not bool((thresholds.diff() > 0).all()) or bool(thresholds.isnan().any()):
        raise ValueError(
            f"thresholds must be strictly ascending numbers: found {[round(t, 6) for t in thresholds.tolist()]}"
        )
