"""Sentences on failures: planted ones are found, and few where there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from medclip_dcl.metrics.calibration import Calibration, FindingCalibration
from medclip_dcl.report import charts
from medclip_dcl.report.draws import Predictions, TestedRun, bootstrap_numbers
from medclip_dcl.report.failures import MAX_SENTENCES, Failure, failures
from medclip_dcl.report.report import render
from medclip_dcl.report.subgroups import Groups, compared_groups, groups_of_run, rows_of

pytestmark = pytest.mark.usefixtures("few_draws")
N = 160
N_DRAWS = 300


def made(
    seed: int = 0,
    findings: tuple[str, ...] = ("Mass",),
    positive: float = 1.0,
    negative: float = 1.0,
    weaker: Mapping[str, float] = {},
    share: float = 0.5,
    noise: float = 0.5,
) -> tuple[Predictions, pd.DataFrame]:
    """One image a patient: slopes of both scores by the label (of the negative prompt downwards), `weaker` by view.

    `noise` is that of the negative prompt.
    """
    random = np.random.default_rng(seed)
    images = pd.DataFrame({"dicom_id": range(N), "subject_id": range(N), "study_id": range(N)})
    images["view"] = random.choice(["AP", "LL", "PA"] if len(weaker) > 1 else ["AP", "PA"], N)
    parts = []
    for finding in findings:
        label = (random.random(N) < share).astype(int)
        slope = positive - images["view"].map(weaker).fillna(0.0).to_numpy()
        scores = (
            slope * label + 0.5 * random.normal(size=N),
            -negative * label + noise * random.normal(size=N),
        )
        named = dict(zip(("score_positive", "score_negative"), scores, strict=True))
        parts.append(images.drop(columns=["study_id", "view"]).assign(finding=finding, label=label, **named))
    return Predictions({"classification": pd.concat(parts, ignore_index=True)}), images


def found(predictions: Predictions, images: pd.DataFrame) -> list[Failure]:
    groups = compared_groups(predictions, images, N_DRAWS)
    return failures(predictions, bootstrap_numbers(predictions, N_DRAWS), groups)


def test_negative_prompts_that_rank_disease_first_are_named():
    predictions, images = made(negative=-1.0)
    cases = predictions.tables["classification"]
    gain, neg = found(predictions, images)
    value = roc_auc_score(1 - cases["label"], cases["score_negative"])
    assert re.match(
        rf"Mass: .*: NEG {value:.3f} \[0\.\d+, 0\.\d+\] \(\d\d patients; p = 0\.\d+ among", neg.text
    )
    own = roc_auc_score(cases["label"], cases["score_positive"] - cases["score_negative"])
    drop = own - roc_auc_score(cases["label"], cases["score_positive"])
    assert f"PNC − POS −{-drop:.3f} [" in gain.text and {neg.table, gain.table} == {
        "Zero-shot classification by finding"
    }


@pytest.mark.parametrize("view", ["AP", "PA"])
def test_the_weaker_view_is_named(view):
    predictions, images = made(weaker={view: 1.0}, negative=0.05)
    (one,) = [x for x in found(predictions, images) if x.table == "View"]
    cases = predictions.tables["classification"].merge(images[["dicom_id", "view"]], on="dicom_id")
    cases["score"] = cases["score_positive"] - cases["score_negative"]
    auc = {name: roc_auc_score(rows["label"], rows["score"]) for name, rows in cases.groupby("view")}
    other = {"AP": "PA", "PA": "AP"}[view]
    start = (
        f"View {view}: AUC of Mass {auc[view]:.3f}, below that of {other} by {auc[other] - auc[view]:.3f} ["
    )
    assert one.text.startswith(start)


@pytest.mark.parametrize(("weak", "others"), [("AP", "PA"), ("PA", "AP"), ("LL", "the others")])
def test_ap_is_beside_pa_and_others_beside_the_rest(weak, others):
    weaker = {"AP": 0.0, "PA": 0.0, "LL": 0.0, weak: 1.0}
    predictions, images = made(seed=1, weaker=weaker, negative=0.05)
    texts = [x.text for x in found(predictions, images) if x.table == "View"]
    assert any(text.startswith(f"View {weak}: AUC of Mass") for text in texts)
    assert any(f"View {weak}" in text and f"below that of {others} by" in text for text in texts)
    groups = compared_groups(predictions, images, N_DRAWS)
    assert groups is not None
    path = "classification/by_finding/Mass/auc"
    value = {group: one.value or 0.0 for group, name, one in rows_of(groups) if name == path}
    assert set(value) == {"view/AP/", "view/PA/", "view/LL/", "view/AP − PA/", "view/LL − rest/"}
    assert value["view/AP − PA/"] == pytest.approx(value["view/AP/"] - value["view/PA/"])


def test_the_largest_six_come_first():
    names = tuple(f"Finding {x}" for x in range(8))
    predictions, images = made(findings=names, negative=-0.5)
    shown = found(predictions, images)
    assert len(shown) == MAX_SENTENCES
    numbers = bootstrap_numbers(predictions, N_DRAWS)
    effects = {}
    for name in names:
        effects[name, "NEG"] = (0.5 - numbers[f"classification/by_finding/{name}/neg"][0]) / 0.05
        effects[name, "PNC"] = -numbers[f"classification/by_finding/{name}/gain"][0] / 0.05
    largest = sorted(effects, key=lambda key: -effects[key])[:MAX_SENTENCES]
    assert [one.text.split(":")[0] for one in shown] == [name for name, _ in largest]
    assert all(kind in one.text for one, (_, kind) in zip(shown, largest, strict=True))


def test_p_is_the_simultaneous_interval():
    """Of two candidates by hand: the share of draws whose larger deviation reaches the effect's."""
    predictions, _ = made(negative=-0.12, positive=0.3)
    numbers = bootstrap_numbers(predictions, N_DRAWS)
    neg, gain = (numbers[f"classification/by_finding/Mass/{x}"] for x in ("neg", "gain"))
    deviations = [np.abs(x[1:] - x[0]) / x[1:].std(ddof=1) for x in (neg, gain)]
    (one,) = [x for x in failures(predictions, numbers, None) if "NEG" in x.text]
    share = (np.max(deviations, axis=0) >= (0.5 - neg[0]) / neg[1:].std(ddof=1)).mean()
    p = float(re.findall(r"p = (\S+) among 2", one.text)[0])
    assert p == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("share", [0.07, 0.94])
def test_few_patients_give_no_sentence(share):
    predictions, images = made(negative=-2.0, share=share)
    n = predictions.n_patients["classification/by_finding/Mass/neg"]
    assert n < 20 and found(predictions, images) == []


def test_small_effects_give_no_sentence():
    predictions, images = made(positive=9.0, negative=-0.4)
    numbers = bootstrap_numbers(predictions, N_DRAWS)
    assert -0.05 < numbers["classification/by_finding/Mass/gain"][0] <= 0
    assert [x.text for x in found(predictions, images) if "PNC" in x.text] == []


@pytest.mark.slow
def test_without_a_failure_there_is_seldom_a_sentence():
    """Views alike, NEG .5 and, as the negative scores hardly differ, PNC that of POS."""
    runs = (made(seed, ("Mass", "Edema"), negative=0.0, noise=1e-3) for seed in range(60))
    n = sum(bool(found(*run)) for run in runs)
    assert n <= 7, n  # 5% of 60, with three standard deviations


def calibrated(run: Path, predictions: Predictions, images: pd.DataFrame) -> TestedRun:
    """A tested run with a calibration.json of its prompts, threshold .5 at score 0."""
    finding = FindingCalibration(
        ("No mass",), ("Mass",), 9, 9, 9, 9, "platt", "", {"temperature": 1.0, "offset": 0.0}, 0.5, 0.9, 0.9
    )
    network = {"weights": "w", "settings": {}, "image_size": 64, "geometry": "shortest"}
    Calibration(network, 1.0, {"sensitivity": 0.9}, {"folder": "x"}, {"Mass": finding}).write(
        run / "calibration.json"
    )
    tested_run = TestedRun(run)
    section = {"auc": 0.5, "by_finding": {"Mass": {"auc": 0.5}}}
    tested_run.__dict__["results"] = {
        "metrics": {"classification": section},
        "protocol": {"classification": {"view": "shortest", "prompts": {}}},
        "checkpoint": {"weights": "w", "settings": {}},
        "images": {"shown": {"image_size": 64}},
    }
    tested_run.__dict__["predictions"] = predictions
    tested_run._tables = {"classification": predictions.tables["classification"], "images": images}
    return tested_run


def test_sensitivity_by_view_is_at_the_threshold(tmp_path, monkeypatch):
    monkeypatch.setattr("medclip_dcl.report.reliability._differing", lambda *_: "")
    predictions, images = made(weaker={"PA": 0.9}, positive=0.4, negative=0.1)
    run = calibrated(tmp_path, predictions, images)
    groups = groups_of_run(run, N_DRAWS)
    assert isinstance(groups, Groups)
    shown = {(group.split("/")[1], path): one for group, path, one in rows_of(groups)}
    cases = predictions.tables["classification"].merge(images[["dicom_id", "view"]], on="dicom_id")
    called = cases["score_positive"] - cases["score_negative"] >= 0
    rate = called[cases["label"] == 1].groupby(cases["view"]).mean()
    path = "calibration/by_finding/Mass/sensitivity"
    assert shown["AP", path].value == pytest.approx(rate["AP"]) and shown["PA", path].value == rate["PA"]
    gap = shown["AP − PA", path]
    assert gap.value == pytest.approx(rate["AP"] - rate["PA"]) and None not in (gap.low, gap.value)
    n_behind = min(cases[cases["label"] == 1].groupby("view")["subject_id"].nunique())
    assert gap.n_patients == n_behind
    texts = [one.text for one in failures(predictions, bootstrap_numbers(predictions, N_DRAWS), groups)]
    assert any(text.startswith(f"View PA: sensitivity of Mass {rate['PA']:.3f}, below") for text in texts)
    without = groups_of_run(calibrated(tmp_path, predictions, images), N_DRAWS)
    monkeypatch.setattr("medclip_dcl.report.reliability._differing", lambda *_: "weights")
    other = groups_of_run(calibrated(tmp_path, predictions, images), N_DRAWS)
    assert other is not None and without is not None
    plain = without.table[~without.table["metric"].str.startswith("calibration")].reset_index(drop=True)
    pd.testing.assert_frame_equal(plain, other.table)  # sensitivities move no other p


def test_each_sentence_links_to_its_table(make_tested_run, tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "chart", lambda *_: None)
    monkeypatch.setattr(charts, "ranks", lambda *_: [])
    run = make_tested_run(tmp_path / "run")
    assert "Where it fails" not in render(run)
    shown = [
        Failure("A fails", "Zero-shot classification by finding"),
        Failure("B fails", "Table 4. Visual grounding"),
    ]
    monkeypatch.setattr("medclip_dcl.report.failures.failures", lambda *_: shown)
    page = render(run)
    links = re.findall(r'<li><a href="#([^"]+)">(\w) fails</a></li>', page)
    assert [name for _, name in links] == ["A", "B"]
    for (anchor, _), one in zip(links, shown, strict=True):
        assert re.search(rf'id="{anchor}">\s*<figcaption>{one.table}</figcaption>', page)
