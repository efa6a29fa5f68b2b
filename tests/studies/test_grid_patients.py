"""Intervals over patients of means and differences over seeds: against a loop over draws with scikit-learn."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, roc_auc_score

from medclip_dcl.common.errors import UserError
from medclip_dcl.report.draws import TestedRun, patient_draws
from medclip_dcl.runs.saved import SavedResultsError
from medclip_dcl.studies.grid import Experiment, Outcome
from medclip_dcl.studies.grid_page import write_report
from medclip_dcl.studies.grid_patients import over_patients
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import results_table
from tests.studies.grids import write_grid, write_results
from tests.studies.test_grid_page import text_of

pytestmark = pytest.mark.slow

N_PATIENTS, N_DRAWS = 60, 60
OUTCOMES = {
    "AUC": {"path": "classification/auc", "higher_is_better": True},
    "both": {"path": ["classification/auc", "classification/acc"]},
}


def cases(seed: int) -> pd.DataFrame:
    """Two images of each patient, the same labels for all seeds."""
    label = np.random.default_rng(7).integers(0, 2, 2 * N_PATIENTS)
    score = label + np.random.default_rng(seed).normal(size=len(label))
    return pd.DataFrame(
        {
            "dicom_id": [f"i{place}" for place in range(len(label))],
            "subject_id": np.arange(len(label)) // 2,
            "finding": "Edema",
            "label": label,
            "score_positive": score - 0.5,
            "score_negative": 0.0,
        }
    )


def numbers(rows: pd.DataFrame, weight: np.ndarray | None = None) -> tuple[float, float]:
    score = rows["score_positive"]
    return (
        float(roc_auc_score(rows["label"], score, sample_weight=weight)),
        float(accuracy_score(rows["label"], score > 0, sample_weight=weight)),
    )


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """A grid whose runs were tested, and the cases of each run."""
    monkeypatch.setattr(inspect.unwrap(TestedRun.draws), "__defaults__", (None, N_DRAWS))
    tables = [{"title": "Table 1", "outcomes": list(OUTCOMES), "where": {"noise": 1}}]
    return write_tested(write_grid(tmp_path, outcomes=OUTCOMES, plots=None, patients=True, tables=tables))


def write_tested(file: Path) -> tuple[Experiment, dict[str, pd.DataFrame]]:
    """Runs of an experiment as a test leaves them, and the cases of each."""
    experiment, tested = read_experiment(file), {}
    for place, run in enumerate(experiment.runs()):
        rows = tested[run.name] = cases(place)
        auc, acc = numbers(rows)
        metrics = {"auc": auc, "acc": acc, "by_finding": {"Edema": {"auc": auc, "acc": acc}}}
        write_results(run.folder, {"classification": metrics}, protocol={"classification": {"min_cases": 1}})
        (run.folder / "predictions").mkdir()
        rows.to_parquet(run.folder / "predictions/classification.parquet")
    return experiment, tested


def test_numbers_that_results_lack_are_of_predictions(grid, capsys):
    experiment, tested = grid
    expected = results_table(experiment)["value"].tolist()
    runs = experiment.runs()
    for run in runs:
        file = run.folder / "results.json"
        results = json.loads(file.read_text())
        del results["metrics"]["classification"]["acc"]
        file.write_text(json.dumps(results))
    assert results_table(experiment)["value"].tolist() == pytest.approx(expected)
    absent = replace(experiment, outcomes={"mIoU": Outcome("grounding/miou")})
    with pytest.raises(UserError, match="has no metric grounding/miou"):
        results_table(absent)
    file = runs[0].folder / "predictions/classification.parquet"
    file.unlink()
    results_of_first = runs[0].folder / "results.json"
    results_of_first.write_text(results_of_first.read_text() + " ")  # a new time: read again
    found = results_table(experiment)
    is_first = (found["run"] == runs[0].name) & (found["outcome"] == "both")
    assert found[is_first]["value"].isna().all() and found[~is_first]["value"].notna().all()
    assert capsys.readouterr().err.count("lacks numbers") == 1


def test_draws_are_averaged_over_seeds_and_paired(grid):
    experiment, tested = grid
    means, differences = over_patients(experiment, results_table(experiment))
    assert (
        len(means) == 8 and len(differences) == 4
    )  # 2 noises x 2 rates x 2 outcomes, and 1 difference of rates
    counts = patient_draws(N_PATIENTS, N_DRAWS, seed=0)[1:]
    values = np.zeros((2, N_DRAWS))
    for draw, count in enumerate(counts):
        for place, rate in enumerate(("slow", "fast")):
            of_seeds = [tested[f"noise=1,rate={rate},seed={seed}"] for seed in range(3)]
            weights = count[of_seeds[0]["subject_id"]]
            values[place, draw] = np.mean([np.mean(numbers(rows, weights)) for rows in of_seeds])
    for found, expected in ((means, values[1]), (differences, values[1] - values[0])):
        (row,) = found.query("noise == 1 and rate == 'fast' and outcome == 'both'").to_dict("records")
        ends = np.quantile(expected, [0.025, 0.975])
        np.testing.assert_allclose([row["patients_low"], row["patients_high"]], ends, atol=1e-6)


def test_few_patients_of_a_class_give_no_interval(grid):
    experiment, tested = grid
    for run in experiment.runs():
        rows = tested[run.name].assign(label=lambda x: (x["subject_id"] < 7).astype(int))
        auc, acc = numbers(rows)
        metrics = {"auc": auc, "acc": acc, "by_finding": {"Edema": {"auc": auc, "acc": acc}}}
        write_results(run.folder, {"classification": metrics}, protocol={"classification": {"min_cases": 1}})
        rows.to_parquet(run.folder / "predictions/classification.parquet")
    for found in over_patients(experiment, results_table(experiment)):
        assert len(found) and found[["patients_low", "patients_high"]].isna().all(axis=None)


def test_the_page_has_both_intervals_and_draws_once(grid, monkeypatch):
    experiment, _ = grid
    page = write_report(experiment, results_table(experiment)).read_text()
    means, _ = over_patients(experiment, results_table(experiment))
    (row,) = means.query("noise == 1 and rate == 'slow' and outcome == 'AUC'").to_dict("records")
    assert f"({row['patients_low']:.3f}, {row['patients_high']:.3f})</small>" in page
    assert "round brackets" in page and page.index("Table 1") < page.index("<figcaption>AUC")

    def drawn_again(*arguments: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr("medclip_dcl.report.draws.bootstrap_numbers", drawn_again)
    assert write_report(experiment, results_table(experiment)).read_text() == page


def test_one_run_tested_on_other_cases_are_not_averaged(grid):
    experiment, tested = grid
    run = experiment.runs()[1]
    rows = tested[run.name].assign(dicom_id=lambda rows: "x" + rows["dicom_id"])
    rows.to_parquet(run.folder / "predictions/classification.parquet")
    with pytest.raises(SavedResultsError, match="cases of classification differ"):
        over_patients(experiment, results_table(experiment))


def test_means_over_other_findings_are_not_subtracted(grid):
    experiment, tested = grid
    before = over_patients(experiment, results_table(experiment))[1]
    run = experiment.runs()[1]
    rows = tested[run.name]
    pd.concat([rows, rows.assign(finding="Mass")]).to_parquet(
        run.folder / "predictions/classification.parquet"
    )
    after = over_patients(experiment, results_table(experiment))[1]
    assert len(before.query("outcome == 'AUC'")) > len(after.query("outcome == 'AUC'"))


SEEDS = {"set": "seed_everything", "values": 3}
RATES = {"set": "model.init_args.learning_rate", "values": [0.1, 0.2]}


@pytest.mark.parametrize(
    "axes",
    [
        {"rate": RATES},
        {"seed": SEEDS},
        {"rate": RATES, "seed": SEEDS},
    ],
)
def test_a_mean_has_an_interval_over_patients(tmp_path, monkeypatch, axes):
    monkeypatch.setattr(inspect.unwrap(TestedRun.draws), "__defaults__", (None, N_DRAWS))
    changes = {"pairs": "seed" if "seed" in axes else None, "outcomes": {"AUC": "classification/auc"}}
    changes |= {"compare": None, "plots": None}
    experiment, tested = write_tested(write_grid(tmp_path, axes=axes, patients=True, **changes))
    text = text_of(write_report(experiment, results_table(experiment)))
    of_seeds = [rows for name, rows in tested.items() if "rate" not in axes or "rate=0.1" in name]
    counts = patient_draws(N_PATIENTS, N_DRAWS, seed=0)[1:]
    draws = [np.mean([numbers(rows, count[rows["subject_id"]])[0] for rows in of_seeds]) for count in counts]
    low, high = np.quantile(draws, [0.025, 0.975])
    assert f"({low:.3f}, {high:.3f})" in text
    assert ("there are no intervals over trainings. In round brackets" in text) == ("seed" not in axes)
