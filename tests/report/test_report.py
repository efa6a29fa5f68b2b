"""Run report of a synthetic run folder: tables, charts, missing pieces, escaping."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from markupsafe import Markup

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.pictures.figure import draw_heat_maps
from medclip_dcl.pictures.plots import write_figure
from medclip_dcl.report import charts
from medclip_dcl.report.report import render, write_report
from medclip_dcl.runs.saved import SavedResultsError
from tests.program import shell
from tests.report.page import Page

main = shell("report")
pytestmark = pytest.mark.usefixtures("few_draws")

SCRIPT = "<script>alert('no')</script> & \"effusion\""


def results(shift: float = 0.0, phantom: bool = False) -> dict:
    """results.json with numbers that are all different, of the set that the paper's rows are of."""
    recalls, other = (
        {
            **{f"R@{k}": a + place / 10 + shift for place, k in enumerate((10, 50, 100))},
            **{"R@1": a / 4 + shift, "R@5": a / 2 + shift, "MedR": m + 100 * shift},
        }
        for a, m in ((0.1001, 61.5), (0.1501, 72.0))
    )
    retrieval = {"recall": 0.2251 + shift, "medr": 66.75, "image_to_text": recalls, "text_to_image": other}
    by_finding: dict[str, Any] = {f: {"auc": 0.7 + i / 100 + shift, "acc": 0.6} for i, f in enumerate(CHEX5)}
    by_finding["Pneumothorax"] = {"auc": None, "acc": None}
    grounding = {"cnr": 1.2346 + shift, "cnr_signed": 0.9876 + shift, "miou": 0.1232 + shift}
    return {
        "format_version": 2,
        "metrics": {
            "classification": {"auc": 0.8123 + shift, "acc": 0.7, "n_findings": 4, "by_finding": by_finding},
            "grounding": {**grounding, "by_category": {"Edema": grounding}, "by_pair": grounding},
            "retrieval": {**retrieval, "tolerant": retrieval},
            "report_retrieval": {
                "image_report": {**retrieval, "tolerant": retrieval},
                "image_sentence": retrieval,
            },
        },
        "protocol": {"grounding": {"comparison": ">"}},
        "counts": {
            "classification": {
                "images": 4000,
                "by_finding": {f: {"positives": 31, "negatives": 77} for f in CHEX5},
            },
            "grounding": {"boxes": 1448, "images": 1047, "boxes_by_category": {"Edema": 1448}},
            "retrieval": {"boxes": 1448, "phrases": 900},
            "report_retrieval": {
                "images": 3403,
                "patients": 293,
                "reports": 3269,
                "distinct_reports": 3100,
                "sentences": 9999,
                "by_chance": {
                    task: dict.fromkeys(
                        ("image_to_text", "text_to_image"),
                        {"R@1": 0.0, "R@5": 0.005, "R@10": 0.01, "R@50": 0.02, "R@100": 0.06, "MedR": 777.0},
                    )
                    for task in ("image_report", "image_sentence")
                },
            },
        },
        "notes": {
            "classification": ["Pneumothorax: no AUC and accuracy from 2 positive and 7 negative cases"]
        },
        "checkpoint": {
            "file": "checkpoints/best.ckpt",
            "weights": "0123456789abcdef",
            "epoch": 7,
            "step": 90,
        },
        "dataset": {
            "source": "mimic-cxr-2.0.0",
            "fingerprint": "f00d",
            "phantom": phantom,
            "folder": "a_set",
            "images": 4000,
            "patients": 1100,
        },
        "images": {
            "shown": {"image_size": 512, "geometry": "stretch"},
            "trained": {"image_size": 480, "geometry": "shortest"},
        },
        "precision": "32-true",
        "versions": {"torch": "9.8.7"},
        "timings": {"test_seconds": 12.3, "metric_seconds": {"grounding": 1.5}},
    }


def make_run(folder: Path, phantom: bool = False) -> Path:
    """A complete run folder."""
    random = np.random.default_rng(0)
    (folder / "results.json").write_text(json.dumps(results(phantom=phantom)))
    (folder / "results_untrained.json").write_text(json.dumps(results(-0.1, phantom)))
    (folder / "config.yaml").write_text(f"model:\n  learning_rate: 1.0e-05  # {SCRIPT}\n")
    (folder / "fit.json").write_text(json.dumps({"seconds": 127.5, "epochs": 9}))
    steps = np.arange(0, 900)
    pd.DataFrame(
        {
            "step": steps,
            "train/loss": 3 * np.exp(-steps / 300) + random.normal(0, 0.1, 900),
            "validate/auc": [0.5 + s / 2000 if s % 100 == 99 else None for s in steps],
            "train/gamma2": 14 + steps / 500,
            "train/at_floor": steps / 9000,
            "train/learning_rate": np.cos(steps / 600),
            "unknown": 1,
        }
    ).to_csv(folder / "metrics.csv", index=False)
    n = 60
    classification = pd.DataFrame(
        [(f"d{i}", i, f, i % 3 == 0, random.normal() + (i % 3 == 0), 0.0) for f in CHEX5 for i in range(n)],
        columns=["dicom_id", "subject_id", "finding", "label", "score_positive", "score_negative"],
    )
    retrieval = pd.DataFrame(
        {
            "direction": ["image_to_text"] * n + ["text_to_image"] * n,
            "rank": random.integers(1, n, 2 * n).astype(float),
            "n_candidates": n,
        }
    )
    for suffix in ("", "_untrained"):
        (folder / f"predictions{suffix}").mkdir()
        classification.to_parquet(folder / f"predictions{suffix}/classification.parquet")
        retrieval.to_parquet(folder / f"predictions{suffix}/retrieval.parquet")
    log_p = -np.arange(40.0) * 1.5 - 2
    pd.DataFrame(
        {
            "sentence_id": np.arange(40),
            "text": [f"Sentence number {i}." if i != 3 else SCRIPT for i in range(40)],
            "n_reports": 1000 - np.arange(40),
            "log_p": log_p,
            "eta": 0.2 * np.exp(0.35 * log_p),
            "rho": random.uniform(0.01, 0.9, 40),
            "sentence_share": random.uniform(0.001, 0.1, 40),
        }
    ).sample(frac=1, random_state=1).to_parquet(folder / "class_probability.parquet")
    yy, xx = np.mgrid[0:96, 0:96]
    image = (120 + 80 * np.sin(xx / 9) * np.cos(yy / 13)).astype(np.uint8)
    for group in ("best", "median", "worst"):
        figure = draw_heat_maps(
            image,
            [random.normal(0.1, 0.2, (6, 6)).astype(np.float32)],
            ["costs $5 and $6 <b>"],
            limits=(-0.5, 0.7),
            size=(300, 250),
            boxes=[(30.0, 60.0, 90.0, 120.0), (150.0, 60.0, 60.0, 80.0)],
            note=f"{group} 1 of 9 boxes by signed CNR: Edema, signed CNR 1.00",
        )
        write_figure(
            figure, folder / f"figures/{'localisation' if group == 'worst' else 'grounding'}_{group}_1.png"
        )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("a_run"))


@pytest.fixture(scope="module")
def html(run):
    return render(run)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


@pytest.fixture
def without_charts(monkeypatch):
    """Leave out the charts, which take most of the time."""
    monkeypatch.setattr(charts, "chart", lambda *_: Markup("<svg></svg>"))


@pytest.fixture
def copy(run, tmp_path, without_charts):
    """A run folder of its own, to break."""
    return shutil.copytree(run, tmp_path / "copy")


def test_both_networks_stand_in_the_papers_tables(page):
    assert page.row(0, "this run") == ["0.81", "0.70", "1.23", "0.99", "0.12", "0.23", "66.8"]
    assert page.row(0, "untrained") == ["0.71", "0.70", "1.13", "0.89", "0.02", "0.13", "66.8"]
    assert page.row(1, "this run") == ["0.700", "0.710", "0.720", "0.730", "–", "0.812"]
    assert page.row(1, "positive / negative cases")[:2] == ["31 / 77", "31 / 77"]
    assert page.row(6, "Edema") == ["31 / 77", "0.710", "0.600", "0.610", "0.600", "0.287", "0.713"]
    assert page.row(2, "untrained") == ["1.135", "0.888", "0.023"]
    assert page.row(2, "this run, per image-phrase pair") == ["1.235", "0.988", "0.123"]
    assert page.row(7, "Edema") == ["1,448", "1.23", "0.99", "0.12", "1.13", "0.89", "0.02"]
    assert page.row(3, "this run") == ["0.10", "0.20", "0.30", "61.5", "0.15", "0.25", "0.35", "72"]
    assert page.row(3, "untrained, duplicate-tolerant")[3] == "51.5"


def test_the_report_needs_no_other_file(html, page):
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|<link|<iframe", html)
    assert sum(address.startswith("data:image/jpeg") for address in page.addresses) == 3
    assert len(page.ids) == len(set(page.ids))
    assert len(html) < 3e6


def test_a_picture_stands_before_the_tables(page):
    assert page.tags.index("svg") < page.tags.index("table") and page.mute == []


def test_the_forest_has_the_numbers_of_the_tables(page):
    for side, marks in page.forest("AUC by finding").items():
        *findings, mean = page.row(1, side)
        assert [x for x, _ in marks] == pytest.approx(
            [float(x) for x in (mean, *findings) if x != "–"], abs=1e-3
        )
        assert [row for _, row in marks] == list(range(5))  # Pneumothorax has none


def test_a_column_without_a_value_is_named_below(copy):
    """Unless the paper's rows have one."""
    for name in ("results.json", "results_untrained.json"):
        found = json.loads((copy / name).read_text())
        found["dataset"]["source"] = "NIH ChestX-ray14"
        found["metrics"]["classification"]["by_finding"]["Hernia"] = {"auc": None, "acc": None}
        found["counts"]["classification"]["by_finding"]["Hernia"] = {"positives": 2, "negatives": 9}
        (copy / name).write_text(json.dumps(found))
    html = render(copy)
    page = Page(html)
    table = next(table for table in page.tables[1:] if "average" in table[0])
    assert table[0] == ["", *[x for x in CHEX5 if x != "Pneumothorax"], "average"]
    assert all(len(row) == len(table[0]) for row in table)
    assert "Left out, without a value: Pneumothorax (31 / 77), Hernia (2 / 9)." in html


def test_text_of_reports_and_configuration_is_escaped(page):
    assert "script" not in page.tags
    assert page.text.count(SCRIPT) == 2


def test_probable_sentences_are_listed_in_order(page):
    most, least = page.tables[8], page.tables[9]
    assert [row[0] for row in most[1:4]] == ["Sentence number 0.", "Sentence number 1.", "Sentence number 2."]
    # The other page, of medclip-dcl eta, counts the training reports.
    assert most[0][1] == "reports (whole set)"
    assert most[1][1:] == ["1,000", "−2.00", "0.0993"]
    assert [row[0] for row in least[1:3]] == ["Sentence number 39.", "Sentence number 38."]


def test_charts_take_the_columns_that_exist(page):
    for title in (
        "loss",
        "validate AUC and accuracy",
        "γ²",
        "share of anchors at the floor",
        "learning rate",
    ):
        assert title in page.text
    assert "share of η capped" not in page.text
    assert page.tags.count("svg") == 5 + 1 + 1 + 2 + 2


def test_constant_curves_are_one_line(run, tmp_path):
    metrics = pd.read_csv(run / "metrics.csv").assign(**{"train/class_probability": 0.0})
    metrics[["step", "train/loss", "train/class_probability"]].to_csv(tmp_path / "metrics.csv", index=False)
    page = Page(render(tmp_path))
    assert page.tags.count("svg") == 1
    assert "With one value throughout: mean η of the anchors 0." in page.text
    assert "class_probability.parquet: " not in page.text


def test_configuration_versions_timings_and_notes_are_shown(page):
    for text in (
        "images were shown at 512 pixels, trained at 480, fitted by stretch, in training by shortest",
        "learning_rate: 1.0e-05",
        "9.8.7",
        "127.5",
        "12.3",
        "0123456789abcdef",
        '"comparison": ">"',
    ):
        assert text in page.text
    assert "Pneumothorax: no AUC and accuracy from 2 positive and 7 negative cases" in page.text
    assert "Missing from this run folder" not in page.text


def test_the_head_names_the_data_and_its_protection(html, copy):
    assert "contains patient data" in html and "Phantom numbers" not in html
    assert "a_set (mimic-cxr-2.0.0), 4,000 test images of 1,100 patients, 1,448 boxes" in html
    for name in ("results.json", "results_untrained.json"):
        (copy / name).write_text(json.dumps(results(phantom=True)))
    phantom = render(copy)
    assert "Phantom numbers are not patient numbers" in phantom and "contains patient data" not in phantom
    few = results()
    few["counts"]["grounding"] |= {"boxes": 138, "images": 70}
    (copy / "results.json").write_text(json.dumps(few))
    assert (
        "a_set (in the layout of mimic-cxr-2.0.0), 4,000 test images of 1,100 patients, 138 boxes"
        in render(copy)
    )
    few["dataset"]["names_patients"] = False
    (copy / "results.json").write_text(json.dumps(few))
    assert "4,000 test images (the set names no patients), 138 boxes" in render(copy)


def test_each_table_has_its_chance_level(page):
    assert page.row(0, "chance level") == ["0.50", "0.71", "–", "0.00", "–", "0.04", "724.5"]
    assert page.row(0, "tested on")[2:6] == ["1,448 boxes"] * 3 + ["1,448 candidates"]
    assert page.row(1, "chance level") == ["0.500"] * 4 + ["–", "0.500"]  # pneumothorax has too few cases
    assert page.row(2, "chance level") == ["–", "0.000", "–"]
    assert page.row(3, "chance level")[3] == "724.5" and page.row(3, "candidates") == ["1,448"] * 8
    for table, texts in ((4, "3,269"), (5, "9,999")):
        assert page.row(table, "chance level") == ["0.00", "0.01", "0.01", "0.02", "0.06", "777"] * 2
        assert page.row(table, "candidates") == [texts] * 6 + ["3,403"] * 6
        assert (
            page.row(table, "this run")[:2] == ["0.03", "0.05"] and page.row(table, "this run")[5] == "61.5"
        )


def test_the_head_shows_chance_and_omits_certainties(copy):
    def tiles() -> dict[str, str]:
        found = re.findall(r'class="tile"><span>(.*?)</span><b>.*?</b>(.*?)</div>', render(copy))
        return {label: re.sub("<.*?>", " ", rest) for label, rest in found}

    assert "by chance 0.037" in tiles()["Recall"] and "by chance 0.00" in tiles()["signed CNR"]
    few = results()
    few["counts"]["retrieval"]["boxes"] = 10  # R@10 of ten candidates is 1 whatever the model
    (copy / "results.json").write_text(json.dumps(few))
    assert "Recall" not in tiles() and "by chance 5.5" in tiles()["MedR"]


def elsewhere_tested(folder: Path, *sections: str) -> Page:
    """The report of a folder that holds the test of another's checkpoint alone, of some sections of results.json."""
    found = results()
    found["dataset"]["source"] = "folder of images with a table"
    for section in {"classification", "grounding", "retrieval", "report_retrieval"} - set(sections):
        found["metrics"][section] = {}
        found["counts"][section] = {"boxes": 0} if section == "grounding" else {}
    found["notes"] = {"grounding": ["the set has no boxes"]}
    (folder / "results.json").write_text(json.dumps(found))
    return Page(render(folder))


def test_the_report_shows_the_measured_sections_alone(tmp_path, without_charts):
    page = elsewhere_tested(tmp_path, "report_retrieval")
    assert len(page.tables) == 2 and page.row(0, "this run")[5] == page.row(1, "this run")[5] == "61.5"
    for absent in ("AUC", "Table", "0 boxes", "Heat maps", "BioViL"):
        assert absent not in page.text, absent
    assert "no boxes" in page.text and "image-report Recall" in page.text
    assert "The test measured nothing" in elsewhere_tested(tmp_path).text
    labelled = elsewhere_tested(tmp_path, "classification")
    assert [row[0] for row in labelled.tables[0]][2:] == ["this run", "tested on", "chance level"]
    assert "MedR" not in labelled.text
    boxed = elsewhere_tested(tmp_path, "grounding", "retrieval")
    assert boxed.text.count("Grounding by category") == 1 and "Table 1. Grounding and retrieval" in boxed.text


def test_an_exported_models_test_asks_for_no_training(tmp_path):
    page = elsewhere_tested(tmp_path, "classification", "grounding", "retrieval", "report_retrieval")
    assert "holds only the test of checkpoints/best.ckpt, epoch 7 (90 steps)" in page.text
    for absent in (
        "medclip_dcl fit",
        "Training",
        "untrained",
        "Class probability",
        "metrics.csv:",
        "config.yaml:",
    ):
        assert absent not in page.text, absent


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("results.json", "the run has not been tested; create it with: medclip-dcl test --config"),
        ("results_untrained.json", "no row of the untrained network"),
        ("metrics.csv", "no training curves; create it with: medclip-dcl fit"),
        ("class_probability.parquet", "no η by sentence"),
        ("config.yaml", "config.yaml: the configuration of the run"),
        ("fit.json", "training has not finished"),
        ("figures/grounding_best_1.png", ""),
        ("predictions/retrieval.parquet", "predictions/retrieval.parquet is missing"),
    ],
)
def test_a_missing_piece_is_named_and_not_fatal(copy, removed, message):
    (copy / removed).unlink()
    page = Page(render(copy))
    assert message in page.text
    assert ("Missing from this run folder" in page.text) == bool(message)
    if removed == "results.json":
        assert page.row(0, "untrained")[0] == "0.71"
        assert not [row for row in page.tables[0] if row and row[0] == "this run"]


def test_thresholds_that_a_network_chose_and_another_preparation(copy):
    """The first are no other protocol; the second is said."""
    for name, threshold in (("results.json", 0.1), ("results_untrained.json", 0.3)):
        found = json.loads((copy / name).read_text())
        found["protocol"]["localisation"] = {"thresholds": {"Edema": threshold}}
        found["images"]["shown"]["prepared_size"], found["images"]["trained"]["prepared_size"] = 256, 512
        (copy / name).write_text(json.dumps(found))
    page = Page(render(copy))
    assert page.row(0, "untrained")[0] == "0.71"
    assert "images were prepared at 256 pixels, those of the training at 512: scores differ" in page.text


def test_an_untrained_network_measured_in_another_way_is_left_out(copy):
    found = json.loads((copy / "results_untrained.json").read_text())
    found["protocol"]["classification"] = "another"
    (copy / "results_untrained.json").write_text(json.dumps(found))
    page = Page(render(copy))
    assert "no row of the untrained network, measured as the others" in page.text
    assert not [row for table in page.tables for row in table if row and row[0] == "untrained"]


def _damage_a_label_without_boxes(run):
    """The test is without predictions of boxes, which is no reason to draw curves of damaged ones."""
    (run / "predictions/grounding.parquet").unlink()
    cases = pd.read_parquet(run / "predictions/classification.parquet")
    cases.assign(label=[2, *cases["label"][1:]]).to_parquet(run / "predictions/classification.parquet")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda run: (run / "metrics.csv").write_bytes(b"step,\xff\n1,2"),
            "metrics.csv is not a readable table",
        ),
        (lambda run: (run / "results.json").write_text('{"format_version": 2}'), "found no metrics; test"),
        (_damage_a_label_without_boxes, "label is 2 in 1 of "),
    ],
)
def test_a_damaged_run_is_refused(make_tested_run, tmp_path, spoil, message):
    run = make_tested_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(UserError, match=message):
        render(run)


def test_other_findings_have_no_published_rows(copy):
    found = results()
    found["metrics"]["classification"]["by_finding"] = {"Fracture": {"auc": 0.6, "acc": 0.5}}
    found["counts"]["classification"]["by_finding"] = {"Fracture": {"positives": 30, "negatives": 70}}
    (copy / "results.json").write_text(json.dumps(found))
    page = Page(render(copy))
    assert page.row(6, "Fracture")[:3] == ["30 / 70", "0.600", "0.500"]
    assert page.row(6, "Fracture")[-1] == "0.700"
    assert "BioViL" not in [row[0] for row in page.tables[1] if row]
    assert page.row(0, "BioViL")[:3] == ["–", "–", "1.14"]  # the paper's AUC and ACC are of CheX5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "expected a run folder with config.yaml, "),
        (lambda run: (run / "results.json").write_text("{"), "results.json is not readable JSON"),
        (
            lambda run: (run / "results.json").write_text('{"format_version": 99, "metrics": {}}'),
            "expected format version 2, found 99; test the run again",
        ),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path, capsys, prepare, message):
    run = tmp_path / "run"
    run.mkdir()
    prepare(run)
    with pytest.raises(SavedResultsError, match=re.escape(message)):
        write_report(run)
    with pytest.raises(SystemExit) as stop:
        main([str(run)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (run / "report.html").exists()
