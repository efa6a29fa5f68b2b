"""Pointing game, IoU and Dice at thresholds, and masks of run lengths, against loops, scikit-learn and pycocotools."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pycocotools import mask as coco
from sklearn.metrics import f1_score, jaccard_score

from medclip_dcl.metrics import default_thresholds
from medclip_dcl.metrics.grounding import overlaps
from medclip_dcl.metrics.localisation import (
    filled_runs,
    iou_of_masks,
    pointing_hit,
    resized_mask,
    segmentation,
    within,
)


def _case(height: int, width: int, nan_share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    heat_map = torch.rand(height, width) * 2 - 1
    heat_map[torch.rand(height, width) < nan_share] = math.nan
    mask = torch.rand(height, width) < 0.3
    mask[0, 0] = True
    return heat_map, mask


@pytest.mark.parametrize("nan_share", [0.0, 0.4])
@pytest.mark.parametrize(("height", "width"), [(7, 11), (31, 17)])
def test_overlaps_are_those_of_scikit_learn(height: int, width: int, nan_share: float) -> None:
    heat_map, mask = _case(height, width, nan_share)
    iou, dice = overlaps(heat_map, mask)
    for place, threshold in enumerate(default_thresholds()):
        above, inside = ((x[~heat_map.isnan()]).numpy() for x in (heat_map > threshold, mask))
        assert iou[place].item() == pytest.approx(jaccard_score(inside, above, zero_division=0))
        assert dice[place].item() == pytest.approx(f1_score(inside, above, zero_division=0))


@pytest.mark.parametrize("nan_share", [0.0, 0.4])
def test_pointing_hit_is_the_loop_over_pixels(nan_share: float) -> None:
    for _ in range(20):
        heat_map, mask = _case(5, 9, nan_share)
        values = {
            (r, c): v
            for r, row in enumerate(heat_map.tolist())
            for c, v in enumerate(row)
            if not math.isnan(v)
        }
        place = max(values, key=lambda key: values[key])
        assert pointing_hit(heat_map, mask).item() == float(mask[place])


def test_equal_maxima_share_the_hit() -> None:
    heat_map = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert pointing_hit(heat_map, torch.tensor([[True, True, False, True]])).item() == pytest.approx(2 / 3)
    assert pointing_hit(torch.full((2, 3), math.nan), torch.ones(2, 3, dtype=torch.bool)).isnan()


def by_description(heat_map: np.ndarray) -> np.ndarray:
    """Otsu's threshold by trying all, isolated pixels left out, and everything that no way from the edge reaches."""
    grey = (255 * (heat_map - heat_map.min()) / np.ptp(heat_map)).astype(np.float32).astype(int)

    def variance(level: int) -> float:
        a, b = grey[grey <= level], grey[grey > level]
        return len(a) * len(b) * (a.mean() - b.mean()) ** 2 if len(a) and len(b) else 0.0

    above = np.pad(grey > max(range(256), key=variance), 1)
    alone = [(r, c) for r, c in np.argwhere(above) if above[r - 1 : r + 2, c - 1 : c + 2].sum() == 1]
    for place in alone:
        above[place] = False
    outside, ways = np.zeros_like(above), [(0, 0)]
    while ways:
        r, c = ways.pop()
        if 0 <= r < above.shape[0] and 0 <= c < above.shape[1] and not (above[r, c] or outside[r, c]):
            outside[r, c] = True
            ways += [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
    return ~outside[1:-1, 1:-1]


def test_segmentation_is_that_of_chexlocalize() -> None:
    for place in range(24):
        heat_map, mask = (x.numpy() for x in _case(13, 9 + place))
        scaled = (heat_map - heat_map.min()) / np.ptp(heat_map)
        otsu = segmentation(heat_map)
        assert (otsu == by_description(heat_map)).all()
        assert (segmentation(heat_map, 0.3) == (scaled > 0.3)).all()
        assert iou_of_masks(otsu, mask) == pytest.approx(jaccard_score(mask.ravel(), otsu.ravel()))
        # A frame that the model did not see changes nothing.
        framed = segmentation(np.pad(heat_map, 2, constant_values=math.nan))
        assert (framed[2:-2, 2:-2] == otsu).all() and framed.sum() == otsu.sum()
    nothing = segmentation(np.zeros((3, 4), np.float32))
    assert not nothing.any() and math.isnan(iou_of_masks(nothing, ~nothing))


def test_a_hit_may_lie_near() -> None:
    mask = np.zeros((40, 50), dtype=bool)
    mask[10:13, 20:30] = True
    rows, columns = np.mgrid[:40, :50]
    inside = np.argwhere(mask)
    distance = np.min([np.hypot(rows - r, columns - c) for r, c in inside], axis=0)
    assert (within(mask, 15) == (distance < 15)).all()  # 15 pixels away is a miss, as in TorchRay
    assert not within(np.zeros_like(mask), 0.5).any()


def test_runs_fill_the_mask_of_coco() -> None:
    mask = np.random.default_rng(0).random((13, 29)) < 0.4
    encoded = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    flat = mask.ravel(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *edges, flat.size])
    counts = [0, *runs] if flat[0] else runs
    assert (filled_runs(counts, 13, 29) == coco.decode(encoded).astype(bool)).all()


def test_a_resized_mask_keeps_its_place() -> None:
    mask = np.zeros((40, 60), dtype=bool)
    mask[10:20, 30:45] = True
    small = resized_mask(mask, 20, 30)
    assert small[5:10, 15:22].all() and not small[:5].any() and not small[10:].any()
    assert (resized_mask(small, 20, 30) == small).all()
    assert resized_mask(mask, 80, 120).sum() == 4 * mask.sum()
    dot = np.zeros((40, 60), dtype=bool)
    dot[10, 30] = True
    assert np.argwhere(resized_mask(dot, 10, 15)).tolist() == [[2, 7]]


def test_a_mask_outside_the_view_has_no_overlap() -> None:
    heat_map = torch.tensor([[math.nan, -2.0]])
    assert not torch.stack(overlaps(heat_map, torch.tensor([[True, False]]))).any()
