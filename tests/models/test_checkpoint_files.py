"""Checkpoints load anywhere; others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medclip_dcl import load
from medclip_dcl.common.formats import CHECKPOINT
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import MaskedLanguageModel
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from tests.models.test_image_text import trainer as quick


def test_an_unsaid_default_is_not_a_difference(of_python, tmp_path):
    file, model = of_python
    content = torch.load(file, weights_only=True)
    bert = content["network"]["text_encoder"]["init_args"]["architecture"]
    bert.pop("use_cache", None)
    bert.pop("layer_norm_eps", None)
    model.on_load_checkpoint(content)
    bert["layer_norm_eps"] = 1e-5
    with pytest.raises(ValueError, match="trained with another text_encoder"):
        model.on_load_checkpoint(content)
    content = torch.load(file, weights_only=True)
    content["network"]["similarity"]["init_args"]["sharpness"] = 4.0
    with pytest.raises(ValueError, match="trained with another similarity"):
        model.on_load_checkpoint(content)


class Keeping(ImageTextModel):
    """A user's model that keeps its arguments, as Lightning advises: encoders and all."""

    def __init__(self, image_encoder, text_encoder, similarity) -> None:
        super().__init__(image_encoder, text_encoder, similarity, learning_rate=0.003, warmup_steps=0)
        self.save_hyperparameters()


class KeepingData(ImageTextDataModule):
    def __init__(self, folder: str, something: object) -> None:
        super().__init__(folder, image_size=48, crop_size=32, batch_size=8, num_workers=0)
        self.save_hyperparameters()


@pytest.fixture(scope="module")
def of_python(small_set, small_bert, tmp_path_factory) -> tuple[Path, ImageTextModel]:
    """A checkpoint made from Python objects, whose data and language model are gone."""
    folder = tmp_path_factory.mktemp("of_python")
    data, text = (shutil.copytree(x, folder / "old" / x.name) for x in (small_set, small_bert))
    torch.manual_seed(4)
    encoders = ResNetRegions(dim=6, stride=16), BertSentences(str(text), dim=6)
    model = Keeping(*encoders, LSENonLocal(dim=6))
    trainer = quick(folder, max_steps=1, limit_val_batches=0)
    trainer.fit(model, KeepingData(str(data), object()))
    trainer.save_checkpoint(folder / "old/a.ckpt")
    shutil.move(folder / "old/a.ckpt", folder / "a.ckpt")
    shutil.rmtree(folder / "old")
    return folder / "a.ckpt", model.eval()


TEXTS = ["No pneumothorax.", "Mild pulmonary edema."]


def test_a_checkpoint_of_python_objects_loads_anywhere(of_python):
    file, model = of_python
    again = ImageTextModel.load_from_checkpoint(file)
    assert again.learning_rate == 0.003 and again.network.config() == model.network.config()
    assert torch.equal(again.network.embed_texts(TEXTS), model.network.embed_texts(TEXTS))
    assert torch.equal(load(file).image_text.embed_texts(TEXTS), model.network.embed_texts(TEXTS))
    content = torch.load(file, weights_only=True)
    assert content["format_version"] == CHECKPOINT.version
    assert not [key for key in content if "hyper_parameters" in key or "hparams" in key]


@pytest.fixture(scope="module")
def language_model(small_set, small_bert, tmp_path_factory) -> Path:
    """A language model's checkpoint, whose data and first weights are gone."""
    folder = tmp_path_factory.mktemp("language_model")
    text, data = (shutil.copytree(x, folder / x.name) for x in (small_bert, small_set))
    model = MaskedLanguageModel(pretrained=str(text), learning_rate=0.003, warmup_steps=0)
    trainer = quick(folder, max_steps=1, limit_val_batches=0)
    trainer.fit(model, ReportsDataModule(str(data), batch_size=8, max_tokens=20))
    trainer.save_checkpoint(folder / "a.ckpt")
    for old in (text, data):
        shutil.rmtree(old)
    return folder / "a.ckpt"


def test_a_language_model_of_python_objects_loads_anywhere(language_model):
    model = MaskedLanguageModel.load_from_checkpoint(language_model)
    assert model.learning_rate == 0.003 and not model.training
    weights = torch.load(language_model, weights_only=True)["state_dict"]
    assert weights and all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


def edited(file: Path, folder: Path, **changes: Any) -> Path:
    content = torch.load(file, weights_only=True)
    torch.save({**content, **changes}, folder / "edited.ckpt")
    return folder / "edited.ckpt"


def test_newer_checkpoints_are_refused(of_python, language_model, small_set, tmp_path):
    message = f"expected a checkpoint of format version {CHECKPOINT.version}, found version 99"
    file, _ = of_python
    newer = edited(file, tmp_path, format_version=99)
    with pytest.raises(ValueError, match=f"edited.ckpt: {message}"):
        load(newer)
    data = ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=0)
    model = ImageTextModel.load_from_checkpoint(file)
    with pytest.raises(ValueError, match=f"the checkpoint: {message}"):
        quick(tmp_path, max_steps=2).fit(model, data, ckpt_path=newer, weights_only=True)
    with pytest.raises(ValueError, match=message):
        MaskedLanguageModel.load_from_checkpoint(edited(language_model, tmp_path, format_version=99))
    with pytest.raises(ValueError, match="a.ckpt is not of a language model: it has no description of one"):
        MaskedLanguageModel.load_from_checkpoint(file)
    with pytest.raises(
        ValueError,
        match="a.ckpt: expected a model of kind image-text or .* or sentences, found language model",
    ):
        ImageTextModel.load_from_checkpoint(language_model)


def test_exported_folders_that_are_incomplete_are_refused(of_python, tmp_path):
    folder = tmp_path / "exported"
    load(of_python[0]).save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(
            ValueError, match=f"{name} (is not .*, or it is truncated|does not desc.* copy it again)"
        ):
            load(folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
            load(folder)
        (folder / name).write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    with pytest.raises(
        ValueError,
        match="config.json: expected a network configuration of format version 3, found version 99",
    ):
        ImageTextNetwork.from_pretrained(folder)
