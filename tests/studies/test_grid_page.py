"""Tables, page and figures of an experiment, from runs written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.report.contrasts import means, paired_differences
from medclip_dcl.studies.grid import Experiment
from medclip_dcl.studies.grid_page import write_report
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_plots import draw_plots
from medclip_dcl.studies.grid_results import results_table
from tests.studies.grids import write_grid, write_results


def write_cells(file: Path, without: tuple[str, ...] = ()) -> None:
    """Finished runs: the error falls by 0.1 from slow to fast, and seeds differ by 1."""
    random = np.random.default_rng(0)
    for run in read_experiment(file).runs():
        noise = random.normal()
        if run.name in without:
            continue
        seed = int(run.levels.get("seed", 0))
        error = seed + 0.01 * noise - 0.1 * (run.levels.get("rate") == "fast")
        metrics = {"tiny": {"error": error}, "slope": {"1.0": {"value": 0.5}}}
        write_results(run.folder, metrics, timings={"test_seconds": 100.0, "device": "CPU, 1 threads"})


def written(folder: Path, without: tuple[str, ...] = (), **changes: Any) -> tuple[Experiment, pd.DataFrame]:
    """An experiment with finished runs, and its table."""
    file = write_grid(folder, **changes)
    write_cells(file, without)
    experiment = read_experiment(file)
    return experiment, results_table(experiment)


def text_of(page: Path) -> str:
    """The page without tags and charts."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_the_page_shows_means_and_paired_differences(tmp_path):
    experiment, table = written(tmp_path)
    page = write_report(experiment, table)
    text = text_of(page)
    errors = table[table["outcome"] == "error"]
    found = paired_differences(errors, compared="rate", reference="slow", pairs="seed", groups=["noise"])
    assert (found["p_holm"] < 0.05).all() and len(found) == 2
    runs = [
        f"−{-x['mean']:.3f}* [−{-x['low']:.3f}, −{-x['high']:.3f}]"
        for x in found.sort_values("noise").to_dict("records")
    ]
    assert f"fast − slow {runs[0]} {runs[1]}" in text
    markdown = (tmp_path / "grid/tables.md").read_text()
    assert markdown.startswith("# grid\n\nMeans over seed;")
    assert f"| fast − slow | {' | '.join(runs)} |" in markdown
    slow = means(errors[errors["rate"] == "slow"], ["noise"]).sort_values("noise").to_dict("records")
    runs = [f"{x['mean']:.3f} [−{-x['low']:.3f}, {x['high']:.3f}]" for x in slow]
    assert f"slow {runs[0]} {runs[1]}" in text
    # Percentages, equal in all runs: no interval, no sign, no star.
    means_of_slope = "slope, % noise 0.1 noise 1 slow 50.0 50.0 fast 50.0 50.0"
    assert f"{means_of_slope} differences from slow, paired by seed fast − slow 0.0 0.0" in text
    assert "12 of 12" in text and "hours of fit and test 3.0" in text and "2 noise × 2 rate × 3 seed" in text
    # Plots on the page and in files.
    html = page.read_text()
    assert html.count("<svg") == 3 and "Fast against slow" in html and "error over noise" in html
    for name in ("error_over_noise", "difference", "both"):
        with Image.open(tmp_path / f"grid/plots/{name}.png") as image:
            assert image.width > 1000
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", html.split("<pre>")[0])
    assert write_report(experiment, table).read_text() == html, "the same runs, the same page"


def test_missing_and_failed_cells_are_said(tmp_path):
    missing = ("noise=1,rate=fast,seed=2", "noise=1,rate=slow,seed=1", "noise=0.1,rate=slow,seed=0")
    experiment, table = written(tmp_path, missing)
    failed = experiment.folder / "runs" / missing[0]
    failed.mkdir()
    (failed / "error.txt").write_text("RuntimeError: <too steep>\n")
    page = write_report(experiment, table)
    text = text_of(page)
    assert "9 of 12" in text and "failed 1" in text and "3 runs are missing" in text
    assert "- 3 runs are missing" in (tmp_path / "grid/tables.md").read_text()
    assert "RuntimeError: &lt;too steep&gt;" in page.read_text()
    # One pair is left of noise 1, two of noise 0.1: too few for an interval.
    assert re.search(r"fast − slow −0\.\d+ n = 2 −0\.\d+ n = 1 ", text)


def test_other_protocols_and_tests_of_some_batches_are_said(tmp_path):
    experiment, _ = written(tmp_path)
    changes = ({"protocol": {"tiny": {"prompts": "others"}}}, {"limited": True})
    for run, change in zip(experiment.runs()[:2], changes, strict=True):
        file = run.folder / "results.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    text = text_of(write_report(experiment, results_table(experiment)))
    assert "with 3 protocols of the test" in text and "1 runs were tested on some batches alone" in text


LINES = {"kind": "lines", "name": "a", "x": "noise", "y": "error"}
OVER_RATE = LINES | {"x": "rate", "where": {"noise": 1}}


@pytest.mark.parametrize(
    ("plot", "there", "absent"),
    [(OVER_RATE, ["rate", "slow", "fast"], "legend"), (LINES | {"levels": ["fast"]}, [">fast<"], ">slow<")],
)
def test_a_plot_has_the_asked_levels(tmp_path, plot, there, absent):
    (panels,) = draw_plots(*written(tmp_path, plots=[plot])).values()
    assert all(text in panels[0] for text in there) and absent not in panels[0]


def test_compared_levels_on_x_and_across(tmp_path):
    x = {"label": "eta", "levels": {"slow": 0.0, "fast": 0.2}}
    plot = {"kind": "lines", "name": "a", "x": x, "y": ["error", "slope"], "where": {"noise": 1}}
    sizes = {"slow": 1, "fast": 2, "own": 3}
    axes = {
        "noise": {"set": "data.init_args.noise", "values": [0.1, 1]},
        "rate": {"levels": {name: {"settings": {"data.init_args.size": x}} for name, x in sizes.items()}},
        "seed": {"set": "seed_everything", "values": 2},
    }
    (panels,) = draw_plots(*written(tmp_path, axes=axes, plots=[plot | {"across": ["own"]}])).values()
    assert len(panels) == 2 and ">error<" in panels[0] and ">slope, %<" in panels[1]
    for panel in panels:
        assert ">eta<" in panel and ">own<" in panel and ">0.2<" in panel and ">fast<" not in panel


def test_an_outcome_may_average_several_numbers(tmp_path):
    both = {"both": {"path": ["tiny/error", "slope/1.0/value"]}}
    experiment, table = written(tmp_path, outcomes=both, plots=None)
    metrics = json.loads((experiment.runs()[3].folder / "results.json").read_text())["metrics"]
    assert table["value"][3] == (metrics["tiny"]["error"] + 0.5) / 2


def test_a_grid_without_pairs_has_plain_numbers(tmp_path):
    axes = {"noise": {"set": "data.init_args.noise", "values": ["a", "b"]}}
    text = text_of(write_report(*written(tmp_path, axes=axes, pairs=None, compare=None, plots=[LINES])))
    assert "there are no intervals" in text and "error noise a noise b mean 0.001 −0.001" in text


def test_two_group_axes_are_rows_and_columns(tmp_path):
    axes = {
        "noise": {"set": "data.init_args.noise", "values": [0.1, 1]},
        "batch": {"set": "data.init_args.batch", "values": [8, 16, 32]},
        "rate": {"set": "model.init_args.learning_rate", "values": [0.05, 0.2]},
        "seed": {"set": "seed_everything", "values": 2},
    }
    plots = [{"kind": "differences", "name": "a", "x": "batch", "y": "error", "where": {"noise": 1}}]
    compare = {"axis": "rate", "reference": 0.05}
    text = text_of(write_report(*written(tmp_path, axes=axes, compare=compare, plots=plots)))
    assert "error batch 8 batch 16 batch 32 noise 0.1 0.05 " in text and " noise 1 0.05 " in text
    assert text.count("0.2 − 0.05") == 4  # two outcomes, two levels of noise


def test_a_map_has_a_panel_by_compared_level(tmp_path):
    plots = [{"kind": "map", "name": "maps", "where": {"noise": 1, "seed": 2}}]
    experiment, table = written(tmp_path, plots=plots)
    with pytest.raises(UserError, match=r"maps: .*rate=slow,seed=2 has no predictions/embedding_map.parquet"):
        draw_plots(experiment, table)
    places = np.arange(6.0)
    points = pd.DataFrame({"x": places, "y": places, "class": list("aabbcc"), "is_selected": places < 2})
    for rate in ("slow", "fast"):
        folder = experiment.folder / f"runs/noise=1,rate={rate},seed=2/predictions"
        folder.mkdir()
        points.to_parquet(folder / "embedding_map.parquet")
    (charts,) = draw_plots(experiment, table).values()
    assert len(charts) == 2 and ">slow<" in charts[0] and ">fast<" in charts[1]
    with Image.open(tmp_path / "grid/plots/maps.png") as image:
        red, _, blue = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int).T
    assert (red - blue > 80).any() and (blue - red > 80).any()


@pytest.mark.slow
def test_figures_may_share_a_title(tmp_path):
    same = [{"kind": "differences", "name": x, "title": "Same", "x": "noise", "y": "error"} for x in "ab"]
    lines = {"kind": "lines", "name": "c", "title": "Other", "y": "error", "where": {"noise": 1}}
    lines |= {"x": {"label": "rate", "levels": {"slow": 1}}, "across": ["fast"]}
    shown = {"title": "One", "outcomes": ["error"], "where": {"noise": 1}}
    experiment, table = written(tmp_path, plots=[*same, lines], tables=[shown])
    charts = draw_plots(experiment, table)
    assert {title: len(panels) for title, panels in charts.items()} == {"Same": 2, "Other": 1}
    assert "One error slow" in text_of(write_report(experiment, table))
