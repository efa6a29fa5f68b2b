"""The picture that the page saves: an image under the heat maps of sentences, side by side, with a colour bar."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from medclip_dcl.inference.heat_maps import limits
from medclip_dcl.pictures.overlay import COLOUR_MAP, overlay

_DPI = 100
_LEAST_SIDE = 640
# Pixels.
_MARGIN, _BAR, _BAR_TEXT, _NOTE, _LINE = 24, 22, 84, 44, 24
_PAGE, _TEXT, _MUTED = "#0f1216", "#e4e7ec", "#98a1ae"


def draw_picture(
    grey: UInt8[np.ndarray, "height width"],
    sentences: Sequence[str],
    heat_maps: Sequence[Float[np.ndarray, "height width"]],
    *,
    opacity: float,
    threshold: float | None,
    note: str,
) -> bytes:
    """Draw heat maps side by side with common colour limits and their sentences above, as a PNG file."""
    low, high = limits(heat_maps)
    scale = max(1.0, _LEAST_SIDE / max(grey.shape))
    height, width = (round(side * scale) for side in grey.shape)
    titles = [textwrap.wrap(sentence, max(12, width // 11)) for sentence in sentences]
    top = _MARGIN + _LINE * max(len(lines) for lines in titles)
    whole = (
        _MARGIN + len(titles) * (width + _MARGIN) + _BAR + _BAR_TEXT,
        top + height + _NOTE,
    )
    figure = Figure(figsize=(whole[0] / _DPI, whole[1] / _DPI), dpi=_DPI, facecolor=_PAGE)

    def place(left: int, width: int) -> tuple[float, float, float, float]:
        return left / whole[0], _NOTE / whole[1], width / whole[0], height / whole[1]

    left = _MARGIN
    for lines, heat_map in zip(titles, heat_maps, strict=True):
        axes = figure.add_axes(place(left, width))
        drawn = overlay(grey, heat_map, opacity=opacity, threshold=threshold, limits=(low, high))
        axes.imshow(drawn, aspect="auto", interpolation="bilinear")
        axes.set_axis_off()
        figure.text(
            left / whole[0],
            (height + _NOTE + 10) / whole[1],
            "\n".join(lines),
            color=_TEXT,
            fontsize=12,
            va="bottom",
            parse_math=False,
        )
        left += width + _MARGIN
    bar = figure.colorbar(
        ScalarMappable(Normalize(low, high), matplotlib.colormaps[COLOUR_MAP]),
        cax=figure.add_axes(place(left, _BAR)),
    )
    bar.set_label("cosine of image region and sentence", color=_TEXT, fontsize=11)
    bar.ax.tick_params(colors=_TEXT, labelsize=11)
    bar.outline.set_visible(False)
    if threshold is not None and threshold > low:
        bar.ax.axhspan(low, threshold, color=_PAGE, alpha=0.75)
        note = f"Coloured from a cosine of {threshold:.2f}. {note}"
    figure.text(_MARGIN / whole[0], 14 / whole[1], note, color=_MUTED, fontsize=10, parse_math=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=_PAGE)
    return file.getvalue()
