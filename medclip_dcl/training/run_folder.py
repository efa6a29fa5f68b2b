"""One folder for each run: its rules, its metrics.csv, and what it remembers of training."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from medclip_dcl.distributed import device_name
from medclip_dcl.errors import UserError
from medclip_dcl.files import write_json, write_text
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.report.saved_results import CONFIG_FILE, differing_settings
from medclip_dcl.training.last_checkpoint import find_readable
from medclip_dcl.weight_files import checkpoint_of_run

FIT_FILE = "fit.json"
INITIAL_WEIGHTS_FILE = "initial_weights.json"
CLASS_PROBABILITY_FILE = "class_probability.parquet"
METRICS_FILE = "metrics.csv"
UNTRAINED_CHECKPOINT = "untrained.ckpt"

DATA_FILE = "data.json"

_ROWS = "metrics_rows"

_LENGTH = "trainer.max_epochs"
_OF_THE_END = ("results.json", "predictions", "figures", "report.html")
"""What was measured or drawn at the end of training."""


class RunFolderError(UserError):
    """The run folder holds another run, or lacks what a command needs; the message says what to do."""


class RunFolder:
    """Where one run keeps everything.

    Args:
        folder: made at the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"

    @property
    def is_finished(self) -> bool:
        """True once `fit` has come to its end."""
        return (self.folder / FIT_FILE).is_file()

    def saved_config(self) -> dict[str, Any]:
        """The run's resolved configuration; empty for a new run.

        Raises:
            RunFolderError: it cannot be read, or the folder is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; --run_folder takes a folder")
        file = self.folder / CONFIG_FILE
        if not file.is_file():
            return {}
        instead = "restore it, or choose another --run_folder"
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunFolderError(
                f"{file} cannot be read ({' '.join(str(error).split())}); {instead}"
            ) from error
        if not isinstance(found, dict):
            raise RunFolderError(f"{file} holds no configuration; {instead}")
        return found

    def check(
        self,
        config: Mapping[str, Any],
        data: Mapping[str, Any],
        complete: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    ) -> bool:
        """Refuse a folder that holds anything but this run; every process calls it, before any waits for another.

        Returns:
            True if it holds this run with fewer epochs: `extend` lets it have more.

        Args:
            config: resolved configuration of the run.
            data: what identifies the prepared data set (its fingerprint).
            complete: adds to the folder's configuration the defaults of options that it does not know yet.

        Raises:
            RunFolderError: another configuration (names the keys that differ), other data, or files of unknown
                origin.
        """
        file = self.folder / CONFIG_FILE
        if not file.is_file():
            if (self.folder / METRICS_FILE).exists() or self.checkpoints.exists():
                raise RunFolderError(
                    f"{self.folder} holds results but no {CONFIG_FILE}: not a run of this program; "
                    "choose another --run_folder"
                )
            return False
        found: Mapping[str, Any] = self.saved_config()
        if found != config:
            found = complete(dict(found))
        differing = sorted(differing_settings(found, config))
        is_longer = differing == [_LENGTH] and _is_longer(found["trainer"], config["trainer"])
        if differing and not is_longer:
            raise RunFolderError(
                f"{self.folder} already holds another run: its {CONFIG_FILE} differs in {', '.join(differing)}; "
                f"choose another --run_folder{self._advice(found)}"
            )
        data_file = self.folder / DATA_FILE
        if data_file.is_file() and json.loads(data_file.read_text(encoding="utf-8")) != dict(data):
            raise RunFolderError(
                f"{self.folder} already holds a run on other data: the prepared set has changed since; "
                "choose another --run_folder, or delete this one to train again"
            )
        return is_longer

    def _advice(self, config: Mapping[str, Any]) -> str:
        """Commands that go on from the run that is here."""
        if not self.is_finished:
            return f", or continue that run with --config {self.folder / CONFIG_FILE}"
        start = ""
        if "init_from" in config.get("model", {}).get("init_args", {}):
            start = f" and start from its weights by --model.init_args.init_from {self.checkpoint_to_test()}"
        epochs = config.get("trainer", {}).get("max_epochs")
        return (
            f"{start}; or train that run, which is finished, longer: --config {self.folder / CONFIG_FILE} "
            f"--{_LENGTH} NUMBER above {epochs}"
        )

    def extend(self, config: Mapping[str, Any]) -> None:
        """Let the run have more epochs; one process calls it, after `check`.

        What was measured at its earlier end gets a name of its own (results_12_epochs.json): nothing of it is taken
        for the longer run's. Killed at any moment, the same command does the rest.

        Raises:
            RunFolderError: there is no checkpoint to go on from.
        """
        if self.checkpoint_to_resume() is None:
            raise RunFolderError(
                f"{self.checkpoints} holds no last.ckpt: the run cannot be trained longer; choose another --run_folder"
            )
        if self.is_finished:
            epochs = read_fit_record(self.folder).get("epochs")
            for name in _OF_THE_END:
                earlier = self.folder / f"{Path(name).stem}_{epochs}_epochs{Path(name).suffix}"
                if (self.folder / name).exists():
                    if earlier.is_dir():
                        shutil.rmtree(earlier)
                    os.replace(self.folder / name, earlier)
            # Before the configuration: a run with that of more epochs would be taken for finished.
            (self.folder / FIT_FILE).unlink()
        write_text(yaml.safe_dump(dict(config), sort_keys=False), self.folder / CONFIG_FILE)

    def claim(self, config: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        """Write config.yaml and data.json unless they are there; one process calls it, after `check`.

        Returns:
            True if they were not.
        """
        if (self.folder / CONFIG_FILE).is_file():
            return False
        write_json(data, self.folder / DATA_FILE)
        write_text(yaml.safe_dump(dict(config), sort_keys=False), self.folder / CONFIG_FILE)
        return True

    def give_up_claim(self) -> None:
        """Take back what `claim` wrote, unless training has begun: the corrected command finds the folder free."""
        if (self.folder / METRICS_FILE).exists() or any(self.checkpoints.glob("*.ckpt")):
            return
        for name in (CONFIG_FILE, DATA_FILE, INITIAL_WEIGHTS_FILE, CLASS_PROBABILITY_FILE):
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.checkpoints, self.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write fit.json: the run has come to its end."""
        write_json(record, self.folder / FIT_FILE)

    def checkpoint_to_resume(self) -> Path | None:
        """The last checkpoint of an unfinished run that can be read; None if there is none yet.

        Raises:
            ResumeError: there are checkpoints, but none can be read.
        """
        return find_readable(self.checkpoints)

    def checkpoint_to_test(self) -> Path:
        """The best checkpoint by validation, else the last.

        Raises:
            RunFolderError: the run has none.
        """
        file = checkpoint_of_run(self.checkpoints)
        if file is None:
            raise RunFolderError(
                f"{self.checkpoints} holds no checkpoint; train first (python -m medclip_dcl fit --run_folder "
                f"{self.folder} ...) or give --ckpt_path"
            )
        return file


def _is_longer(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if both say how many epochs, and the second says more."""
    return 0 < (before["max_epochs"] or 0) < (now["max_epochs"] or 0)


class MetricsFile(Logger):
    """Every logged figure as a row of metrics.csv; a resumed run appends, and never repeats a step.

    Lightning's CSVLogger deletes the file of a run that resumes.

    Args:
        folder: the run folder.
    """

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

    @property
    def log_dir(self) -> str:
        """The run folder."""
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
        """Drop the rows of steps that a resumed run will do again.

        Args:
            step: the first of them.
            rows: how many rows there were, where the run goes on with a validation of the step before: its own rows
                would stand there twice.
        """
        if self.file.is_file():
            self._rewrite([row for row in self._rows()[:rows] if int(row["step"] or 0) < step])

    def count(self) -> int:
        """Number of rows, all of them on the disk by now."""
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


class RunRecord(Callback):
    """Keeps what the evaluation needs from `fit`: the untrained weights, and how long it took."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._started = 0.0
        self._earlier_seconds = 0.0
        self._rows: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_seconds = float(state_dict["seconds"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        counts = [logger.count() for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        if counts and trainer.validating:
            checkpoint[_ROWS] = counts[0]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._rows = checkpoint.get(_ROWS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.time()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # a trial leaves nothing behind
        untrained = self.run.checkpoints / UNTRAINED_CHECKPOINT
        if trainer.global_step == 0:
            # Other models have no beginning with which their end is compared.
            if isinstance(pl_module, ImageTextModel):
                trainer.save_checkpoint(untrained, weights_only=True)
            self._write_initial_weights(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.forget_after(trainer.global_step, self._rows)

    def _write_initial_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every tensor that was taken over from another training, and every one that was not."""
        taken_over = getattr(pl_module, "initial_weights", None)
        if trainer.is_global_zero and taken_over is not None:
            write_json(taken_over.record(), self.run.folder / INITIAL_WEIGHTS_FILE)

    def record(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Content of fit.json."""
        return {
            "seconds": round(self._seconds(), 1),
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "precision": str(trainer.precision),
            "devices": trainer.world_size,
            "device": device_name(pl_module.device),
        }

    def _seconds(self) -> float:
        return self._earlier_seconds + (time.time() - self._started if self._started else 0.0)


def read_fit_record(folder: Path) -> dict[str, Any]:
    """fit.json of a run folder; empty if `fit` has not come to its end."""
    file = folder / FIT_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
