"""The average of the weights is what evaluations see and what checkpoints give; training goes on without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from medclip_dcl import load
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.last_checkpoint import in_order
from medclip_dcl.training.throughput import Throughput

DECAY = 0.9


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, those that checkpoints leave out as well."""
    return {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


class Probe(Callback):
    """The weights after each step, and when a validation has ended, as an evaluation would see them."""

    def __init__(self) -> None:
        self.after_step: list[dict[str, Tensor]] = []
        self.in_validation: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.after_step.append(state(pl_module))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.in_validation.append(state(pl_module))

    def averages(self) -> list[dict[str, Tensor]]:
        """Record the expected average after each step."""
        found = [self.after_step[0]]
        for step in self.after_step[1:]:
            found.append({name: self._next(found[-1][name], value) for name, value in step.items()})
        return found

    @staticmethod
    def _next(average: Tensor, value: Tensor) -> Tensor:
        return DECAY * average + (1 - DECAY) * value if value.is_floating_point() else value


def assert_equal_states(found: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = True) -> None:
    assert found and found.keys() <= expected.keys()
    for name, value in found.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(value, expected[name], **tolerance, msg=name)


def test_validation_and_checkpoint_have_the_average(build, data, trainer, tmp_path):
    probe, model = Probe(), build()
    best = ModelCheckpoint(tmp_path, "best", monitor="validate/loss", enable_version_counter=False)
    # As given, the average would come before the evaluation that stands behind it.
    fit = trainer([AveragedWeights(DECAY), probe, best], enable_checkpointing=True)
    fit.fit(model, data)
    expected = probe.averages()
    assert [len(probe.after_step), len(probe.in_validation)] == [6, 2]
    for seen, steps in zip(probe.in_validation, (3, 6), strict=True):
        assert_equal_states(seen, expected[steps - 1], exact=False)
    checkpoint = torch.load(tmp_path / "best.ckpt", weights_only=True)
    steps = checkpoint["global_step"]
    assert_equal_states(checkpoint["state_dict"], expected[steps - 1], exact=False)
    assert_equal_states(checkpoint["current_model_state"], probe.after_step[steps - 1])
    gap = (
        probe.after_step[-1]["network.image_encoder.map.0.weight"]
        - probe.in_validation[-1]["network.image_encoder.map.0.weight"]
    )
    assert gap.abs().max() > 1e-3  # the two are told apart
    loaded = load(tmp_path / "best.ckpt").network.state_dict()
    assert_equal_states({f"network.{k}": v for k, v in loaded.items()}, expected[steps - 1], exact=False)
    assert_equal_states(
        ImageTextModel.load_from_checkpoint(tmp_path / "best.ckpt").state_dict(),
        expected[steps - 1],
        exact=False,
    )
    # The run ends with the average in the model.
    assert_equal_states(state(model), expected[-1], exact=False)


def test_constants_stay_what_they_are(build):
    model = build()
    average = AveragedWeights(0.999)._build(model)
    for _ in range(50):
        average.update_parameters(model)
    assert_equal_states(state(average.module), state(model))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_average(build, data, trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 6)

    def fit(name: str, epochs: int, checkpoint: str | None = None) -> dict[str, Any]:
        last = ModelCheckpoint(tmp_path, name, save_on_train_epoch_end=True, enable_version_counter=False)
        run = trainer([AveragedWeights(DECAY), last], enable_checkpointing=True, limit_val_batches=1)
        run.fit_loop.max_epochs = epochs
        path = None if checkpoint is None else tmp_path / checkpoint
        run.fit(build(), data, ckpt_path=path, weights_only=True)
        return torch.load(tmp_path / f"{name}.ckpt", weights_only=True)

    whole, _, second = fit("whole", 2), fit("first", 1), fit("second", 2, "first.ckpt")
    assert int(whole["averaging_state"]["n_averaged"]) == int(second["averaging_state"]["n_averaged"]) == 6
    assert_equal_states(second["state_dict"], whole["state_dict"])
    assert_equal_states(second["current_model_state"], whole["current_model_state"])
    for a, b in zip(*(run["optimizer_states"][0]["state"].values() for run in (whole, second)), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
    # Resumed after its last step, a run ends with the average, too.
    model, run = build(), trainer([AveragedWeights(DECAY)], limit_val_batches=1)
    run.fit_loop.max_epochs = 2
    run.fit(model, data, ckpt_path=tmp_path / "whole.ckpt", weights_only=True)
    assert_equal_states(whole["state_dict"], state(model))


def test_the_average_of_gamma_stays_below_its_cap(build, data, trainer):
    model = build(LSENonLocal(dim=16, gamma2=14.0, max_gamma2=14.1))
    probe = Probe()
    # Gradients of the loss may push gamma either way: here it is pushed up.
    model.network.similarity.log_gamma2.register_hook(lambda gradient: -torch.ones_like(gradient))
    average = AveragedWeights(DECAY)
    trainer([probe, average], limit_val_batches=1, max_epochs=3).fit(model, data)
    name = "network.similarity.log_gamma2"
    cap = torch.tensor(14.1).log()
    assert torch.isclose(probe.after_step[-1][name], cap)
    assert all(step[name] <= cap + 1e-6 for step in [*probe.after_step, *probe.in_validation])


class FailsInValidation(Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        raise RuntimeError("stopped")


def test_an_exception_in_validation_swaps_weights_back(build, data, trainer, tmp_path):
    probe = Probe()
    saved = ModelCheckpoint(tmp_path, "saved", save_on_exception=True)
    fit = trainer([probe, FailsInValidation(), AveragedWeights(DECAY), saved], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="stopped"):
        fit.fit(build(), data)
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert_equal_states(checkpoint["current_model_state"], probe.after_step[-1])
    assert_equal_states(checkpoint["state_dict"], probe.averages()[-1], exact=False)


def test_a_slow_decay_is_a_warning(build, data, trainer):
    with pytest.warns(UserWarning, match="ema_decay 0.999 is slow for a run of 6 optimiser steps: 99%"):
        trainer([AveragedWeights(0.999)], limit_val_batches=0).fit(build(), data)


def test_callbacks_are_put_in_order():
    a, b, c, d, e = Throughput(), ModelCheckpoint(), AveragedWeights(0.5), Probe(), FiniteCheck()
    assert in_order([a, b, c, d, e, a.arrival]) == [a.arrival, d, e, c, b, a]
