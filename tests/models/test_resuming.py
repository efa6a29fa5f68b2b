"""A run that is stopped anywhere and resumed ends as if it had not been stopped, bit for bit."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.reports import ReportsDataModule
from medclip_dcl.data.samplers import EpochDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.masked_language import BertArchitecture, MaskedLanguageModel
from medclip_dcl.models.seeded_batches import seed_of_batch
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import (
    ConstantClassProbability,
    PosteriorTargets,
    RankedByText,
    ResampleByTextSimilarity,
    WeightedInfoNCE,
)
from medclip_dcl.runs.checkpoint_files import ResumeError, find_readable
from medclip_dcl.runs.loggers import MetricsFile
from medclip_dcl.runs.run_folder import RunFolder
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.kept_steps import KeptSteps
from medclip_dcl.training.last_checkpoint import (
    AtomicCheckpointIO,
    LastCheckpoint,
    LastEpoch,
    Stopped,
    in_order,
)
from medclip_dcl.training.record import RunRecord
from tests.small import PatchRegions, write_small_ranking

EPOCHS = 3


class Killed(BaseException):
    """Stands for kill -9: nothing is done about it."""


class Kill(Callback):
    """Ends training at a moment, without a word.

    Args:
        hook: the callback hook at which it ends.
        epoch: from 0.
        batch: from 0, of training or of validation; None for a hook of an epoch.
        saved_until: the last batch of the epoch after which last.ckpt may be written; None for all.
    """

    def __init__(
        self, hook: str, epoch: int, batch: int | None = None, saved_until: int | None = None
    ) -> None:
        self.epoch, self.batch, self.saved_until = epoch, batch, saved_until
        setattr(self, hook, self._end)

    def _end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        batch = next((x for x in rest if isinstance(x, int)), None)
        if trainer.current_epoch == self.epoch and batch == self.batch:
            raise Killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if (
            trainer.current_epoch == self.epoch
            and self.saved_until is not None
            and batch_idx > self.saved_until
        ):
            last = next(x for x in trainer.callbacks if isinstance(x, LastCheckpoint))
            last.seconds = float("inf")


@dataclass(frozen=True)
class Case:
    """A model and its data; the rest are the arguments of `fit`."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    of_language: bool = False


CASES = {
    "plain": Case(),
    "accumulating_unevenly": Case(data={"num_workers": 2}, trainer={"accumulate_grad_batches": 4}),
    "gradient_cache": Case(
        {"label_weight": 0.5}, {"contrastive_batch": 8}, trainer={"accumulate_grad_batches": 2}
    ),
    "ranked_by_text": Case({"negative_weights": RankedByText(), "image_to_text": 0.3}),
    "ranked_at_random": Case(
        {"negative_weights": RankedByText(0.3, k=0.0, random_seed=1)}, {"sentences": "all"}
    ),
    "all_options": Case(
        {
            "masked_language_weight": 0.5,
            "label_weight": 0.5,
            "negative_weights": ResampleByTextSimilarity(),
            "image_to_text": 0.3,
            "loss": WeightedInfoNCE(),
        },
        data={"views": 2, "sentences": "all"},
        trainer={"precision": "bf16-mixed", "log_every_n_steps": 4},
        text={"masked_language_head": True},
    ),
    "drawn_positives": Case(
        {
            "class_probability": ConstantClassProbability(0.1),
            "correction_images": "sentence",
            "correction_count": 2,
        },
        data={"num_workers": 2},
    ),
    "posterior_targets": Case({"loss": PosteriorTargets(0.5)}, {"sentences": "all"}),
    "validating_often": Case(trainer={"val_check_interval": 0.5}),
    "validating_seldom": Case(trainer={"check_val_every_n_epoch": 2}),
    "validating_between": Case(trainer={"val_check_interval": 4}),
    "by_steps": Case(trainer={"max_steps": 15, "max_epochs": -1}),
    "by_steps_of_whole_epochs": Case(trainer={"max_steps": 12, "max_epochs": -1}),
    "language_model": Case(data={"num_workers": 2}, trainer={"accumulate_grad_batches": 2}, of_language=True),
    "limited": Case(data={"batch_size": 2}, trainer={"limit_train_batches": 6}),
}


FAST = ("plain",)
"""Cases that the slow tests do not keep to themselves."""


def fast_and_slow(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: cases, of which all but the representative are slow."""
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(case: Case, small_set: Path, small_bert: Path) -> tuple[LightningModule, EpochDataModule]:
    torch.manual_seed(3)
    if case.of_language:
        size = BertArchitecture(1, 32, 2, 40, max_positions=40, dropout=0.2)
        reports = {"batch_size": 8, "max_tokens": 20, "vocabulary_size": 120, **case.data}
        language_model = MaskedLanguageModel(architecture=size, learning_rate=3e-3, warmup_steps=2)
        return language_model, ReportsDataModule(str(small_set), **reports)
    text = BertSentences(str(small_bert), dim=16, **{"dropout": 0.2, **case.text})
    # The cap of gamma is reached at once: that a step is followed by it must not depend on when it is saved.
    similarity = LSENonLocal(dim=16, gamma2=9.995, max_gamma2=10.0, learn_gamma="loss" not in case.model)
    options = {"learning_rate": 3e-3, "warmup_steps": 2, **copy.deepcopy(case.model)}
    data = {"image_size": 48, "crop_size": 32, "batch_size": 4, "num_workers": 0, **case.data}
    return ImageTextModel(PatchRegions(dropout=0.1), text, similarity, **options), ImageTextDataModule(
        str(small_set), **data
    )


def train(
    folder: Path, model: Any, data: Any, *callbacks: Callback, minutes: float = 0.0, **options: Any
) -> None:
    """Fit into a run folder as the command line does, from its last checkpoint if there is one."""
    checkpoints = folder / "checkpoints"
    found = find_readable(checkpoints)
    of_step: dict[str, Any] = (
        {"save_on_train_epoch_end": False} if any(isinstance(x, KeptSteps) for x in callbacks) else {}
    )
    best = ModelCheckpoint(
        checkpoints, "best", monitor="validate/loss", enable_version_counter=False, **of_step
    )
    trainer = Trainer(
        **{
            "max_epochs": EPOCHS,
            "default_root_dir": folder,
            "logger": [MetricsFile(folder)],
            "plugins": [AtomicCheckpointIO()],
            "callbacks": [*callbacks, RunRecord(RunFolder(folder)), LastEpoch(), best],
            "log_every_n_steps": 1,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
            **options,
        }
    )
    trainer.callbacks.append(LastCheckpoint(checkpoints, minutes))  # type: ignore[attr-defined]
    trainer.fit(model, data, ckpt_path=None if found is None else str(found), weights_only=True)


def run(
    case: Case, folder: Path, small_set: Path, small_bert: Path, *stops: Callback, **options: Any
) -> None:
    """Train, be stopped each time, and train on."""
    for stop in stops:
        with pytest.raises((Killed, Stopped)):
            train(folder, *build(case, small_set, small_bert), stop, **{**case.trainer, **options})
    torch.rand(5)  # another process has other random numbers
    train(folder, *build(case, small_set, small_bert), **{**case.trainer, **options})


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{i}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, f"{where}: {a} {b}"


def assert_same_run(whole: Path, resumed: Path) -> None:
    """Weights, optimiser, schedule, counters, best score and metrics are those of the run that was not stopped."""
    for name in ("last.ckpt", "best.ckpt"):
        a, b = (torch.load(x / "checkpoints" / name, weights_only=True) for x in (whole, resumed))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            assert_same(a[part], b[part], f"{name} {part}")
        scores = [
            next(v for k, v in x["callbacks"].items() if "validate/loss" in k)["best_model_score"]
            for x in (a, b)
        ]
        assert torch.equal(*scores), name
    rows = [pd.read_csv(x / "metrics.csv").drop(columns="time") for x in (whole, resumed)]
    pd.testing.assert_frame_equal(rows[0], rows[1][rows[0].columns])
    assert rows[0]["train/loss"].notna().any() and rows[0]["validate/loss"].notna().any()


@pytest.fixture(scope="module")
def whole(embedded_set, small_bert, tmp_path_factory):
    """Folder of a case's run that is not stopped, trained once."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole") / name
            run(CASES[name], folders[name], embedded_set, small_bert, minutes=1000.0)
        return folders[name]

    return of


VALIDATIONS = {
    "plain": (3, 2),
    "validating_seldom": (2, 2),
    "validating_between": (4, 2),
    "by_steps": (3, 2),
    "by_steps_of_whole_epochs": (2, 1),
}
"""Validations of a whole run, and the epoch of the last one."""


@pytest.mark.parametrize("name", fast_and_slow(CASES))
def test_killed_in_an_epoch_and_a_validation(name, whole, embedded_set, small_bert, tmp_path):
    last = 2 if name == "gradient_cache" else 5
    kills = [Kill("on_train_batch_end", 0, last - 1, saved_until=1), Kill("on_train_batch_end", 1, last)]
    if name == "validating_often":
        kills = [
            Kill("on_train_batch_end", 0, 3),
            Kill("on_validation_batch_end", 1, 0),
            Kill("on_validation_batch_end", 1, 1),
            Kill("on_train_batch_end", 1, 4),
            Kill("on_validation_batch_end", 1, 0),
        ]
    if name in VALIDATIONS:
        kills.append(Kill("on_validation_batch_end", VALIDATIONS[name][1], 1))
    if name == "plain":
        del kills[1]  # `all_options`, a slow test, has it
    run(CASES[name], tmp_path, embedded_set, small_bert, *kills)
    assert_same_run(whole(name), tmp_path)


@pytest.mark.slow
def test_one_run_killed_at_ten_moments(whole, embedded_set, small_bert, tmp_path):
    """A validation that a resumed run repeats is interrupted again."""
    kills = [
        Kill("on_before_optimizer_step", 0, None),
        Kill("on_validation_epoch_end", 0),
        Kill("on_train_batch_start", 1, 3, saved_until=1),
        Kill("on_validation_start", 1),
        Kill("on_validation_batch_end", 1, 1),
        Kill("on_train_epoch_end", 1),
        Kill("on_train_epoch_start", 2),
        Kill("on_train_batch_end", 2, 0),
        Kill("on_validation_end", 2),
        Kill("on_train_end", 3),
    ]
    run(CASES["plain"], tmp_path, embedded_set, small_bert, *kills)
    assert_same_run(whole("plain"), tmp_path)


@pytest.mark.parametrize("name", fast_and_slow(VALIDATIONS))
def test_training_ends_with_one_validation(name, whole):
    metrics = pd.read_csv(whole(name) / "metrics.csv")
    validated = metrics.loc[metrics["validate/loss"].notna(), "step"]
    assert len(validated) == len(set(validated)) == VALIDATIONS[name][0]
    last = metrics["step"] == metrics["step"].max()
    assert metrics.loc[last, "validate/loss"].notna().any() and metrics.loc[last, "train/loss"].notna().any()


KEPT = [2, 6, 9, 18]
"""Within an epoch, at the end of one, and at the end of training; of six steps an epoch."""


@pytest.mark.slow
def test_kept_steps_survive_kills(embedded_set, small_bert, tmp_path):
    """Before, in and after their validations: they and metrics.csv are those of a run that was not stopped."""
    case, (whole, killed) = CASES["validating_seldom"], (tmp_path / "whole", tmp_path / "killed")
    kills = [
        Kill("on_train_batch_end", 0, 1),
        Kill("on_validation_batch_end", 0, 1),
        Kill("on_validation_epoch_end", 0),
        Kill("on_train_batch_start", 0, 3),
        Kill("on_train_epoch_end", 0),
        Kill("on_validation_batch_end", 1, 0),
        Kill("on_train_batch_end", 1, 4, saved_until=2),
        Kill("on_validation_epoch_end", 2),
    ]
    for folder, stops in ((whole, []), (killed, kills)):
        for stop in (*stops, None):
            kept = KeptSteps(folder / "checkpoints", KEPT)
            with nullcontext() if stop is None else pytest.raises(Killed):
                ends = [] if stop is None else [stop]
                train(folder, *build(case, embedded_set, small_bert), *ends, kept, **case.trainer)
    assert_same_run(whole, killed)
    validated = pd.read_csv(whole / "metrics.csv").dropna(subset=["validate/loss"])
    assert validated["step"].tolist() == [1, 5, 8, 11, 17]  # also at the end of the second epoch, as without
    for step in KEPT:
        a, b = (torch.load(x / f"checkpoints/step_{step}.ckpt", weights_only=True) for x in (whole, killed))
        assert_same(a, b)
        assert a["global_step"] == step
    weights = [
        torch.load(whole / f"checkpoints/{x}.ckpt", weights_only=True)["state_dict"]
        for x in ("step_18", "last")
    ]
    assert_same(*weights)


@pytest.mark.slow
def test_kept_average_is_that_of_a_shorter_training(embedded_set, small_bert, tmp_path):
    """With averaged weights, steps of several batches and a constant rate; of six batches the second step has two."""
    case = Case(
        {"schedule": "constant"}, trainer={"accumulate_grad_batches": 4, "check_val_every_n_epoch": 2}
    )
    lengths: dict[str, dict[str, Any]] = {"long": {}, "short": {"max_steps": 3}}
    for name, options in lengths.items():
        folder = tmp_path / name
        callbacks = in_order([AveragedWeights(0.5), KeptSteps(folder / "checkpoints", [2, 3])])
        model, data = build(case, embedded_set, small_bert)
        train(folder, model, data, *callbacks, **{**case.trainer, **options})
    kept, last = (
        torch.load(tmp_path / name, weights_only=True)
        for name in ("long/checkpoints/step_3.ckpt", "short/checkpoints/last.ckpt")
    )
    assert kept["global_step"] == 3
    assert_same(kept["state_dict"], last["state_dict"])
    assert any(
        not torch.equal(x, kept["state_dict"][name]) for name, x in last["current_model_state"].items()
    )
    metrics = pd.read_csv(tmp_path / "long/metrics.csv").dropna(subset=["validate/loss"])
    assert metrics["step"].tolist() == [1, 2, 3, 5]


class Signal(Callback):
    """Asks the own process to stop, from a moment within an epoch."""

    def __init__(self, number: int, hook: str, epoch: int, batch: int) -> None:
        self.number, self.epoch, self.batch = number, epoch, batch
        setattr(self, hook, self._ask)

    def _ask(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, index: int, *rest: Any
    ) -> None:
        if (trainer.current_epoch, index) == (self.epoch, self.batch):
            os.kill(os.getpid(), self.number)


SIGNALS: list[tuple[Signal, int | None]] = [
    (Signal(signal.SIGTERM, "on_train_batch_end", 0, 2), 3),
    (Signal(signal.SIGUSR1, "on_train_batch_end", 1, 2), 9),
    (Signal(signal.SIGTERM, "on_validation_batch_end", 1, 0), None),
    (Signal(signal.SIGINT, "on_train_batch_end", 2, 3), 16),
]
"""Signals, and the optimiser steps of the checkpoint that each leaves."""


@pytest.mark.parametrize(
    ("name", "signals"),
    [
        pytest.param("plain", SIGNALS[::3], id="first and last"),
        pytest.param("plain", SIGNALS, id="all", marks=pytest.mark.slow),
        # Gradients are accumulated over four batches: the step is finished first.
        pytest.param(
            "accumulating_unevenly",
            [(Signal(signal.SIGTERM, "on_train_batch_end", 1, 2), 3)],
            id="accumulating_unevenly",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_loses_nothing(name, signals, whole, embedded_set, small_bert, tmp_path):
    case = CASES[name]
    for stop, steps in signals:
        before = signal.getsignal(stop.number)
        with pytest.raises(Stopped) as stopped:
            train(tmp_path, *build(case, embedded_set, small_bert), stop, minutes=1000.0, **case.trainer)
        assert stopped.value.code == 128 + stop.number and signal.getsignal(stop.number) == before
        last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
        assert steps is None or last["global_step"] == steps
    run(case, tmp_path, embedded_set, small_bert)
    assert_same_run(whole(name), tmp_path)


@pytest.mark.slow
def test_a_signal_at_an_epochs_end_is_answered(whole, embedded_set, small_bert, tmp_path):
    stop = Signal(15, "on_train_batch_end", 0, 5)
    run(CASES["validating_seldom"], tmp_path, embedded_set, small_bert, stop, minutes=1000.0)
    assert_same_run(whole("validating_seldom"), tmp_path)


@pytest.mark.slow
def test_a_run_that_a_callback_ended_stays_ended(embedded_set, small_bert, tmp_path):
    """Killed before its fit.json it trains no further epoch; it does with a larger max_epochs."""

    def fit(*stops: Callback, **options: Any) -> int:
        early = EarlyStopping("validate/loss", min_delta=10.0, patience=1)
        with pytest.raises(Killed) if stops else nullcontext():
            train(tmp_path, *build(CASES["plain"], embedded_set, small_bert), early, *stops, **options)
        return torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"]

    ends = [fit(Kill("on_train_end", 2)), fit(), fit(max_epochs=5), fit(max_epochs=5)]
    assert ends == [12, 12, 18, 18]


def test_training_does_not_change_later_draws(embedded_set, small_bert, tmp_path):
    """The seed of torch's generator is the program's own again, not that of the last batch."""
    train(tmp_path, *build(CASES["plain"], embedded_set, small_bert), limit_val_batches=0, max_steps=1)
    assert torch.initial_seed() == 3


def test_each_batch_of_each_process_has_a_seed():
    seeds = {seed_of_batch(*key) for key in itertools.product((0, 7), range(3), range(40), range(4))}
    assert len(seeds) == 2 * 3 * 40 * 4 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_resuming_from_lightnings_own_checkpoints(whole, embedded_set, small_bert, tmp_path):
    """Without this project's run folders: a Trainer and a ModelCheckpoint that saves by steps."""
    keep: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 4, "save_on_train_epoch_end": False}
    options: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "limit_val_batches": 2,
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    for resume in (None, tmp_path / "step=16.ckpt"):
        torch.rand(3)
        trainer = Trainer(callbacks=[ModelCheckpoint(tmp_path, "{step}", **keep)], **options)
        trainer.fit(*build(CASES["plain"], embedded_set, small_bert), ckpt_path=resume, weights_only=True)
        expected = torch.load(whole("plain") / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        assert_same(dict(trainer.lightning_module.state_dict()), dict(expected))


def test_resuming_from_the_best(whole, embedded_set, small_bert, tmp_path):
    """best.ckpt is of a validation's end; what the run does after it is done again."""
    shutil.copytree(whole("validating_seldom") / "checkpoints", tmp_path / "checkpoints")
    best = tmp_path / "checkpoints/best.ckpt"
    os.replace(best, tmp_path / "checkpoints/last.ckpt")
    run(CASES["validating_seldom"], tmp_path, embedded_set, small_bert)
    a, b = (
        torch.load(x / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for x in (whole("validating_seldom"), tmp_path)
    )
    assert_same(a, b)


@pytest.mark.slow
def test_a_moved_run_keeps_its_best_score(whole, embedded_set, small_bert, tmp_path):
    run_case = partial(run, CASES["plain"], small_set=embedded_set, small_bert=small_bert)
    with pytest.raises(Killed):
        train(
            tmp_path / "a", *build(CASES["plain"], embedded_set, small_bert), Kill("on_train_batch_end", 2, 3)
        )
    (tmp_path / "a").rename(tmp_path / "b")
    run_case(folder=tmp_path / "b")
    assert_same_run(whole("plain"), tmp_path / "b")
    last = torch.load(tmp_path / "b/checkpoints/last.ckpt", weights_only=True)
    state = next(v for k, v in last["callbacks"].items() if "validate/loss" in k)
    assert Path(state["best_model_path"]) == tmp_path / "b/checkpoints/best.ckpt"
    assert list(state["best_k_models"]) == [state["best_model_path"]]


def in_two_processes(folder: Path, small_set: Path, small_bert: Path) -> None:
    """One of two processes, whose group is initialised: trains once, and once with two kills."""
    case = Case(trainer={"devices": 2, "strategy": "ddp"})
    run(case, folder / "whole", small_set, small_bert, minutes=1000.0)
    kills = (Kill("on_train_batch_end", 0, 3, saved_until=2), Kill("on_validation_batch_end", 1, 0))
    run(case, folder / "killed", small_set, small_bert, *kills)


def test_another_runs_checkpoint_brings_no_best_score(whole, embedded_set, small_bert, tmp_path):
    """Training on from another folder's checkpoint: its best file is not here, and is not taken for one."""
    model, data = build(CASES["plain"], embedded_set, small_bert)
    best = ModelCheckpoint(tmp_path, "best", monitor="validate/loss")
    trainer = Trainer(
        callbacks=[best],
        max_epochs=EPOCHS + 1,
        logger=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.callbacks.append(LastCheckpoint(tmp_path))  # type: ignore[attr-defined]
    trainer.fit(model, data, ckpt_path=str(whole("plain") / "checkpoints/last.ckpt"), weights_only=True)
    assert (tmp_path / "best.ckpt").is_file() and Path(best.best_model_path) == tmp_path / "best.ckpt"


def test_another_runs_checkpoint_must_leave_steps(whole, embedded_set, small_bert, tmp_path):
    """Its step is beyond the schedule where an epoch has fewer steps: the rate would be 0 throughout."""
    start = find_readable(whole("plain") / "checkpoints")
    model, data = build(Case(data={"batch_size": 8}), embedded_set, small_bert)
    callbacks: list[Callback] = [LastCheckpoint(tmp_path)]
    trainer = Trainer(callbacks=callbacks, max_epochs=EPOCHS + 1, logger=False, enable_progress_bar=False)
    with pytest.raises(
        UserError, match="before the run's last step 12, found one of step 18, where its rate"
    ):
        trainer.fit(model, data, ckpt_path=str(start), weights_only=True)


def test_c_of_another_run_does_not_come_with_its_checkpoint(embedded_set, small_bert, tmp_path):
    def built(share: float) -> tuple[LightningModule, EpochDataModule]:
        return build(Case({"negative_weights": RankedByText(share)}), embedded_set, small_bert)

    train(tmp_path / "first", *built(0.3), max_epochs=1)
    of_step = Kill("on_train_batch_start", 1, 0)
    model, data = built(0.8)
    trainer = Trainer(callbacks=[of_step], max_epochs=2, logger=False, enable_progress_bar=False)
    trainer.callbacks.append(LastCheckpoint(tmp_path / "second"))  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        trainer.fit(model, data, ckpt_path=str(tmp_path / "first/checkpoints/last.ckpt"), weights_only=True)
    alone, data = built(0.8)
    train(tmp_path / "alone", alone, data, max_epochs=1)
    name = "objective.negative_weights.log_c"
    assert model.state_dict()[name] == alone.state_dict()[name]


@pytest.mark.parametrize("name", ["ranked_by_text", "language_model"])
def test_files_beside_the_set_may_not_change(name, embedded_set, small_bert, tmp_path):
    """Ended in its middle, a training is not continued with other numbers under the same name."""
    folder, extra = tmp_path / "set", tmp_path / "extra.txt"
    shutil.copytree(embedded_set, folder)
    extra.write_text("Heart is enlarged.\n")
    case = CASES[name]
    if case.of_language:
        case = replace(case, data={**case.data, "extra_text": str(extra)})
    with pytest.raises(Killed):
        train(tmp_path / "run", *build(case, folder, small_bert), Kill("on_train_batch_end", 0, 3))
    if case.of_language:
        extra.write_text("Enlarged is heart.\n")
    else:
        write_small_ranking(folder, dim=5)
    found = "extra_text" if case.of_language else "report_ranking, sentence_ranking"
    with pytest.raises(ResumeError, match=f"files of {found} have changed"):
        train(tmp_path / "run", *build(case, folder, small_bert))


def test_early_stopping_of_another_run_is_not_continued(whole, embedded_set, small_bert, tmp_path):
    for start in (None, tmp_path / "first/checkpoints/last.ckpt"):
        model, data = build(CASES["plain"], embedded_set, small_bert)
        folder = tmp_path / ("first" if start is None else "second")
        stop = EarlyStopping("validate/loss", patience=1, mode="max", min_delta=100.0)
        trainer = Trainer(
            callbacks=[stop],
            default_root_dir=tmp_path,
            max_epochs=10,
            logger=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            limit_train_batches=2,
        )
        trainer.callbacks.append(LastCheckpoint(folder / "checkpoints"))  # type: ignore[attr-defined]
        trainer.fit(model, data, ckpt_path=start and str(start), weights_only=True)
        assert stop.wait_count == 1
    assert trainer.current_epoch == 4


def test_the_next_fit_begins_at_the_first_batch(small_set):
    data = ImageTextDataModule(str(small_set))
    data.load_state_dict({"epoch": 2, "batch": 5})
    data.teardown("fit")
    assert (data.first_epoch, data.first_batch) == (0, 0)
