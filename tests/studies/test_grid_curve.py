"""Learning curve: the verdict of the last doubling, on the page, in the CSV and on the terminal."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from medclip_dcl.studies.grid_curve import write_verdicts
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import write_table
from tests.program import shell
from tests.studies.grids import write_grid, write_results
from tests.studies.test_grid_page import text_of

pytestmark = pytest.mark.slow

N_PATIENTS = 60
STARTS = {
    # Start -> signal by fraction, and whether a seed changes the scores.
    "useless": ({0.25: 1.0, 0.5: 2.0, 1.0: 2.02}, False),
    "good": ({0.25: 0.2, 0.5: 0.2, 1.0: 6.0}, True),
    "unclear": ({0.25: 0.5, 0.5: 1.0, 1.0: 1.0}, True),
    "worse": ({0.25: 6.0, 0.5: 6.0, 1.0: 0.2}, True),
}


@pytest.fixture
def grid(tmp_path, few_draws):
    """An experiment file whose runs are done: two images of each patient, the same labels in all runs."""
    file = write_grid(
        tmp_path,
        axes={
            "start": {"levels": dict.fromkeys(STARTS)},
            "share": {"set": "data.init_args.label_fraction", "values": [0.25, 0.5, 1.0]},
            "seed": {"set": "seed_everything", "values": 3},
        },
        compare={"axis": "start", "reference": "useless"},
        outcomes={"AUC": {"path": "classification/auc", "higher_is_better": True}},
        learning_curve={"axis": "share", "outcome": "AUC"},
        plots=[{"kind": "lines", "name": "curve", "x": "share", "y": "AUC", "log": True}],
        patients=True,
    )
    label = np.random.default_rng(7).integers(0, 2, 2 * N_PATIENTS)
    for run in read_experiment(file).runs():
        signals, has_seed = STARTS[run.levels["start"]]
        share, seed = float(run.levels["share"]), int(run.levels["seed"])
        noise = np.random.default_rng([int(100 * share), seed] if has_seed else 0).normal(size=len(label))
        rows = pd.DataFrame(
            {
                "dicom_id": [f"i{place}" for place in range(len(label))],
                "subject_id": np.arange(len(label)) // 2,
                "finding": "Edema",
                "label": label,
                "score_positive": signals[share] * label + noise,
                "score_negative": 0.0,
            }
        )
        auc, acc = (
            roc_auc_score(label, rows["score_positive"]),
            ((rows["score_positive"] > 0) == label).mean(),
        )
        numbers = {"auc": float(auc), "acc": float(acc)}
        metrics = {"classification": numbers | {"by_finding": {"Edema": numbers}}}
        write_results(run.folder, metrics, protocol={"classification": {"min_cases": 1}})
        (run.folder / "predictions").mkdir()
        rows.to_parquet(run.folder / "predictions/classification.parquet")
        fit = {"epochs": 2, "steps": 6, "seconds": 800.0, "train_patients": int(90 * share) + seed - 1}
        (run.folder / "fit.json").write_text(json.dumps(fit))
    return file


def test_the_last_doubling_is_judged_for_each_start(grid, capsys):
    shell("study")([str(grid), "--report_only"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning curve: ")]
    folder = read_experiment(grid).folder
    table: Any = pd.read_csv(folder / "learning_curve.csv").set_index("start").to_dict("index")
    sentences = [row["verdict"] for row in table.values()]
    assert [line.removeprefix("learning curve: ") for line in said] == sentences
    ends = {start: row["verdict"].rpartition(": ")[2] for start, row in table.items()}
    assert ends == {
        "useless": "more patients would not help",
        "good": "more patients would help",
        "unclear": "undecided whether more patients would help",
        "worse": "undecided whether more patients would help",
    }
    runs = pd.read_parquet(folder / "results.parquet")
    means: Any = runs.groupby(["start", "share"])["value"].mean()
    for start, row in table.items():
        assert (row["patients_before"], row["patients"]) == (45, 90)
        assert row["difference"] == pytest.approx(means[start, 1.0] - means[start, 0.5], abs=1e-6)
        assert row["low"] <= row["difference"] <= row["high"]
        assert f"{row['low']:+.3f} to {row['high']:+.3f}" in row["verdict"]
    assert table["worse"]["high"] < 0
    for text in (text_of(folder / "report.html"), (folder / "tables.md").read_text()):
        assert all(sentence in text for sentence in sentences)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (folder / "report.html").read_text())
    assert "training patients" in words and {"22", "45", "90"} <= {*words}
    assert not {"44", "46", "89", "91"} & {*words}  # of single seeds


def test_patients_are_those_of_each_group(grid):
    """A start may have a set of its own; an outcome without a number is not a change of 0."""
    for run in read_experiment(grid).runs():
        if run.levels["start"] == "good":
            fit = json.loads((run.folder / "fit.json").read_text())
            fit["train_patients"] *= 100
            (run.folder / "fit.json").write_text(json.dumps(fit))
        if run.levels["start"] == "useless":
            file = run.folder / "predictions/classification.parquet"
            pd.read_parquet(file).assign(label=1).to_parquet(file)
            results = json.loads((run.folder / "results.json").read_text())
            results["metrics"] = {"classification": {"auc": None, "by_finding": {"Edema": {"auc": None}}}}
            (run.folder / "results.json").write_text(json.dumps(results))
    experiment = read_experiment(grid)
    said = "\n".join(write_verdicts(experiment, write_table(experiment)))
    assert "good: from 4,500 to 9,000 training patients" in said and "unclear: from 45 to 90 " in said
    assert "useless: from 45 to 90 training patients AUC changed by an unknown number (no interval" in said


def test_a_curve_without_its_last_doubling_has_no_verdict(grid, capsys):
    for run in read_experiment(grid).runs():
        if run.levels["share"] == "1.0":
            (run.folder / "results.json").unlink()
    shell("study")([str(grid), "--report_only"])
    assert "learning curve:" not in capsys.readouterr().out
