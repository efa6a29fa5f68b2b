"""Stop training at the first loss or gradient that is not finite, and name the batch.

Loss and gradient norm are checked before the optimiser moves the weights: one NaN gradient spoils them although the
loss is finite. On a GPU the host waits here for the backward pass, once a step. The scaler of mixed float16 skips
steps with infinite gradients and halves its scale, so there a gradient counts only after SKIPPED_STEPS in a row. All
processes stop together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from medclip_dcl.distributed import gather_objects, is_distributed, rank_and_size
from medclip_dcl.errors import UserError

IDENTITIES = ("dicom_id", "study_id", "sentence_id", "index")
SKIPPED_STEPS = 50
"""Steps in a row that a scaler may skip (choice): halved so often, its first scale of 2^16 is far below the smallest
float16, 2^-24."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; the message names the step and the batch."""


class FiniteCheck(Callback):
    """Logs train/gradient_norm (before clipping) and stops every process if it, or the loss, is not finite.

    No checkpoint is written after that: BatchNorm's running statistics have seen the batch.

    Raises:
        NonFiniteError: names epoch, step and the identities of the batch.
    """

    def __init__(self) -> None:
        # Of the next optimiser step: several batches if gradients are accumulated.
        self._identities: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._skipped = 0
        self._error: NonFiniteError | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._identities.append({name: batch[name] for name in IDENTITIES if name in batch})

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        losses, self._losses = torch.stack(self._losses).float(), []
        identities, self._identities = self._identities, []
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = get_total_norm(gradients).float().to(losses.device)
        pl_module.log("train/gradient_norm", norm, batch_size=1)
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        loss_is_broken, gradient_is_broken = _anywhere(
            ~torch.stack([losses.isfinite().all(), norm.isfinite()])
        )
        self._skipped = self._skipped + 1 if has_scaler and gradient_is_broken else 0
        if loss_is_broken or (gradient_is_broken and not 0 < self._skipped < SKIPPED_STEPS):
            # Lightning divides accumulated losses by their number: their sum is the step's loss.
            parts = gather_objects(_described(identities, float(losses.sum())))
            where = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
            self._error = NonFiniteError(_message(where, float(norm), self._skipped, parts))
            raise self._error

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to save after the stop, e.g. by a callback that saves on exceptions."""
        if self._error is not None:
            raise self._error


def _anywhere(is_true: Bool[Tensor, " fact"]) -> list[bool]:
    """True on all processes if true on one, so that they stop together."""
    numbers = is_true.float()
    if is_distributed():
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [number > 0 for number in numbers.tolist()]


def _described(identities: Sequence[Mapping[str, Any]], loss: float) -> dict[str, Any]:
    """This process's part of the batch: identities, never texts."""
    return {"process": rank_and_size()[0], "loss": loss} | {
        name: [value for one in identities for value in _plain(one[name])] for name in identities[0]
    }


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _message(where: str, norm: float, skipped: int, parts: Sequence[Mapping[str, Any]]) -> str:
    with_loss = [part for part in parts if not math.isfinite(part["loss"])]
    what = "the loss is not finite" if with_loss else f"the gradient is not finite (its norm is {norm})"
    if skipped and not with_loss:
        what += f", as in the {skipped - 1} steps before, which mixed float16 skipped"
    lines = [f"training stopped at {where}: {what}."]
    for part in with_loss or parts:
        lines.append(f"Batch of process {part['process']}, loss {part['loss']:g}:")
        lines += [f"  {name}: {', '.join(map(str, part[name]))}" for name in IDENTITIES if name in part]
    lines.append(
        "No checkpoint holds weights from after this step. The same command continues from the last checkpoint; if it "
        "stops at the same batch, look at these images and their prepared files. Otherwise training diverged: train "
        "in a new run folder with a lower model.init_args.learning_rate, more warmup_steps, "
        "trainer.gradient_clip_val: 1.0, or trainer.precision: 32-true."
    )
    return "\n".join(lines)
