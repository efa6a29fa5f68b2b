"""Settings and callbacks that training refuses, with the words that the error must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonargparse import Namespace
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)

from medclip_dcl.common.errors import UserError
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.best_checkpoint import check_callbacks, complete_selection
from medclip_dcl.training.last_checkpoint import LastCheckpoint


class Average(EMAWeightAveraging):
    """Of a user."""


OWNERS = [
    (EMAWeightAveraging(), "set ema_decay"),
    (Average(), "set ema_decay"),
    (StochasticWeightAveraging(1e-3), "set ema_decay"),
    (BatchSizeFinder(), "set data.init_args.batch_size"),
    (LearningRateFinder(), "set model.init_args.learning_rate"),
    (BackboneFinetuning(), "set the model's frozen"),
    (ModelPruning("l1_unstructured"), "remove it"),
]


def test_own_average_and_other_callbacks_are_taken():
    check_callbacks(
        [AveragedWeights(0.5), EarlyStopping("validate/loss"), GradientAccumulationScheduler({0: 1})]
    )


def test_plain_trainers_refuse_them_at_fit_alone(build, data, trainer):
    with pytest.raises(UserError, match="found EMAWeightAveraging"):
        trainer([EMAWeightAveraging()]).fit(build(), data)
    trainer([EMAWeightAveraging()], limit_val_batches=1).validate(build(), data, verbose=False)


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
        (
            lambda: check_callbacks([AveragedWeights(0.9), ModelCheckpoint(save_weights_only=True)]),
            "save_weights_only: expected false with ema_decay",
        ),
        (lambda: check_callbacks([ModelCheckpoint(save_last=True)]), "callbacks: ModelCheckpoint"),
        *((lambda x=x: check_callbacks([x]), f"{type(x).__name__}; {words}") for x, words in OWNERS),
        *((lambda x=x: AveragedWeights(x), f"ema_decay: .* {x}") for x in (0.0, 1.0, -1.0, float("nan"))),
        (lambda: LastCheckpoint("x", -1.0), "checkpoint_minutes: .* -1"),
    ],
)
def test_what_training_refuses(refused: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        refused()
