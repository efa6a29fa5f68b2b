"""The declared plots of an experiment: charts for the page, and PNG for a paper."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.plots import COLOURS, MARKERS, MUTED, write_figure
from medclip_dcl.report.charts import chart
from medclip_dcl.report.contrasts import means, paired_differences
from medclip_dcl.studies.grid import Experiment, Level, Places, Plot, as_list

FOLDER = "plots"
_MAP_FILE = "predictions/embedding_map.parquet"
_DPI = 300
_PAPER: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
}
_DODGE = 0.012
"""Share of the x axis by which lines are set apart, so that their intervals do not hide one another."""

Panel = Callable[[Axes], None]


def draw_plots(experiment: Experiment, table: pd.DataFrame) -> dict[str, list[Markup]]:
    """Write plots/NAME.png of each plot for which something is finished; return charts of its panels by title."""
    found: dict[str, list[Markup]] = {}
    for plot in experiment.plots:
        if plot.kind == "map":
            size, panels = (3.0, 3.2), _maps(experiment, plot, table)
        else:
            size, panels = (4.8, 3.3), _lines(experiment, plot, table)
        if not panels:
            continue
        with matplotlib.rc_context(_PAPER):
            whole = Figure(figsize=(size[0] * len(panels), size[1]), layout="constrained")
            for axes, draw in zip(whole.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                draw(axes)
            write_figure(whole, experiment.folder / FOLDER / f"{plot.name}.png", dpi=_DPI)
        title = plot.title or plot.name.replace("_", " ")
        # Figures may share a title.
        charts = [chart(f"{plot.name}-{place}", size, draw) for place, draw in enumerate(panels)]
        found.setdefault(title, []).extend(charts)
    return found


def _lines(experiment: Experiment, plot: Plot, table: pd.DataFrame) -> list[Panel]:
    """A panel for each outcome that is finished."""
    if isinstance(plot.x, Places) and plot.x.outcomes:
        return _panel(experiment, plot, table, plot.x.outcomes, next(iter(as_list(plot.y)), None))
    return [panel for name in plot.used for panel in _panel(experiment, plot, table, {name: None}, name)]


def _panel(
    experiment: Experiment, plot: Plot, table: pd.DataFrame, used: Mapping[str, Any], label: str | None
) -> list[Panel]:
    """A line for each compared level (one over the compared axis): its means, or its differences from the reference.

    `used` has the place of each outcome on x; None: an axis or the compared levels are x.
    """
    x, compared = plot.x, experiment.compared
    rows, across = _selected(experiment, plot, table[table["outcome"].isin(list(used))]), pd.DataFrame()
    rows = rows if x == "step" else rows[rows["chosen"]]
    if experiment.learning_curve is not None and x == experiment.learning_curve.axis:
        # Seeds of one level may draw some patients more or less.
        alike = rows.groupby(list(dict.fromkeys([x, *experiment.groups])))["train_patients"]
        rows, x_label = rows.assign(x=alike.transform("median").astype("int64")), "training patients"
    elif isinstance(x, str):
        rows, x_label = rows.assign(x=rows[x]), x
        compared = None if x == compared else compared
    elif x.outcomes:
        rows, x_label = rows.assign(x=rows["outcome"].map(used)), x.label
    else:
        value_of = {level.name: level.value for level in experiment.axes[str(compared)]}
        across = means(rows, [str(compared)])
        across = across[across[str(compared)].isin([value_of[str(name)] for name in plot.across])]
        place_of = {value_of[str(name)]: place for name, place in x.levels.items()}
        rows, x_label = rows.assign(x=rows[str(compared)].map(place_of)).dropna(subset=["x"]), x.label
        compared = None
    outcome, y_label = experiment.outcomes[next(iter(used))], label or next(iter(used))
    y_label += f", {outcome.rule}" if outcome.rule and x != "step" else ""
    reference = experiment.reference if plot.kind == "differences" else None
    if reference is None:
        points = means(rows, [*([compared] if compared else []), "x"], outcome.bounds)
    else:
        points = paired_differences(
            rows,
            compared=str(compared),
            reference=reference.value,
            pairs=str(experiment.pairs),
            groups=["x"],
            bounds=outcome.bounds,
        )
        y_label = f"{y_label} − {_label(str(compared), reference)}"
    if points.empty:
        return []
    for found in (points, across):
        if len(found):
            found[["mean", "low", "high"]] *= outcome.scale
    levels = experiment.axes[compared] if compared else (Level("", "", ()),)
    if plot.levels:
        levels = tuple(experiment.level(str(compared), name) for name in plot.levels)
    is_log = plot.log
    places = _places(points["x"], is_log)
    step = _DODGE * (max(places.values()) - min(places.values()) or 1.0)

    def draw(axes: Axes) -> None:
        looks = itertools.cycle(zip(COLOURS, MARKERS, strict=True))
        for (colour, marker), (place, level) in zip(looks, enumerate(levels), strict=False):
            of_level = points[points[compared] == level.value] if compared else points
            of_level = of_level.sort_values("x", key=lambda x: x.map(places))
            at = np.array([places[value] for value in of_level["x"]]) + (place - (len(levels) - 1) / 2) * step
            at = 10**at if is_log else at
            if len(at):
                label = _label(str(compared), level)
                axes.plot(at, of_level["mean"], color=colour, lw=1.2, marker=marker, ms=3.5, label=label)
            axes.vlines(at, of_level["low"], of_level["high"], color=colour, lw=1.0)
        for colour, row in zip(itertools.cycle(COLOURS[1:]), across.to_dict("records"), strict=False):
            axes.axhline(
                row["mean"], color=colour, lw=1.2, linestyle="--", label=row[str(experiment.compared)]
            )
            axes.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)
        if reference is not None:
            axes.axhline(0, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set(xlabel=x_label, ylabel=f"{y_label}, %" if outcome.percent else y_label)
        axes.set_xscale("log" if is_log else "linear")
        axes.set_xticks(
            [10**at if is_log else at for at in places.values()],
            [f"{value:g}" if isinstance(value, float) else str(value) for value in places],
        )
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8)
        axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
        if compared or len(across):
            below = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
            axes.legend(fontsize=8, frameon=False, ncols=min(3, max(len(levels), len(across))), **below)

    return [draw]


def _label(axis: str, level: Level) -> str:
    """A level in a legend; a number says of what."""
    return level.name if isinstance(level.value, str) else f"{axis} {level.name}"


def _places(values: pd.Series, is_log: bool) -> dict[Any, float]:
    """Position of each value on the x axis; words are side by side."""
    distinct = list(dict.fromkeys(values))
    if not pd.api.types.is_numeric_dtype(values):
        return {value: float(place) for place, value in enumerate(distinct)}
    return {value: float(np.log10(value) if is_log else value) for value in sorted(distinct)}


def _maps(experiment: Experiment, plot: Plot, table: pd.DataFrame) -> list[Panel]:
    """A panel for each compared level, from the embedding map of its run."""
    done = set(_selected(experiment, plot, table)["run"])
    panels: list[Panel] = []
    for run in experiment.runs():
        if run.name in done:
            file = run.folder / _MAP_FILE
            if not file.is_file():
                raise UserError(f"plots: {plot.name}: {run.folder} has no {_MAP_FILE}")
            title = run.levels[experiment.compared] if experiment.compared else run.name
            panels.append(partial(_draw_map, title, pd.read_parquet(file)))
    return panels


def _draw_map(title: str, points: pd.DataFrame, axes: Axes) -> None:
    """t-SNE in which the selected classes are shades of red, the others of blue (SSD, figure 4)."""
    for is_selected, shades in ((False, "Blues"), (True, "Reds")):
        rows = points[points["is_selected"] == is_selected]
        classes = sorted(rows["class"].unique())
        colours = matplotlib.colormaps[shades](np.linspace(0.35, 0.95, len(classes)))
        for name, colour in zip(classes, colours, strict=True):
            of_class = rows[rows["class"] == name]
            axes.scatter(of_class["x"], of_class["y"], s=5, color=colour, linewidths=0, rasterized=True)
    axes.set_axis_off()
    axes.set_title(title, loc="left")


def _selected(experiment: Experiment, plot: Plot, rows: pd.DataFrame) -> pd.DataFrame:
    for axis, level in plot.where.items():
        rows = rows[rows[axis] == experiment.level(axis, level).value]
    return rows
