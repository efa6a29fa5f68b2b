"""Localisation of a finding without a phrase: a heat map against the union of the finding's boxes or masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float
from scipy import ndimage
from torch import Tensor

from medclip_dcl.metrics.grounding import highest

Mask = Bool[np.ndarray, "height width"]


def pointing_hit(
    heat_map: Float[Tensor, "height width"], mask: Bool[Tensor, "height width"]
) -> Float[Tensor, ""]:
    """Pointing game (Zhang et al., IJCV 2018), hit rate of CheXlocalize (Saporta et al., 2022): the max lies inside.

    Args:
        heat_map: region-sentence cosines; NaN where the model saw nothing (ignored).
        mask: True inside.

    Returns:
        1 or 0; of several maxima, equal within rounding (1e-6), the share that lies inside, since an enlarged map is
        flat beyond the outermost regions' centres. NaN if no pixel is defined.
    """
    is_top = highest(heat_map)
    return (mask & is_top).sum() / is_top.sum()


def within(mask: Mask, tolerance: float | int) -> Mask:
    """Pixels less than `tolerance` pixels away from the mask: a hit of TorchRay's pointing game, which takes 15."""
    return mask | (ndimage.distance_transform_edt(~mask) < tolerance)


def segmentation(heat_map: Float[np.ndarray, "height width"], threshold: float | None = None) -> Mask:
    """Segmentation of CheXlocalize (Saporta et al., 2022) by a heat map that is scaled to [0, 1]: above a threshold.

    Without one, above Otsu's of 256 grey levels, with holes filled and without pixels that have no neighbour, since its
    code draws contours. Of a constant map nothing; NaN, where the model saw nothing, lies outside.
    """
    is_seen = np.isfinite(heat_map)
    low, high = (heat_map[is_seen].min(), heat_map[is_seen].max()) if is_seen.any() else (0.0, 0.0)
    if low == high:
        return np.zeros_like(is_seen)
    scaled = np.where(is_seen, (heat_map - low) / (high - low), 0)
    if threshold is not None:
        return scaled.astype(np.float64) > threshold
    levels = (255 * scaled).astype(np.uint8)
    counts = np.bincount(levels[is_seen], minlength=256) / is_seen.sum()
    below, mean = counts.cumsum(), (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = np.nan_to_num((mean[-1] * below - mean) ** 2 / (below * (1 - below)), posinf=0)
    above = levels > between.argmax()
    return ndimage.binary_fill_holes(
        above & (ndimage.convolve(above.astype(int), np.ones((3, 3), int), mode="constant") > 1)
    )


def iou_of_masks(one: Mask, other: Mask) -> float:
    """IoU of CheXlocalize: NaN where one of them is empty."""
    return float((one & other).sum() / (one | other).sum()) if one.any() and other.any() else float("nan")


def between_readers(readers: Iterable[str], masks: Iterable[np.ndarray]) -> dict[str, float]:
    """Mean IoU and Dice of pairs of readers, each with the union of their masks (H, W) bool; NaN for one reader."""
    unions: dict[str, np.ndarray] = {}
    for reader, mask in zip(readers, masks, strict=True):
        unions[reader] = unions.get(reader, False) | mask
    pairs = np.array([iou_of_masks(*pair) for pair in combinations(unions.values(), 2)] or [np.nan])
    return {"reader_iou": float(pairs.mean()), "reader_dice": float((2 * pairs / (1 + pairs)).mean())}


def filled_runs(counts: Sequence[int] | np.ndarray, height: int, width: int) -> Mask:
    """The mask of COCO run lengths: column by column, alternately outside and inside, outside first."""
    is_inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(is_inside, counts).reshape(width, height).T


def resized_mask(mask: Mask, height: int, width: int) -> Bool[np.ndarray, "rows columns"]:
    """The mask in another size: each pixel takes the one at its middle; one that falls between them keeps a pixel."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for new, old in ((height, mask.shape[0]), (width, mask.shape[1]))
    )
    found = mask[rows[:, None], columns]
    if not found.any():
        inside = np.nonzero(mask)
        found[inside[0] * height // mask.shape[0], inside[1] * width // mask.shape[1]] = True
    return found
