"""Loggers: metrics.csv, folders of the others, and protection of patients' data.

A logger that may use a network gets figures and checkpoints only with `share_patient_data: true`, or of a phantom.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping
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


def check_loggers(loggers: Any, may_share: bool) -> None:
    """Refuse a configured logger (one, a list, null, true or false) that would upload checkpoints of patients' data."""
    for one in listed(loggers):
        options = one.get("init_args") or {}
        for upload in ("log_model", "log_model_checkpoints"):
            if options.get(upload) and not may_share:
                raise UserError(
                    f"trainer.logger, {upload}: expected false, found {options[upload]}, which uploads checkpoints "
                    "of patients' reports; set it to false, or give --share_patient_data true"
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
    """Hand PNG files, by name, to each logger that takes images; to networked ones only if allowed.

    Loggers that take images are TensorBoard's, and any with `log_image(key=..., images=[file])` (W&B's).
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
            f"{', '.join(withheld)}; --share_patient_data true sends them, where the terms of the data allow it"
        )
