"""Draw a heat map over a radiograph."""

from __future__ import annotations

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8

COLOUR_MAP = "turbo"
OPACITY = 0.45

_STRIP = 64


def overlay(
    grey: UInt8[np.ndarray, "height width"],
    heat_map: Float[np.ndarray, "height width"],
    *,
    limits: tuple[float, float],
    opacity: float = OPACITY,
    threshold: float | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """Blend the colours of a heat map into a grey image; both have the same size.

    Args:
        heat_map: cosines; NaN where the model saw nothing, which stays grey.
        limits: cosines of the lowest and the highest colour; the same for heat maps that are compared.
        opacity: of the colours, from 0 (image alone) to 1 (heat map alone).
        threshold: cosine below which the image stays grey; None colours everything.
    """
    is_seen, (low, high) = np.isfinite(heat_map), limits
    drawn = np.empty((*grey.shape, 3), np.uint8)
    # In strips: the colours of an image of 100 megapixels would take gigabytes.
    for start in range(0, len(grey), _STRIP):
        rows = slice(start, start + _STRIP)
        values, seen = heat_map[rows], is_seen[rows]
        scaled = (np.where(seen, values, low) - low) / ((high - low) or 1.0)
        colours = matplotlib.colormaps[COLOUR_MAP](scaled.clip(0, 1))[..., :3] * 255
        is_coloured = seen if threshold is None else seen & (values >= threshold)
        weight = (opacity * is_coloured)[..., None]
        drawn[rows] = np.round(grey[rows, :, None] * (1 - weight) + colours * weight)
    return drawn
