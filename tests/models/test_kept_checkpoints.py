"""Checkpoints of today and of earlier formats load anywhere and say what they said; others are refused."""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer

from medclip_dcl import load
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.formats import CHECKPOINT
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.similarity import LSENonLocal

KEPT = Path(__file__).resolve().parent / "checkpoints"
FILES = sorted(KEPT.glob("*.ckpt.xz"))


def questions() -> Any:
    """checkpoints/make.py, which has asked the models when it kept them."""
    specification = importlib.util.spec_from_file_location("kept_checkpoints_make", KEPT / "make.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def unpacked(name: str, folder: Path) -> Path:
    file = folder / name.removesuffix(".xz")
    file.write_bytes(lzma.decompress((KEPT / name).read_bytes()))
    return file


def quick(folder: Path, **options: Any) -> Trainer:
    off: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", enable_checkpointing=False, **off, **options)


def test_there_is_a_small_file_of_every_format():
    assert all(file.stat().st_size < 1_000_000 for file in FILES)
    for kind in ("image_text", "language_model", "language_model_of_python"):
        found = {int(match[1]) for x in FILES if (match := re.fullmatch(rf"{kind}_(\d+)\.ckpt\.xz", x.name))}
        # Today's format is tested with checkpoints that the tests make.
        assert found >= set(range(CHECKPOINT.version))


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_a_kept_model_says_what_it_said(name, tmp_path):
    file = unpacked(name, tmp_path)
    expected = json.loads((KEPT / name.replace(".ckpt.xz", ".json")).read_text())
    make = questions()
    ask = make.ask_image_text if name.startswith("image_text") else make.ask_language_model
    np.testing.assert_allclose(ask(file), expected, rtol=1e-3, atol=1e-5)


def test_a_kept_model_knows_its_objective(tmp_path):
    model = ImageTextModel.load_from_checkpoint(unpacked("image_text_0.ckpt.xz", tmp_path))
    assert (model.learning_rate, model.beta2, model.objective.image_to_text) == (0.002, 0.98, 0.1)
    assert model.class_probability.config() == {"a": 0.2, "k": 0.35, "max_eta": 0.3}
    assert model.network.image_size == 48 and not model.training


def test_a_kept_language_model_knows_its_options(tmp_path):
    size = BertArchitecture(1, 16, 2, 24, 30, 0.1)
    by_command = MaskedLanguageModel.load_from_checkpoint(unpacked("language_model_0.ckpt.xz", tmp_path))
    assert (by_command.architecture, by_command.learning_rate, by_command.warmup_steps) == (size, 0.002, 1)
    by_python = MaskedLanguageModel.load_from_checkpoint(
        unpacked("language_model_of_python_0.ckpt.xz", tmp_path)
    )
    assert by_python.architecture == size  # its other options had not been kept


def test_training_continues_from_a_kept_checkpoint(small_set, tmp_path):
    file = unpacked("image_text_0.ckpt.xz", tmp_path)
    model = ImageTextModel.load_from_checkpoint(file).train()
    data = ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=0)
    trainer = quick(tmp_path, max_epochs=2, limit_val_batches=0)
    trainer.fit(model, data, ckpt_path=file, weights_only=True)
    assert trainer.global_step == 6 and trainer.current_epoch == 2
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    assert torch.load(tmp_path / "new.ckpt", weights_only=True)["format_version"] == CHECKPOINT.version


def test_the_language_model_continues_from_a_kept_checkpoint(small_set, tmp_path):
    file = unpacked("language_model_0.ckpt.xz", tmp_path)
    data = ReportsDataModule(str(small_set), batch_size=8, max_tokens=20, vocabulary_size=90)
    trainer = quick(tmp_path, max_epochs=2, limit_val_batches=0)
    model = MaskedLanguageModel(architecture=BertArchitecture(1, 16, 2, 24, 30, 0.1), warmup_steps=1)
    trainer.fit(model, data, ckpt_path=file, weights_only=True)
    assert trainer.global_step == 12


def test_a_default_that_another_library_does_not_say_is_no_difference(of_python, tmp_path):
    file, model = of_python
    content = torch.load(file, weights_only=True)
    bert = content["network"]["text_encoder"]["init_args"]["bert"]
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
    assert torch.equal(load(file).network.embed_texts(TEXTS), model.network.embed_texts(TEXTS))
    content = torch.load(file, weights_only=True)
    assert content["format_version"] == CHECKPOINT.version
    assert not [key for key in content if "hyper_parameters" in key or "hparams" in key]


def test_a_language_model_of_python_objects_loads_anywhere(small_set, small_bert, tmp_path):
    text = shutil.copytree(small_bert, tmp_path / "bert")
    data = shutil.copytree(small_set, tmp_path / "set")
    model = MaskedLanguageModel(pretrained=str(text), learning_rate=0.003, warmup_steps=0)
    trainer = quick(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(model, ReportsDataModule(str(data), batch_size=8, max_tokens=20))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for folder in (text, data):
        shutil.rmtree(folder)
    again = MaskedLanguageModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.pretrained == str(text) and again.learning_rate == 0.003 and not again.training
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def edited(file: Path, folder: Path, **changes: Any) -> Path:
    content = torch.load(file, weights_only=True)
    torch.save({**content, **changes}, folder / "edited.ckpt")
    return folder / "edited.ckpt"


def test_newer_checkpoints_are_refused_with_both_versions(of_python, tmp_path):
    message = f"checkpoint of format version 99, this program reads up to version {CHECKPOINT.version}"
    file = edited(of_python[0], tmp_path, format_version=99)
    for read in (load, ImageTextModel.load_from_checkpoint):
        with pytest.raises(ValueError, match=f"edited.ckpt: {message}"):
            read(file)
    model = edited(unpacked("language_model_0.ckpt.xz", tmp_path), tmp_path, format_version=99)
    with pytest.raises(ValueError, match=message):
        MaskedLanguageModel.load_from_checkpoint(model)


def test_training_does_not_continue_from_a_newer_checkpoint(of_python, small_set, tmp_path):
    file, model = of_python
    data = ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=0)
    newer = edited(file, tmp_path, format_version=99)
    with pytest.raises(ValueError, match="the checkpoint: checkpoint of format version 99"):
        quick(tmp_path, max_steps=2).fit(
            ImageTextModel.load_from_checkpoint(file), data, ckpt_path=newer, weights_only=True
        )


class Code:
    def __reduce__(self):
        return (print, ("code of the file ran",))


READERS = (load, ImageTextModel.load_from_checkpoint, MaskedLanguageModel.load_from_checkpoint)


@pytest.mark.parametrize("read", READERS, ids=("load", "image_text", "language_model"))
def test_bad_files_are_refused(read, of_python, tmp_path, capsys):
    kept = "language_model_0" if read is READERS[2] else "image_text_0"
    whole = unpacked(f"{kept}.ckpt.xz", tmp_path)
    for length in (0, 100, whole.stat().st_size // 2, whole.stat().st_size - 1):
        (tmp_path / "part.ckpt").write_bytes(whole.read_bytes()[:length])
        with pytest.raises(
            ValueError, match="part.ckpt is not a checkpoint that can be loaded safely, or it is trunc"
        ):
            read(tmp_path / "part.ckpt")
    with pytest.raises(ValueError, match="files that hold Python objects are not opened"):
        read(edited(whole, tmp_path, callbacks={"x": Code()}))
    assert "code of the file ran" not in capsys.readouterr().out
    torch.save({"epoch": 3, "state_dict": {"weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="other.ckpt is no.*it has no description of"):
        read(tmp_path / "other.ckpt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere.ckpt")


def test_exported_folders_that_are_incomplete_are_refused(of_python, tmp_path):
    folder = tmp_path / "exported"
    load(of_python[0]).save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=f"{name} is not .*, or it is truncated"):
            load(folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
            load(folder)
        (folder / name).write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    with pytest.raises(ValueError, match="config.json: network configuration of format version 99"):
        ImageTextNetwork.from_pretrained(folder)
