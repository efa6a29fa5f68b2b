"""Writes the checkpoints that are kept here, each in the format of the code that ran: run it once for each format.

    pytest tests/models/checkpoints/make.py

A file is NAME_VERSION.ckpt.xz; beside it, NAME_VERSION.json has what the model says to `ask`'s questions. Files of
version 0 were made by commit 8d46cfa, whose checkpoints had no version. They are what `fit` left, apart from the
numbers in their tensors: those are overwritten by a short pattern, so that 34 MB pack into 80 kB. (At that commit the
language model of Python asked for its architecture again to load.)
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from torch import Tensor

from medclip_dcl import load
from medclip_dcl.cli import main
from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[2] / "configs"
TEXTS = ["No pneumothorax.", "Small left pleural effusion.", "Cardiomegaly is unchanged from ___."]


def ask_image_text(file: Path) -> list[list[float]]:
    """Similarities of an image of noise with TEXTS."""
    grey = np.random.default_rng(5).integers(0, 256, (90, 70)).astype(np.uint8)
    return load(file).similarity(grey, TEXTS).tolist()


def ask_language_model(file: Path) -> list[list[float]]:
    """Logits of the first word pieces at each place of a sentence of three."""
    model = MaskedLanguageModel.load_from_checkpoint(file)
    assert model.language_model is not None
    with torch.no_grad():
        return model.language_model(input_ids=torch.tensor([[2, 7, 3]])).logits[0, :, :5].tolist()


def test_image_text(small_set, small_bert, tmp_path):
    model, data = "--model.init_args.", "--data.init_args."
    main([
        "fit", "--config", str(CONFIGS / "demo.yaml"), "--config", str(CONFIGS / "objective/dcl_lm.yaml"),
        "--run_folder", str(tmp_path / "run"), "--trainer.max_epochs", "1", "--trainer.precision", "32-true",
        "--trainer.check_val_every_n_epoch", "1", f"{model}warmup_steps", "1", f"{model}learning_rate", "0.002",
        f"{model}text_encoder.init_args.pretrained", str(small_bert), f"{data}folder", str(small_set),
        f"{data}image_size", "48", f"{data}crop_size", "32", f"{data}batch_size", "8",
    ])  # fmt: skip
    keep(tmp_path, tmp_path / "run/checkpoints/last.ckpt", "image_text", ask_image_text)


def test_language_model_of_the_command_line(small_set, tmp_path):
    model, data = "--model.init_args.", "--data.init_args."
    main([
        "fit", "--config", str(CONFIGS / "language_model_small.yaml"), "--run_folder", str(tmp_path / "run"),
        "--trainer.max_epochs", "1", "--trainer.precision", "32-true", f"{model}warmup_steps", "1",
        f"{model}learning_rate", "0.002", f"{model}architecture.layers", "1",
        f"{model}architecture.hidden_size", "16", f"{model}architecture.intermediate_size", "24",
        f"{model}architecture.max_positions", "30", f"{data}max_tokens", "20", f"{data}vocabulary_size", "90",
        f"{data}folder", str(small_set), f"{data}batch_size", "8",
    ])  # fmt: skip
    keep(tmp_path, tmp_path / "run/checkpoints/last.ckpt", "language_model", ask_language_model)


def test_language_model_of_python(small_set, tmp_path):
    size = BertArchitecture(
        layers=1, hidden_size=16, attention_heads=2, intermediate_size=24, max_positions=30
    )
    data = ReportsDataModule(str(small_set), batch_size=8, max_tokens=20, vocabulary_size=90)
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(MaskedLanguageModel(architecture=size, warmup_steps=1, learning_rate=0.002), datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    keep(tmp_path, tmp_path / "a.ckpt", "language_model_of_python", ask_language_model)


def keep(tmp_path: Path, file: Path, name: str, ask: Any) -> None:
    checkpoint = elsewhere(torch.load(file, weights_only=True), str(tmp_path))
    name = f"{name}_{checkpoint.get('format_version', 0)}"
    checkpoint["state_dict"] = {key: pattern(key, value) for key, value in checkpoint["state_dict"].items()}
    for optimizer in checkpoint["optimizer_states"]:
        for state in optimizer["state"].values():
            state.update({key: pattern(key, value) for key, value in state.items()})
    torch.save(checkpoint, file)
    packed = lzma.compress(file.read_bytes(), preset=9)
    assert len(packed) < 200_000
    (HERE / f"{name}.ckpt.xz").write_bytes(packed)
    (HERE / f"{name}.json").write_text(json.dumps(ask(file), indent=1) + "\n")


def elsewhere(content: Any, folder: str) -> Any:
    """`content` without the path of this machine's folder."""
    if isinstance(content, str):
        return content.replace(folder, "somewhere")
    if isinstance(content, dict):
        return {elsewhere(key, folder): elsewhere(value, folder) for key, value in content.items()}
    return [elsewhere(value, folder) for value in content] if isinstance(content, list) else content


def pattern(name: str, value: Tensor) -> Tensor:
    """A tensor of about the same mean and spread that repeats after 251 numbers."""
    if not value.is_floating_point() or value.numel() < 2:
        return value
    wave = (torch.arange(value.numel()) * 37 % 251 / 251 - 0.5) * 3.5
    mean, spread = (round(float(x), 4) for x in (value.mean(), value.std()))
    found = (mean + spread * wave).to(value.dtype).view_as(value)
    return found.abs() if name.endswith(("running_var", "exp_avg_sq")) else found
