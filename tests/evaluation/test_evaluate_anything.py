"""`test` and `load` on an exported folder, and BioViL's published weights from end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.prepared import write_table
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.report.report import render
from tests.command.small_runs import CLASSIFICATION
from tests.exchange.test_biovil import image_state, write_text_folder
from tests.program import verb

convert = verb("convert")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("undrawn")


def arguments(run: Path, folder: Path, small_set: Path, *more: str) -> list[str]:
    return [
        "test",
        "--config", str(ROOT / "configs/demo.yaml"),
        "--run_folder", str(run),
        "--ckpt_path", str(folder),
        "--trainer.enable_progress_bar", "false",
        "--trainer.accelerator", "cpu",
        "--trainer.precision", "32-true",
        "--data.init_args.folder", str(small_set),
        "--data.init_args.image_size", "64",
        "--data.init_args.crop_size", "64",
        *more,
    ]  # fmt: skip


def assert_results_are_the_loaded_models(run: Path, folder: Path, small_set: Path) -> None:
    """The scores in predictions/ are what `load` gives for the same prepared images."""
    images = pd.read_parquet(small_set / "images.parquet").set_index("dicom_id")
    found = pd.read_parquet(run / "predictions/classification.parquet")
    dicom_id = found["dicom_id"].iloc[0]
    model = load(folder)
    difference = model.classify(small_set / "images" / images.loc[dicom_id, "path"])
    mine = found[found["dicom_id"] == dicom_id].set_index("finding")
    for finding in CHEX5:
        expected = (mine["score_positive"] - mine["score_negative"])[finding]
        assert difference[finding].iloc[0] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def exported(small_bert, tmp_path_factory) -> Path:
    """An export whose normalisation is not the usual one."""
    torch.manual_seed(0)
    image, text = ResNetRegions(dim=16, stride=16, width=8), BertSentences(str(small_bert), dim=16)
    network = ImageTextNetwork(image, text, LSENonLocal(dim=16), image_size=64, mean=[0.3] * 3, std=[0.7] * 3)
    folder = tmp_path_factory.mktemp("export") / "model"
    network.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:test. ")
def test_an_exported_folder_is_tested(exported, small_set, tmp_path):
    run = tmp_path / "run"
    prompts = {"Edema": ["No edema", ["Edema", "Mild edema."]]}
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    options = {
        "ZeroShotClassification": {"prompts": str(tmp_path / "prompts.yaml")},
        "Grounding": {"heat_map_size": "model", "smoothing": 2},
    }
    callbacks = [
        {"class_path": f"medclip_dcl.evaluation.{name}", "init_args": options.get(name, {})}
        for name in ("ZeroShotClassification", "Grounding", "Retrieval")
    ]
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    main(arguments(run, exported, small_set, "--config", str(tmp_path / "protocol.yaml")))
    results = json.loads((run / "results.json").read_text())
    protocol = results["protocol"]
    assert protocol["classification"]["prompts"] == {
        "Edema": {"negative": "No edema", "positive": ["Edema", "Mild edema."]}
    }
    assert protocol["grounding"]["heat_map_size"] == "model"
    assert protocol["grounding"]["pixels"] == [[64, 64]] and protocol["grounding"]["smoothing"] == 2.0
    assert results["checkpoint"]["file"] == "model"
    assert not (run / "results_untrained.json").exists()
    assert results["counts"]["grounding"]["boxes"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:test. ")
def test_a_set_of_reports_alone_is_tested(exported, small_set, tmp_path):
    folder = shutil.copytree(small_set, tmp_path / "set")
    (folder / "boxes.parquet").unlink()
    write_table(pd.read_parquet(folder / "cases.parquet")[:0], folder / "cases.parquet", "cases")
    run = tmp_path / "run"
    main(arguments(run, exported, folder))
    results = json.loads((run / "results.json").read_text())
    assert (
        results["metrics"]["classification"]["auc"] is None
        and results["metrics"]["retrieval"]["recall"] is None
    )
    assert results["metrics"]["report_retrieval"]["image_report"]["medr"] >= 1
    assert results["counts"]["report_retrieval"]["reports"] == results["dataset"]["images"] == 6
    notes = {note for section in results["notes"].values() for note in section}
    assert len(notes) == 2 and not any("0 positive" in note for note in notes)
    assert "Report retrieval" in render(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:test. ")
def test_image_size_defaults_to_the_networks(exported, small_set, tmp_path):
    config = json.loads((exported / "config.json").read_text())
    again = shutil.copytree(exported, tmp_path / "again")
    with pytest.warns(UserWarning, match="trained on images of 64 pixels, data.image_size is 96"):
        main(
            arguments(
                tmp_path / "run", exported, small_set, "--data.init_args.image_size", "96", *CLASSIFICATION
            )
        )
    images = json.loads((tmp_path / "run/results.json").read_text())["images"]
    assert (images["trained"]["image_size"], images["shown"]["image_size"]) == (64, 96)
    (again / "config.json").write_text(json.dumps({**config, "image_size": 96}))
    assert_results_are_the_loaded_models(tmp_path / "run", again, small_set)
    (again / "config.json").write_text(json.dumps({**config, "image_size": 80, "crop_size": 48}))
    main(
        arguments(tmp_path / "run", again, small_set, "--data.init_args.image_size", "null", *CLASSIFICATION)
    )
    images = json.loads((tmp_path / "run/results.json").read_text())["images"]
    assert images["trained"]["image_size"] == images["shown"]["image_size"] == 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:test. ")
def test_biovils_weights_from_the_published_names_to_results(small_bert, small_set, tmp_path, capsys):
    text, run, folder = (
        write_text_folder(small_bert, tmp_path / "text"),
        tmp_path / "run",
        tmp_path / "biovil",
    )
    torch.save(image_state(), tmp_path / "image.pt")
    convert([str(tmp_path / "image.pt"), "--text_encoder", str(text), "--output", str(folder)])
    assert "Converted from image.pt" in (folder / "README.md").read_text()
    shutil.rmtree(text)  # the export needs no file of theirs
    with pytest.warns(UserWarning, match="trained on images of 512 pixels, data.image_size is 64"):
        main(arguments(run, folder, small_set, *CLASSIFICATION))
    results = json.loads((run / "results.json").read_text())
    assert results["protocol"]["classification"]["final_period"] is False  # as the original
    config = json.loads((folder / "config.json").read_text())
    assert config["similarity"]["class_path"] == "medclip_dcl.networks.GlobalCosine"
    # `load` shows images at the export's own size.
    config["image_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    assert_results_are_the_loaded_models(run, folder, small_set)
    assert np.abs(load(folder).heat_map(np.zeros((70, 90), np.uint8), "edema")).max() <= 1
