"""Settings and callbacks that training refuses, with the words that the error must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonargparse import Namespace
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

from medclip_dcl.common.errors import UserError
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.best_checkpoint import check_callbacks, complete_selection
from medclip_dcl.training.last_checkpoint import LastCheckpoint, in_order


def select(**options: Any) -> None:
    complete_selection(
        Namespace(monitor="validate/auc", filename="best", mode=None).update(Namespace(options))
    )


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: select(save_last=True), "checkpoint.save_last"),
        (lambda: select(save_on_exception=True), "checkpoint.save_on_exception"),
        (lambda: select(filename="last"), "checkpoint.filename: last.ckpt"),
        (lambda: select(mode="min"), "checkpoint.mode: expected max .* found min"),
        (lambda: select(monitor="validate/my_number"), "checkpoint.mode: .* validate/my_number"),
        (lambda: select(every_n_train_steps=2), "checkpoint.every_n_train_steps: validate/auc"),
        (lambda: select(save_on_train_epoch_end=True), "checkpoint.save_on_train_epoch_end: validate/auc"),
        (lambda: check_callbacks([EarlyStopping("validate/auc")]), "EarlyStopping.mode: expected max"),
        (lambda: check_callbacks([ModelCheckpoint(filename="best")]), "callbacks: ModelCheckpoint"),
        (lambda: check_callbacks([ModelCheckpoint(save_last=True)]), "callbacks: ModelCheckpoint"),
        (lambda: in_order([EMAWeightAveraging()]), "EMAWeightAveraging.*ema_decay"),
        *((lambda x=x: AveragedWeights(x), f"ema_decay: .* {x}") for x in (0.0, 1.0, -1.0, float("nan"))),
        (lambda: LastCheckpoint("x", -1.0), "checkpoint_minutes: .* -1"),
    ],
)
def test_what_training_refuses(refused: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        refused()
