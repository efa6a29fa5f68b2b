"""Model card: every number is that of the run folder, and what the folder lacks is said with its command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from medclip_dcl.exchange.card import model_card
from medclip_dcl.exchange.card_facts import FACTS, training_facts
from medclip_dcl.metrics.calibration import Calibration, FindingCalibration
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.report.draws import bootstrap_intervals
from medclip_dcl.report.tables import DESCRIPTIONS, Cell, Column, Row, Table, column_of, number
from medclip_dcl.runs.saved import setting, value_at
from tests.small import PatchRegions

pytestmark = pytest.mark.usefixtures("few_draws")
ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [column_of(entry, arrow=False) for entry in DESCRIPTIONS["headline"]]
HEADLINE = [(x.heading, x.path, x.digits) for x in COLUMNS if not x.path.startswith("finding_classification")]


@pytest.fixture(scope="module")
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(0)
    text = BertSentences(str(small_bert), dim=5)
    return ImageTextNetwork(ResNetRegions(dim=5, stride=16, width=8), text, LSENonLocal(dim=5), image_size=48)


def settings() -> dict:
    """The configuration of SSD's row DCL, eta_LM."""
    config = yaml.safe_load((ROOT / "configs/mimic_cxr.yaml").read_text())
    objective = yaml.safe_load((ROOT / "configs/objective/dcl_lm.yaml").read_text())
    config["model"]["init_args"] |= objective["model"]["init_args"]
    config["data"]["init_args"]["folder"] = "/home/somebody/secret/mimic_cxr"
    return config


@pytest.fixture(scope="module")
def run(make_tested_run, network, tmp_path_factory) -> Path:
    folder = make_tested_run(tmp_path_factory.mktemp("runs") / "mine")
    edit(
        folder / "results.json",
        lambda found: found["checkpoint"].update(weights=weights_fingerprint(network)),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(settings()))
    (folder / "fit.json").write_text(json.dumps({"epochs": 7, "steps": 1234, "device": "a GPU"}))
    (folder / "data.json").write_text(json.dumps({"fingerprint": "f00d"}))
    return folder


@pytest.fixture(scope="module")
def card(run, network) -> str:
    return model_card(run, network, "me/mine")


@pytest.fixture
def changed(run, tmp_path) -> Path:
    """A copy of the run without predictions, whose intervals take a second."""
    return shutil.copytree(run, tmp_path / "mine", ignore=shutil.ignore_patterns("predictions*"))


def edit(file: Path, change) -> None:
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def rows(card: str, title: str) -> dict[str, list[str]]:
    """Cells of the table below a title, by the label of the row."""
    text = card.split(f"### {title}\n")[1].split("\n#")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_numbers_are_those_of_results_with_intervals(run, card):
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    untrained = json.loads((run / "results_untrained.json").read_text())["metrics"]
    intervals = bootstrap_intervals(run)
    summary = rows(card, "Summary")
    assert summary[""] == ["this model", "untrained", "by chance"]
    shown = {label.split(": ")[1]: cells for label, cells in summary.items() if ": " in label}
    expected = {label: (path, digits) for label, path, digits in HEADLINE}
    assert shown.keys() == expected.keys()
    for label, cells in shown.items():
        path, digits = expected[label]
        low, high, _, n, n_patients = intervals[path][1:6]
        between = f"[{number(low, digits)}, {number(high, digits)}]" if n else f"(n = {n_patients})"
        assert cells[0] == f"{number(value_at(metrics, path), digits)} {between}", label
        assert cells[1].startswith(number(value_at(untrained, path), digits))
    by_finding = rows(card, "Zero-shot classification by finding")
    assert by_finding[""][:3] == ["positive / negative cases", "this model: AUC", "this model: ACC"]
    for finding, found in metrics["classification"]["by_finding"].items():
        assert by_finding[finding][1].startswith(number(found["auc"], 3)), finding
    assert rows(card, "Grounding by category").keys() >= {"Edema", "Nodule/Mass", "Pneumonia"}


def test_the_hub_reads_exactly_the_numbers_of_results(run, card):
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    data: Any = ModelCard(card).data
    assert (data.library_name, data.license, data.language) == ("medclip_dcl", "other", ["en"])
    found = {one.metric_name: one.metric_value for one in data.eval_results}
    assert len(found) == 10 and found["AUC"] == metrics["classification"]["auc"]
    for label, path, _ in HEADLINE:
        assert found.get(label) == value_at(metrics, path), label


def test_objective_training_and_network_are_the_runs(card):
    assert "LanguageModelClassProbability (a 0.2, k 0.35, max_eta 0.3). eta_LM(x) = a \\* p_LM(x)^k" in card
    for line in ("| epochs | 7 |", "| steps | 1,234 |", "| learning rate | 1e-05 |", "| seed | 0 |"):
        assert line in card
    assert "| initial weights of the text encoder | microsoft/BiomedVLP-CXR-BERT-general |" in card
    assert (
        "| image encoder | ResNetRegions (depth 18, stride 16, centred False, dim 5, projection linear, width 8) |"
        in card
    )
    assert "num_hidden_layers 2, hidden_size 32" in card
    assert "reconstructed" in card.split("## Limits")[1] and 'load("me/mine")' in card


def test_settings_of_the_card_are_those_of_configurations():
    for key in (*FACTS["training"].values(), *FACTS["objective"].values()):
        *above, name = key.split(".")
        assert name in (setting(settings(), ".".join(above)) if above else settings()), key


def test_the_card_holds_no_report_text_or_path(run, card):
    assert "SECRET" not in card and str(run.parent) not in card and "/home" not in card
    assert "medclip-dcl calibrate mine" in card


@pytest.mark.parametrize(
    "source, phantom, said, terms",
    [
        (
            "digital phantom",
            True,
            "**Trained on the digital phantom, not on radiographs.**",
            "No patient data",
        ),
        ("mimic-cxr-2.0.0", False, "Trained on one source, mimic-cxr-2.0.0", "PhysioNet Credentialed Health"),
        ("a hospital", False, "Trained on one source, a hospital", "The license of these data is not known"),
    ],
)
def test_the_card_names_the_training_data(changed, network, source, phantom, said, terms):
    edit(changed / "results.json", lambda found: found["dataset"].update(source=source, phantom=phantom))
    card = model_card(changed, network, "x")
    metadata = ModelCard(card).data.to_dict()
    assert said in card and terms in card and "**Research only, not for clinical use.**" in card
    assert ("phantom" in metadata["tags"]) == ("**Trained on the digital phantom" in card) == phantom
    assert ("language" in metadata) == (source != "a hospital")


def test_data_are_the_trainings_not_the_tests(changed, network, tmp_path):
    (changed / "data.json").write_text(json.dumps({"fingerprint": "beef"}))
    card = model_card(changed, network, "x")
    assert "**Whether this model was trained on patients or on the phantom is not known**" in card
    data: dict[str, Any] = {"fingerprint": "beef", "phantom": False, "source": "mimic-cxr-2.0.0"}
    data |= {"counts": {"images_by_use": {"train": 9876}}, "options": {"labels": "chexpert"}}
    (tmp_path / "set").mkdir()
    (tmp_path / "set/dataset.json").write_text(json.dumps(data))
    config = settings()
    config["data"]["init_args"]["folder"] = str(tmp_path / "set")
    (changed / "config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(changed, network, "x")
    assert "| trained on | set (mimic-cxr-2.0.0) |" in card and "| images for training | 9,876 |" in card
    assert "those of chexpert, made from the reports, not by readers of the images." in card
    assert "same source" not in card
    data["options"]["test_labels"] = "radiologist"
    (tmp_path / "set/dataset.json").write_text(json.dumps(data))
    assert "those of the test images are a radiologist's." in model_card(changed, network, "x")


def test_what_is_missing_is_said_with_its_command(changed, network):
    test = "medclip-dcl test --config mine/config.yaml --run_folder mine"
    edit(changed / "results.json", lambda found: found["checkpoint"].update(weights="others"))
    card = model_card(changed, network, "x")
    assert (
        f"is of other weights (checkpoints/best.ckpt), so that its numbers are left out; test these: {test}"
        in card
    )
    assert "### Summary" not in card and "model-index" not in card
    for name in ("results.json", "fit.json", "config.yaml"):
        (changed / name).unlink()
    card = model_card(changed, network, "x")
    missing = card.split("## Missing")[1]
    for line in (
        f"results.json: the model has not been tested; create it with: {test}",
        "the description of the training data",
        "config.yaml: objective and settings",
        "fit.json: training has not finished; continue it with: medclip-dcl fit --config mine/config.yaml",
        "calibration.json: no probabilities and thresholds",
    ):
        assert line in missing
    assert "None that belong to these weights" in card


def test_an_untrained_network_measured_in_another_way_is_left_out(changed, network):
    edit(changed / "results_untrained.json", lambda found: found.update(precision="bf16-mixed"))
    card = model_card(changed, network, "x")
    assert rows(card, "Summary")[""] == ["this model", "by chance"]
    assert "no numbers of the untrained network, measured as the trained one" in card


def test_without_predictions_there_are_numbers_but_no_intervals(changed, network):
    def unmeasured(found):
        found["metrics"]["classification"]["by_finding"]["Pneumothorax"] = {"auc": None, "acc": None}
        del found["metrics"]["retrieval"]

    edit(changed / "results.json", unmeasured)
    card = model_card(changed, network, "x")
    assert "Without intervals, this model: mine/predictions/classification.parquet is missing" in card
    assert "[" not in rows(card, "Summary")["zero-shot classification: AUC"][0]
    assert rows(card, "Zero-shot classification by finding")["Pneumothorax"][1] == "–"
    limits = card.split("## Limits")[1]
    assert "Too few test cases for a number: Pneumothorax." in limits
    assert "Not measured: retrieval of phrases and boxes." in limits


def test_calibration_is_shown_where_the_run_has_one(changed, network, monkeypatch):
    (changed / "predictions").mkdir()
    (changed / "predictions/images.parquet").touch()
    monkeypatch.setattr("medclip_dcl.exchange.card.described", lambda run, missing: (None, []))
    findings = {
        "Edema": FindingCalibration(
            *(("No edema.",), ("Edema.",), 41, 82, 30, 40, "platt"),
            parameters={"temperature": 0.5, "offset": 0.1},
            threshold=0.3125,
            sensitivity=0.95,
            specificity=0.5,
        ),
        "Pneumonia": FindingCalibration(
            ("No pneumonia.",), ("Pneumonia.",), 2, 82, 2, 40, reason="2 patients"
        ),
    }
    data = {"images": 123, "patients": 45, "use": "validate", "folder": "a_set"}
    calibration = Calibration(network.fingerprint(), 14.0, {"sensitivity": 0.95}, data, findings)
    calibration.write(changed / "calibration.json")
    card = model_card(changed, network, "x", calibration)
    assert "fitted on 123 images, 45 patients (use validate) of a_set" in card and "sensitivity 0.95" in card
    table = rows(card, "By finding")
    assert table["Edema"] == ["platt", "0.312", "0.950", "0.500", "41", "82"]
    assert table["Pneumonia"] == ["–", "–", "–", "–", "2", "82"] and "Pneumonia: 2 patients." in card
    assert 'model.classify("chest.jpg", calibrated=True)' in card
    assert "no probabilities and thresholds" not in card
    assert "Nothing that this card has a place for." in card
    card = model_card(changed, network, "x")
    assert "calibration.json: is of other weights" in card and "### By finding" not in card


def test_the_example_is_of_the_models_own_findings(changed, network):
    prompts = {"Erguss": ["Kein Erguss.", ["Erguss.", "Pleuraerguß."]]}
    config = settings()
    config["trainer"]["callbacks"] = [
        {"class_path": "medclip_dcl.evaluation.ZeroShotClassification", "init_args": {"prompts": prompts}}
    ]
    (changed / "config.yaml").write_text(yaml.safe_dump(config))
    one = FindingCalibration(("Kein Erguss.",), ("Erguss.", "Pleuraerguß."), 1, 2, 1, 2, reason="2 patients")
    for calibration in (None, Calibration(network.fingerprint(), 14.0, {}, {}, {"Erguss": one})):
        card = model_card(changed, network, 'a "folder"', calibration)
        example = card.split("```python\n")[1].split("```")[0]
        assert '    "Erguss": [["Kein Erguss."], ["Erguss.", "Pleuraerguß."]],\n' in example
        assert 'heat_map("chest.jpg", "Erguss.")' in example and 'load("a \\"folder\\"")' in example
        assert "CheX5" not in example and "calibrated=True" not in example, "no finding is calibrated"
    both = Calibration(network.fingerprint(), 14.0, {}, {}, {"Erguss": one}, ensemble="embeddings")
    card = model_card(changed, network, "x", both)
    assert 'model.classify("chest.jpg", prompts, ensemble="embeddings")' in card


def test_own_classes_are_imported_by_the_example(changed, small_bert):
    text = BertSentences(str(small_bert), dim=16)
    card = model_card(changed, ImageTextNetwork(PatchRegions(), text, LSENonLocal(dim=16), 48), "x")
    assert "```python\nimport tests.small  # " in card


def test_subgroups_are_shown_where_there_are_any(changed, network, monkeypatch):
    cells = [Cell("0.71"), Cell("0.82")]
    table = Table("Sex", [Column("female"), Column("male")], [Row("AUC", "plain", cells)])
    groups = {"found": ["Sex, female: AUC -0.11"], "tables": [table]}
    monkeypatch.setattr("medclip_dcl.exchange.card.described", lambda run, missing: (groups, []))
    card = model_card(changed, network, "x")
    section = card.split("## Subgroups")[1].split("## Limits")[0]
    assert "- Sex, female: AUC -0.11" in section and rows(section, "Sex")["AUC"] == ["0.71", "0.82"]
    groups["found"] = []
    assert "which does not show that there is none" in model_card(changed, network, "x")
    monkeypatch.undo()
    card = model_card(changed, network, "x")
    missing = card.split("## Missing")[1]
    assert (
        "predictions/images.parquet: no numbers by view, sex and age; create it with: medclip-dcl test"
        in missing
    )


def test_a_pretrained_image_encoder_is_not_random():
    encoder = {"class_path": "medclip_dcl.networks.TransformersRegions"}
    for arguments, words in (({"pretrained": "/data/a/dinov2"}, "dinov2"), ({}, "random")):
        config = {"model": {"init_args": {"image_encoder": {**encoder, "init_args": arguments}}}}
        assert training_facts({}, config)["initial weights of the image encoder"] == words
