"""Pointing game, IoU and Dice at thresholds, and masks of run lengths, against loops, scikit-learn and pycocotools."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pycocotools import mask as coco
from sklearn.metrics import f1_score, jaccard_score

from medclip_dcl.metrics import default_thresholds
from medclip_dcl.metrics.localisation import filled_runs, overlaps, pointing_hit, resized_mask


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


def test_runs_fill_the_mask_of_coco() -> None:
    mask = np.random.default_rng(0).random((13, 29)) < 0.4
    encoded = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    flat = mask.ravel(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *edges, flat.size])
    counts = [0, *runs] if flat[0] else runs
    assert (filled_runs(counts, 13, 29) == coco.decode(encoded).astype(bool)).all()
    with pytest.raises(ValueError, match="do not fill a mask of 13 x 30"):
        filled_runs(counts, 13, 30)


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
