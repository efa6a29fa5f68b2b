"""Training that starts from other weights: they are there at once, and missed by nobody once it has begun."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

from medclip_dcl import load
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_encoder import RegionEncoder, ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import ConstantClassProbability
from tests.models.test_image_text import trainer as quick
from tests.small import PatchRegions


@pytest.fixture
def source(small_bert, tmp_path) -> Path:
    """An exported network whose images have a mean and a deviation of their own."""
    return export(small_bert, PatchRegions(dim=6), tmp_path / "source")


def export(small_bert: Path, image_encoder: RegionEncoder, folder: Path) -> Path:
    torch.manual_seed(3)
    parts = (image_encoder, BertSentences(str(small_bert), dim=6), LSENonLocal(dim=6))
    ImageTextNetwork(*parts, 64, (0.0, 0.1, 0.2), (0.4, 0.7, 1.0)).save_pretrained(folder)
    return folder


def build(small_bert, source, dim: int = 6, regions=PatchRegions, **options) -> ImageTextModel:
    torch.manual_seed(5)
    return ImageTextModel(
        regions(dim=dim),
        BertSentences(str(small_bert), dim=dim, dropout=0.0),
        LSENonLocal(dim=dim),
        ConstantClassProbability(0.05),
        **{"learning_rate": 1e-3, "warmup_steps": 1, "init_from": source and str(source), **options},
    )


def data(small_set) -> ImageTextDataModule:
    return ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=0)


def trainer(folder, epochs=2) -> Trainer:
    limits = {"limit_val_batches": 0, "limit_train_batches": 1, "limit_test_batches": 1}
    return quick(folder, max_epochs=epochs, **limits)


def test_encoders_are_taken_without_their_projections(small_bert, tmp_path):
    """Which may be of another size, and start as without the source."""
    parts = ["image_encoder.backbone", "text_encoder.transformer"]
    resnet = partial(ResNetRegions, stride=16)
    source = export(small_bert, resnet(dim=6), tmp_path / "source")
    options: dict[str, Any] = {"dim": 4, "regions": resnet}
    model, expected = build(small_bert, source, **options, init_parts=parts), load(source).network
    alone = build(small_bert, source, **options, init_from=None)
    for name, value in model.network.state_dict().items():
        is_new = "projection" in name or name.startswith("similarity")
        there = (alone.network if is_new else expected).state_dict()[name]
        assert torch.equal(value, there), name
    assert model.initial_weights is not None and model.initial_weights.source == str(source)
    assert torch.equal(model.network.std, expected.std)


def test_checkpoints_do_not_need_their_source(small_bert, small_set, source, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 2)
    whole = build(small_bert, source)
    trainer(tmp_path, 2).fit(whole, data(small_set))
    half = trainer(tmp_path, 1)
    half.fit(build(small_bert, source), data(small_set))
    half.save_checkpoint(tmp_path / "half.ckpt")
    shutil.rmtree(source)

    resumed = build(small_bert, None)
    trainer(tmp_path, 2).fit(resumed, data(small_set), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert torch.equal(resumed.network.mean, whole.network.mean)
    assert resumed.initial_weights == whole.initial_weights
    trainer(tmp_path).test(resumed, data(small_set), verbose=False)

    loaded = ImageTextModel.load_from_checkpoint(tmp_path / "half.ckpt")
    assert loaded.initial_weights == whole.initial_weights
    assert torch.equal(loaded.network.std, whole.network.std)
    trainer(tmp_path).test(loaded, data(small_set), verbose=False)
    with pytest.raises(FileNotFoundError, match="no file or folder .*source"):
        build(small_bert, source)
