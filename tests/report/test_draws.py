"""Bootstrap intervals against a loop that repeats rows and calls scikit-learn and pandas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import MIN_PATIENTS
from medclip_dcl.metrics.table import SECTIONS
from medclip_dcl.report import draws as intervals
from medclip_dcl.report.contrasts import bootstrap_differences
from medclip_dcl.report.draws import (
    Predictions,
    TestedRun,
    bootstrap_intervals,
    bootstrap_numbers,
    patient_draws,
)

MIN_CASES = 3


@pytest.fixture
def tables(make_predictions):
    return make_predictions()


def leaves(metrics, prefix=""):
    """Path -> number of every number or None in results.json's metrics."""
    found: dict[str, Any] = {}
    for key, value in metrics.items():
        found |= leaves(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def repeated(table: pd.DataFrame, counts: dict[int, float]) -> pd.DataFrame:
    """Every row as often as its patient was drawn."""
    parts = [
        table[table["subject_id"] == patient].assign(copy=copy)
        for patient, count in counts.items()
        for copy in range(int(count))
    ]
    return pd.concat(parts, ignore_index=True)


def test_every_number_has_its_value_and_interval(make_tested_run, tmp_path):
    run = make_tested_run(tmp_path / "run")
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    expected = leaves(metrics)
    assert expected.pop("classification/n_findings") == 5
    found = bootstrap_intervals(run, n_draws=300)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        one = found[path]
        assert one.value == pytest.approx(value, abs=1e-12), path
        is_still = value == 0 and path.endswith(("R@1", "R@5"))
        if is_still or (one.n_patients is not None and one.n_patients < MIN_PATIENTS):
            assert one[1:5] == (None, None, None, 0) and one.n_patients is not None, path
            continue
        assert one.low is not None and one.high is not None
        assert one.low <= value <= one.high and one.low < one.high, path


def test_draws_equal_a_loop_over_repeated_rows(tables, measured):
    n_draws = 40
    numbers = bootstrap_numbers(Predictions(tables, MIN_CASES), n_draws, seed=4)
    patients = np.unique(np.concatenate([table["subject_id"] for table in tables.values()]))
    lost = np.flatnonzero(np.isnan(numbers["classification/by_finding/Pneumothorax/auc"]))
    assert len(lost), "no draw lost the few positives of pneumothorax"
    for draw in {*range(0, n_draws + 1, 10), *lost[:2]}:
        counts = patient_draws(len(patients), n_draws, 4)[draw]
        assert counts.sum() == len(patients)
        times = dict(zip(patients, counts, strict=True))
        resampled = {section: repeated(table, times) for section, table in tables.items()}
        expected = leaves(measured(resampled, decided_on=tables))
        for path, values in numbers.items():
            assert values[draw] == pytest.approx(expected[path], abs=1e-12, nan_ok=True), (path, draw)


@pytest.mark.parametrize("n", [19, 20])
@pytest.mark.parametrize("is_rarer", [0, 1])
def test_few_patients_have_a_count_instead(n, is_rarer):
    """Those of the rarer class, or with a box; means over these and other findings keep their interval."""
    patients = np.repeat(np.arange(60), 2)
    rows = pd.DataFrame(
        {"dicom_id": np.arange(120), "subject_id": patients, "logit": np.arange(120) % 7 - 3.0}
    )
    few = rows.assign(finding="rare/auc", label=np.where(patients < n, is_rarer, 1 - is_rarer))
    many = rows.assign(finding="often", label=patients % 2)
    boxes = boxes_of(patients, np.arange(120.0)).tables["grounding"]
    boxes = boxes.assign(
        category=np.where(patients < n, "rare", "often"), miou=boxes["cnr"], pair_miou=boxes["cnr"]
    )
    of_map = dict.fromkeys(SECTIONS["localisation"].names, rows["logit"]) | {
        "reader_iou": np.where(patients < 3, rows["logit"], np.nan)
    }
    drawn = rows.assign(category=boxes["category"], **of_map)
    calibrated = few.assign(
        before=np.where(patients % 3 == 0, 0.51, 0.55),
        after=np.where(rows["logit"] > 0, 0.7, 0.2),
        threshold=0.5,
    )
    tables = {"finding_classification": pd.concat([few, many]), "grounding": boxes, "localisation": drawn}
    predictions = Predictions(tables)
    reliability = Predictions({"calibration": calibrated})
    found = bootstrap_intervals(predictions, 50) | bootstrap_intervals(reliability, 50)
    without = {path for path, one in found.items() if one.value is not None and one.low is None}
    # The mean of the readers is over the rare finding alone.
    readers = {"localisation/by_category/rare/reader_iou", "localisation/reader_iou"}
    # All numbers of the rare one, whatever is declared later.
    names = [path for path in found if re.match(r"\w+/by_\w+/rare/", path) and path not in readers]
    assert {
        "finding_classification/by_finding/rare/auc/balanced_acc",
        "calibration/by_finding/rare/auc/f1",
    } < {*names}
    assert without - readers == ({*names} if n < MIN_PATIENTS else set())
    assert {found[path].n_patients for path in names} == {n} and readers <= without
    means = [path for path, one in found.items() if "/by_" not in path and "reader" not in path]
    assert all(found[path].low is not None and found[path].n_patients is None for path in means)
    assert found["localisation/reader_iou"][1:] == (None, None, None, 0, 3, "patients")
    cases = tables["finding_classification"]
    other = cases.assign(logit=np.random.default_rng(0).permutation(cases["logit"]))
    others = Predictions(tables | {"finding_classification": other})
    difference = bootstrap_differences(others, predictions, 50)[
        "finding_classification/by_finding/rare/auc/auc"
    ]
    assert (difference.low is None) == (n < MIN_PATIENTS) and difference.n_patients == n


def test_a_finding_of_few_cases_is_not_averaged(tables):
    few = Predictions(tables, min_cases=10)
    found = bootstrap_intervals(few, n_draws=100)
    assert found["classification/by_finding/Pneumothorax/auc"][:5] == (None, None, None, None, 0)
    others = [
        float(one.value or 0)
        for path, one in found.items()
        if path.startswith("classification/by_finding") and path.endswith("auc") and "thorax" not in path
    ]
    assert found["classification/auc"].value == pytest.approx(np.mean(others))
    assert found["classification/auc"][1:] == (None, None, None, 0, 12, "patients"), (
        "over findings of 12 or more"
    )


def perfect(**n_positive: int) -> Predictions:
    """A classifier of 47 patients that ranks all of them right; of "noisy" findings by chance."""
    random, tables = np.random.default_rng(3), []
    for finding, n in n_positive.items():
        label = (np.arange(47) < n).astype(int)
        logit = random.normal(size=47) if finding.startswith("noisy") else label * 4.0 - 2
        one = pd.DataFrame({"dicom_id": range(47), "subject_id": range(47), "logit": logit})
        tables.append(one.assign(finding=finding, label=label))
    return Predictions({"finding_classification": pd.concat(tables)})


def test_what_no_draw_changes_has_a_count(make_predictions):
    found = bootstrap_intervals(perfect(Mass=21), 50)
    for path in ("auc", "by_finding/Mass/auc", "by_finding/Mass/average_precision", "acc"):
        assert found[f"finding_classification/{path}"] == (1.0, None, None, None, 0, 21, "patients"), path
    ranks = make_predictions()["retrieval"].assign(rank=lambda rows: rows["rank"] + 1)
    found = bootstrap_intervals(Predictions({"retrieval": ranks}), 50)
    of_1, of_50 = (found[f"retrieval/image_to_text/R@{k}"] for k in (1, 50))
    assert of_1 == (0.0, None, None, None, 0, ranks["subject_id"].nunique(), "patients")
    assert of_50.low is not None and of_50.high is not None and of_50.low < of_50.high
    # 0.1 is rounded in each sum of a draw.
    assert (
        bootstrap_intervals(boxes_of(np.arange(31), np.arange(31.0)), 50)["grounding/miou"].n_patients == 31
    )


@pytest.mark.parametrize(("n_often", "has_one"), [(19, False), (20, True)])
def test_a_mean_needs_a_finding_with_an_interval(n_often, has_one):
    """A perfect finding has none, whatever its number of patients."""
    found = bootstrap_intervals(perfect(Mass=22, noisy_few=8, noisy_often=n_often), 50)
    mean = found["finding_classification/auc"]
    assert (mean.low is not None) == has_one and mean.n_patients == (None if has_one else 8)
    assert mean.value is not None and mean.value < 1


def test_neither_chunks_nor_the_row_order_matter(tables, monkeypatch):
    whole = bootstrap_numbers(Predictions(tables), 40)
    monkeypatch.setattr(intervals, "_ELEMENTS_PER_CHUNK", 4000)
    shuffled = {name: table.sample(frac=1, random_state=3) for name, table in tables.items()}
    for path, values in bootstrap_numbers(Predictions(shuffled), 40).items():
        assert values == pytest.approx(whole[path], abs=1e-12, nan_ok=True), path
    other = bootstrap_numbers(Predictions(tables), 40, seed=2)
    assert not np.array_equal(other["grounding/miou"], whole["grounding/miou"])


def boxes_of(patients: np.ndarray, values: np.ndarray, trials: int = 1) -> Predictions:
    """Boxes with the given signed CNR and nothing else of interest; of several trials, each a category."""
    names = [f"i{i}" for i in range(len(values))]
    table = pd.DataFrame({"dicom_id": names, "subject_id": patients, "phrase": "p"})
    table["category"] = np.repeat(np.arange(trials), len(values) // trials)
    table = table.assign(box=range(len(values)), cnr_signed=values, cnr=np.abs(values), miou=0.1)
    table = table.assign(pair_cnr_signed=values, pair_miou=0.1)
    return Predictions({"grounding": table})


@pytest.mark.slow
def test_intervals_hold_the_truth_95_times_in_100():
    random = np.random.default_rng(0)
    n_patients, n_trials = 60, 250
    of_patients = np.repeat(random.normal(size=(n_trials, n_patients)), 3, axis=1)
    values = 2.0 + of_patients + 0.5 * random.normal(size=(n_trials, 3 * n_patients))
    patients = np.tile(np.repeat(np.arange(n_patients), 3), n_trials)
    found = bootstrap_intervals(boxes_of(patients, values.ravel(), n_trials), 400)
    hits = 0
    for trial in range(n_trials):
        one = found[f"grounding/by_category/{trial}/cnr_signed"]
        assert one.low is not None and one.high is not None
        hits += one.low <= 2.0 <= one.high
    assert 0.91 <= hits / n_trials <= 0.98


def test_differences_are_paired():
    random = np.random.default_rng(0)
    patients, values = np.arange(80), random.normal(size=80)
    values -= values.mean()
    a, b = boxes_of(patients, values + 0.1), boxes_of(patients, values)
    shift = bootstrap_differences(a, b, 400)["grounding/cnr_signed"]
    assert shift[0] == pytest.approx(0.1) and shift[1:] == (None, None, 1 / 401, 0, 80, "patients")
    single = bootstrap_intervals(a, 400)["grounding/cnr_signed"]
    assert single.low is not None and single.low < 0.0, "unpaired, 0.1 is nothing"
    same = bootstrap_differences(a, a, 400)["grounding/cnr_signed"]
    assert same[:5] == (0.0, None, None, 1.0, 0)


def _drop_column(run: Path) -> None:
    file = run / "predictions/grounding.parquet"
    pd.read_parquet(file).drop(columns="miou").to_parquet(file)


def _other_values(run: Path) -> None:
    file = run / "predictions/retrieval.parquet"
    pd.read_parquet(file).assign(rank=1.0).to_parquet(file)


def _with(section: str, column: str, value: float | str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        file = run / f"predictions/{section}.parquet"
        table = pd.read_parquet(file)
        table[column] = table[column].where(np.arange(len(table)) != 6, value)
        table.to_parquet(file)

    return spoil


def _without(section: str, rows: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        file = run / f"predictions/{section}.parquet"
        pd.read_parquet(file).query(rows).to_parquet(file)

    return spoil


def _stored(section: str, *absent: str, **null: None) -> Callable[[Path], None]:
    """Drops numbers of results.json, or sets them to null."""

    def spoil(run: Path) -> None:
        results = json.loads((run / "results.json").read_text())
        numbers = results["metrics"][section]
        results["metrics"][section] = {k: x for k, x in (numbers | null).items() if k not in absent}
        (run / "results.json").write_text(json.dumps(results))

    return spoil


def test_results_may_lack_numbers_but_the_first(make_tested_run, tmp_path):
    """They are computed from the predictions."""
    whole, run = make_tested_run(tmp_path / "whole"), make_tested_run(tmp_path / "run")
    _stored("grounding", "cnr", "by_category")(run)
    _stored("classification", "acc", "by_finding")(run)
    found, expected = TestedRun(run).predictions.values, TestedRun(whole).predictions.values
    assert found == expected and "grounding/by_category/Edema/cnr" in found["grounding"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_stored("grounding", "miou"), "by the predictions and no number by the results"),
        (_stored("grounding", cnr=None), "by the predictions and None by the results"),
        (lambda run: (run / "results.json").unlink(), "create it with: medclip-dcl test --config"),
        (lambda run: (run / "predictions/grounding.parquet").unlink(), "grounding.parquet is missing"),
        (lambda run: (run / "predictions/grounding.parquet").write_text("x"), "not a readable Parquet file"),
        (_drop_column, "has no column miou; test the run again"),
        (_other_values, "retrieval/recall is 1.0 by the predictions and"),
        (_without("retrieval", "box < 0"), "retrieval/recall is None by the predictions and 0."),
        (_with("classification", "label", 2), "classification.parquet is damaged: label is 2 in 1 of 2"),
        (
            _with("classification", "label", np.nan),
            "classification.parquet is damaged: label is nan in 1 of 2",
        ),
        (_with("classification", "score_negative", np.nan), "score_negative is nan in 1 of 2"),
        (_with("report_retrieval", "rank_tolerant", np.nan), "rank_tolerant is nan in 1 of 3"),
        (
            _with("grounding", "cnr_signed", np.inf),
            "grounding/cnr_signed is ",
        ),
    ],
)
def test_what_cannot_be_read_is_named(make_tested_run, tmp_path, spoil, message):
    run = make_tested_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(UserError, match=re.escape(message)):
        _ = TestedRun(run).predictions
