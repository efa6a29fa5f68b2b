"""Mean of the validation loss over all batches and processes."""

from __future__ import annotations

import torch
from pytorch_lightning import LightningModule
from torch import Tensor


class ValidationLoss:
    """Sums losses in double precision (float32 on MPS, which has no float64) and their number.

    Lightning's own mean rounds the number of examples when it reduces over processes.
    """

    def __init__(self, module: LightningModule) -> None:
        precision = torch.float32 if module.device.type == "mps" else torch.float64
        self._module = module
        self._sums = torch.zeros(2, dtype=precision, device=module.device)

    def add(self, total: Tensor, count: int) -> None:
        """Add a batch: the sum of its losses and their number."""
        self._sums += torch.stack([total.to(self._sums.dtype), self._sums.new_tensor(count)])

    def mean(self) -> Tensor:
        """Mean over the batches of all processes."""
        total, count = self._module.trainer.strategy.reduce(self._sums, reduce_op="sum")
        return total / count
