"""Heat maps of one image: in its own pixels, as pictures, and as a plot of all texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from medclip_dcl.networks.similarity import heat_map_in_image
from medclip_dcl.pictures.geometry import View

if TYPE_CHECKING:
    from medclip_dcl.pictures.figure import ShownFigure


@dataclass(frozen=True)
class HeatMaps:
    """Similarities of several texts with one image and, by `regions`, with the part of it that `view` covers."""

    grey: Image.Image
    texts: tuple[str, ...]
    similarity: Float[np.ndarray, " text"]
    regions: Float[Tensor, "text region_row region_column"]
    view: View

    def in_image(self, text: int) -> Float[np.ndarray, "height width"]:
        """Cosines of a text, by its position, bilinearly interpolated to the image's own pixels.

        NaN outside the middle square with geometry "shortest".
        """
        size = self.grey.height, self.grey.width
        return heat_map_in_image(self.regions[text], self.view, size).numpy()

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Lowest and highest cosine of all texts inside the image: the ends of their common colours."""
        return limits(self.in_image(text) for text in range(len(self.texts)))

    def overlay(self, text: int) -> UInt8[np.ndarray, "height width 3"]:
        """The image under the colours of a text's heat map; all texts have the same colours, from `limits`."""
        from medclip_dcl.pictures.overlay import overlay

        return overlay(np.asarray(self.grey), self.in_image(text), limits=self.limits)

    def figure(self) -> ShownFigure:
        """The image, and the overlay of each text with its similarity; shows itself as the last line of a cell."""
        from medclip_dcl.pictures.figure import draw_heat_maps

        titles = [
            f"{text}\nsimilarity {score:.2f}" for text, score in zip(self.texts, self.similarity, strict=True)
        ]
        heat_maps = (self.in_image(text) for text in range(len(self.texts)))
        return draw_heat_maps(np.asarray(self.grey), heat_maps, titles, limits=self.limits)


def limits(heat_maps: Iterable[Float[np.ndarray, "height width"]]) -> tuple[float, float]:
    """Lowest and highest cosine of all heat maps, at least one."""
    # One at a time: a heat map is as large as its image.
    lowest, highest = zip(*((np.nanmin(found), np.nanmax(found)) for found in heat_maps), strict=True)
    return float(min(lowest)), float(max(highest))
