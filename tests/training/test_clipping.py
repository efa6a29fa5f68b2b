"""Gradient clipping bounds the norm of the gradient of all processes' batch, with mixed bfloat16 too."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.utils import get_total_norm

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.similarity import LSENonLocal
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.order import in_order

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
        ResNetRegions(dim=16, stride=16),
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


def process(rank: int, port: int, folder: str, small_set: str, small_bert: str) -> None:
    own = {
        "LOCAL_RANK": rank,
        "NODE_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in own.items()})
    torch.set_num_threads(1)
    found = fit(folder, small_set, small_bert, "bf16-mixed", devices=2)
    torch.save({"values": found.values, "weights": found.weights}, Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_clipped_norm_is_the_bound(small_set, small_bert, tmp_path, precision):
    norms = fit(str(tmp_path), str(small_set), str(small_bert), precision, devices=1)
    assert len(norms.values) == 3
    for before, after in norms.values:
        assert before > CLIP and after == pytest.approx(CLIP, rel=1e-4)


def test_two_processes_clip_the_gradient_of_both(small_set, small_bert, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (port, str(tmp_path), str(small_set), str(small_bert)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    # The same gradient in both, of which the norm is bounded: a clip of each process's own would leave them apart.
    assert first["values"] == second["values"]
    for before, after in first["values"]:
        assert before > CLIP and after == pytest.approx(CLIP, rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
