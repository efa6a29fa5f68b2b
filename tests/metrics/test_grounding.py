"""Facts about the contrast-to-noise ratio and the mean IoU, against numpy and the loop over thresholds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import medclip_dcl.metrics.grounding as grounding_module
from medclip_dcl.metrics import (
    BoxedHeatMap,
    Rectangle,
    box_bounds,
    contrast_to_noise_ratio,
    default_thresholds,
    mean_iou,
)
from medclip_dcl.metrics.localisation import pointing_hit

NAN = math.nan


def random_case(height: int, width: int, nan_share: float = 0.0) -> tuple[Tensor, Tensor]:
    heat_map = torch.rand(height, width) * 2.2 - 1.1
    heat_map[torch.rand(height, width) < nan_share] = NAN
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[height // 3 : height // 3 + 4, 1 : width // 2 + 1] = True
    return heat_map, mask


def cnr_by_numpy(heat_map: Tensor, mask: Tensor) -> float:
    values, inside = heat_map.double().numpy(), mask.numpy()
    a, b = values[inside & ~np.isnan(values)], values[~inside & ~np.isnan(values)]
    return (a.mean() - b.mean()) / math.sqrt(a.var() + b.var())


def iou_by_loop(heat_map: Tensor, mask: Tensor, thresholds: list[float]) -> float:
    total = 0.0
    for t in thresholds:
        above = [
            (v > t, bool(m))
            for v, m in zip(heat_map.flatten().tolist(), mask.flatten().tolist(), strict=True)
            if not math.isnan(v)
        ]
        total += sum(a and m for a, m in above) / sum(a or m for a, m in above)
    return total / len(thresholds)


@pytest.mark.parametrize(("height", "width"), [(7, 11), (1, 4), (31, 17)])
@pytest.mark.parametrize("nan_share", [0.0, 0.3])
def test_cnr_is_numpys_with_nan_pixels_left_out(height, width, nan_share):
    heat_map, mask = random_case(height, width, nan_share)
    mask[0, 0] = True
    heat_map[0, :3] = torch.tensor([0.3, -0.2, 0.9])
    expected = cnr_by_numpy(heat_map, mask)
    assert contrast_to_noise_ratio(heat_map, mask, signed=True).item() == pytest.approx(expected, abs=1e-5)
    assert contrast_to_noise_ratio(heat_map, mask).item() == pytest.approx(abs(expected), abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e-20])
def test_cnr_of_a_constant_map_is_nan_exactly(value):
    heat_map, mask = torch.full((101, 37), value), random_case(101, 37)[1]
    assert contrast_to_noise_ratio(heat_map, mask).isnan()
    assert math.isnan(BoxedHeatMap(heat_map).agreement([Rectangle(2, 5, 3, 4)]).cnr_signed)


def test_cnr_of_constant_and_of_empty_sides():
    mask = random_case(101, 37)[1]
    heat_map = torch.where(mask, 0.1, 0.3)
    assert contrast_to_noise_ratio(heat_map, mask, signed=True).item() == -math.inf
    for inside in (True, False):
        assert contrast_to_noise_ratio(torch.rand(3, 5), torch.full((3, 5), inside)).isnan()


@pytest.mark.parametrize(("height", "width"), [(7, 11), (13, 5)])
@pytest.mark.parametrize("nan_share", [0.0, 0.4])
def test_mean_iou_is_the_loop_over_thresholds(height, width, nan_share):
    heat_map, mask = random_case(height, width, nan_share)
    heat_map[mask] = heat_map[mask].nan_to_num(0.25)
    expected = iou_by_loop(heat_map, mask, default_thresholds().tolist())
    assert mean_iou(heat_map, mask).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pixel_equal_to_a_threshold_is_below(dtype):
    values = default_thresholds(dtype)[torch.randperm(41)].reshape(1, 41)
    mask = torch.zeros(1, 41, dtype=torch.bool)
    mask[0, :9] = True
    expected = iou_by_loop(values, mask, default_thresholds(dtype).tolist())
    assert mean_iou(values, mask).item() == pytest.approx(
        expected, abs=1e-6 if dtype != torch.bfloat16 else 2e-3
    )
    shifted_down = iou_by_loop(values, mask, [t - 1e-3 for t in default_thresholds(dtype).tolist()])
    assert abs(expected - shifted_down) > 1e-3


@pytest.mark.parametrize("spacing", ["even", "uneven", "one"])
def test_values_on_and_beside_thresholds_and_many_blocks(spacing, monkeypatch):
    monkeypatch.setattr(grounding_module, "_PIXELS_PER_BLOCK", 100)
    thresholds = {
        "even": default_thresholds(),
        "uneven": torch.tensor([-0.7, -0.1, 0.0, 0.33]),
        "one": torch.tensor([0.2]),
    }[spacing]
    beside = [thresholds, thresholds.nextafter(torch.tensor(9.0)), thresholds.nextafter(torch.tensor(-9.0))]
    some = torch.cat(
        [*beside, torch.tensor([-math.inf, math.inf, 5.0, -5.0, NAN]), torch.rand(577) * 3 - 1.5]
    )
    heat_map = some[torch.randperm(len(some))][None]
    mask = torch.zeros_like(heat_map, dtype=torch.bool)
    mask[0, 130:290] = True
    expected = iou_by_loop(heat_map, mask, thresholds.tolist())
    assert mean_iou(heat_map, mask, thresholds).item() == pytest.approx(expected, abs=1e-6)


def test_default_thresholds_are_the_papers():
    assert default_thresholds(torch.float64).tolist() == [round(-1 + 0.05 * i, 2) for i in range(41)]


def test_edges_of_boxes_are_rounded_and_clipped():
    assert box_bounds(1.4, -3, 2.3, 5, image_height=4, image_width=6) == Rectangle(0, 2, 1, 4)
    # Less than a pixel: those that it touches.
    assert box_bounds(2.2, 0.8, 0.3, 0.4, image_height=4, image_width=6) == Rectangle(0, 2, 2, 3)


def by_mask(heat_map: Tensor, boxes: list[Rectangle]) -> tuple[float, ...]:
    mask = torch.zeros(heat_map.shape, dtype=torch.bool)
    for top, bottom, left, right in boxes:
        mask[top:bottom, left:right] = True
    ratio, pointed = contrast_to_noise_ratio(heat_map, mask, signed=True), pointing_hit(heat_map, mask)
    return float(ratio), float(mean_iou(heat_map, mask)), float(pointed), float(mask.float().mean())


@pytest.mark.parametrize(
    "boxes",
    [
        [Rectangle(3, 9, 2, 17)],
        [Rectangle(0, 1, 0, 1)],
        [Rectangle(3, 9, 2, 17), Rectangle(6, 20, 10, 12), Rectangle(6, 20, 10, 12)],
        [Rectangle(3, 9, 2, 7), Rectangle(9, 20, 7, 23)],
        [Rectangle(0, 29, 0, 23)],
    ],
    ids=["one", "pixel", "overlapping", "touching", "all"],
)
def test_boxes_agree_as_their_mask_does(boxes, monkeypatch):
    monkeypatch.setattr(grounding_module, "_PIXELS_PER_BLOCK", 100)
    heat_map = random_case(29, 23)[0]
    boxed = BoxedHeatMap(heat_map)
    for _ in range(2):
        assert boxed.agreement(boxes) == pytest.approx(by_mask(heat_map, boxes), abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("inside", [0.1, 0.3])
@pytest.mark.parametrize("first", [0.1, 0.3])
def test_an_exactly_marked_box_has_infinite_ratio(inside, first):
    heat_map = torch.full((31, 47), 0.4 - inside)
    box = Rectangle(2, 30, 5, 44) if first != inside else Rectangle(0, 30, 0, 44)
    heat_map[box.top : box.bottom, box.left : box.right] = inside
    found = BoxedHeatMap(heat_map).agreement([box])
    assert found.cnr_signed == (math.inf if inside > 0.2 else -math.inf)
