"""Charts of the run report as inline SVG in the page's text colour, which reads on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from medclip_dcl.pictures.plots import COLOURS, MUTED, draw_ranks, lay_out, plain_log_labels
from medclip_dcl.statistics.draws import Estimate

_TEXT = "#010203"
"""Placeholder for the page's text colour; no other element has it."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "medclip_dcl",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT),
}
_MAX_POINTS = 400

ETA = "mean η of the anchors"
CURVES: dict[str, tuple[str, ...]] = {
    "loss": ("train/loss", "validate/loss"),
    "validate AUC and accuracy": ("validate/auc", "validate/acc", "validate/average_precision"),
    "validate recall, images and sentences": ("validate/retrieval_recall",),
    "validate median rank": ("validate/medr",),
    "γ²": ("train/gamma2",),
    ETA: ("train/class_probability",),
    "share of anchors at the floor": ("train/at_floor",),
    "share of η capped": ("train/capped",),
    "mean false-negative mass": ("train/false_negative_mass",),
    "mean weight of a negative": ("train/weight",),
    "bias of the sigmoid loss": ("train/bias",),
    "mean target of the positives": ("train/positive_target",),
    "temperatures of the anchors": (
        "train/temperature",
        "train/temperature_min",
        "train/temperature_greatest",
    ),
    "mean divergence of the weights of negatives, nats": ("train/divergence",),
    "masked-language-modelling loss": ("train/masked_language_loss",),
    "learning rate": ("train/learning_rate", "train/learning_rate_text", "train/encoder_learning_rate"),
    "norm of the gradient, before clipping": ("train/gradient_norm",),
    "images per second": ("train/images_per_second",),
    "share of time waiting for batches": ("train/data_wait",),
}
"""Title of a chart -> columns of metrics.csv."""


def curves(metrics: pd.DataFrame) -> tuple[list[Markup], dict[str, str]]:
    """A small chart for each group of columns of metrics.csv that changes; title -> value of the others."""
    charts: list[Markup] = []
    constant: dict[str, str] = {}
    for title, names in CURVES.items():
        series = {name: metrics[["step", name]].dropna() for name in names if name in metrics}
        series = {name: points for name, points in series.items() if len(points)}
        if any(
            not np.allclose(points[name], points[name].iloc[0], 1e-6, 0) for name, points in series.items()
        ):
            charts.append(chart(f"curve{len(charts)}", (3.7, 2.3), _draw_curves, title, series))
        elif series:
            values = (f"{points[name].iloc[0]:.4g}".replace("-", "−") for name, points in series.items())
            constant[title] = " and ".join(values)
    return charts, constant


def ranks(
    by_run: Mapping[str, pd.DataFrame], items: tuple[str, str], chance: Mapping[str, float | None]
) -> list[Markup]:
    """Histograms of ranks, one for each direction between two kinds of items, with the median rank by chance."""
    titles = {"image_to_text": " to ".join(items), "text_to_image": " to ".join(reversed(items))}
    charts = []
    for direction, title in titles.items():
        rows = {name: rows[rows["direction"] == direction] for name, rows in by_run.items()}
        charts.append(chart(f"ranks-{direction}", (4.6, 2.9), draw_ranks, rows, title, chance[direction]))
    return charts


def chart(name: str, size: tuple[float, float], draw: Callable[..., None], *arguments: Any) -> Markup:
    """The <svg> element alone, in the page's font and text colour, with identifiers that are unique on the page."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), *arguments)
        FigureCanvasSVG(figure)
        lay_out(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    # matplotlib has escaped all texts.
    return Markup(svg.replace(_TEXT, "currentColor"))


def _draw_curves(axes: Axes, title: str, series: Mapping[str, pd.DataFrame]) -> None:
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        if len(points) > _MAX_POINTS:  # means of consecutive points
            points = points.groupby(np.arange(len(points)) * _MAX_POINTS // len(points)).mean()
        marker = "o" if len(points) < 40 else None
        axes.plot(
            points["step"], points[name], color=colour, lw=1.3, marker=marker, markersize=2.5, label=name
        )
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)


def draw_reliability(
    axes: Axes, finding: str, curves: Mapping[str, tuple[pd.DataFrame, Sequence[Estimate]]]
) -> None:
    """Curves by label: mean probability and number of cases (mean, size) of each bin, and its share of positives."""
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
    for colour, (label, (bins, shares)) in zip((MUTED, COLOURS[0]), curves.items(), strict=True):
        observed = np.array([share.value for share in shares], dtype="float64")
        axes.plot(bins["mean"], observed, color=colour, lw=1.0, marker="o", markersize=2, label=label)
        axes.scatter(bins["mean"], observed, s=150 * bins["size"] / bins["size"].sum(), color=colour, lw=0)
        for p, share in zip(bins["mean"], shares, strict=True):
            if share.low is not None and share.high is not None:
                axes.plot([p, p], [share.low, share.high], color=colour, lw=0.9)
    axes.set(xlabel="mean probability", ylabel="share of positives", aspect="equal")
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axes.set_title(finding, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def draw_eta(axes: Axes, eta: pd.Series) -> None:
    """Histogram of the class probability of the distinct training sentences."""
    positive = eta[eta > 0]
    if positive.empty:
        axes.text(0.5, 0.5, "η is 0 for every sentence", ha="center", transform=axes.transAxes)
        return
    low, high = float(positive.min()), float(positive.max())
    edges = np.geomspace(low / 1.05, high * 1.05, 40)
    axes.hist(positive, bins=list(edges), color=COLOURS[0], alpha=0.75, histtype="stepfilled")
    median = float(eta.median())
    axes.axvline(median, color=COLOURS[1], linewidth=1.3, label=f"median {median:.3g}")
    axes.set(xscale="log", xlabel="class probability η", ylabel="distinct sentences")
    plain_log_labels(axes.xaxis)
    axes.legend(fontsize=8, frameon=False)


def draw_truth(axes: Axes, table: pd.DataFrame) -> None:
    """The class probability against the share of images of which the sentence is true."""
    labels = {
        "rho": "ρ: share of images of which it is true",
        "sentence_share": "share of sentences that say it",
    }
    for colour, (column, label) in zip(COLOURS, labels.items(), strict=False):
        if column in table:
            rows = table[(table["eta"] > 0) & (table[column] > 0)]
            marks: dict[str, Any] = {"s": 7, "alpha": 0.4, "linewidths": 0, "rasterized": True}
            axes.scatter(rows[column], rows["eta"], color=colour, label=label, **marks)
    axes.set(xscale="log", yscale="log", xlabel="truth", ylabel="class probability η")
    plain_log_labels(axes.xaxis, axes.yaxis)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8, linestyle=":", scalex=False, scaley=False)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
