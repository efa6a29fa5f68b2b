from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from medclip_dcl.pictures.figure import draw_heat_maps

GREY = np.arange(63, dtype=np.uint8).reshape(9, 7)
MAPS = [np.linspace(-1, 1, 63, dtype=np.float32).reshape(9, 7), np.full((3, 2), 0.4, np.float32)]


def test_the_image_stands_before_its_heat_maps():
    figure = draw_heat_maps(GREY, MAPS, ["costs $5", "two\nlines"], limits=(-1.0, 1.0), note="a note")
    plain, first, second, bar = figure.axes
    assert [len(axes.images) for axes in (plain, first, second)] == [1, 2, 2]
    assert [axes.get_title() for axes in (first, second)] == ["costs $5", "two\nlines"]
    for axes, heat_map in zip((first, second), MAPS, strict=True):
        grey, coloured = axes.images
        assert np.array_equal(np.asarray(coloured.get_array()), heat_map) and coloured.get_clim() == (
            -1.0,
            1.0,
        )
        assert tuple(grey.get_extent()) == tuple(coloured.get_extent()) == (0, 7, 9, 0)
    assert bar.get_ylim() == (-1.0, 1.0) and figure._repr_png_()


def test_below_the_threshold_the_image_stays_grey():
    figure = draw_heat_maps(GREY, MAPS[:1], ["x"], limits=(-1.0, 1.0), threshold=0.5)
    shown: np.ndarray = np.ma.filled(np.ma.asarray(figure.axes[1].images[1].get_array()), np.nan)
    assert np.array_equal(np.isfinite(shown), MAPS[0] >= 0.5)


@pytest.mark.parametrize("n_boxes", [0, 1, 3])
def test_boxes_are_drawn_on_every_panel(n_boxes):
    boxes = [(10.0 * i, 5.0, 20.0, 30.0) for i in range(n_boxes)]
    figure = draw_heat_maps(GREY, MAPS, ["a", "b"], limits=(0.0, 1.0), size=(180, 140), boxes=boxes)
    for axes in figure.axes[:3]:
        drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sorted(patch.get_bbox().bounds for patch in drawn) == boxes
        assert [patch.get_linestyle() for patch in drawn].count("-") == min(n_boxes, 1)
