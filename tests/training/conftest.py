"""A small model and its data, and a trainer for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.training.last_checkpoint import in_order
from tests.command.small_runs import small
from tests.small import PatchRegions


@pytest.fixture
def build(small_bert: Path) -> Callable[..., ImageTextModel]:
    """Makes the same model every time; without dropout, as checkpoints hold no random-number state."""

    def make(
        similarity: LSENonLocal | None = None, image_encoder: RegionEncoder | None = None, **options: Any
    ) -> ImageTextModel:
        torch.manual_seed(0)
        image_encoder = PatchRegions() if image_encoder is None else image_encoder
        encoders = image_encoder, BertSentences(str(small_bert), dim=16, dropout=0.0)
        similarity = LSENonLocal(dim=16) if similarity is None else similarity
        return ImageTextModel(*encoders, similarity, **{"learning_rate": 1e-2, "warmup_steps": 1, **options})

    return make


@pytest.fixture
def data(small_set: Path) -> ImageTextDataModule:
    """Three batches of eight images an epoch."""
    return ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=0)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes trainers of two epochs that write nothing."""

    def make(callbacks: Sequence[Callback], **options: Any) -> Trainer:
        defaults = {
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
        }
        return Trainer(callbacks=in_order(callbacks), **{**defaults, **options})

    return make


@pytest.fixture(scope="session")
def arguments(small_set: Path, small_bert: Path) -> Callable[..., list[str]]:
    """Makes arguments of a run of two epochs of three steps: the demo with a small set, encoder and image."""

    def make(run: Path, *more: str) -> list[str]:
        no_dropout = ["--model.init_args.text_encoder.init_args.dropout", "0.0"]
        return small(run, small_set, small_bert, *no_dropout, "--trainer.accelerator", "cpu", *more)

    return make
