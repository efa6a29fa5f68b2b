"""Loggers: metrics.csv, folders of the others, and protection of patients' data.

Figures show images and sentences of reports, and a checkpoint's vocabulary and weights come from them. A logger that
may use a network gets them only with `share_patient_data: true`, or if the data set is a phantom. Every logger counts
as networked unless it is known to write to the local disk alone.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_text
from medclip_dcl.runs.run_folder import METRICS_FILE


class MetricsFile(Logger):
    """Writes metrics.csv in the run folder; a resumed run appends and never repeats a step (CSVLogger deletes it)."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.file = Path(folder) / METRICS_FILE
        self._columns: list[str] = []
        if self.file.is_file():
            with self.file.open(newline="", encoding="utf-8") as stream:
                self._columns = next(csv.reader(stream), [])

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.file.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings stand in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite(self._rows())
        with self.file.open("a", newline="", encoding="utf-8") as stream:
            csv.DictWriter(stream, self._columns).writerow(row)

    @rank_zero_only
    def forget_after(self, step: int, rows: int | None = None) -> None:
        """Drop the rows that a resumed run will write again.

        Args:
            step: first step that it repeats.
            rows: number of rows to keep, if it resumes with the validation of the step before.
        """
        if self.file.is_file():
            self._rewrite([row for row in self._rows()[:rows] if int(row["step"] or 0) < step])

    def count(self) -> int:
        """Number of rows, after they are flushed to the disk."""
        if not self.file.is_file():
            return 0
        with self.file.open("rb") as stream:
            os.fsync(stream.fileno())
        return len(self._rows())

    def _rows(self) -> list[dict[str, str]]:
        if not self.file.is_file():
            return []
        with self.file.open(newline="", encoding="utf-8") as stream:
            return [row for row in csv.DictReader(stream) if None not in row.values()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_text(text.getvalue(), self.file)


_LOCAL = (MetricsFile, CSVLogger, TensorBoardLogger)
_PACKAGES = {"TensorBoardLogger": ("tensorboard", "tensorboardX"), "WandbLogger": ("wandb",)}
_UPLOADS = ("log_model", "log_model_checkpoints")


def check_loggers(loggers: Any, may_share: bool) -> None:
    """Refuse a configured logger whose package is missing, or that would upload checkpoints of patients' data.

    Args:
        loggers: trainer.logger: one, a list, null, true or false.
        may_share: patients' data may go to networked loggers.
    """
    for one in listed(loggers):
        name = one.class_path.rpartition(".")[2]
        packages = _PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            raise UserError(
                f"trainer.logger: {name} needs the package {packages[0]}, which is not installed; "
                f"run: pip install -e '.[{packages[0]}]'"
            )
        options = one.get("init_args") or {}
        for upload in _UPLOADS:
            if options.get(upload) and not may_share:
                raise UserError(
                    f"trainer.logger: {name} with {upload}: {options[upload]} uploads checkpoints, whose vocabulary "
                    f"and weights come from patients' reports; set {upload}: false, or share_patient_data: true"
                )


def place_loggers(loggers: Any, run_folder: str | Path) -> None:
    """Put a relative `save_dir` of trainer.logger into the run folder."""
    for one in listed(loggers):
        options = one.get("init_args") or {}
        folder = options.get("save_dir")
        if folder is not None and "://" not in str(folder):
            options["save_dir"] = str(Path(run_folder) / folder)


def listed(value: Any) -> list[Any]:
    """The parts of the Trainer that a setting configures: one, or a list; none where it is null, true or false."""
    return [one for one in (value if isinstance(value, list) else [value]) if one not in (None, True, False)]


def is_networked(logger: Logger) -> bool:
    """False only for a logger that is known to write to the local disk alone."""
    return not isinstance(logger, _LOCAL) or "://" in str(logger.save_dir)


def show_figures(loggers: Iterable[Logger], figures: Mapping[str, Path], may_share: bool) -> None:
    """Hand PNG files to each logger that takes images; to networked ones only if allowed, else with a warning.

    Args:
        loggers: TensorBoard's, and any with `log_image(key=..., images=[file])` (W&B's).
        figures: name -> file.
        may_share: patients' images and texts may go to networked loggers.
    """
    withheld = []
    for logger in loggers:
        is_board = isinstance(logger, TensorBoardLogger)
        if not figures or not (is_board or callable(getattr(logger, "log_image", None))):
            continue
        if is_networked(logger) and not may_share:
            withheld.append(type(logger).__name__)
            continue
        for name, file in figures.items():
            if is_board:
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("RGB"))
                logger.experiment.add_image(name, pixels, dataformats="HWC")  # type: ignore[attr-defined]
            else:
                logger.log_image(key=name, images=[str(file)])  # type: ignore[attr-defined]
    if withheld:
        rank_zero_warn(
            f"{len(figures)} figures, which show patients' images and sentences, were not given to "
            f"{', '.join(withheld)}: they are in {next(iter(figures.values())).parent}; share_patient_data: true sends "
            "them, where the terms of the data allow it"
        )
