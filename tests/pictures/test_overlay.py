from __future__ import annotations

import numpy as np
import pytest

from medclip_dcl.pictures.overlay import overlay

GREY = np.arange(35, dtype=np.uint8).reshape(5, 7) * 7


def test_opacity_weighs_the_image_and_the_colours():
    heat_map = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    black = np.zeros_like(GREY)
    plain, colours, on_black = (
        overlay(grey, heat_map, limits=(-1.0, 1.0), opacity=opacity)
        for grey, opacity in ((GREY, 0.0), (GREY, 1.0), (black, 1.0))
    )
    assert np.array_equal(plain, np.repeat(GREY[..., None], 3, 2)) and np.array_equal(colours, on_black)


def test_low_cosines_are_blue_and_high_ones_red():
    heat_map = np.full((5, 7), 0.1, np.float32)
    heat_map[0, 0], heat_map[4, 6] = -0.5, 0.5
    drawn = overlay(np.zeros_like(GREY), heat_map, limits=(-0.5, 0.5), opacity=1.0).astype(int)
    assert drawn[4, 6, 0] > drawn[4, 6, 2] + 50
    assert drawn[0, 0, 2] > drawn[0, 0, 0]


def test_below_the_threshold_the_image_stays_grey():
    heat_map = np.full((5, 7), 0.6, np.float32)
    heat_map[:, :3], heat_map[0] = 0.2, np.nan
    drawn = overlay(GREY, heat_map, threshold=0.4, limits=(0.0, 1.0))
    is_grey = (drawn == GREY[..., None]).all(axis=2)
    assert is_grey[0].all()
    assert is_grey[1:, :3].all()
    assert not is_grey[1:, 3:].any()


@pytest.mark.parametrize("value", [0.3, np.nan])
def test_a_constant_or_unseen_heat_map_is_drawn(value):
    heat_map = np.full((5, 7), value, np.float32)
    assert overlay(GREY, heat_map, limits=(0.3, 0.3)).shape == (5, 7, 3)


def test_a_tall_image_is_drawn_as_its_parts():
    generator = np.random.default_rng(0)
    grey = generator.integers(0, 256, (151, 7)).astype(np.uint8)
    heat_map = generator.uniform(-1, 1, (151, 7)).astype(np.float32)
    limits = float(heat_map.min()), float(heat_map.max())
    parts = [overlay(grey[[row]], heat_map[[row]], limits=limits) for row in range(151)]
    assert np.array_equal(overlay(grey, heat_map, limits=limits), np.concatenate(parts))
