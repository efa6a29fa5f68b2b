"""best.ckpt is the best, or there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from medclip_dcl.common.weight_files import read_model
from medclip_dcl.training.best_checkpoint import (
    BestCheckpoint,
    best_mode,
    check_callbacks,
    complete_selection,
)

NAN = math.nan
AUC = {"monitor": "validate/auc", "filename": "best"}


class Measured(LightningModule):
    """Logs these AUCs, one an epoch of two steps."""

    def __init__(self, aucs: list[float]) -> None:
        super().__init__()
        self.aucs, self.weight = aucs, torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.weight.sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validate/auc", self.aucs[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, aucs: list[float], **options: Any) -> BestCheckpoint:
    best = BestCheckpoint(dirpath=folder, auto_insert_metric_name=False, **options)
    trainer = Trainer(
        max_epochs=len(aucs),
        accelerator="cpu",
        logger=False,
        callbacks=[best],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Measured(aucs), DataLoader(range(2)), DataLoader(range(1)))  # type: ignore[arg-type]
    return best


@pytest.mark.parametrize(
    ("options", "aucs", "epoch", "others"),
    [
        (AUC, [0.6, 0.9, 0.7], 2, set()),
        ({**AUC, "save_top_k": 2}, [0.6, 0.9, 0.7], 2, {"best-step4", "best-step6"}),
        ({**AUC, "save_top_k": -1, "filename": "x"}, [0.9, 0.6], 1, {"x-step2", "x-step4"}),
        ({**AUC, "filename": "mine"}, [0.6, 0.9, 0.7], 2, {"mine"}),
        (AUC, [NAN, 0.3, NAN], 2, set()),
        ({**AUC, "save_top_k": 3}, [NAN, 0.3, math.inf], 2, {"best-step4"}),
        (AUC, [NAN, NAN], None, set()),
        ({**AUC, "save_top_k": 0}, [0.6], None, set()),
        ({"filename": "best"}, [0.6, 0.5], None, set()),
        ({"filename": "best", "save_top_k": -1}, [0.6, 0.5], None, {"step2", "step4"}),
        ({"filename": "best", "save_top_k": -1, "every_n_train_steps": 3}, [0.6, 0.5], None, {"step3"}),
    ],
)
def test_best_is_the_best_or_none(options, aucs, epoch, others, tmp_path):
    best = train(tmp_path, aucs, **options)
    selected = best.selected({})
    said = best.describe(selected, len(aucs))
    assert {file.stem for file in tmp_path.iterdir()} - {"best"} == others
    if epoch is None:
        assert selected is None and said.startswith("no checkpoint was selected, since ")
        assert ("save_top_k is 0" in said) == (options.get("save_top_k") == 0)
        assert not (tmp_path / "best.ckpt").exists()
    else:
        found = {"epoch": epoch, "step": 2 * epoch}
        assert read_model(tmp_path / "best.ckpt").progress == found
        assert selected == {**found, "metric": "validate/auc", "value": aucs[epoch - 1]}
        # The Trainer of processes that it started itself has trained nothing: their last.ckpt has the state.
        state = torch.load(tmp_path / "best.ckpt", weights_only=True)["callbacks"][best.state_key]
        other = BestCheckpoint(dirpath=tmp_path, auto_insert_metric_name=False, **options)
        assert other.selected({}) is None
        state = {**state, "best_model_score": best.best_model_score}
        assert other.selected({"callbacks": {other.state_key: state}}) == selected
        assert f"epoch {epoch} of {len(aucs)} ({2 * epoch} steps), validate/auc 0." in said


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *[(f"validate/{x}", "max") for x in ("auc", "acc_pleural_effusion", "average_precision")],
        *[(f"validate/{x}", "max") for x in ("retrieval_recall", "knn_accuracy")],
        *[(f"validate/{x}", "min") for x in ("loss", "perplexity", "medr", "text_to_image_medr")],
        ("train/masked_language_loss", "min"),
        ("validate/my_number", None),
        ("train/gamma2", None),
    ],
)
def test_the_direction_of_own_metrics_is_known(metric, mode):
    assert best_mode("checkpoint", metric, None) == mode


def test_settings_without_contradiction_are_completed():
    options = Namespace({**AUC, "mode": None})
    complete_selection(options)
    assert options.mode == "max"
    complete_selection(Namespace(monitor=None, mode=None, filename="best", every_n_train_steps=5))
    check_callbacks(
        [EarlyStopping("validate/loss"), ModelCheckpoint(filename="{step}"), BestCheckpoint(dirpath="x")]
    )
