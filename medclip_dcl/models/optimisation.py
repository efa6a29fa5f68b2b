"""Optimiser of every model: AdamW, linear warm-up, then a cosine decay or a constant rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from medclip_dcl.common.errors import UserError

Schedule: TypeAlias = Literal["cosine", "constant"]
CONFIGURED = ("initial_lr", "weight_decay", "betas")


def adamw_warmup_cosine(
    groups: list[dict[str, Any]],
    learning_rate: float,
    warmup_steps: int,
    total_steps: int | float,
    beta2: float = 0.999,
    schedule: Schedule = "cosine",
) -> dict[str, Any]:
    """For `configure_optimizers`: AdamW whose rates follow `warmup_cosine` by optimiser step.

    A group of `parameter_groups` with an "lr" keeps it instead of `learning_rate`; one with a "first_step" has rate 0
    before it, and its own warm-up and decay to the same end from there. A constant schedule has the warm-up alone.
    """
    if math.isinf(total_steps) and schedule == "cosine":
        raise UserError(
            "trainer.max_epochs -1: the learning rate decays to the last step; set trainer.max_steps, too"
        )
    optimizer = AdamW(groups, lr=learning_rate, betas=(0.9, beta2))
    firsts = [group.get("first_step", 0) for group in groups]
    for name, steps, result in (
        ("warmup_steps", warmup_steps, "the learning rate never reaches model.learning_rate"),
        ("frozen_steps", max(firsts), "what is frozen is never trained"),
    ):
        if steps >= total_steps:
            warnings.warn(
                f"model.{name} {steps} is not less than the run's {int(total_steps)} optimiser steps: {result}",
                stacklevel=2,
            )
    end = math.inf if schedule == "constant" else int(total_steps)
    scheduler = LambdaLR(optimizer, [_factor_from(first, warmup_steps, end) for first in firsts])
    # Those of the settings: a checkpoint brings its own (`training.last_checkpoint`).
    configured = [{name: group[name] for name in CONFIGURED} for group in optimizer.param_groups]
    optimizer.configured = configured  # type: ignore[attr-defined]
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _factor_from(first: int, warmup: int, total: float) -> Callable[[int], float]:
    return lambda step: 0.0 if step < first else warmup_cosine(step - first, warmup, total - first)


def warmup_cosine(step: int, warmup: int, total: float) -> float:
    """Factor of the learning rate at an optimiser step: linear warm-up to 1, then half a cosine to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def learning_rates(optimizer: Optimizer) -> dict[str, Tensor]:
    """Metrics to log: learning_rate, that of the last group, and learning_rate_NAME of each name among the groups.

    On the host: Lightning copies a number that is logged to the device, which waits for a GPU at each step.
    """
    named = {f"_{group['name']}": group["lr"] for group in optimizer.param_groups if "name" in group}
    rates = {"": optimizer.param_groups[-1]["lr"], **named}
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # not the precision of training
    return {f"learning_rate{name}": torch.tensor(float(rate), **options) for name, rate in rates.items()}


def parameter_groups(
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
    learning_rate: float | None = None,
    name: str | None = None,
) -> list[dict[str, Any]]:
    """Those that need a gradient: matrices and kernels with weight decay; biases, norms and gamma without."""
    trained = [p for p in parameters if p.requires_grad]
    own: dict[str, Any] = {} if learning_rate is None else {"lr": learning_rate}
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay, **own},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, **own},
    ]
    groups = [group for group in groups if group["params"]]
    if name is not None and groups:
        groups[0]["name"] = name  # Lightning's LearningRateMonitor refuses two of one name
    return groups
