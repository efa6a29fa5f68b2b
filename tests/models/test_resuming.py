"""A run that is stopped after an epoch and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import torch
from pytorch_lightning import Callback, Trainer

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.similarity import LSENonLocal


class Seen(Callback):
    """Keeps which sentences and images were trained on, in order."""

    def __init__(self) -> None:
        self.batches: list[tuple] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.batches.append((batch["dicom_id"], batch["sentence_id"].tolist(), batch["images"].sum().item()))


def fit(small_set, small_bert, folder, epochs, checkpoint=None):
    torch.manual_seed(0)
    # Without dropout: Lightning's checkpoints hold no random-number state.
    text = BertSentences(str(small_bert), dim=16, dropout=0.0)
    model = ImageTextModel(
        ResNetRegions(dim=16, stride=16), text, LSENonLocal(dim=16), learning_rate=1e-3, warmup_steps=2
    )
    data = ImageTextDataModule(str(small_set), image_size=48, crop_size=32, batch_size=8, num_workers=1)
    seen = Seen()
    trainer = Trainer(
        max_epochs=4,
        limit_train_batches=3,
        callbacks=[seen],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accelerator="cpu",
    )
    trainer.fit_loop.max_epochs = epochs
    trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    return trainer, model, seen.batches


def test_resumed_equals_uninterrupted(small_set, small_bert, tmp_path, monkeypatch):
    # The schedule of a run of four epochs, however many of them are run before the stop.
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 12)
    _, whole, all_batches = fit(small_set, small_bert, tmp_path, 4)
    trainer, _, first = fit(small_set, small_bert, tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, second = fit(small_set, small_bert, tmp_path, 4, str(tmp_path / "half.ckpt"))
    assert first + second == all_batches
    assert all_batches[:3] != all_batches[6:9]
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
