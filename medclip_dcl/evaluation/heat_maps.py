"""Heat maps of `Grounding` and `Localisation`: enlarged to the image; drawn for the best, median and worst cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.ndimage import gaussian_filter
from torch import Tensor

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.networks.similarity import at_image_size
from medclip_dcl.pictures.figure import draw_heat_maps
from medclip_dcl.pictures.geometry import Seen, View


class Example(NamedTuple):
    """A case's heat map, its phrase, (height, width) of its image, and x, y, w, h of its boxes in pixels of that."""

    heat_map: Float[np.ndarray, "map_height map_width"]
    phrase: str
    size: tuple[int, int]
    boxes: Sequence[list[float]]


def seen_heat_map(
    regions: Float[Tensor, "region_row region_column"],
    square: Seen,
    part: Seen,
    interpolation: str = "bilinear",
    smoothing: float = 0.0,
) -> Float[Tensor, "height width"]:
    """Heat map of `part`, the part of the image that lies in the `square` that the model sees.

    Smoothing is the sigma of a Gaussian in pixels, cut at 4 sigma.
    """
    heat_map = at_image_size(regions, square.height, square.width, interpolation)
    if smoothing:
        smoothed = gaussian_filter(heat_map.cpu().numpy(), smoothing, mode="nearest")
        heat_map = torch.from_numpy(smoothed).to(heat_map.device)
    return heat_map[part.slices_in(square)]


def whole_heat_map(
    regions: Float[Tensor, "region_row region_column"],
    view: View,
    size: tuple[int, int],
    original: tuple[int, int],
    interpolation: str = "bilinear",
    smoothing: float = 0.0,
) -> Float[Tensor, "height width"]:
    """Heat map of an image that is evaluated at this (height, width), NaN where the model saw nothing."""
    square = view.of(*size, original)
    part = square.within(*size)
    whole = torch.full(size, math.nan)
    whole[part.slices] = seen_heat_map(regions, square, part, interpolation, smoothing)
    return whole


def image_sizes(tables: EvaluationTables) -> dict[str, tuple[int, int]]:
    """(height, width) of each original image in pixels."""
    images = tables.images
    columns = (images["dicom_id"], images["height"], images["width"])
    return {dicom_id: (int(height), int(width)) for dicom_id, height, width in zip(*columns, strict=True)}


def example_figures(
    name: str,
    cases: pd.DataFrame,
    count: int,
    unit: str,
    example: Callable[[pd.Series], Example],
    load_image: Any,
) -> Iterator[tuple[str, Figure]]:
    """Names and heat maps of the best, median and worst cases by signed CNR: the best alone would mislead."""
    for group, place, row in chosen_examples(cases["cnr_signed"], count):
        case = cases.iloc[row]
        heat_map, phrase, size, boxes = example(case)
        figure = draw_heat_maps(
            load_image(case["dicom_id"]),
            [heat_map],
            [phrase],
            limits=(float(np.nanmin(heat_map)), float(np.nanmax(heat_map))),
            size=size,
            boxes=boxes,
            note=f"{group} {place + 1} of {len(cases)} {unit} by signed CNR: {case['category']}, "
            f"signed CNR {case['cnr_signed']:.2f}, mIoU {case['miou']:.2f}",
        )
        yield f"{name}_{group}_{place + 1}", figure


def chosen_examples(signed_cnr: pd.Series, count: int) -> list[tuple[str, int, int]]:
    """(group, place, row) of the best, median and worst rows, none of them twice; NaN is never chosen."""
    order = [
        int(i) for i in np.argsort(-signed_cnr.to_numpy(), kind="stable") if math.isfinite(signed_cnr.iloc[i])
    ]
    count = min(count, len(order) // 3) if len(order) >= 3 else min(count, 1 if order else 0)
    middle = (len(order) - count) // 2
    groups = {"best": order[:count]}
    if len(order) >= 3:
        groups["median"] = order[middle : middle + count]
        groups["worst"] = order[::-1][:count]
    return [(group, place, row) for group, rows in groups.items() for place, row in enumerate(rows)]
