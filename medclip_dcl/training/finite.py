"""Stop training at the first loss or gradient that is not finite, and name the batch.

A GPU does not wait for the check: its numbers are read one step later, or before anything is validated or saved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from medclip_dcl.common.distributed import gather_objects, greatest_of_all, rank_and_size
from medclip_dcl.common.errors import UserError

IDENTITIES = ("dicom_id", "study_id", "sentence_id", "index")
SKIPPED_STEPS = 50
"""Steps in a row that a scaler may skip (choice): halved so often, its first scale of 2^16 is far below the smallest
float16, 2^-24."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; the message names the step and the batch."""


class _Step(NamedTuple):
    """An optimiser step, the identities of its batches, and its numbers, which are on their way to the host.

    These are 1 where a loss, and where the gradient's norm is not finite on any process; this one's loss and norm.
    `wait` returns when they have arrived; None: they are there.
    """

    where: str
    identities: list[dict[str, Any]]
    numbers: Tensor
    wait: Callable[[], None] | None


class FiniteCheck(Callback):
    """Logs train/gradient_norm (before clipping) and stops every process if it, or the loss, is not finite.

    A scaler of mixed float16 skips steps with infinite gradients; there a gradient counts after SKIPPED_STEPS in a row.
    No checkpoint is written after the stop: BatchNorm's running statistics have seen the batch.
    """

    def __init__(self) -> None:
        # Of the next optimiser step: several batches if gradients are accumulated.
        self._identities: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._unchecked: deque[_Step] = deque()
        self._skipped = 0
        self._error: NonFiniteError | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
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
        # 1 on all processes if true on one, so that they stop together.
        is_broken = greatest_of_all((~torch.stack([losses.isfinite().all(), norm.isfinite()])).float())
        # Lightning divides accumulated losses by their number: their sum is the step's loss.
        numbers, wait = _to_host(torch.cat([is_broken, torch.stack([losses.sum(), norm])]))
        where = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
        self._unchecked.append(_Step(where, identities, numbers, wait))
        self._check(trainer, but=0 if wait is None else 1)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Lightning saves weights alone without asking callbacks.
        savers = (one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint))
        if any(one.save_weights_only for one in savers):
            self._check(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    def _check(self, trainer: Trainer, but: int = 0) -> None:
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        while self._error is None and len(self._unchecked) > but:
            step = self._unchecked.popleft()
            if step.wait is not None:
                step.wait()
            loss_is_broken, gradient_is_broken, loss, norm = step.numbers.tolist()
            self._skipped = self._skipped + 1 if has_scaler and gradient_is_broken else 0
            if loss_is_broken or (gradient_is_broken and not 0 < self._skipped < SKIPPED_STEPS):
                identities = step.identities
                own = {
                    name: [x.item() if isinstance(x, Tensor) else x for one in identities for x in one[name]]
                    for name in identities[0]
                }
                parts = gather_objects({"process": rank_and_size()[0], "loss": loss, **own})
                self._error = NonFiniteError(
                    _message(step.where, norm, self._skipped, parts, on_gpu=step.wait is not None)
                )
                raise self._error

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._check(trainer)
        if self._error is not None:
            raise self._error


def _to_host(numbers: Float[Tensor, " number"]) -> tuple[Tensor, Callable[[], None] | None]:
    """Numbers on the host, and the wait until a GPU has written them."""
    if numbers.device.type != "cuda":
        return numbers, None
    copy = numbers.to("cpu", non_blocking=True)  # pinned memory
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived.synchronize


def _message(where: str, norm: float, skipped: int, parts: Sequence[Mapping[str, Any]], on_gpu: bool) -> str:
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
    if on_gpu:
        lines.append(
            "Wrong inputs of the objective (eta outside [0, 1), log p above 0 or NaN, negative weights) are not read "
            "on a GPU and end here too; the same training with trainer.accelerator: cpu names them."
        )
    return "\n".join(lines)
