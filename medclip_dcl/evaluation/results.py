"""Results of a test on disk: results.json, predictions/*.parquet and figures/*.png in the run folder."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl import __version__
from medclip_dcl.common.devices import device_name
from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json, write_parquet
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.eta import training_sentences
from medclip_dcl.data.images import EvaluatedImages, shown_images
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.data.link import trainer_data
from medclip_dcl.data.prepared import OPTIONAL
from medclip_dcl.evaluation.callback import (
    Evaluation,
    EvaluationData,
    EvaluationResult,
    OwnData,
    evaluation_data,
    is_part,
)
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.described import ImageNetwork
from medclip_dcl.pictures.plots import write_figure
from medclip_dcl.runs.loggers import show_figures
from medclip_dcl.runs.run_folder import PART
from medclip_dcl.runs.saved import RESULTS_FILE, RESULTS_FORMAT_VERSION, read_json

UNTRAINED_FILE = "results_untrained.json"
IMAGES = "images"
"""Name of the table of tested images in predictions/, beside those of the evaluations."""


class ResultsWriter(Callback):
    """Writes the results of the evaluation callbacks on test: after all of them, by one process, each file atomically.

    The same weights, data and settings give the same bytes, except for ``timings``.

    Args:
        file_name: ``results<suffix>.json`` in the run folder, beside ``predictions<suffix>/`` and ``figures<suffix>/``.
        figures: False writes no figures. Figures of images are patient data unless they show a phantom.
        share_patient_data: True sends figures to networked loggers, too; False to local ones only, unless they show
            a phantom.

    Attributes:
        writes_all: False writes results.json alone, without predictions and figures.
        folder: where the last test was written: the Trainer's `default_root_dir`, or `PART` in it for a test that
            leaves out batches and would replace a complete one.
        exported: folder of the evaluated network, if it does not come from a checkpoint; results.json names it.
        lineage: of the evaluated network, if it is known.
        trained_on: image_size and geometry of the network's training, and image_size_before, that of the weights which
            it started from; as far as known.
    """

    def __init__(
        self, file_name: str = RESULTS_FILE, figures: bool = True, share_patient_data: bool = False
    ) -> None:
        self.file_name = file_name
        self.figures = figures
        self.writes_all = True
        self.share_patient_data = share_patient_data
        self.folder: Path | None = None
        self.exported: Path | None = None
        self.lineage: Lineage | None = None
        self.trained_on: dict[str, Any] = {}
        self._started = 0.0
        self._notes: dict[str, list[str]] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        self._notes = {}
        if any(isinstance(one, Evaluation) and one.section == IMAGES for one in trainer.callbacks):  # type: ignore[attr-defined]
            raise UserError(
                f"trainer.callbacks: section {IMAGES!r} is the table of tested images; name it otherwise"
            )
        data, lineage = trainer_data(trainer), self.lineage
        if lineage is None or not isinstance(data, EvaluationData) or self.file_name == UNTRAINED_FILE:
            return
        prepared = data.prepared
        if lineage.fingerprint in (None, prepared.fingerprint):
            return
        lineage.require_untrained(prepared, data.evaluation("test").images["dicom_id"])
        file = _relative(trainer.ckpt_path or self.exported, Path(trainer.default_root_dir))
        elsewhere = lineage.of_set(prepared).elsewhere
        self._notes["data"] = [
            f"{file} was trained on another set ({lineage.record.get('source')}, fingerprint {lineage.fingerprint}) "
            f"than it was tested on ({prepared.info['source']}, fingerprint {prepared.fingerprint})"
            + (f"; its training patients in {elsewhere} cannot be compared" if elsewhere else "")
        ]

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._started
        evaluations = [one for one in trainer.callbacks if isinstance(one, Evaluation) and one.results]  # type: ignore[attr-defined]
        if not trainer.is_global_zero or not evaluations or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        sections = {section: result for one in evaluations for section, result in one.results.items()}
        folder, suffix = Path(trainer.default_root_dir), _suffix(self.file_name)
        limited = {"limited": True} if is_part(trainer) else {}
        earlier = [file for name in (RESULTS_FILE, self.file_name) if (file := folder / name).is_file()]
        if limited and any("limited" not in read_json(file) for file in earlier):
            rank_zero_info(
                f"this test leaves out batches; the complete results in {folder} stay, these go to {folder / PART}"
            )
            folder /= PART
        self.folder = folder
        datamodule = _tested_data(trainer)
        prepared = datamodule if isinstance(datamodule, EvaluationData) else None
        tables = {section: result.predictions for section, result in sections.items()}
        if prepared is not None and self.writes_all:
            tables[IMAGES] = _tested_images(prepared)
        drawn: dict[str, Path] = {}
        _forget_earlier(folder, self.file_name)
        for name, table in tables.items() if self.writes_all else ():
            write_parquet(table, folder / f"predictions{suffix}" / f"{name}.parquet")
        load_image = None if prepared is None else prepared.load_image
        for one in evaluations if self.figures and self.writes_all else ():
            for name, figure in one.figures(load_image):
                drawn[f"test/{name}"] = folder / f"figures{suffix}" / f"{name}.png"
                write_figure(figure, drawn[f"test/{name}"])
        # Last: a results.json says that everything else is there.
        content = self._content(trainer, pl_module, sections, seconds)
        write_json({**content, **limited}, folder / self.file_name)
        is_phantom = prepared is not None and prepared.prepared.is_phantom
        show_figures(trainer.loggers, drawn, self.share_patient_data or is_phantom)

    def _content(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        sections: Mapping[str, EvaluationResult],
        seconds: float,
    ) -> dict[str, Any]:
        packages = ("torch", "torchvision", "pytorch-lightning", "transformers")
        network: Any = pl_module.network
        return {
            "format_version": RESULTS_FORMAT_VERSION,
            "metrics": {section: one.metrics for section, one in sections.items()},
            "protocol": {section: one.protocol for section, one in sections.items()},
            "counts": {section: one.counts for section, one in sections.items()},
            "notes": {section: one.notes for section, one in sections.items()} | self._notes,
            "checkpoint": {
                "file": _relative(trainer.ckpt_path or self.exported, Path(trainer.default_root_dir)),
                "weights": weights_fingerprint(network),
                **_settings(network),
                **(read_model(trainer.ckpt_path).progress if trainer.ckpt_path else {}),
            },
            **self._tested(_tested_data(trainer)),
            "precision": str(trainer.precision),
            "prompts_in_training": self._prompts_in_training(_tested_data(trainer), sections),
            "versions": {
                "medclip_dcl": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
            "timings": {
                "test_seconds": round(seconds, 3),
                "device": device_name(pl_module.device),
                "processes": rank_and_size()[1],
            },
        }

    def _prompts_in_training(self, data: Any, sections: Mapping[str, EvaluationResult]) -> list[str] | None:
        """Prompts that training reports have as a sentence; None without prompts, and of a training on another set."""
        pairs = sections["classification"].protocol.get("prompts") if "classification" in sections else None
        if pairs is None or self.lineage is None or self.lineage.fingerprint != data.prepared.fingerprint:
            return None
        known = {text.strip(" .").casefold() for text in training_sentences(data.prepared)["text"]}
        sides = (side for pair in pairs.values() for side in pair.values())
        texts = (text for side in sides for text in ([side] if isinstance(side, str) else side))
        return [text for text in dict.fromkeys(texts) if text.strip(" .").casefold() in known]

    def _tested(self, datamodule: EvaluationData | OwnData) -> dict[str, Any]:
        """Entries that say which images were tested and, for those of a prepared set, how they were shown."""
        if not isinstance(datamodule, EvaluationData):
            return {"dataset": datamodule.dataset()}
        prepared, images = datamodule.prepared, _measured(datamodule.evaluation("test"))
        return {
            "dataset": {
                "source": prepared.info.get("source"),
                "fingerprint": prepared.fingerprint,
                "phantom": prepared.is_phantom,
                "folder": prepared.folder.resolve().name,
                "images": len(images),
                "patients": int(images["subject_id"].nunique()),
                "names_patients": prepared.names_patients,
            },
            "images": {"shown": shown_images(datamodule), "trained": self.trained_on},
        }


def _settings(network: Any) -> dict[str, Any]:
    """Digests of the settings of a network's parts, which a calibration must share."""
    try:
        return {"settings": network.settings_fingerprint()} if isinstance(network, ImageNetwork) else {}
    except (
        NotImplementedError
    ):  # parts of a user that do not describe themselves: no checkpoint, no calibration
        return {}


def _tested_data(trainer: Trainer) -> EvaluationData | OwnData:
    """The Trainer's datamodule; one with a prepared set is described by that."""
    data = trainer_data(trainer)
    if isinstance(data, OwnData) and not isinstance(data, EvaluationData):
        return data
    return evaluation_data(trainer)


def _measured(tables: EvaluatedImages) -> pd.DataFrame:
    """The images of a test without those that only choose thresholds."""
    return tables.images[~tables.images["dicom_id"].isin(getattr(tables, "tuning", ()))]


def _tested_images(datamodule: EvaluationData) -> pd.DataFrame:
    """Patient, study, view and, where the set has them, sex and age of each tested image, for tables by group."""
    images = datamodule.prepared.table("images")
    tested = images[images["dicom_id"].isin(_measured(datamodule.evaluation("test"))["dicom_id"])]
    columns = ["dicom_id", "study_id", "subject_id", "view", *(x for x in OPTIONAL["images"] if x in images)]
    return tested[columns].sort_values("dicom_id")


def _forget_earlier(folder: Path, file_name: str) -> None:
    """Delete the results of an earlier test, so that none of them is mistaken for one of these."""
    results = folder / file_name
    sections = list(read_json(results)["metrics"]) if results.is_file() else []
    # First: without results.json the folder counts as untested.
    results.unlink(missing_ok=True)
    for section in [IMAGES, *sections]:
        (folder / f"predictions{_suffix(file_name)}" / f"{section}.parquet").unlink(missing_ok=True)
    for figure in (folder / f"figures{_suffix(file_name)}").glob("*.png"):
        figure.unlink()


def _relative(file: Any, folder: Path) -> str | None:
    """Path relative to the run folder, so that a moved run keeps its results; of others with their run's name."""
    if file is None:
        return None
    file = Path(file)
    path, folder = file.resolve(), folder.resolve()
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return "/".join(path.parts[-3:] if file.parent.name == "checkpoints" else [file.name])


def _suffix(file_name: str) -> str:
    return Path(file_name).stem.removeprefix("results")
