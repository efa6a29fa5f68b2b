"""Visual grounding: how well a heat map of region-sentence cosines agrees with the radiologist's box."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric

_PIXELS_PER_BLOCK = 2**17
_NEAR = 1e-3


def default_thresholds(dtype: torch.dtype = torch.float32) -> Float[Tensor, "threshold"]:
    """The 41 thresholds -1, -0.95, ..., 1 of the mean IoU (SSD, section 3.2), each the nearest number in ``dtype``."""
    return (torch.arange(-20, 21, dtype=torch.float64) / 20).to(dtype)


def box_bounds(
    x: float | int,
    y: float | int,
    width: float | int,
    height: float | int,
    *,
    image_height: int,
    image_width: int,
) -> tuple[int, int, int, int]:
    """Rows and columns of an image inside a box: (top, bottom, left, right), the second of each excluded.

    Edges are rounded to whole pixels and clipped to the image.

    Args:
        x: left edge, pixels of the image; ``y`` the upper edge.
        width: of the box, pixels; ``height`` likewise.
        image_height: rows of the image; ``image_width`` its columns.

    Raises:
        ValueError: no pixel of the image lies inside the box.
    """
    left, right = max(round(x), 0), min(round(x + width), image_width)
    top, bottom = max(round(y), 0), min(round(y + height), image_height)
    if left >= right or top >= bottom:
        raise ValueError(
            f"box (x={x:g}, y={y:g}, w={width:g}, h={height:g}) covers no pixel of the"
            f" {image_width} x {image_height} image; boxes are in pixels of the original image"
        )
    return top, bottom, left, right


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
    size = _PIXELS_PER_BLOCK if values.device.type == "cpu" else max(1, len(values))
    yield from zip(values.split(size), inside.split(size), strict=True)


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
        counts += torch.bincount(exceeded.add_(inside, alpha=levels), minlength=2 * levels)
    outside, within = counts.view(2, levels)
    everywhere = outside + within
    return within.flip(0).cumsum(0).flip(0), everywhere.flip(0).cumsum(0).flip(0)


def _n_exceeded(
    values: Float[Tensor, "pixel"], thresholds: Float[Tensor, "threshold"]
) -> Int[Tensor, "pixel"]:
    """How many of the ascending thresholds lie below each value.

    Where the thresholds are evenly spaced, the place between them is arithmetic, up to four times as fast as a search;
    only values so near to a threshold that rounding might decide are searched for.
    """
    steps = thresholds.double().diff()
    is_even = len(steps) > 0 and bool(((steps / steps.mean() - 1).abs() < _NEAR / 10 / len(steps)).all())
    if not is_even or values.dtype not in (torch.float32, torch.float64):
        # bucketize puts a value equal to a threshold below it: the comparison is `>`.
        return torch.bucketize(values, thresholds, out_int32=True)
    places = (values - thresholds[0]).div_(float(steps.mean()))
    found = places.ceil().clamp_(0, len(thresholds)).int()
    near = (places.sub_(places.round()).abs_() < _NEAR).nonzero().flatten()
    if len(near):
        found[near] = torch.bucketize(values[near], thresholds, out_int32=True)
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
