"""A figure of heat maps over one radiograph, without pyplot and its global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image

from medclip_dcl.pictures.overlay import COLOUR_MAP, OPACITY

_COLUMNS = 4
_PANEL_INCHES = 3.2
# Enough for a panel on paper; a radiograph has several times as many.
_LONGEST_SIDE = 1024
_LETTERS_A_LINE = 36


class ShownFigure(Figure):
    """A figure that a notebook shows although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def draw_overlays(
    grey: Image.Image, overlays: Iterable[Image.Image], titles: Sequence[str], limits: tuple[float, float]
) -> ShownFigure:
    """The image alone, then its overlays with their titles, and one colour bar.

    Args:
        grey: the image.
        overlays: one picture a title, of the same size.
        titles: wrapped at spaces; their line breaks are kept.
        limits: cosines of the lowest and the highest colour in all overlays.
    """
    n_panels = len(titles) + 1
    columns = min(n_panels, _COLUMNS)
    rows = -(-n_panels // columns)
    figure = ShownFigure(
        figsize=(columns * _PANEL_INCHES + 0.8, rows * _PANEL_INCHES * 1.2), layout="constrained"
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.axis("off")
    for axes, picture, title in zip(panels, chain([grey], overlays), ["", *titles], strict=False):
        axes.imshow(_reduced(picture), cmap="gray", vmin=0, vmax=255)
        axes.set_title(_wrapped(title), fontsize="small", parse_math=False)
    colours = ScalarMappable(Normalize(*limits), COLOUR_MAP)
    figure.colorbar(colours, ax=panels, alpha=OPACITY, shrink=0.7, label="cosine of region and text")
    return figure


def _reduced(picture: Image.Image) -> Image.Image:
    reduced = picture.copy()
    reduced.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    return reduced


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.fill(line, _LETTERS_A_LINE) for line in title.splitlines())
