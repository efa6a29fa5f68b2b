"""Training stops at numbers that are not finite, says whose they are, and leaves every checkpoint whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor

from medclip_dcl.command.cli import main
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.objectives import contrastive
from medclip_dcl.training import finite
from medclip_dcl.training.finite import FiniteCheck, NonFiniteError
from tests.small import LinearPatches


class Seen(Callback):
    """Identities of the batches, and the weights before each."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        names = ("dicom_id", "study_id", "sentence_id")
        self.batches.append({k: [str(x) for x in list(map(_value, batch[k]))] for k in names if k in batch})
        self.weights.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})


def _value(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) else x


def break_loss(monkeypatch: pytest.MonkeyPatch, at_step: int, value: float = float("nan")) -> None:
    """The loss of one step of training is `value`."""
    whole = ImageTextModel.training_step

    def broken(self: ImageTextModel, batch: Any, batch_index: int) -> Tensor:
        loss = whole(self, batch, batch_index)
        return loss * value if self.global_step == at_step else loss

    monkeypatch.setattr(ImageTextModel, "training_step", broken)


def break_gradient(model: LightningModule, at_step: int, value: float = float("nan")) -> None:
    """One element of one gradient is `value` in one step; the loss is what it is."""

    def broken(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if model.global_step == at_step:
            gradient[(0,) * gradient.dim()] = value
        return gradient

    next(p for p in model.parameters() if p.requires_grad).register_hook(broken)


def assert_names(message: str, batch: dict[str, list[str]]) -> None:
    for name, values in batch.items():
        assert f"{name}: {', '.join(values)}\n" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_loss_stops_before_the_step(build, data, trainer, monkeypatch, value):
    break_loss(monkeypatch, at_step=4, value=value)
    seen, model = Seen(), build()
    fit = trainer([seen, FiniteCheck()])
    with pytest.raises(NonFiniteError, match="stopped at epoch 1, step 4: the loss is not finite") as error:
        fit.fit(model, data)
    assert len(seen.batches) == 5
    assert_names(str(error.value), seen.batches[4])
    assert set(seen.batches[4]["dicom_id"]).isdisjoint(seen.batches[3]["dicom_id"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, seen.weights[4][name]), name
    with pytest.raises(NonFiniteError):  # as a checkpoint of the exception would be
        fit.save_checkpoint("never.ckpt")


def slow_copy(numbers: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """As from a GPU: a copy that holds the numbers after the wait alone."""
    copy = torch.full_like(numbers, -1.0)

    def wait() -> None:
        copy.copy_(numbers)

    return copy, wait


@pytest.mark.parametrize("at_step, steps", [(4, 6), (2, 3)])
def test_a_gpu_is_checked_before_anything_is_kept(build, data, trainer, monkeypatch, at_step, steps):
    """Epochs have three steps: step 2 is followed by validation."""
    monkeypatch.setattr(finite, "_to_host", slow_copy)
    monkeypatch.setattr(contrastive, "is_on_host", lambda values: False)
    break_loss(monkeypatch, at_step=at_step)
    seen = Seen()
    fit = trainer([seen, FiniteCheck()])
    with pytest.raises(NonFiniteError, match=f"step {at_step}: the loss is not finite") as error:
        fit.fit(build(), data)
    assert len(seen.batches) == steps
    assert "with trainer.accelerator: cpu names them" in str(error.value)
    assert_names(str(error.value), seen.batches[at_step])
    with pytest.raises(NonFiniteError):
        fit.save_checkpoint("never.ckpt")


@pytest.mark.parametrize("weights_only", [True, False])
def test_no_checkpoint_of_a_gpu_holds_spoilt_weights(
    build, data, trainer, monkeypatch, tmp_path, weights_only
):
    monkeypatch.setattr(finite, "_to_host", slow_copy)
    monkeypatch.setattr(contrastive, "is_on_host", lambda values: False)
    break_loss(monkeypatch, at_step=1)
    saving = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=weights_only
    )
    with pytest.raises(NonFiniteError, match="step 1: the loss is not finite"):
        trainer([saving, FiniteCheck()], enable_checkpointing=True).fit(build(), data)
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_nan_gradient_stops(build, data, trainer, precision):
    seen, model = Seen(), build()
    break_gradient(model, at_step=2)
    fit = trainer([seen, FiniteCheck()], precision=precision, gradient_clip_val=1.0)
    with pytest.raises(
        NonFiniteError, match=r"step 2: the gradient is not finite \(its norm is nan\)"
    ) as error:
        fit.fit(model, data)
    assert_names(str(error.value), seen.batches[2])
    assert all(p.isfinite().all() for p in model.parameters())


def test_all_batches_of_an_accumulated_step_are_named(build, data, trainer, monkeypatch):
    monkeypatch.setattr(ImageTextModel, "training_step", _second_batch_is_nan(ImageTextModel.training_step))
    seen = Seen()
    with pytest.raises(NonFiniteError, match="epoch 0, step 0: the loss is not finite") as error:
        trainer([seen, FiniteCheck()], accumulate_grad_batches=3).fit(build(), data)
    three = {name: [x for batch in seen.batches for x in batch[name]] for name in seen.batches[0]}
    assert len(seen.batches) == 3
    assert_names(str(error.value), three)


def _second_batch_is_nan(whole: Any) -> Any:
    def broken(self: ImageTextModel, batch: Any, batch_index: int) -> Tensor:
        return whole(self, batch, batch_index) * (float("nan") if batch_index == 1 else 1.0)

    return broken


class Scales(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


def test_gradients_that_a_scaler_skips_do_not_stop(build, data, trainer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    scales, model = Scales(), build(image_encoder=LinearPatches(16, 16))  # a ResNet takes seconds in float16
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer([scales, FiniteCheck()], max_epochs=1, plugins=[plugin], limit_val_batches=0).fit(model, data)
    assert scales.values == [2.0**119, 2.0**118, 2.0**117]  # halved at each step, each of which was skipped
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_scaler_that_always_skips_stops(build, data, trainer, monkeypatch):
    monkeypatch.setattr("medclip_dcl.training.finite.SKIPPED_STEPS", 3)
    seen, model = Seen(), build(image_encoder=LinearPatches(16, 16))
    breaks = {0, 1, 3, 4, 5}  # the third step is whole: counting begins anew
    next(p for p in model.parameters() if p.requires_grad).register_hook(
        lambda gradient: gradient * (float("nan") if len(seen.batches) - 1 in breaks else 1.0)
    )
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fit = trainer([seen, FiniteCheck()], max_epochs=3, plugins=[plugin], limit_val_batches=0)
    with pytest.raises(
        NonFiniteError, match="as in the 2 steps before, which mixed float16 skipped"
    ) as error:
        fit.fit(model, data)
    assert len(seen.batches) == 6
    assert_names(str(error.value), seen.batches[5])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_the_command_ends_with_whole_checkpoints(arguments, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    break_loss(monkeypatch, at_step=4)
    with pytest.raises(SystemExit) as error:
        main(["fit", *arguments(run, "--ema_decay", "0.5", "--trainer.callbacks", "[]")])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "medclip-dcl fit: error: training stopped at epoch 1, step 4: the loss is not finite." in message
    for text in ("pneumothorax", "edema", "lungs"):
        assert text not in message.lower()
    assert not (run / "fit.json").exists()
    for name in ("best", "last"):
        checkpoint = torch.load(run / f"checkpoints/{name}.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 3
        for key in ("state_dict", "current_model_state"):
            assert all(value.isfinite().all() for value in checkpoint[key].values())
    # The same command goes on from there.
    monkeypatch.undo()
    for folder in (run, tmp_path / "whole"):
        main(["fit", *arguments(folder, "--ema_decay", "0.5", "--trainer.callbacks", "[]")])
    for name in ("best", "last"):
        a, b = (
            torch.load(tmp_path / f"{x}/checkpoints/{name}.ckpt", weights_only=True) for x in ("run", "whole")
        )
        assert a["averaging_state"]["n_averaged"] == b["averaging_state"]["n_averaged"] == b["global_step"]
        for key in ("state_dict", "current_model_state"):
            assert all(torch.equal(value, b[key][part]) for part, value in a[key].items())
    metrics = pd.read_csv(run / "metrics.csv")
    assert metrics.loc[metrics["train/loss"].notna(), "step"].tolist() == list(range(6))
    assert metrics["train/gradient_norm"].dropna().gt(0).sum() == 6
