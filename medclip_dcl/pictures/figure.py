"""A figure of heat maps over one radiograph, without pyplot and its global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from medclip_dcl.pictures.overlay import COLOUR_MAP, OPACITY

PANEL_INCHES = 3.2
_COLUMNS = 4
# Enough for a panel on paper; a radiograph has several times as many.
_LONGEST_SIDE = 1024
_LETTERS_A_LINE = 36
_LINE_INCHES = 0.17


class ShownFigure(Figure):
    """A figure that a notebook shows although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def draw_heat_maps(
    grey: UInt8[np.ndarray, "height width"],
    heat_maps: Iterable[Float[np.ndarray, "_ _"]],
    titles: Sequence[str],
    *,
    limits: tuple[float, float],
    opacity: float = OPACITY,
    threshold: float | None = None,
    size: tuple[int, int] | None = None,
    boxes: Sequence[Sequence[float]] = (),
    note: str = "",
) -> ShownFigure:
    """The image alone, then under each heat map with its title, and one colour bar.

    Args:
        heat_maps: cosines, one map a title; they cover the whole image at any resolution. NaN stays grey.
        titles: wrapped at spaces; their line breaks are kept.
        limits: cosines of the lowest and the highest colour in all maps.
        threshold: cosine below which the image stays grey; None colours everything.
        size: (height, width) whose proportions the panels have; None: the image's own.
        boxes: x, y, w, h in pixels of `size`; the first is drawn solid, others dashed.
        note: printed below.
    """
    height, width = size or grey.shape
    n_panels = len(titles) + 1
    columns = min(n_panels, _COLUMNS)
    rows = -(-n_panels // columns)
    lines = max((_wrapped(title).count("\n") + 1 for title in titles), default=0)
    figure = ShownFigure(
        figsize=(
            columns * PANEL_INCHES + 0.8,
            rows * (PANEL_INCHES * max(1.0, height / width) + _LINE_INCHES * lines) + 0.6,
        ),
        layout="constrained",
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    small = Image.fromarray(grey)
    small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    extent = (0, width, height, 0)
    for axes in panels:
        axes.axis("off")
    for axes in panels[:n_panels]:
        axes.imshow(small, cmap="gray", vmin=0, vmax=255, extent=extent)
        for place, (x, y, w, h) in reversed(list(enumerate(boxes))):
            line: tuple[float, str] = (1.2, "--") if place else (1.6, "-")
            outline = withStroke(linewidth=line[0] + 1.6, foreground="black")  # white alone is lost on white
            axes.add_patch(
                Rectangle(
                    (x, y),
                    w,
                    h,
                    fill=False,
                    edgecolor="white",
                    lw=line[0],
                    ls=line[1],
                    path_effects=[outline],
                )
            )
    for axes, heat_map, title in zip(panels[1:], heat_maps, titles, strict=False):
        step = max(1, max(heat_map.shape) // _LONGEST_SIDE)
        few = heat_map[::step, ::step]
        shown = few if threshold is None else np.where(few >= threshold, few, np.nan)
        axes.imshow(shown, cmap=COLOUR_MAP, norm=Normalize(*limits), alpha=opacity, extent=extent)
        axes.set_title(_wrapped(title), fontsize="small", parse_math=False)
    colours = ScalarMappable(Normalize(*limits), COLOUR_MAP)
    bar = figure.colorbar(colours, ax=panels, alpha=opacity, shrink=0.7, label="cosine of region and text")
    if threshold is not None and threshold > limits[0]:
        bar.ax.axhspan(limits[0], threshold, color="white", alpha=0.75)
        note = f"Coloured from a cosine of {threshold:.2f}. {note}"
    figure.supxlabel(_wrapped(note, columns + 1), fontsize="small", parse_math=False)
    return figure


def _wrapped(title: str, panels: int = 1) -> str:
    return "\n".join(textwrap.fill(line, panels * _LETTERS_A_LINE) for line in title.splitlines())
