"""A model and data of milliseconds for grids of runs: a line through noisy points."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.files import write_json
from medclip_dcl.data.samplers import EpochDataModule, EpochSampler
from medclip_dcl.models.seeded_batches import SeededBatches


class Points(Dataset):
    """y = 2 x + noise, drawn from (seed, epoch, index)."""

    def __init__(self, seed: int, noise: float) -> None:
        self.seed, self.noise = seed, noise

    def __len__(self) -> int:
        return 12

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * key[0] + key[1])
        x, noise = torch.randn(2, generator=generator)
        return {"index": torch.tensor(key[1]), "x": x, "y": 2 * x + self.noise * noise}


class TinyData(EpochDataModule):
    def __init__(self, seed: int = 0, noise: float = 0.5) -> None:
        super().__init__()
        self.points = Points(seed, noise)

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.points, EpochSampler(12, 4, self.points.seed), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader([self.points[99, i] for i in range(5)], batch_size=5)  # type: ignore[arg-type]

    test_dataloader = val_dataloader


class TinyModel(LightningModule):
    """Learns the slope; may fail, or kill its process, at the second epoch, and may take its time."""

    def __init__(self, learning_rate: float = 0.05, ends_by: str = "itself", seconds: float = 0.0) -> None:
        super().__init__()
        self.learning_rate, self.ends_by, self.seconds = learning_rate, ends_by, seconds
        self.slope = torch.nn.Parameter(torch.randn(()))

    def configure_callbacks(self) -> list[Any]:
        return [SeededBatches()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)

    def error(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.slope * batch["x"] - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        time.sleep(self.seconds)
        if self.current_epoch and self.ends_by == "raising":
            raise RuntimeError("the slope\nis too steep")
        if self.current_epoch and self.ends_by == "dying":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.error(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.log("validate/loss", self.error(batch))

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.log("test/error", self.error(batch))

    def on_test_end(self) -> None:
        results = {
            "format_version": 2,
            "metrics": {
                "tiny": {"error": float(self.trainer.callback_metrics["test/error"]), "undefined": None},
                "slope": {"1.0": {"value": float(self.slope), "by_draw": [1.0]}},
            },
            **{part: {} for part in ("protocol", "counts", "notes")},
            "checkpoint": {"weights": f"{float(self.slope):.9f}"},
            "dataset": {"fingerprint": "points"},
            "precision": str(self.trainer.precision),
            "versions": {"torch": torch.__version__},
            "timings": {"test_seconds": 0.5, "device": "CPU, 1 threads"},
        }
        write_json(results, Path(self.trainer.default_root_dir) / "results.json")
