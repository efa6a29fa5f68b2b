"""Unimodal training by the command line: training, the evaluation of features, its results, and what is refused."""

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
from jsonargparse import Namespace
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.command.network_of_checkpoint import take_network_from
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import SavedModel, read_model
from medclip_dcl.report.report import render
from medclip_dcl.runs.saved import SavedResultsError
from medclip_dcl.unimodal.data import UnimodalDataModule
from medclip_dcl.unimodal.network import UnimodalNetwork

CONFIGS = Path(__file__).resolve().parents[2] / "configs/unimodal"
CLASSES = ["0", "3", "5", "6"]


def words(run: Path, *more: str, **evaluation: Any) -> list[str]:
    """Arguments of a run of seconds on four classes of the digits, of which two are thinned."""
    options = {
        "label_fractions": [1.0, 0.2],
        "label_draws": 3,
        "k": 7,
        "average_k": [1, 3],
        "mean_labels": 5,
        "top_k": [1, 2],
        "embedding_map": True,
    }
    callback = {
        "class_path": "medclip_dcl.unimodal.UnimodalEvaluation",
        "init_args": {**options, "probe_learning_rate": 0.02, **evaluation},
    }
    own = run.parent / f"{run.name}.yaml"
    own.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    return [
        "--config", str(CONFIGS / "digits.yaml"),
        "--config", str(CONFIGS / "objective/dcl_true.yaml"),
        "--config", str(own),
        "--run_folder", str(run),
        "--trainer.max_epochs", "4",
        "--trainer.log_every_n_steps", "1",
        "--trainer.enable_progress_bar", "false",
        "--model.init_args.image_encoder.init_args.width", "6",
        "--data.init_args.classes", json.dumps(CLASSES),
        "--data.init_args.fraction", "0.5",
        "--data.init_args.batch_size", "64",
        *more,
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_maps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medclip_dcl.unimodal.evaluation._MAP_IMAGES", 40)
        yield


@pytest.fixture(scope="module")
def tested(small_maps, undrawn, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("unimodal") / "run"
    main(["fit", *words(run)])
    main(["test", "--config", str(run / "config.yaml")])
    return run


@pytest.fixture(scope="module")
def results(tested) -> dict[str, Any]:
    return json.loads((tested / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def features(tested) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and classes of training and test images, computed apart from the datamodule's loaders."""
    network = UnimodalNetwork.from_pretrained(tested / "checkpoints/last.ckpt")
    module = UnimodalDataModule(classes=CLASSES, fraction=0.5)
    module.load("test")
    images = module.chosen
    with torch.no_grad():
        train, test = (network.features(x / 255) for x in (images.train, images.test))
    return train, images.train_labels, test, images.test_labels


def test_a_run_leaves_what_is_documented(tested, results):
    assert {x.name for x in (tested / "checkpoints").iterdir()} == {
        "last.ckpt",
        "previous.ckpt",
        "untrained.ckpt",
    }
    assert {x.name for x in (tested / "predictions").iterdir()} == {
        "unimodal.parquet",
        "embedding_map.parquet",
    }
    assert results["checkpoint"]["file"] == "checkpoints/last.ckpt"
    assert results["dataset"]["classes"] == CLASSES and results["dataset"]["selected"] == ["5", "6"]
    kept = results["dataset"]["train_images"]
    assert (
        kept["5"] < 0.6 * kept["0"] and sum(kept.values()) == results["counts"]["unimodal"]["training_images"]
    )
    untrained = json.loads((tested / "results_untrained.json").read_text(encoding="utf-8"))
    assert untrained["dataset"] == results["dataset"] and untrained["protocol"] == results["protocol"]
    assert untrained["checkpoint"]["weights"] != results["checkpoint"]["weights"]
    metrics = pd.read_csv(tested / "metrics.csv")
    assert metrics["validate/knn_accuracy"].notna().sum() == 1
    assert (metrics["train/images_per_second"].dropna() > 0).all()
    assert metrics["train/class_probability"].iloc[0] == pytest.approx(1 / 4, abs=0.1)


def test_nearest_neighbours_are_scikit_learns(results, features):
    train, train_labels, test, test_labels = features
    neighbours = KNeighborsClassifier(7, weights=lambda x: np.exp((1 - x**2 / 2) / 0.5))
    neighbours.fit(normalize(train).numpy(), train_labels.numpy())
    found = results["metrics"]["unimodal"]["knn"]["accuracy"]
    assert found == pytest.approx(neighbours.score(normalize(test).numpy(), test_labels.numpy()), abs=1e-9)


def test_linear_probes_are_near_logistic_regression(results, features):
    train, train_labels, test, test_labels = features
    shift, scale = train.mean(0), train.std(0, correction=0)
    reference = LogisticRegression(max_iter=1000).fit(((train - shift) / scale).numpy(), train_labels.numpy())
    found = results["metrics"]["unimodal"]["linear_probe"]
    expected = reference.score(((test - shift) / scale).numpy(), test_labels.numpy())
    assert found["1.0"]["accuracy"] == pytest.approx(expected, abs=0.04) and expected > 0.8
    assert len(found["1.0"]["by_draw"]) == 1 and len(set(found["0.2"]["by_draw"])) > 1
    assert found["0.2"]["accuracy"] == pytest.approx(np.mean(found["0.2"]["by_draw"]))
    assert results["counts"]["unimodal"]["labels"]["0.2"] == pytest.approx(0.2 * len(train), abs=2)


def test_the_mean_classifier_is_a_loop(results, features):
    train, train_labels, test, test_labels = (normalize(x) if x.dim() == 2 else x for x in features)
    means = torch.stack([train[train_labels == c].double().mean(0) for c in range(4)])
    scores = test.double() @ means.T
    is_right = scores.argmax(1) == test_labels
    by_class = [is_right[test_labels == c].double().mean().item() for c in range(4)]
    found = results["metrics"]["unimodal"]
    assert found["mean_classifier"]["accuracy"] == pytest.approx(np.mean(by_class), abs=1e-6)
    # Three rivals of four classes: the task of all.
    assert found["average_k"]["3"] == pytest.approx(found["mean_classifier"], abs=1e-9)
    deviations, counts = [], test_labels.bincount().double()
    for c in range(4):
        covariance = torch.cov(test[test_labels == c].double().T, correction=0)
        deviations.append(torch.linalg.eigvalsh(covariance)[-1].sqrt())
    deviation = counts**2 @ torch.stack(deviations) / (counts**2).sum()
    assert found["intraclass_deviation"] == pytest.approx(deviation.item(), rel=1e-6)


def test_accuracies_of_classifiers_are_loops(results, features):
    train, train_labels, test, test_labels = (normalize(x) if x.dim() == 2 else x for x in features)
    found = results["metrics"]["unimodal"]["classifiers"]
    assert set(found) == {"linear_probe", "mean", "mean_5"}
    assert {*found["mean"]} == {"avg_2", "avg_4", "top_1", "top_2"}
    probe = results["metrics"]["unimodal"]["linear_probe"]["1.0"]["accuracy"]
    assert found["linear_probe"]["top_1"] == pytest.approx(probe)
    average = results["metrics"]["unimodal"]["average_k"]["1"]["accuracy"]
    assert found["mean"]["avg_2"] == pytest.approx(average, abs=1e-6)
    means = torch.stack([train[train_labels == c].double().mean(0) for c in range(4)])
    for k in (1, 2):
        expected = top_k_accuracy_score(test_labels, test.double() @ means.T, k=k, labels=range(4))
        assert found["mean"][f"top_{k}"] == pytest.approx(expected, abs=5e-3)
    few = []
    for draw in range(3):
        order = np.random.default_rng([0, draw, 2]).permutation(len(train_labels))
        rows = [[i for i in order if train_labels[i] == c][:5] for c in range(4)]
        few.append(test @ torch.stack([train[of_class].mean(0) for of_class in rows]).T)
    expected = np.mean([top_k_accuracy_score(test_labels, x, k=1, labels=range(4)) for x in few])
    assert found["mean_5"]["top_1"] == pytest.approx(expected, abs=5e-3) and len({*map(str, few)}) == 3


def test_predict_names_what_to_use_instead(tested, capsys):
    with pytest.raises(SystemExit) as end:
        main(["predict", "--config", str(tested / "config.yaml")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "UnimodalDataModule has no images to predict; `test` writes" in said


def test_predictions_hold_the_accuracies(tested, results, features):
    rows = pd.read_parquet(tested / "predictions/unimodal.parquet")
    found = results["metrics"]["unimodal"]
    train_labels, test_labels = features[1], features[3]
    assert rows["class"].tolist() == [CLASSES[c] for c in test_labels]
    assert rows["index"].tolist() == list(range(len(train_labels), len(train_labels) + len(test_labels)))
    is_right = rows["linear_probe"] == rows["class"]
    assert is_right.mean() == pytest.approx(found["linear_probe"]["1.0"]["accuracy"])
    is_selected = rows["class"].isin(["5", "6"])
    assert is_right[is_selected].mean() == pytest.approx(found["linear_probe_selected"]["1.0"]["accuracy"])
    assert is_right[~is_selected].mean() == pytest.approx(found["linear_probe_others"]["1.0"]["accuracy"])
    assert (rows["knn"] == rows["class"]).mean() == pytest.approx(found["knn"]["accuracy"])
    by_class = (rows["mean_classifier"] == rows["class"]).groupby(rows["class"]).mean()
    assert by_class.mean() == pytest.approx(found["mean_classifier"]["accuracy"])
    placed = pd.read_parquet(tested / "predictions/embedding_map.parquet")
    assert len(placed) == 40 and np.isfinite(placed[["x", "y"]]).all(axis=None)
    both = placed.merge(rows, on="index", suffixes=("", "_of_rows"))
    assert (both["class"] == both["class_of_rows"]).all() and (
        both["is_selected"] == both["class"].isin(["5", "6"])
    ).all()


@pytest.mark.slow
def test_testing_again_gives_the_same_results(tested, results, tmp_path):
    run = shutil.copytree(tested, tmp_path / "run")
    (run / "results_untrained.json").unlink()
    main(["test", "--config", str(run / "config.yaml"), "--run_folder", str(run), "--untrained", "false"])
    again = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert {**again, "timings": 0} == {**results, "timings": 0}
    assert not (run / "results_untrained.json").exists()


def test_reports_refuse_a_unimodal_run(tested):
    with pytest.raises(
        SavedResultsError,
        match="expected a test on a prepared set, found one on digits; embedding_map, unimodal: its numbers",
    ):
        render(tested)
    with pytest.raises(UserError, match="found unimodal"):
        load(tested)


@pytest.mark.slow
def test_a_test_limited_to_some_batches_says_so(tested, tmp_path, capsys):
    run = shutil.copytree(tested, tmp_path / "run")
    options = ["--config", str(run / "config.yaml"), "--run_folder", str(run), "--untrained", "false"]
    for batches, is_evaluated, note in [
        (1, False, "unimodal: 297 of 361 train images were not evaluated"),
        (9, True, "unimodal: 26 of 241 test images were not evaluated"),
    ]:
        main(["test", *options, "--trainer.limit_test_batches", str(batches)])
        found = json.loads((run / "tests" / "limited" / "results.json").read_text(encoding="utf-8"))
        assert bool(found["metrics"]["unimodal"]) == is_evaluated
        assert found["notes"]["unimodal"][0].startswith(note)


@pytest.mark.parametrize(
    "more, evaluation, message",
    [
        pytest.param((), {"average_k": [4]}, "1 to 3 rivals for 4 classes, found 4", marks=pytest.mark.slow),
        ((), {"k": 0}, "UnimodalEvaluation.k: expected at least 1, found 0"),
        pytest.param(
            ("--model.init_args.image_encoder.init_args.channels", "3"),
            {},
            "channels: expected 1, those of",
            marks=pytest.mark.slow,
        ),
        (
            (
                *("--config", str(CONFIGS / "objective/logistic.yaml")),
                *("--model.init_args.objective.init_args.k", "64"),
            ),
            {},
            "data.batch_size: expected at least 65, as Blocks needs, found 64",
        ),
    ],
)
def test_mistakes_end_with_one_line(more, evaluation, message, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *words(run, *more, **evaluation)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not run.exists()


def test_a_checkpoint_of_another_kind_is_refused(tested, tmp_path):
    """Without text, nothing is said of starting a classifier from it."""
    source = read_model(tested / "checkpoints/last.ckpt")
    radiographs = Namespace(class_path="medclip_dcl.models.Classifier", init_args=Namespace())
    with pytest.raises(UserError, match=r"expected kind classifier, as of model .*, found unimodal$"):
        take_network_from(source, radiographs)
    language_model = SavedModel(tested, checkpoint={"language_model": {}})
    with pytest.raises(UserError, match="found language model; score, embed and similar take it"):
        take_network_from(language_model, radiographs)
    other = Namespace(class_path="medclip_dcl.unimodal.UnimodalModel", init_args=Namespace(hidden=3))
    take_network_from(source, other)
    assert other.init_args.hidden is None and other.init_args.image_encoder.init_args.width == 6
