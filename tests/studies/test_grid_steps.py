"""Outcomes at steps whose weights the runs keep: rows, rules, curves and hypotheses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pytorch_lightning import Trainer
from scipy import stats

from medclip_dcl.command.cli import main as cli
from medclip_dcl.common.errors import UserError
from medclip_dcl.report.tables import NOTHING
from medclip_dcl.runs.run_folder import RunFolder
from medclip_dcl.runs.saved import command_of_test
from medclip_dcl.studies import grid_workers as workers
from medclip_dcl.studies.grid import Outcome
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import results_table
from medclip_dcl.studies.grid_tables import tables
from tests.processes import FRESH
from tests.studies.grids import MODULE, SETTINGS, main, write_grid

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = [1, 3, 4, 6]
BEST = {"path": "tiny/error", "validate": "validate/loss", "step": "best", "higher_is_better": False}
GRID: dict[str, Any] = {
    "settings": {**SETTINGS, "kept_steps": STEPS, "trainer.check_val_every_n_epoch": 2},
    "axes": {
        "rate": {"levels": {"slow": None, "fast": {"settings": {"model.init_args.learning_rate": 0.9}}}},
        "seed": {"set": ["seed_everything", "data.init_args.seed"], "values": 3},
    },
    "outcomes": {
        "error": BEST,
        "end": {"path": "tiny/error", "step": "end"},
        "third": {"path": "tiny/error", "step": 3, "validate": "validate/loss"},
        "checkpoint": "tiny/error",
    },
    "hypotheses": {"H1": {"level": "fast", "minus": "slow", "outcome": "error", "alpha": 0.02}},
    "plots": [{"kind": "lines", "name": "curve", "x": "step", "y": "error", "log": True}],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "CONTEXT", FRESH)
        main([str(write_grid(folder, **GRID)), "--workers", "2"])
    return folder


def test_rows_are_those_of_each_kept_step(finished):
    """Also that best.ckpt, by the same number, is the best kept step, and results.json its test."""
    table = pd.read_parquet(finished / "grid/results.parquet")
    for name in table["run"].unique():
        folder = finished / "grid/runs" / name
        of_run = table[table["run"] == name]
        curve = of_run[of_run["outcome"] == "error"].set_index("step")
        assert curve.index.tolist() == STEPS
        metrics = pd.read_csv(folder / "metrics.csv").set_index("step")["validate/loss"].dropna()
        for step in STEPS:
            results = json.loads((folder / f"steps/{step}/results.json").read_text())
            assert curve.loc[step, "value"] == results["metrics"]["tiny"]["error"]
            assert curve.loc[step, "validate"] == metrics[step - 1]
        assert curve.index[curve["chosen"]].tolist() == [curve["validate"].astype(float).idxmin()]
        others = of_run.set_index("outcome")
        chosen = curve.loc[curve["chosen"], "value"].item()
        assert others.loc["checkpoint", "value"] == chosen and pd.isna(others.loc["checkpoint", "step"])
        assert (others.loc["end", "step"], others.loc["end", "value"]) == (6, curve.loc[6, "value"])
        assert (others.loc["third", "step"], others.loc["third", "validate"]) == (3, metrics[2])
    assert len(table) == 6 * (len(STEPS) + 3)


def test_page_stars_hypotheses_alone_and_names_rules(finished):
    page = (finished / "grid/tables.md").read_text()
    table = pd.read_parquet(finished / "grid/results.parquet")
    rows = table[(table["outcome"] == "error") & table["chosen"]].pivot(
        index="seed", columns="rate", values="value"
    )
    difference = rows["fast"] - rows["slow"]
    p = stats.ttest_1samp(difference, 0).pvalue
    half = stats.t.ppf(0.99, 2) * difference.std() / np.sqrt(3)
    line = next(line for line in page.splitlines() if "H1: fast" in line)
    assert f"{p:.2g}" in line and f"{abs(difference.mean() + half):.3f}" in line
    assert "error, best step" in line and ("*" in line) == (p <= 0.02)
    assert "error, over steps ↓" in page and "step 4" in page and "end, last step" in page
    assert (finished / "grid/plots/curve.png").is_file()


def test_star_needs_all_pairs(tmp_path):
    """p of three of four pairs far below the share."""
    changes = {"outcomes": {"error": "tiny/error"}, "plots": None, "settings": SETTINGS}
    axes = {**GRID["axes"], "seed": {"set": "seed_everything", "values": 4}}
    experiment = read_experiment(write_grid(tmp_path, **{**GRID, **changes, "axes": axes}))
    rows = [("slow", seed, seed / 100) for seed in range(4)] + [
        ("fast", seed, 5.0 + seed / 1e4) for seed in range(4)
    ]
    table = pd.DataFrame(rows, columns=["rate", "seed", "value"]).assign(outcome="error", chosen=True)
    cells = [tables(experiment, part)[0].rows[0].cells[0] for part in (table, table[:7])]
    assert cells[0].text.endswith("*") and not cells[1].text.endswith("*") and "n = 3" in cells[1].interval


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"outcomes": {"error": {**BEST, "step": 5}}},
            r"one of kept_steps, \[1, 3, 4, 6\] in run .*, found 5",
        ),
        (
            {
                "outcomes": {"error": {**BEST, "step": 3}},
                "axes": {
                    **GRID["axes"],
                    "kept": {"levels": {"a": None, "b": {"settings": {"kept_steps": [1, 2]}}}},
                },
            },
            r"one of kept_steps, \[1, 2\] in run .*, found 3",
        ),
        (
            {"outcomes": {"error": {**BEST, "validate": None}}},
            "best step needs validate and higher_is_better",
        ),
        (
            {"outcomes": {"error": {**BEST, "validate": "validate/own", "higher_is_better": None}}},
            "best step needs validate and higher_is_better",
        ),
        ({"outcomes": {"error": {**BEST, "validate": "validate/los"}}}, "no evaluation writes validate/los"),
        (
            {"outcomes": {"error": BEST}, "patients": True},
            "outcomes at steps have no intervals over patients",
        ),
        ({"outcomes": {"error": {**BEST, "step": "end"}}}, "over step, error needs step: best"),
        (
            {"hypotheses": {"H": {**GRID["hypotheses"]["H1"], "alpha": 0.06}}},
            "sum of at most 0.05, found 0.06",
        ),
        ({"hypotheses": {"H": {**GRID["hypotheses"]["H1"], "level": "quick"}}}, "no compared level quick"),
    ],
)
def test_contradictions_are_named(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        read_experiment(write_grid(tmp_path, **{**GRID, **changes}))


def test_missing_test_of_a_step_is_named(finished):
    """A number of the validation needs no test."""
    experiment = read_experiment(finished / "grid.yaml")
    tuned = Outcome("validate/loss", step="best", validate="validate/loss")
    file = finished / "grid/runs/rate=slow,seed=0/steps/4/results.json"
    content = file.read_text()
    file.unlink()
    with pytest.raises(UserError, match="has no test of step 4"):
        results_table(experiment)
    table = results_table(dataclasses.replace(experiment, outcomes={"tuned": tuned}))
    assert len(table) == 6 * len(STEPS) and (table["value"] == table["validate"]).all()
    least = table.groupby("run")["value"].min()
    assert table[table["chosen"]].set_index("run")["value"].equals(least.loc[table["run"].unique()])
    file.write_text(content)


def test_known_metric_chooses_by_its_own_direction(finished):
    """The least validate/loss also where more of the outcome is better."""
    experiment = read_experiment(finished / "grid.yaml")
    less, more = (
        results_table(
            dataclasses.replace(
                experiment,
                outcomes={"error": dataclasses.replace(experiment.outcomes["error"], higher_is_better=x)},
            )
        )
        for x in (False, True)
    )
    pd.testing.assert_frame_equal(less, more)
    assert Outcome("own/x", validate="validate/own", higher_is_better=False).is_higher_chosen is False


@pytest.mark.parametrize(("alternative", "share"), [("greater", 1.1), ("greater", 0.9), ("two-sided", 1.9)])
def test_a_star_agrees_with_its_interval(alternative, share, tmp_path):
    """Shares of alpha near the p of that side, or of both."""
    gaps = np.array([0.2, 0.3, 0.4])
    p = stats.ttest_1samp(gaps, 0, alternative="greater").pvalue
    hypothesis = {**GRID["hypotheses"]["H1"], "alpha": float(share * p), "alternative": alternative}
    changes = {"outcomes": {"error": "tiny/error"}, "plots": None, "settings": SETTINGS}
    axes = {**GRID["axes"], "seed": {"set": "seed_everything", "values": 3}}
    grid = write_grid(tmp_path, **{**GRID, **changes, "axes": axes, "hypotheses": {"H": hypothesis}})
    rows = [
        (rate, seed, gap * (rate == "fast")) for rate in ("slow", "fast") for seed, gap in enumerate(gaps)
    ]
    table = pd.DataFrame(rows, columns=["rate", "seed", "value"]).assign(outcome="error", chosen=True)
    cell = tables(read_experiment(grid), table)[0].rows[0].cells[0]
    assert cell.text.endswith("*") == (share == 1.1) == cell.interval.startswith("[+")


def test_hypothesis_without_p_has_none(tmp_path):
    """One pair."""
    changes = {"outcomes": {"error": "tiny/error"}, "plots": None, "settings": SETTINGS}
    experiment = read_experiment(write_grid(tmp_path, **{**GRID, **changes}))
    table = pd.DataFrame({"rate": ["slow", "fast"], "seed": 0, "value": [0.1, 0.3], "outcome": "error"})
    cells = tables(experiment, table.assign(chosen=True))[0].rows[0].cells
    assert cells[1].text == NOTHING and not cells[0].text.endswith("*")


def test_test_of_a_kept_step_is_its_own(finished, tmp_path):
    """Results of the run stay; files of other names are no kept steps."""
    run = shutil.copytree(finished / "grid/runs/rate=slow,seed=0", tmp_path / "run")
    own, of_step = (run / "results.json").read_bytes(), (run / "steps/3/results.json").read_text()
    shutil.copy(run / "checkpoints/step_3.ckpt", run / "checkpoints/step_5.ckpt")
    (run / "steps/3/results.json").unlink()
    cli([*shlex.split(command_of_test(run / "steps/3"))[1:], "--import", MODULE])
    assert json.loads((run / "steps/3/results.json").read_text())["metrics"] == json.loads(of_step)["metrics"]
    assert (run / "results.json").read_bytes() == own
    assert [*RunFolder(run).kept_steps()] == STEPS


def test_a_killed_test_leaves_no_results_over_steps_of_another(finished, tmp_path, monkeypatch):
    run = shutil.copytree(finished / "grid/runs/rate=slow,seed=1", tmp_path / "run")
    test, n_tested = Trainer._test_impl, itertools.count()

    def test_two(self, *args, **options):
        if next(n_tested) == 2:
            raise SystemExit(3)  # stands for a kill
        return test(self, *args, **options)

    monkeypatch.setattr(Trainer, "_test_impl", test_two)
    with pytest.raises(SystemExit):
        cli(["test", str(run), "--import", MODULE])
    assert not (run / "results.json").exists()
