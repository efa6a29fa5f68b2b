"""Throughput and the share of time spent waiting for batches, by a clock that the test turns."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from medclip_dcl.command.cli import main
from medclip_dcl.training import throughput
from medclip_dcl.training.throughput import Throughput

BATCH = {"dicom_id": ["a", "b", "c"], "lengths": torch.ones(5)}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Run:
    """Calls the hooks of one callback as a Trainer does."""

    def __init__(
        self,
        clock: Clock,
        watch: Throughput,
        processes: int = 1,
        log_every: int = 4,
        begins_an_epoch: bool = True,
        **data: Any,
    ) -> None:
        self.clock, self.watch = clock, watch
        self.logged: list[dict[str, float]] = []
        self.trainer, self.module = Mock(spec=Trainer), Mock(spec=LightningModule)
        self.trainer.global_step, self.trainer.log_every_n_steps = 0, log_every
        self.trainer.should_stop = False
        self.trainer.world_size, self.trainer.datamodule = processes, SimpleNamespace(**data)
        self.module.log_dict = lambda metrics, batch_size: self.logged.append(metrics)
        watch.on_train_start(self.trainer, self.module)
        if begins_an_epoch:
            watch.on_train_epoch_start(self.trainer, self.module)

    def batch(
        self, wait: float, work: float, steps: bool = True, batch: Any = BATCH, others: float = 0.0
    ) -> None:
        self.clock.now += wait
        self.watch.arrival.on_train_batch_start(self.trainer, self.module, batch, 0)
        self.clock.now += others
        self.watch.on_train_batch_start(self.trainer, self.module, batch, 0)
        self.clock.now += work
        self.trainer.global_step += steps
        self.watch.on_train_batch_end(self.trainer, self.module, None, batch, 0)

    def validation(self, before: float, seconds: float) -> None:
        self.clock.now += before
        self.watch.arrival.on_validation_start(self.trainer, self.module)
        self.watch.on_validation_start(self.trainer, self.module)
        self.clock.now += seconds
        self.watch.on_validation_end(self.trainer, self.module)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(throughput, "time", found)
    yield found


def test_clock_is_set_and_others_do_not_count(clock):
    run = Run(clock, Throughput(), log_every=1, begins_an_epoch=False)
    run.batch(wait=1.0, work=2.0)
    assert run.logged == [{"train/images_per_second": 1.0, "train/data_wait": pytest.approx(1 / 3)}]
    run = Run(clock, Throughput(), log_every=2)
    run.batch(wait=1.0, work=2.0, others=5.0)  # a checkpoint is written
    run.batch(wait=1.0, work=1.0)
    assert run.logged == [{"train/images_per_second": 0.6, "train/data_wait": 0.2}]
    run = Run(clock, Throughput(), log_every=0)
    run.batch(wait=1.0, work=2.0)
    assert run.logged == []


def test_images_a_second_and_share_of_waiting(clock):
    run = Run(clock, Throughput(), processes=5)
    for wait in (0.25, 0.0, 0.5, 0.25):
        run.batch(wait, work=0.75)
    # 4 steps of 3 images in 5 processes, in 1 s of waiting and 3 s of work.
    assert run.logged == [{"train/images_per_second": 15.0, "train/data_wait": 0.25}]
    for _ in range(4):
        run.batch(wait=0.0, work=0.5)
    assert run.logged[1:] == [{"train/images_per_second": 30.0, "train/data_wait": 0.0}]


def test_validation_is_not_training_time(clock):
    run = Run(clock, Throughput(), log_every=2)
    run.batch(wait=1.0, work=1.0)
    run.validation(before=0.5, seconds=1000.0)
    run.batch(wait=0.5, work=1.0)
    assert run.logged == [{"train/images_per_second": 6 / 4, "train/data_wait": 0.5}]


def test_only_the_next_epochs_batch_is_waited_for(clock):
    run = Run(clock, Throughput(), log_every=2)
    run.batch(wait=0.0, work=1.0)
    clock.now += 77  # checkpoints
    run.watch.on_train_epoch_start(run.trainer, run.module)
    run.batch(wait=2.0, work=1.0)
    assert run.logged == [{"train/images_per_second": 6 / 4, "train/data_wait": 0.5}]


def test_accumulated_batches_are_logged_once_a_step(clock):
    run = Run(clock, Throughput(), log_every=2)
    for steps in (False, True, False, True, False):
        run.batch(wait=0.0, work=1.0, steps=steps)
    assert run.logged == [{"train/images_per_second": 3.0, "train/data_wait": 0.0}]


def test_a_language_models_sentences_are_counted(clock):
    run = Run(clock, Throughput(), log_every=1)
    run.batch(wait=0.0, work=1.0, batch={"lengths": torch.ones(5)})
    assert run.logged == [{"train/sentences_per_second": 5.0, "train/data_wait": 0.0}]


def test_a_slow_loader_is_reported_once(clock):
    run = Run(clock, Throughput(), num_workers=3, cache_images=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):  # the warm-up: loaders start
            run.batch(wait=9.0, work=1.0)
        for _ in range(50):
            run.batch(wait=0.125, work=0.875)
        for _ in range(49):
            run.batch(wait=0.3, work=0.7)
    message = (
        r"over the last 50 steps 30% of the time \(0.300 of 1.000 s a step, 3.0 images a second\); raise "
        r"data.init_args.num_workers \(now 3; this machine has \d+ cores\), or set data.init_args.cache_images: true"
    )
    with pytest.warns(UserWarning, match=message):
        run.batch(wait=0.3, work=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            run.batch(wait=9.0, work=1.0)


def test_cached_images_are_not_recommended_again(clock):
    run = Run(clock, Throughput(), num_workers=0, cache_images=True)
    with pytest.warns(UserWarning, match="a second") as told:
        for _ in range(100):
            run.batch(wait=1.0, work=1.0)
    assert len(told) == 1 and "cache_images" not in str(told[0].message)


@pytest.mark.slow
def test_a_run_logs_them_with_other_metrics(arguments, tmp_path):
    options = ["--trainer.log_every_n_steps", "2", "--ema_decay", "0.5", "--trainer.callbacks", "[]"]
    main(["fit", *arguments(tmp_path / "run", *options)])
    metrics = pd.read_csv(tmp_path / "run/metrics.csv")
    rows = metrics[metrics["train/loss"].notna()]
    assert rows["step"].tolist() == [1, 3, 5]
    assert rows["train/images_per_second"].gt(1).all() and rows["train/data_wait"].between(0, 0.99).all()
    seconds = json.loads((tmp_path / "run/fit.json").read_text())["seconds"]
    # Two steps of eight images each, all within the run.
    assert (16 / rows["train/images_per_second"]).sum() < seconds
    assert metrics["train/data_wait"].count() == 3
