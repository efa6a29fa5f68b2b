"""Figures of the evaluations. They hold patient images: they go to disk under the run folder, nowhere else.

Built on matplotlib's Figure without pyplot, so that no global state or display is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from sklearn.metrics import roc_curve

from medclip_dcl.common.files import replacing
from medclip_dcl.common.findings import CHEX5

DPI = 110
COLOURS = ("#3b7dd8", "#d07a1f", "#3a9d5d", "#c2474b", "#8a63c9", "#8c7a52", "#d06aa8", "#5b9aa0")
"""Told apart on white and on black, also with the common colour deficiencies by their lightness."""
MUTED = "#8a8f98"
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
"""Beside the colours, for readers who do not see them."""

_DIRECTION_TITLES = {"image_to_text": "box to phrase", "text_to_image": "phrase to box"}


def roc_figure(predictions: pd.DataFrame, aucs: Mapping[str, float | None]) -> Figure:
    """ROC curves of the findings that have an AUC."""
    figure = Figure(figsize=(4.8, 4.6), layout="constrained")
    draw_roc(figure.subplots(), predictions, aucs)
    return figure


def draw_roc(axes: Axes, predictions: pd.DataFrame, aucs: Mapping[str, float | None]) -> None:
    """One curve for each finding with an AUC, of score(positive) - score(negative), or of a classifier's logit."""
    scores = (
        predictions["logit"]
        if "logit" in predictions
        else predictions["score_positive"] - predictions["score_negative"]
    )
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
    for place, (finding, auc) in enumerate(aucs.items()):
        is_its = predictions["finding"] == finding
        if auc is None or not is_its.any():
            continue
        false_positive, true_positive, _ = roc_curve(predictions.loc[is_its, "label"], scores[is_its])
        turn, look = divmod(place, len(COLOURS))
        line: Any = {"color": COLOURS[look], "linestyle": LINES[(look + turn) % len(LINES)], "linewidth": 1.4}
        axes.plot(false_positive, true_positive, label=f"{finding} {auc:.3f}", **line)
    axes.set(
        xlabel="1 - specificity", ylabel="sensitivity", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal"
    )
    if axes.get_legend_handles_labels()[0]:
        legend: Any = {"fontsize": 8, "title": "AUC", "title_fontsize": 8, "ncols": 2, "handlelength": 3}
        axes.figure.legend(loc="outside lower right", frameon=False, **legend)


def embedding_map_figure(predictions: pd.DataFrame) -> Figure:
    """A point for each image at (x, y), coloured by its group; several findings or none lie below, in grey."""
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    findings = [finding for finding in CHEX5 if (predictions["group"] == finding).any()]
    others = [group for group in sorted(predictions["group"].unique()) if group not in CHEX5]
    colours = dict(zip(others, ("#c4c8ce", MUTED)[: len(others)], strict=True))
    colours |= dict(zip(findings, COLOURS[: len(findings)], strict=True))
    for marker, (group, colour) in zip(MARKERS, colours.items(), strict=False):
        rows = predictions[predictions["group"] == group]
        look: dict[str, Any] = {"s": 12, "marker": marker, "color": colour, "linewidths": 0, "alpha": 0.85}
        axes.scatter(rows["x"], rows["y"], label=f"{group} ({len(rows)})", **look)
    axes.set(xticks=[], yticks=[], title="t-SNE of the test images' embeddings")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def rank_figure(predictions: pd.DataFrame) -> Figure:
    """Histograms of the rank of the correct item, in both directions."""
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    for axes, (direction, title) in zip(
        figure.subplots(1, 2, sharey=True), _DIRECTION_TITLES.items(), strict=True
    ):
        rows = predictions[predictions["direction"] == direction]
        draw_ranks(axes, {"this run": rows}, title)
    return figure


def draw_ranks(
    axes: Axes, by_run: Mapping[str, pd.DataFrame], title: str, chance: float | None = None
) -> None:
    """Histogram of ranks on a logarithmic axis, with the median rank and that by chance; None: of one correct item."""
    n_candidates = max(int(rows["n_candidates"].max()) for rows in by_run.values())
    edges = np.geomspace(0.9, max(n_candidates, 2) * 1.1, 26)
    # The first is filled, the second an outline, so that neither hides the other.
    styles: tuple[dict[str, Any], ...] = (
        {"color": COLOURS[0], "alpha": 0.65, "histtype": "stepfilled"},
        {"color": COLOURS[1], "histtype": "step", "linewidth": 1.3},
    )
    for style, (name, rows) in zip(styles, by_run.items(), strict=False):
        median = float(rows["rank"].median())
        axes.hist(rows["rank"], bins=list(edges), label=f"{name}: median {median:g}", **style)
        axes.axvline(median, color=style["color"], linewidth=1.2)
    chance = (n_candidates + 1) / 2 if chance is None else chance
    axes.axvline(chance, color=MUTED, linewidth=1.0, linestyle=":", label=f"chance: {chance:g}")
    axes.set(
        xscale="log", xlabel=f"rank of the correct item among {n_candidates:,}", ylabel="queries", title=title
    )
    plain_log_labels(axes.xaxis)
    axes.title.set_fontsize(10)
    axes.legend(fontsize=8, frameon=False)


def plain_log_labels(*axes: Axis) -> None:
    """Label logarithmic axes 1, 10, 100; powers of ten would go through matplotlib's formula parser, which is slow."""
    for axis in axes:
        axis.set_major_formatter(_PlainLogFormatter())
        axis.set_minor_formatter(_PlainLogFormatter())


class _PlainLogFormatter(LogFormatter):
    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def lay_out(figure: Figure) -> None:
    """Place the axes of a figure that has a canvas; left to savefig, that costs a second drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def write_figure(figure: Figure, file: Path, dpi: int = DPI) -> None:
    """Write a figure as PNG."""
    FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    lay_out(figure)
    with replacing(file) as stream:
        figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
