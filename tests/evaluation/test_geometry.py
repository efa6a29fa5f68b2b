"""Boxes of images that were stretched, padded or cropped to a square: what bright regions say fits a bright box."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation import regions
from medclip_dcl.evaluation.grounding import Grounding
from medclip_dcl.evaluation.retrieval import box_features
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.geometry import GEOMETRIES, View, fit
from medclip_dcl.pictures.transforms import centre_crop

STRIDE, SIZE = 4, 96
SHAPES = [(150, 260), (250, 140), (160, 160)]
BOX = (70.0, 60.0, 50.0, 45.0)


class Network(ImageTextNetwork):
    """Its regions are handed to the evaluation; only their stride is asked for."""

    stride = STRIDE

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


def regions_of(shape: tuple[int, int], geometry: str, seen: int) -> Tensor:
    """Feature map (2, row, column) of a picture with a bright box: the cosine with (1, 0) is .9 in it, -.9 outside."""
    pixels = np.zeros(shape, np.uint8)
    x, y, w, h = map(int, BOX)
    pixels[y : y + h, x : x + w] = 255
    fitted = np.asarray(fit(Image.fromarray(pixels), geometry, SIZE, Image.Resampling.BILINEAR))
    square = torch.from_numpy(centre_crop(fitted, seen).astype(np.float32))
    cosines = torch.nn.functional.avg_pool2d(square[None], STRIDE)[0] / 255 * 1.8 - 0.9
    return torch.stack([cosines, (1 - cosines**2).sqrt()])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("seen", "size"), [(96, "model"), (80, "original")])
def test_the_heat_map_lies_on_the_box(
    shape: tuple[int, int], geometry: str, seen: int, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "embed_texts", lambda *_: torch.tensor([[1.0, 0.0]]))
    height, width = shape
    nothing = pd.DataFrame()
    columns = ["dicom_id", "category", "phrase", "x", "y", "w", "h"]
    tables = EvaluationTables(
        images=pd.DataFrame({"dicom_id": ["a"], "height": [height], "width": [width]}),
        cases=nothing,
        boxes=pd.DataFrame([("a", "Edema", "edema", *BOX)], columns=columns),
        sentences=nothing,
        view=View(seen, SIZE, geometry, SIZE),
    )
    callback = Grounding(heat_map_size=size)
    callback.prepare(tables, "test")
    feature_maps = regions_of(shape, geometry, seen)[None]

    def measure() -> Any:
        return callback.measure(Network(), feature_maps, ["a"])["a"]["edema"]

    measured = measure()
    if size == "original":
        assert measured["size"] == shape
    else:
        longer = {"stretch": (96, 96), "shortest": (96 * height / min(shape), 96 * width / min(shape))}
        expected = longer.get(geometry, (96 * height / max(shape), 96 * width / max(shape)))
        np.testing.assert_allclose(measured["size"], expected, atol=0.5)
    assert measured["unseen"] == 0
    # Regions are coarse: a fourth of the box is high in the padded landscape image.
    assert measured["boxes"][0].miou > 0.55
    assert measured["boxes"][0].cnr_signed > 3.5
    if geometry != "stretch" and height != width:
        callback._view = View(seen, SIZE)
        assert not measure()["boxes"][0].miou > 0.45
        callback._view = tables.view
    # What is drawn is NaN where nothing was seen, and bright in the middle of the box.
    drawn = callback._in_image(torch.from_numpy(measured["map"]), measured["size"], shape).numpy()
    assert drawn.shape == measured["size"]
    middle = (BOX[1] + BOX[3] / 2) * drawn.shape[0] / height, (BOX[0] + BOX[2] / 2) * drawn.shape[1] / width
    assert drawn[int(middle[0]), int(middle[1])] > 0.8
    hidden = geometry == "shortest" and height != width or seen < SIZE and geometry != "pad"
    if hidden or height == width:
        assert math.isnan(drawn[0, 0]) == (hidden or seen < SIZE)


@pytest.mark.parametrize(("shape", "seen"), list(zip(SHAPES, (80, 96, 80), strict=True)))
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_features_of_a_box_equal_its_regions(shape: tuple[int, int], geometry: str, seen: int) -> None:
    feature_map, view = regions_of(shape, geometry, seen), View(seen, SIZE, geometry, SIZE)
    x, y, w, h = BOX
    boxes = torch.tensor(
        [[x + w / 4, y + h / 4, w / 2, h / 2], [x - w, y, w / 2, h], [x, y + 1.5 * h, w, h / 3]]
    )
    inside, beside, below = box_features(feature_map, boxes, shape, view)[:, 0].tolist()
    assert inside > 0.8 and below < -0.8
    # The middle square of the first image begins at column 55: what stands beside the box is not seen.
    is_seen = view.of(*shape).left < x - w / 2
    assert beside < -0.8 if is_seen else beside == 0
