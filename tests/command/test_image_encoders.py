"""Runs with an image encoder of transformers: whole, on frozen features, as a classifier; its folder is not kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from transformers import Dinov2Config, Dinov2Model

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.command.network_of_checkpoint import take_network_from
from medclip_dcl.common.formats import CHECKPOINT, VERSION_KEY
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.networks import BertSentences, ImageTextNetwork, LSENonLocal
from tests.command.small_runs import ROOT, refused, small
from tests.program import shell, verb
from tests.small import PatchRegions

encode = verb("encode")
export = shell("export")

ENCODER = "--model.init_args.image_encoder"
OWN = [ENCODER, "TransformersRegions", f"{ENCODER}.init_args.pretrained"]


@pytest.fixture
def dinov2(tmp_path: Path) -> Path:
    folder = tmp_path / "dinov2"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24}
    Dinov2Model(Dinov2Config(patch_size=8, **sizes)).save_pretrained(folder)
    settings = {"image_mean": [0.53] * 3, "image_std": [0.26] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("has_global_vector", [False, True])
def test_the_whole_way(dinov2, small_set, small_bert, tmp_path, capsys, has_global_vector):
    folder, run, exported = (tmp_path / name for name in ("set", "run", "exported"))
    shutil.copytree(small_set, folder)
    own = [*OWN, str(dinov2)]
    if has_global_vector:
        own += [f"{ENCODER}.init_args.global_vector", "true"]
        own += ["--model.init_args.similarity", "medclip_dcl.networks.GlobalCosine"]
    words = small(run, folder, small_bert, objective="infonce", resnet=True) + own
    said = refused(capsys, ["fit", *words, "--data.init_args.crop_size", "36"])
    assert "data.crop_size: expected a multiple of the image encoder's patch, 8 pixels, found 36" in said
    assert not run.exists()
    main(["fit", *words])
    # On which images the published encoder was trained is not known.
    assert json.loads((run / "data.json").read_text())["images_of"] == ["test", None]
    shutil.move(dinov2, tmp_path / "elsewhere")
    main(["test", "--config", str(run / "config.yaml")])
    found = json.loads((run / "results.json").read_text())["metrics"]
    assert set(found) > {"classification", "grounding", "retrieval"}
    model = load(run)
    assert model.network.mean.flatten().tolist() == pytest.approx([0.53] * 3)
    export([str(run), "--output", str(exported)])
    assert "model_type dinov2" in (exported / "README.md").read_text()
    encode([str(exported), str(folder), "--device", "cpu"])
    (name,) = (file.name for file in (folder / "features").iterdir())
    shutil.move(tmp_path / "elsewhere", dinov2)
    heads = small(tmp_path / "heads", folder, small_bert, objective="infonce", resnet=True, heads=True) + own
    text = "--model.init_args.text_encoder.init_args."
    heads += [f"{text}max_tokens", "64", f"{text}pooling", "mean", "--data.init_args.features", name]
    main(["fit", *heads, "--model.init_args.init_from", str(exported)])
    main(["test", "--config", str(tmp_path / "heads/config.yaml")])
    on_features = json.loads((tmp_path / "heads/results.json").read_text())["metrics"]
    main(["test", "--config", str(tmp_path / "heads/config.yaml"), "--data.init_args.features", "null"])
    on_images = json.loads((tmp_path / "heads/results.json").read_text())["metrics"]
    expected = on_images["grounding"]["cnr"]
    assert on_features["grounding"]["cnr"] == pytest.approx(expected, abs=2e-3)
    tuned = ["--config", str(ROOT / "configs/finetune.yaml"), "--run_folder", str(tmp_path / "tuned")]
    tuned += ["--data.init_args.folder", str(folder), "--data.init_args.crop_size", "40"]
    tuned += ["--data.init_args.num_workers=0", "--trainer.max_epochs=1", "--trainer.precision=32-true"]
    tuned += ["--model.init_args.init_from", str(exported), "--model.init_args.layer_decay", "0.5"]
    main(["fit", *tuned])
    main(["test", "--config", str(tmp_path / "tuned/config.yaml")])
    assert (tmp_path / "tuned/results.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("decay", ["null", "0.5"])
def test_adapters_are_merged_after_training(dinov2, small_set, small_bert, tmp_path, decay):
    run, exported = tmp_path / "run", tmp_path / "exported"
    own = [*OWN, str(dinov2)]
    words = small(run, small_set, small_bert, "--ema_decay", decay, objective="infonce", resnet=True) + own
    main(["fit", *words, "--model.init_args.lora.rank", "4"])
    shutil.rmtree(dinov2)
    main(["test", "--config", str(run / "config.yaml")])
    export([str(run), "--output", str(exported)])
    found = load(exported).network.fingerprint()["weights"]
    assert found == load(run).network.fingerprint()["weights"]
    assert json.loads((run / "results.json").read_text())["checkpoint"]["weights"] == found
    assert (run / "results_untrained.json").is_file()
    assert "LoRA" in (exported / "README.md").read_text()


def test_fit_refuses_a_mean_in_grey_levels(dinov2, small_set, small_bert, tmp_path, capsys):
    """Before a finished run is opened again, too."""
    own, run, old = [*OWN, str(dinov2)], tmp_path / "run", tmp_path / "old.ckpt"
    words = ["fit", *small(run, small_set, small_bert, objective="infonce", resnet=True)]
    network = ImageTextNetwork(PatchRegions(), BertSentences(str(small_bert), dim=16), LSENonLocal(dim=16))
    described = {**network.config(), "std": [57.0, 58.0, 59.0]}
    torch.save({VERSION_KEY: CHECKPOINT.version, "network": described, "state_dict": {}}, old)
    assert "old.ckpt: mean and std: " in refused(capsys, [*words, "--ckpt_path", str(old)])
    settings = {"image_mean": [127.5] * 3, "image_std": [64] * 3}
    (dinov2 / "preprocessor_config.json").write_text(json.dumps(settings))
    assert "found 127.5; divide" in refused(capsys, [*words, *own])
    assert not run.exists()


def test_a_continued_run_keeps_gradient_checkpointing():
    """It is a setting of the training, which no checkpoint describes."""
    name = "medclip_dcl.networks.TransformersRegions"
    described: dict[str, Any] = {
        "kind": "image-text",
        "image_encoder": {"class_path": name, "init_args": {"architecture": {"model_type": "vit"}, "dim": 8}},
    }
    own = Namespace(pretrained="folder that is gone", gradient_checkpointing=True)
    encoder = Namespace(class_path=name, init_args=own)
    model = Namespace(
        class_path="medclip_dcl.models.ImageTextModel", init_args=Namespace(image_encoder=encoder)
    )
    take_network_from(SavedModel(Path("run/last.ckpt"), described), model)
    found = model.init_args.image_encoder.init_args.as_dict()
    assert found == {**described["image_encoder"]["init_args"], "gradient_checkpointing": True}
