"""The report's section on calibration, of made-up predictions."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import brier_score_loss, f1_score

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.metrics import calibration
from medclip_dcl.metrics.calibration import Calibration, fit_finding, perfect_error
from medclip_dcl.report import draws as intervals
from medclip_dcl.report.draws import TestedRun, patient_draws
from medclip_dcl.report.reliability import section
from medclip_dcl.report.report import render
from medclip_dcl.report.tables import Table

pytestmark = pytest.mark.usefixtures("few_draws")
SCALE = 6.0
SETTINGS = dict.fromkeys(("image_encoder", "text_encoder", "similarity"), "0")


@pytest.fixture(scope="module")
def run(make_tested_run, make_predictions, tmp_path_factory) -> Path:
    """A tested run with a calibration by other patients' predictions; Edema has none."""
    folder = make_tested_run(tmp_path_factory.mktemp("runs") / "a", untrained=None)
    results = json.loads((folder / "results.json").read_text())
    results["protocol"]["classification"] |= {
        "view": "whole image",
        "blank": "ignore",
        "prompts": {f: {"negative": pair.negative, "positive": pair.positive} for f, pair in CHEX5.items()},
    }
    (folder / "results.json").write_text(json.dumps(results))
    cases = make_predictions(seed=5)["classification"]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "PLATT_PATIENTS", 2)
        for finding, (negative, positive) in CHEX5.items():
            rows = cases[cases["finding"] == finding]
            patients = rows["subject_id"].to_numpy() * (finding != "Edema")
            logits = SCALE * (rows["score_positive"] - rows["score_negative"]).to_numpy()
            labels = (rows["label"] == 1).to_numpy()
            target = {"specificity": 0.7}
            found[finding] = fit_finding(logits, labels, patients, target, ((negative,), (positive,)))
    Calibration(
        fingerprint={"weights": "weights0", "image_size": 48, "geometry": "stretch", "settings": SETTINGS},
        scale=SCALE,
        target=target,
        data={"fingerprint": "other", "folder": "clinic", "patients": 31, "blank": "ignore"},
        findings=found,
    ).write(folder / "calibration.json")
    return folder


def content(folder: Path) -> dict:
    found = section(TestedRun(folder))
    assert found is not None and not any("precision" in note for note in found.get("notes", []))
    return found


@pytest.fixture(scope="module")
def tables(run) -> list[Table]:
    return content(run)["tables"]


def test_numbers_of_test_cases_before_and_after(run, tables):
    errors, thresholds = tables
    own = Calibration.read(run / "calibration.json")
    cases = pd.read_parquet(run / "predictions/classification.parquet")
    by_finding = {row.label: [cell.text for cell in row.cells] for row in errors.rows}
    assert list(by_finding) == ["Cardiomegaly", "Pleural Effusion", "Pneumonia", "Pneumothorax"]
    for finding, texts in by_finding.items():
        rows = cases[cases["finding"] == finding]
        logits = (SCALE * (rows["score_positive"] - rows["score_negative"])).to_numpy()
        labels, parameters = rows["label"].to_numpy(), own.findings[finding].parameters
        before = 1 / (1 + np.exp(-logits))
        after = 1 / (1 + np.exp(-logits / parameters["temperature"] - parameters["offset"]))
        assert texts[0] == f"{(labels == 1).sum()} / {(labels == 0).sum()}"
        for place, p in ((6, before), (7, after)):
            assert texts[place] == f"{brier_score_loss(labels, p):.3f}"
        assert texts[8] == f"{labels.mean() * (1 - labels.mean()):.3f}"
        shown = next(row for row in thresholds.rows if row.label == finding)
        is_above = after >= own.findings[finding].threshold
        assert [cell.text for cell in shown.cells[3:]] == [
            f"{is_above[labels == 1].mean():.3f}",
            f"{(~is_above)[labels == 0].mean():.3f}",
            f"{f1_score(labels, is_above):.3f}",
        ]
        n_patients = min(rows.loc[rows["label"] == label, "subject_id"].nunique() for label in (0, 1))
        assert shown.cells[4].interval == f"(n = {n_patients})"  # of fewer than 20


def test_intervals_draw_patients(run, monkeypatch):
    monkeypatch.setattr(intervals, "MIN_PATIENTS", 2)
    found = section(TestedRun(run))
    assert found is not None
    cell = found["tables"][1].rows[1].cells[3]
    own = Calibration.read(run / "calibration.json").findings["Pleural Effusion"]
    cases = pd.read_parquet(run / "predictions/classification.parquet").query("finding != 'Edema'")
    counts = patient_draws(cases["subject_id"].nunique(), 100, 0)[1:]
    rows = cases[(cases["finding"] == "Pleural Effusion") & (cases["label"] == 1)]
    p = own.probabilities(SCALE * (rows["score_positive"] - rows["score_negative"]).to_numpy())
    places = np.searchsorted(np.unique(cases["subject_id"]), rows["subject_id"])
    repeated = ((p >= own.threshold).repeat(count[places].astype(int)) for count in counts)
    low, high = np.quantile([x.mean() for x in repeated], [0.025, 0.975])
    assert cell.interval == f"[{low:.3f}, {high:.3f}]"


def test_the_page_shows_curves_and_explains_them(run):
    page = render(run)
    assert page.count('id="reliability') >= 4 and "Edema: not calibrated: 1 patients with a positive" in page
    assert "The probabilities hold at the prevalence of the validate cases" in page
    assert "validate patients of another set, clinic" in page
    assert "Thresholds chosen for a specificity of 0.7 on validate patients" in page


def test_a_set_without_patients_has_images(run):
    tested = TestedRun(run)
    tested.tested["dataset"]["names_patients"] = False
    tested.tested["dataset"]["fingerprint"] = Calibration.read(run / "calibration.json").data["fingerprint"]
    found = section(tested)
    assert found is not None and found["fitted_units"] == "images"
    assert [table.title.rpartition(" on ")[2] for table in found["tables"]] == [
        "test images",
        "validate images",
    ]


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (("fingerprint", "weights"), "0f", "weights 'weights0' instead of '0f'"),
        (("fingerprint", "image_size"), 64, "image size 48 instead of 64"),
        (
            ("fingerprint", "geometry"),
            "pad",
            "part of the image 'whole image' instead of 'whole image, padded'",
        ),
        (("findings", "Edema", "positive"), ["oedema"], "prompts of Edema"),
        (("data", "blank"), "zeros", "blank labels 'ignore' instead of 'zeros'"),
        (("fingerprint", "settings", "text_encoder"), "1", "settings of text_encoder '0' instead of '1'"),
        (("fingerprint", "settings"), {}, "settings of similarity '0' instead of None"),
    ],
)
def test_a_calibration_of_another_test_is_named(run, tmp_path, keys, value, message):
    copy = shutil.copytree(run, tmp_path / "a")
    whole = json.loads((copy / "calibration.json").read_text())
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (copy / "calibration.json").write_text(json.dumps(whole))
    found = content(copy)
    assert message in found["reason"] and "calibrate again" in found["reason"]
    if keys[-1] == "weights":
        assert "calibration.json does not belong to this test" in render(copy)


@pytest.mark.slow
def test_another_precision_of_the_test_is_said(run):
    for precision, is_said in (("32-true", False), ("bf16-mixed", True)):
        tested = TestedRun(run)
        tested.tested["precision"] = precision
        found = section(tested)
        assert found is not None
        assert any("bf16-mixed precision" in note for note in found["notes"]) == is_said


def test_a_damaged_file_is_one_error(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "a")
    (copy / "calibration.json").write_text("{")
    with pytest.raises(UserError, match="calibration.json is not a calibration"):
        render(copy)


def test_the_perfect_models_error_is_the_binomials():
    p = np.array([0.31] * 40 + [0.86] * 10)
    # |mean of n labels - p| of each bin, from the binomial distribution, weighted by its share.
    expected = 0.0
    for share, n in ((0.31, 40), (0.86, 10)):
        k = np.arange(n + 1)
        chances = np.array([math.comb(n, i) for i in range(n + 1)]) * share**k * (1 - share) ** (n - k)
        expected += n / 50 * (chances * np.abs(k / n - share)).sum()
    assert perfect_error(p) == pytest.approx(expected, abs=0.005)
