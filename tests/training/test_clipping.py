"""Gradient clipping bounds the norm of the gradient, with mixed bfloat16 too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.utils import get_total_norm

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.last_checkpoint import in_order

CLIP = 0.125


class Norms(Callback):
    """(logged, clipped) norm of the gradient of each step, and the weights at the end."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        clipped = get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
        self.values.append((float(trainer.callback_metrics["train/gradient_norm"]), float(clipped)))
        self.weights = [p.detach().clone() for p in pl_module.parameters()]


def fit(folder: str, small_set: str, small_bert: str, precision: str, devices: int) -> Norms:
    torch.manual_seed(0)
    norms = Norms()
    model = ImageTextModel(
        ResNetRegions(dim=16, stride=16, width=8),
        BertSentences(small_bert, dim=16, dropout=0.0),
        LSENonLocal(dim=16),
        learning_rate=1e-3,
        warmup_steps=0,
    )
    data = ImageTextDataModule(small_set, image_size=48, crop_size=32, batch_size=4, num_workers=0)
    trainer = Trainer(
        max_epochs=1,
        callbacks=in_order([norms, FiniteCheck()]),
        precision=precision,  # type: ignore[arg-type]
        gradient_clip_val=CLIP,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accelerator="cpu",
        limit_val_batches=0,
        limit_train_batches=3,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data)
    return norms


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_clipped_norm_is_the_bound(small_set, small_bert, tmp_path, precision):
    norms = fit(str(tmp_path), str(small_set), str(small_bert), precision, devices=1)
    assert len(norms.values) == 3
    for before, after in norms.values:
        assert before > CLIP and after == pytest.approx(CLIP, rel=1e-4)
