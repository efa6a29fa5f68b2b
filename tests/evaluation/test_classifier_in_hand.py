"""A trained classifier by load, ask, calibrate, export and page, against the LightningModule's own logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import write_table
from medclip_dcl.exchange.onnx_files import export_onnx
from medclip_dcl.pictures.inputs import as_grey, network_input
from medclip_dcl.runs.run_folder import IMAGES_FILE
from tests.evaluation.classifier_runs import FINDINGS, words
from tests.program import shell

ask = shell("ask")
calibrate = shell("calibrate")
export = shell("export")


@pytest.fixture(scope="module")
def run(labelled_set, encoder, undrawn, tmp_path_factory) -> Path:
    """Fine-tuned for nine steps; predictions of all train images."""
    run = tmp_path_factory.mktemp("runs") / "tuned"
    main(["fit", *words(run, labelled_set, encoder)])
    main(["predict", "--config", str(run / "config.yaml"), "--data.init_args.predict_use", "train"])
    (run / IMAGES_FILE).unlink()  # its training images serve as validate images below
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "classifier"
    load(run).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def validate_set(run, labelled_set, tmp_path_factory) -> Path:
    """`labelled_set` with validate images of 40 patients, whose labels the run's own logits mostly tell."""
    folder = shutil.copytree(labelled_set, tmp_path_factory.mktemp("calibration") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images["use"] = images["official_split"] = ["validate"] * 40 + ["test"] * 2
    images["subject_id"] = images["study_id"] = np.arange(42)
    write_table(images, folder / "images.parquet", "images")
    scores = load(run).classify([folder / "images" / path for path in images["path"][:40]])
    noisy = scores.rank() + np.random.default_rng(0).normal(0, 6, (40, 1))
    labels = pd.DataFrame(np.nan, images["study_id"], list(CHEXPERT))
    labels.loc[:39, "Edema"] = (noisy["Edema"].rank() > 20).to_numpy(float)
    labels.loc[:39, "Fracture"] = (noisy["Fracture"].rank() > 24).to_numpy(float)
    write_table(labels.reset_index(), folder / "labels.parquet", "labels")
    return folder


def logits(run: Path, folder: Path) -> pd.DataFrame:
    """Lightning's logits, by the images' paths."""
    found = pd.read_parquet(run / "predictions/finding_probabilities.parquet")
    images = pd.read_parquet(folder / "images.parquet").set_index("dicom_id")["path"]
    found["path"] = [str(folder / "images" / images[dicom_id]) for dicom_id in found["dicom_id"]]
    return found.pivot(index="path", columns="finding", values="logit")[list(FINDINGS)]


def test_load_gives_lightnings_logits(run, exported, probed, labelled_set):
    main(["predict", "--config", str(probed / "config.yaml")])
    for source in (probed, run, run / "checkpoints/best.ckpt", exported):
        expected = logits(probed if source == probed else run, labelled_set)
        assert len(expected) == (9 if source == probed else 24) and (expected.std() > 1e-3).all()
        model = load(source)
        found = model.classify(list(expected.index))
        assert list(found.columns) == list(FINDINGS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        vectors = model.embed_images(list(expected.index)[:3])
        assert vectors.shape == (3, 32) and np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3))
        assert model.classify([]).shape == (0, 3)
        text = "no text encoder; ask for its own findings, by classify .*Edema, Fracture, Support Devices"
        for question in (
            lambda model: model.similarity([], "edema"),
            lambda model: model.heat_map(Image.new("L", (32, 32)), "edema"),
            lambda model: model.embed_texts("edema"),
        ):
            with pytest.raises(UserError, match=f"{source} holds a classifier: it has {text}"):
                question(model)
        with pytest.raises(UserError, match="holds a classifier, which scores findings of its own"):
            model.classify([], {"Edema": ("no edema", "edema")})


@pytest.mark.parametrize("kind", [pytest.param("run", marks=pytest.mark.slow), "exported"])
def test_its_logits_are_calibrated(kind, run, exported, validate_set, tmp_path, capsys):
    source = shutil.copytree(run if kind == "run" else exported, tmp_path / "model")
    files = [str(file) for file in sorted((validate_set / "images").rglob("*.jpg"))]
    ask([str(source), *files, "--classify", "--output", str(tmp_path / "scores.csv")])
    scores = load(source).classify(files)
    found = pd.read_csv(tmp_path / "scores.csv", index_col="image")[list(FINDINGS)]
    np.testing.assert_allclose(found, scores, rtol=0, atol=2e-6)

    calibrate([str(source), str(validate_set), "--sensitivity", "0.8"])
    said = capsys.readouterr().out
    assert "Edema: 20 positive, 20 negative" in said and "Fracture: not calibrated: 16" in said
    assert "Support Devices: not calibrated: 0 patients" in said
    content = json.loads((source / "calibration.json").read_text())
    assert content["scale"] == 1 and content["findings"]["Edema"]["positive"] == []
    one = content["findings"]["Edema"]["parameters"]
    expected = 1 / (1 + np.exp(-(scores["Edema"] / one["temperature"] + one["offset"])))
    probabilities = load(source).classify(files, calibrated=True)
    np.testing.assert_allclose(probabilities["Edema"], expected, rtol=0, atol=1e-6)
    assert probabilities["Support Devices"].isna().all()
    ask([str(source), *files, "--classify", "--calibrated", "--output", str(tmp_path / "p.csv")])
    found = pd.read_csv(tmp_path / "p.csv", index_col="image")
    np.testing.assert_allclose(found["Edema"], expected, rtol=0, atol=1e-5)
    threshold = content["findings"]["Edema"]["threshold"]
    assert (found["Edema positive"] == (expected >= threshold).to_numpy(float)).all()
    load(source).save_pretrained(tmp_path / "again")
    pd.testing.assert_frame_equal(load(tmp_path / "again").classify(files, calibrated=True), probabilities)


@pytest.mark.slow
def test_run_checkpoint_and_export_count_the_same_cases(labelled_set, validate_set, encoder, tmp_path):
    """A classifier knows what its training's evaluation took an empty label for."""
    run, alone, folder = tmp_path / "zeros", tmp_path / "alone.ckpt", tmp_path / "exported"
    data = shutil.copytree(validate_set, tmp_path / "set")
    labels = pd.read_parquet(data / "labels.parquet").replace({"Edema": {0.0: np.nan}})
    write_table(labels, data / "labels.parquet", "labels")
    main(["fit", *words(run, labelled_set, encoder, "--trainer.max_epochs", "1", blank="zeros")])
    (run / IMAGES_FILE).unlink()
    shutil.copy(run / "checkpoints/best.ckpt", alone)
    load(run).save_pretrained(folder)
    cases = []
    for source in (run, alone, folder):
        calibrate([str(source), str(data), "--output", str(tmp_path / "calibration.json")])
        content = json.loads((tmp_path / "calibration.json").read_text())["findings"]
        cases.append({name: (one["n_positive"], one["n_negative"]) for name, one in content.items()})
    assert cases[0] == cases[1] == cases[2]
    assert cases[0] == {"Edema": (20, 20), "Fracture": (16, 24), "Support Devices": (0, 0)}


def test_an_export_has_a_card_and_its_logits(run, labelled_set, tmp_path, capsys):
    folder, expected = tmp_path / "exported", logits(run, labelled_set)
    export([str(run), "--output", str(folder)])
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card and "Edema, Fracture, Support Devices" in card
    assert "A classifier of chest radiographs" in card and "heat_map" not in card and "image-text" not in card
    np.testing.assert_allclose(load(folder).classify(list(expected.index)), expected, rtol=0, atol=1e-5)
    main(["test", "--config", str(run / "config.yaml"), "--ckpt_path", str(folder)])
    assert len([*(run / "tests").rglob("results.json")]) == 1
    for place, more in enumerate((["--text_encoder", str(tmp_path / "text")], ["--format", "transformers"])):
        with pytest.raises(SystemExit):
            export([str(run), "--output", str(tmp_path / f"other{place}"), *more])
        assert "classifier" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_its_onnx_file_gives_its_logits(run, labelled_set, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    expected, network = logits(run, labelled_set)[:5], load(run).network
    export_onnx(network, tmp_path)
    inputs = np.stack([network_input(as_grey(file), network.view) for file in expected.index])
    images = (inputs[:, None].repeat(3, axis=1) / 255).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "classifier.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["logits"], {"images": images})[0], expected, rtol=0, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["findings"]) == list(FINDINGS)


def test_the_page_shows_its_scores_without_sentences(exported, labelled_set):
    client = pytest.importorskip("starlette.testclient").TestClient
    from medclip_dcl.use.page.app import make_app

    page, file = (
        client(make_app(load(exported), "mine"), "http://localhost"),
        next(labelled_set.rglob("*.jpg")),
    )
    text = page.get("/").text
    assert "Logits of findings" in text and 'class="sentence" hidden' in text and "Heat maps" not in text
    opened = page.post("/image", content=file.read_bytes()).json()
    scores = {one["finding"]: one["score"] for one in opened["scores"]}
    assert scores == pytest.approx(load(exported).classify(file).iloc[0].to_dict(), abs=1e-5)
    question = {"image": opened["image"], "sentences": ["edema"], "threshold": None}
    answer = page.post("/maps", content=json.dumps(question))
    assert answer.status_code == 422 and "has no text encoder" in answer.json()["error"]
