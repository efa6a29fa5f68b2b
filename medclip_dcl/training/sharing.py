"""Loggers besides metrics.csv: their folders, and protection of patients' data.

Figures show images and sentences of reports, and a checkpoint's vocabulary and weights come from them. A logger that
may use a network gets them only with `share_patient_data: true`, or if the data set is a phantom. Every logger counts
as networked unless it is known to write to the local disk alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from medclip_dcl.errors import UserError
from medclip_dcl.training.record import MetricsFile

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
