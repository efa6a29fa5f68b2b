"""Results of a test on disk: results.json, predictions/*.parquet and figures/*.png in the run folder."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from medclip_dcl import __version__
from medclip_dcl.distributed import device_name, rank_and_size
from medclip_dcl.encoders.pretrained import weights_fingerprint
from medclip_dcl.errors import UserError
from medclip_dcl.evaluation.base import EvaluationCallback, Findings
from medclip_dcl.evaluation.figures import write_figure
from medclip_dcl.files import write_json, write_parquet
from medclip_dcl.training.image_sizes import image_settings
from medclip_dcl.training.sharing import show_figures

FORMAT_VERSION = 1
RESULTS_FILE = "results.json"
UNTRAINED_FILE = "results_untrained.json"


class ResultsWriter(Callback):
    """Writes what the evaluation callbacks found on test: after all of them, by one process, each file atomically.

    A file name ``results<suffix>.json`` puts the other files into ``predictions<suffix>/`` and ``figures<suffix>/``,
    so that the untrained network's results stand beside the trained one's. Everything but ``timings`` is the same
    for the same weights, data and settings.

    Args:
        file_name: of the results in the run folder (``trainer.default_root_dir``).
        figures: False writes no figures. Those of images are patient data unless they show a phantom.
        share_patient_data: True hands figures to networked loggers too; False to local ones, unless they show a
            phantom.

    Attributes:
        exported: folder of the evaluated network where it came from no checkpoint; results.json names it.
        trained_on: image_size and geometry of the network's training, and image_size_before, of that which it had
            started from, where they are known.

    Raises:
        ValueError: a file name that is not ``results<suffix>.json``.
    """

    def __init__(
        self, file_name: str = RESULTS_FILE, figures: bool = True, share_patient_data: bool = False
    ) -> None:
        self.file_name = file_name
        self.figures = figures
        self.share_patient_data = share_patient_data
        self.exported: Path | None = None
        self.trained_on: dict[str, Any] = {}
        self._started = 0.0
        _suffix(file_name)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._started
        evaluations = {
            callback.section: callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, EvaluationCallback) and callback.found is not None
        }
        if not trainer.is_global_zero or not evaluations:
            return
        folder, suffix = Path(trainer.default_root_dir), _suffix(self.file_name)
        datamodule = getattr(trainer, "datamodule")  # noqa: B009
        drawn: dict[str, Path] = {}
        _forget_earlier(folder, self.file_name)
        for section, found in _sections(evaluations).items():
            write_parquet(found.predictions, folder / f"predictions{suffix}" / f"{section}.parquet")
        for callback in evaluations.values():
            if self.figures:
                for name, figure in callback.figures(datamodule.load_image):
                    drawn[f"test/{name}"] = folder / f"figures{suffix}" / f"{name}.png"
                    write_figure(figure, drawn[f"test/{name}"])
        # Last: where results.json is, everything else is.
        results = _results(trainer, pl_module, evaluations, seconds, self.exported, self.trained_on)
        write_json(results, folder / self.file_name)
        show_figures(trainer.loggers, drawn, self.share_patient_data or datamodule.prepared.is_phantom)


def _forget_earlier(folder: Path, file_name: str) -> None:
    """Delete what an earlier test found: nothing of it may stand beside these results as if it were of them."""
    results = folder / file_name
    sections = list(json.loads(results.read_text(encoding="utf-8"))["metrics"]) if results.is_file() else []
    # First: without results.json nothing of the folder counts.
    results.unlink(missing_ok=True)
    for section in sections:
        (folder / f"predictions{_suffix(file_name)}" / f"{section}.parquet").unlink(missing_ok=True)
    for figure in (folder / f"figures{_suffix(file_name)}").glob("*.png"):
        figure.unlink()


def strict(value: Any) -> Any:
    """The same value for JSON: a number that is NaN or infinite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _results(
    trainer: Trainer,
    pl_module: LightningModule,
    evaluations: Mapping[str, EvaluationCallback],
    seconds: float,
    exported: Path | None,
    trained_on: Mapping[str, Any],
) -> dict[str, Any]:
    found = _sections(evaluations)
    datamodule = getattr(trainer, "datamodule")  # noqa: B009
    prepared, images = datamodule.prepared, datamodule.evaluation("test").images
    return strict(
        {
            "format_version": FORMAT_VERSION,
            "metrics": {section: one.metrics for section, one in found.items()},
            "protocol": {section: one.protocol for section, one in found.items()},
            "counts": {section: one.counts for section, one in found.items()},
            "notes": {section: one.notes for section, one in found.items()},
            "checkpoint": {
                "file": _relative(trainer.ckpt_path or exported, Path(trainer.default_root_dir)),
                "weights": weights_fingerprint(getattr(pl_module, "network")),  # noqa: B009
            },
            "dataset": {
                "source": prepared.info.get("source"),
                "fingerprint": prepared.info.get("fingerprint"),
                "phantom": prepared.is_phantom,
                "folder": prepared.folder.resolve().name,
                "images": len(images),
                "patients": int(images["subject_id"].nunique()),
            },
            "images": {"shown": image_settings(datamodule), "trained": trained_on},
            "precision": str(trainer.precision),
            "versions": {
                "medclip_dcl": __version__,
                "python": platform.python_version(),
                **{
                    name: version(name)
                    for name in ("torch", "torchvision", "pytorch-lightning", "transformers")
                },
            },
            "timings": {
                "test_seconds": round(seconds, 3),
                "metric_seconds": {section: round(one.seconds, 3) for section, one in evaluations.items()},
                "device": device_name(pl_module.device),
                "processes": rank_and_size()[1],
            },
        }
    )


def _sections(evaluations: Mapping[str, EvaluationCallback]) -> dict[str, Findings]:
    """What was found, by its section of results.json; an evaluation may have several."""
    found: dict[str, Findings] = {}
    for section, callback in evaluations.items():
        if callback.found is not None:
            found |= {section: callback.found, **callback.found.also}
    return found


def _relative(file: Any, folder: Path) -> str | None:
    """A file of the run folder by its place there, so that a moved run keeps its results."""
    if file is None:
        return None
    file = Path(file)
    inside = file.resolve().is_relative_to(folder.resolve())
    return file.resolve().relative_to(folder.resolve()).as_posix() if inside else file.name


def _suffix(file_name: str) -> str:
    if not (
        file_name.startswith("results") and file_name.endswith(".json") and Path(file_name).name == file_name
    ):
        raise UserError(f'ResultsWriter: file_name must be "results<suffix>.json": found {file_name!r}')
    return file_name.removeprefix("results").removesuffix(".json")
