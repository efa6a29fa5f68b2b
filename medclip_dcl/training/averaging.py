"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from medclip_dcl.common.errors import check_range

_MAX_SHARE = 0.05

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class AveragedWeights(WeightAveraging):
    """Validation, checkpoints and `test` use an average of the weights over steps; training continues with the last.

    average = decay * average + (1 - decay) * weights after each optimiser step, starting from the weights after the
    first. In a checkpoint `state_dict` is the average and `current_model_state` the weights that a resumed run takes.

    Unlike Lightning's EMAWeightAveraging, it copies integers, which averaging would truncate, builds the average after
    the model and on its device, and restores the weights when validation raises.
    """

    is_saved = True

    def __init__(self, decay: float) -> None:
        check_range("", "(0, 1)", ema_decay=decay)
        super().__init__()
        self.decay = decay
        self._is_swapped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: some models are built by their own `setup`, which runs later."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._build(pl_module)
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = self._build(pl_module)
        # The counter stays on the CPU: reading it would wait for the device.
        average.module.to(pl_module.device)
        steps = trainer.estimated_stepping_batches
        if (share := self.decay**steps) > _MAX_SHARE:
            rank_zero_warn(
                f"ema_decay {self.decay} is slow for a run of {steps} optimiser steps: {share:.0%} of the average at "
                "its end are the weights after the first step; lower it"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also in a run that is resumed after its last step, which has no `on_train_end`."""
        if self._average_model is not None:
            self._copy_average_to_current(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_swapped:
            self._swap_models(pl_module)

    def _build(self, pl_module: LightningModule) -> AveragedModel:
        if self._average_model is None:
            self._average_model = AveragedModel(pl_module, use_buffers=True, multi_avg_fn=self._move)
        return self._average_model

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self._is_swapped = not self._is_swapped

    def _move(self, averages: _Tensors, current: _Tensors, count: Tensor | int) -> None:
        """One step of the average; the tensors have one device and type."""
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, current, 1 - self.decay)
        else:
            torch._foreach_copy_(averages, current)
