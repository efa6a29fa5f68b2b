"""A classifier by the command line: its run folder, its numbers, their intervals, the report, comparisons, resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from medclip_dcl.command.cli import main
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.report.charts import CURVES
from medclip_dcl.report.compare import compare, write_comparison
from medclip_dcl.report.draws import bootstrap_intervals
from medclip_dcl.report.report import render
from tests.evaluation.classifier_runs import results, words
from tests.program import verb

pytestmark = pytest.mark.usefixtures("few_draws")
TUNED = ("--model.init_args.balanced", "true", "--model.init_args.frozen_steps", "4")


@pytest.fixture(scope="module")
def tuned(labelled_set, encoder, undrawn, tmp_path_factory) -> Path:
    """A fine-tuned run, tested where its source is gone, and predicted."""
    run, source = tmp_path_factory.mktemp("runs") / "tuned", tmp_path_factory.mktemp("gone") / "source.ckpt"
    shutil.copy(encoder, source)
    main(["fit", *words(run, labelled_set, source, *TUNED)])
    source.unlink()
    for command in ("test", "predict"):
        main([command, "--config", str(run / "config.yaml")])
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_another_size_than_the_sources_is_said(labelled_set, encoder, tmp_path):
    other = ["--data.init_args.image_size", "48", "--trainer.max_epochs", "1"]
    with pytest.warns(
        UserWarning, match=r"trained on images of 32 pixels, data.image_size is 48.* null takes 32"
    ):
        main(["fit", *words(tmp_path / "run", labelled_set, encoder, *other, probe=True)])
    main(["test", "--config", str(tmp_path / "run/config.yaml")])
    trained = {"image_size": 48, "geometry": "stretch", "prepared_size": None, "image_size_before": 32}
    assert results(tmp_path / "run")["images"]["trained"] == trained
    assert "48 pixels, started from weights of 32" in render(tmp_path / "run")


def test_a_run_keeps_sizes_without_its_source(tuned, labelled_set, encoder, caplog):
    gone = yaml.safe_load((tuned / "config.yaml").read_text())["model"]["init_args"]["init_from"]
    with caplog.at_level("INFO"):
        main(["fit", *words(tuned, labelled_set, Path(gone), *TUNED)])
    assert "nothing to do" in caplog.text


def test_a_run_folder_of_a_classifier(tuned):
    names = {path.name for path in tuned.iterdir()}
    assert names == {
        "config.yaml", "data.json", "checkpoints", "metrics.csv", "fit.json", "results.json", "predictions", "figures",
        "initial_weights.json", "data_images.parquet",
    }  # fmt: skip
    assert {path.name for path in (tuned / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    }
    metrics = pd.read_csv(tuned / "metrics.csv")
    assert metrics["train/loss"].count() == 9 and metrics["validate/auc"].count() == 3
    assert {
        "validate/average_precision",
        "validate/acc",
        "validate/loss",
        "validate/auc_support_devices",
    } <= set(metrics)
    assert (
        metrics["train/learning_rate_image_encoder"].dropna() < metrics["train/learning_rate"].dropna()
    ).all()
    drawn = {name for names in CURVES.values() for name in names}
    assert {name for name in map(str, metrics) if name.startswith("train/learning_rate")} <= drawn


@pytest.mark.parametrize(("name", "crop"), [("tuned", 24), ("probed", None)])
def test_a_run_is_its_sources_and_its_best(name, crop, request):
    run = request.getfixturevalue(name)
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]
    assert (data["image_size"], data["crop_size"]) == (32, crop)
    assert results(run)["images"]["shown"] == {
        **{"image_size": 32, "geometry": "stretch"},
        "prepared_size": None,
    }
    aucs = pd.read_csv(run / "metrics.csv")["validate/auc"].dropna().tolist()
    best = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    assert best["global_step"] == 3 * (1 + aucs.index(max(aucs)))
    assert results(run)["checkpoint"]["file"] == "checkpoints/best.ckpt"


def test_numbers_are_scikit_learns_of_the_predictions(tuned, labelled_set):
    found, cases = results(tuned), pd.read_parquet(tuned / "predictions/finding_classification.parquet")
    metrics = found["metrics"]["finding_classification"]
    edema = cases[cases["finding"] == "Edema"]
    assert edema["label"].tolist() == [1, 0, 0, 1, 1, 0, 1] and cases["dicom_id"].nunique() == 9
    expected = {
        "auc": roc_auc_score(edema["label"], edema["logit"]),
        "average_precision": average_precision_score(edema["label"], edema["logit"]),
        "acc": ((edema["logit"] > 0) == (edema["label"] == 1)).mean(),
        "balanced_acc": balanced_accuracy_score(edema["label"], edema["logit"] > 0),
    }
    nothing = {"auc": None, "average_precision": None, "acc": None, "balanced_acc": None}
    assert metrics["by_finding"]["Edema"] == pytest.approx(expected)
    assert metrics["by_finding"]["Fracture"] == metrics["by_finding"]["Support Devices"] == nothing
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    counts = found["counts"]["finding_classification"]["by_finding"]
    assert metrics["n_findings"] == 1 and counts["Fracture"] == {"positives": 1, "negatives": 7}
    note = "Fracture: no AUC and accuracy from 1 positive and 7 negative cases; at least 2 of each are needed"
    assert note in found["notes"]["finding_classification"][0]
    model = Classifier.load_from_checkpoint(tuned / "checkpoints/best.ckpt")
    assert model.network.image_size == 32 and (model.positive_weight != 1).any()
    patients = pd.read_parquet(labelled_set / "images.parquet").set_index("dicom_id")["subject_id"]
    assert (patients[cases["dicom_id"]].to_numpy() == cases["subject_id"]).all()


def test_a_blank_may_be_a_negative_case(labelled_set, tuned, tmp_path):
    run = shutil.copytree(tuned, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["callbacks"][0]["init_args"]["blank"] = "zeros"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    main(["test", "--config", str(run / "config.yaml"), "--run_folder", str(run)])
    found = results(run)
    counts = found["counts"]["finding_classification"]["by_finding"]
    # The wholly blank study is no case of anything.
    assert counts["Support Devices"] == {"positives": 4, "negatives": 4}
    assert counts["Edema"] == {"positives": 4, "negatives": 4}
    assert found["metrics"]["finding_classification"]["by_finding"]["Support Devices"]["auc"] is not None


def test_predictions_are_probabilities_of_the_tested_images(tuned):
    found = pd.read_parquet(tuned / "predictions/finding_probabilities.parquet")
    cases = pd.read_parquet(tuned / "predictions/finding_classification.parquet")
    assert len(found) == 9 * 3 and list(found)[:3] == ["dicom_id", "subject_id", "study_id"]
    merged = cases.merge(found, on=["dicom_id", "finding"], suffixes=("", "_predicted"))
    assert len(merged) == len(cases)
    assert merged["logit_predicted"].to_numpy() == pytest.approx(merged["logit"].to_numpy(), abs=1e-5)
    assert found["probability"].to_numpy() == pytest.approx(1 / (1 + np.exp(-found["logit"])), abs=1e-6)


def test_a_probe_keeps_the_checkpoints_encoder(probed, encoder):
    source = torch.load(encoder, weights_only=True)["state_dict"]
    for name in ("best", "last"):
        state = torch.load(probed / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"]
        own = {key for key in state if key.startswith("network.image_encoder.")}
        assert len(own) > 60
        for key in own:
            assert torch.equal(state[key], source[key]), key
        assert not (state["network.feature_std"] == 1).any()
    assert "train/learning_rate_image_encoder" not in pd.read_csv(probed / "metrics.csv")


def test_intervals_have_every_number(tuned):
    found = bootstrap_intervals(tuned, n_draws=60)
    metrics = results(tuned)["metrics"]["finding_classification"]
    for name in ("auc", "average_precision", "acc"):
        one = found[f"finding_classification/by_finding/Edema/{name}"]
        assert one.value == pytest.approx(metrics["by_finding"]["Edema"][name], abs=1e-6)
        assert one.low is None and one.n_patients is not None and one.n_patients < 20
        assert found[f"finding_classification/by_finding/Fracture/{name}"].value is None
        assert found[f"finding_classification/{name}"] == one, "the mean over Edema alone"


def test_the_report_shows_what_a_classifier_has(tuned):
    html = render(tuned)
    assert "labelled positive or negative" in html and "labeller" not in html
    for title in ("AUC", "average precision", "accuracy"):
        assert f"Classification of findings, {title}" in html
    assert "4 / 3" in html and "Fracture: no AUC and accuracy" in html and "validate AUC" in html
    for other in ("Zero-shot", "Table 1", "untrained", "class_probability", "Heat maps", "MedR"):
        # The configuration, which is shown, has an option of that name.
        assert other not in html.replace("untrained: true", ""), other


def test_two_classifiers_are_compared_by_finding(tuned, probed, tmp_path):
    comparison = compare([tuned, probed], baseline="probe", n_draws=60)
    markdown = write_comparison(comparison, tmp_path)
    assert "Classification of findings, average precision" in markdown and "tuned − probe" in markdown
    expected, baseline = (results(run)["metrics"]["finding_classification"]["auc"] for run in (tuned, probed))
    found = comparison.differences["tuned"]["finding_classification/auc"].value
    assert found == pytest.approx(expected - baseline, abs=1e-6)


@pytest.mark.slow
def test_an_interrupted_run_continues_without_its_source(tuned, labelled_set, encoder, tmp_path):
    source, run = tmp_path / "source.ckpt", tmp_path / "run"
    shutil.copy(encoder, source)

    class Killed(Exception):
        pass

    def kill(self, *_: Any) -> None:
        if self.current_epoch == 2:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", kill)
        with pytest.raises(Killed):
            main(["fit", *words(run, labelled_set, source, *TUNED)])
    source.unlink()
    main(["fit", *words(run, labelled_set, source, *TUNED)])
    a, b = (torch.load(x / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for x in (tuned, run))
    for name in a:
        assert torch.equal(a[name], b[name]), name
    first, second = (pd.read_csv(x / "metrics.csv")["train/loss"].dropna().tolist() for x in (tuned, run))
    assert first == second and len(first) == 9
    network = Classifier.load_from_checkpoint(run / "checkpoints/last.ckpt").network
    assert network.mean.flatten().tolist() == pytest.approx([0.3] * 3)


def test_a_run_from_nothing_on_one_finding(labelled_set, tmp_path):
    """On a laptop, with half of the training patients."""
    run = tmp_path / "run"
    settings: dict[str, dict[str, Any]] = {
        "model": {"encoder_learning_rate": "null", "findings": '["Edema"]'},
        "data": {"image_size": 32, "crop_size": "null", "label_fraction": 0.5, "uncertain": "zeros"},
    }
    more = [f"--{part}.init_args.{key}={x}" for part, own in settings.items() for key, x in own.items()]
    more = ["--config", "laptop", "--run_folder", str(run), "--trainer.max_epochs", "1", *more]
    main(["fit", *words(run, labelled_set, None, *more)])
    trained = Classifier.load_from_checkpoint(run / "checkpoints/last.ckpt")
    assert trained.findings == ("Edema",) and trained.network.image_encoder.width == 32
    assert json.loads((run / "fit.json").read_text())["train_patients"] == 6


def error_of(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_errors_are_lines_that_say_the_remedy(labelled_set, encoder, tmp_path, capsys):
    run = tmp_path / "run"
    for more, message in (
        (["--model.init_args.findings", '["Oedema"]'], "does not label 'Oedema'; did you mean Edema?"),
        (
            ["--data.init_args.label_fraction", "0.01", "--data.init_args.blank", "ignore"],
            "have none of one kind for",
        ),
    ):
        assert message in error_of(["fit", *words(run, labelled_set, encoder, *more)], capsys)
        shutil.rmtree(run, ignore_errors=True)
    folder = shutil.copytree(labelled_set, tmp_path / "set")
    (folder / "labels.parquet").unlink()
    assert "has no table labels.parquet" in error_of(["fit", *words(run, folder, encoder)], capsys)


def test_another_kind_of_checkpoint_is_refused(tuned, small_bert, tmp_path, capsys):
    from medclip_dcl.networks.image_text import ImageTextNetwork
    from medclip_dcl.networks.text_encoder import BertSentences

    network = ImageTextNetwork(
        ResNetRegions(dim=5, stride=16, width=8), BertSentences(str(small_bert), dim=5), None
    )
    network.save_pretrained(tmp_path / "exported")
    message = error_of(
        ["test", "--config", str(tuned / "config.yaml"), "--ckpt_path", str(tmp_path / "exported")], capsys
    )
    assert (
        "exported: expected kind classifier, as of model medclip_dcl.models.Classifier, found image-text"
        in message
    )
    assert "give it as model.init_args.init_from" in message


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_real_x_rays_with_real_labels(real_data, encoder, tmp_path):
    """Fine-tuning on real images in MIMIC-CXR's layout; the test is what the release's labels allow."""
    source = real_data / "real_cxr"
    boxes = source / "MS_CXR_Local_Alignment_v1.0.0.json"
    options = ["--ms_cxr", str(boxes), "--size", "64", "--workers", "1"]
    verb("prepare mimic-cxr")(["--source", str(source), "--output", str(tmp_path / "set"), *options])
    labels = pd.read_parquet(tmp_path / "set/labels.parquet")
    images = pd.read_parquet(tmp_path / "set/images.parquet")
    train = images.query("use == 'train'").merge(labels, on="study_id")
    findings = [f for f in CHEXPERT if (train[f] == 1).any() and ((train[f] == 0) | train[f].isna()).any()]
    more = ["--model.init_args.findings", json.dumps(findings[:3]), "--trainer.max_epochs", "1"]
    main(["fit", *words(tmp_path / "run", tmp_path / "set", encoder, *more, blank="zeros")])
    main(["test", "--config", str(tmp_path / "run/config.yaml")])
    found = results(tmp_path / "run")
    assert found["dataset"]["phantom"] is False
    assert found["counts"]["finding_classification"]["images"] > 0
