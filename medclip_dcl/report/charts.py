"""Charts of the run report as inline SVG that takes the page's text colour, so that it reads on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from medclip_dcl.evaluation.figures import COLOURS, MUTED, draw_ranks, draw_roc

_TEXT = "#010203"
"""Stands for the page's text colour until the SVG is written; no other element has it."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "medclip_dcl",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT),
}

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("train/loss", "validate/loss")),
    ("validate AUC and accuracy", ("validate/auc", "validate/acc", "validate/average_precision")),
    ("validate recall, images and sentences", ("validate/retrieval_recall",)),
    ("validate median rank", ("validate/medr",)),
    ("γ²", ("train/gamma2",)),
    ("mean η of the anchors", ("train/class_probability",)),
    ("share of anchors at the floor", ("train/at_floor",)),
    ("share of η capped", ("train/capped",)),
    ("mean false-negative mass", ("train/false_negative_mass",)),
    ("mean weight of a negative", ("train/weight",)),
    ("masked-language-modelling loss", ("train/masked_language_loss",)),
    ("learning rate", ("train/learning_rate", "train/learning_rate_text", "train/encoder_learning_rate")),
    ("norm of the gradient, before clipping", ("train/gradient_norm",)),
    ("images per second", ("train/images_per_second",)),
    ("share of time waiting for batches", ("train/data_wait",)),
)
"""Panels of the training curves: title and columns of metrics.csv; a panel without any of its columns is left out."""

_MOST_POINTS = 400


def curves(metrics: pd.DataFrame) -> list[Markup]:
    """A small chart for each panel of which metrics.csv has a column with values."""
    charts: list[Markup] = []
    for title, names in CURVES:
        series = {name: metrics[["step", name]].dropna() for name in names if name in metrics}
        series = {name: points for name, points in series.items() if len(points)}
        if series:
            charts.append(_chart(f"curve{len(charts)}", (3.7, 2.3), _draw_curves, title, series))
    return charts


def roc(predictions: pd.DataFrame, aucs: Mapping[str, float | None]) -> Markup:
    """ROC curves of the findings that have an AUC."""
    return _chart("roc", (4.6, 4.4), draw_roc, predictions, aucs)


def ranks(
    by_run: Mapping[str, pd.DataFrame], items: tuple[str, str], chance: Mapping[str, float | None]
) -> list[Markup]:
    """Rank histograms, one chart for each direction between two kinds of items, with the median rank by chance."""
    titles = {"image_to_text": " to ".join(items), "text_to_image": " to ".join(reversed(items))}
    return [
        _chart(
            f"ranks-{direction}",
            (4.6, 2.9),
            draw_ranks,
            {name: rows[rows["direction"] == direction] for name, rows in by_run.items()},
            title,
            chance[direction],
        )
        for direction, title in titles.items()
    ]


def eta_histogram(eta: pd.Series) -> Markup:
    """How the class probability is spread over the distinct training sentences."""
    return _chart("eta", (4.6, 2.9), _draw_eta, eta)


def eta_against_truth(table: pd.DataFrame) -> Markup:
    """The class probability against the share of images of which the sentence is true."""
    return _chart("truth", (4.6, 2.9), _draw_truth, table)


def _chart(name: str, size: tuple[float, float], draw: Any, *arguments: Any) -> Markup:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), *arguments)
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), name)


def _inline(svg: str, name: str) -> Markup:
    """The <svg> element alone, in the page's font and text colour, with identifiers that are unique on the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = svg.replace(_TEXT, "currentColor")
    # matplotlib escapes the text that it was given; everything else here it wrote itself.
    return Markup(svg)


def _draw_curves(axes: Axes, title: str, series: Mapping[str, pd.DataFrame]) -> None:
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        thinned = _thinned(points)
        marker = "o" if len(thinned) < 40 else None
        axes.plot(
            thinned["step"],
            thinned[name],
            color=colour,
            linewidth=1.3,
            marker=marker,
            markersize=2.5,
            label=name,
        )
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)


def _thinned(points: pd.DataFrame) -> pd.DataFrame:
    """Means of consecutive points where there are more than a chart can show."""
    if len(points) <= _MOST_POINTS:
        return points
    return points.groupby(np.arange(len(points)) * _MOST_POINTS // len(points)).mean()


def _draw_eta(axes: Axes, eta: pd.Series) -> None:
    positive = eta[eta > 0]
    if positive.empty:
        axes.text(0.5, 0.5, "η is 0 for every sentence", ha="center", transform=axes.transAxes)
        return
    low, high = float(positive.min()), float(positive.max())
    axes.hist(positive, bins=list(np.geomspace(low / 1.05, high * 1.05, 40)), color=COLOURS[0], alpha=0.75)
    median = float(eta.median())
    axes.axvline(median, color=COLOURS[1], linewidth=1.3, label=f"median {median:.3g}")
    axes.set(xscale="log", xlabel="class probability η", ylabel="distinct sentences")
    axes.legend(fontsize=8, frameon=False)


def _draw_truth(axes: Axes, table: pd.DataFrame) -> None:
    for colour, column, label in (
        (COLOURS[0], "rho", "ρ: share of images of which it is true"),
        (COLOURS[1], "sentence_share", "share of sentences that say it"),
    ):
        if column in table:
            rows = table[(table["eta"] > 0) & (table[column] > 0)]
            axes.scatter(
                rows[column],
                rows["eta"],
                s=7,
                color=colour,
                alpha=0.4,
                linewidths=0,
                label=label,
                rasterized=True,
            )
    axes.set(xscale="log", yscale="log", xlabel="truth", ylabel="class probability η")
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8, linestyle=":", scalex=False, scaley=False)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
