"""Charts of the run report as inline SVG in the page's text colour, which reads on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import yaml
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from medclip_dcl.pictures.plots import COLOURS, LINES, MARKERS, MUTED, draw_ranks, lay_out, plain_log_labels
from medclip_dcl.report.draws import Estimate

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
CURVES: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("curves.yaml").read_text(encoding="utf-8")
)
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


def forests(
    of_sets: Mapping[str, Mapping[str, Mapping[str, Estimate]]], marks: Mapping[tuple[str, str], str] = {}
) -> list[Markup]:
    """A forest plot for each set (-> side -> finding -> AUC), on one axis; `marks` of (set, side) are in the legend."""
    estimates = [one for sides in of_sets.values() for found in sides.values() for one in found.values()]
    ends = [x for one in estimates for x in (one.value, one.low, one.high) if x is not None]
    limits = min([0.48, *ends]) - 0.02, max([0.52, *ends]) + 0.02
    sides = list(dict.fromkeys(side for of_set in of_sets.values() for side in of_set))
    charts: list[Markup] = []
    for title, every in of_sets.items():
        if found := {side: aucs for side, aucs in every.items() if aucs}:
            n_rows = len({finding for aucs in found.values() for finding in aucs})
            height = 0.9 + 0.17 * len(found) + n_rows * max(0.24, 0.1 * len(found) + 0.06)
            looks = {side: (sides.index(side), side + marks.get((title, side), "")) for side in found}
            name, size = f"forest{len(charts)}", (4.6, height)
            charts.append(chart(name, size, draw_forest, title, found, looks, limits))
    return charts


def draw_forest(
    axes: Axes,
    title: str,
    found: Mapping[str, Mapping[str, Estimate]],
    looks: Mapping[str, tuple[int, str]],
    limits: tuple[float, float],
) -> None:
    """AUC (side -> finding -> estimate): a row for each finding, in it a mark and an interval for each side.

    The order of the marks is that of the legend. `looks`: side -> number of its colour and marker, and its label.
    """
    findings = list(dict.fromkeys(finding for of_side in found.values() for finding in of_side))
    for place, (side, of_side) in enumerate(found.items()):
        look, label = looks[side]
        colour, marker = COLOURS[look % len(COLOURS)], MARKERS[look % len(MARKERS)]
        offset = 0.8 * ((place + 0.5) / len(found) - 0.5)
        at = [findings.index(finding) + offset for finding in of_side]
        fill = "full" if look < len(MARKERS) else "none"
        values = np.array([one.value for one in of_side.values()], dtype="float64")
        axes.plot(values, at, marker, color=colour, ms=4, fillstyle=fill, label=label, gid=f"side-{place}")
        for y, one in zip(at, of_side.values(), strict=True):
            if one.low is not None and one.high is not None:
                axes.plot([one.low, one.high], [y, y], color=colour, lw=1.1)
    for row in range(0, len(findings), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=MUTED, alpha=0.1, lw=0)
    axes.axvline(0.5, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(findings)), findings)
    axes.set(xlabel="AUC", xlim=limits, ylim=(len(findings) - 0.5, -0.5))
    axes.set_title(title, loc="left")
    axes.figure.legend(fontsize=9, frameon=False, loc="outside upper left")


def chart(name: str, size: tuple[float, float], draw: Callable[..., None], *arguments: Any) -> Markup:
    """The <svg> element alone, in the page's font and text colour, with identifiers that are unique on the page.

    Its text for readers who do not see it is the title and the names of the axes.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(axes := figure.subplots(), *arguments)
        FigureCanvasSVG(figure)
        lay_out(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    title, names = axes.get_title(loc="left") or axes.get_title(), (axes.get_ylabel(), axes.get_xlabel())
    label = escape(": ".join(filter(None, (title, " by ".join(filter(None, names))))))
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    # matplotlib has escaped all texts.
    return Markup(svg.replace(_TEXT, "currentColor"))


def _draw_curves(axes: Axes, title: str, series: Mapping[str, pd.DataFrame]) -> None:
    for colour, line, (name, points) in zip(COLOURS, LINES, series.items(), strict=False):
        if len(points) > _MAX_POINTS:  # means of consecutive points
            points = points.groupby(np.arange(len(points)) * _MAX_POINTS // len(points)).mean()
        marker = "o" if len(points) < 40 else None
        look: Any = {"color": colour, "linestyle": line, "lw": 1.3, "marker": marker, "markersize": 2.5}
        axes.plot(points["step"], points[name], label=name, **look)
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
    looks = (MUTED, "s", "--"), (COLOURS[0], "o", "-")
    for (colour, marker, line), (label, (bins, shares)) in zip(looks, curves.items(), strict=True):
        observed = np.array([share.value for share in shares], dtype="float64")
        axes.plot(
            bins["mean"], observed, line, color=colour, lw=1.0, marker=marker, markersize=2, label=label
        )
        sizes = 150 * bins["size"] / bins["size"].sum()
        axes.scatter(bins["mean"], observed, s=sizes, color=colour, marker=marker, lw=0)
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
    for colour, marker, (column, label) in zip(COLOURS, MARKERS, labels.items(), strict=False):
        if column in table:
            rows = table[(table["eta"] > 0) & (table[column] > 0)]
            marks: dict[str, Any] = {"s": 7, "marker": marker, "alpha": 0.4, "lw": 0, "rasterized": True}
            axes.scatter(rows[column], rows["eta"], color=colour, label=label, **marks)
    axes.set(xscale="log", yscale="log", xlabel="truth", ylabel="class probability η")
    plain_log_labels(axes.xaxis, axes.yaxis)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8, linestyle=":", scalex=False, scaley=False)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
