"""The rules of a run folder: it holds one run, which is continued, extended or left alone. Without Lightning."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import pandas as pd
import yaml

from medclip_dcl.common import files
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import CHECKPOINTS, LANGUAGE_MODEL, FoundModel
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.runs import saved
from medclip_dcl.runs.checkpoint_files import find_readable

FIT_FILE = "fit.json"
ASKED_FILE = "asked.json"
"""Record, in the folder of a benchmark's test, of what was asked for."""
INITIAL_WEIGHTS_FILE = "initial_weights.json"
CLASS_PROBABILITY_FILE = "class_probability.parquet"
METRICS_FILE = "metrics.csv"
UNTRAINED_CHECKPOINT = "untrained.ckpt"
DATA_FILE = "data.json"
ARRAYS_FOLDER = "arrays"
"""Folder for arrays of a prepared set that cannot be written: `medclip_dcl.data.arrays`."""
IMAGES_FILE = "data_images.parquet"
"""Names of the sets of the training, and its images: `medclip_dcl.data.lineage`."""
LINEAGE = "lineage"
"""Entry of a checkpoint with the content of data.json."""
TESTS = "tests"
"""Folder in a run folder for results that are not those of its own network on its own set."""
PART = f"{TESTS}/limited"
"""Folder in the folder of complete results for those of a test or a prediction of some batches."""
LOCK_FILE = "training.lock"
_LENGTHS = {"trainer.max_epochs": "epochs", "trainer.max_steps": "steps"}
"""Settings at which a run ends, and their entries of fit.json."""
_REMEDY = (
    "restore it, or choose another --run_folder"  # without it the results could be taken for another run's
)
_OF_THE_END = (
    *("results.json", "predictions", "figures", "report.html", "calibration.json", TESTS),
    *(LANGUAGE_MODEL, "text_encoder"),
)
"""Measured, drawn or written at the end of training."""


class RunFolderError(UserError):
    """The run folder holds another run, or lacks what a command needs; the message says what to do."""


class RunFolder:
    """The folder of one run, made at the first write."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"

    def kept_steps(self) -> dict[int, Path]:
        """Optimiser step of kept_steps -> checkpoint of its weights, where it exists, ascending."""
        kept = {
            step: self.checkpoints / saved.step_checkpoint(step)
            for step in self.saved_config().get("kept_steps") or ()
        }
        return {step: file for step, file in kept.items() if file.is_file()}

    @property
    def is_finished(self) -> bool:
        """True once `fit` has come to its end."""
        return (self.folder / FIT_FILE).is_file()

    def saved_config(self) -> dict[str, Any]:
        """The run's resolved configuration; empty for a new run."""
        return saved.read_config(self.folder) or {}

    def check(self, config: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        """Refuse a folder that holds anything but this run; every process calls it, before any waits for another.

        Args:
            config: resolved configuration of the run.
            data: identity of the prepared data set (its fingerprint); empty in a process that has not looked at it.

        Returns:
            True if the folder holds this run with fewer epochs or steps, see `extend`.
        """
        if self.folder.is_file():
            raise RunFolderError(
                f"--run_folder: expected a folder, found the file {self.folder}; choose another"
            )
        found = self.saved_config()
        if not found:
            of_a_run = (METRICS_FILE, "checkpoints", "results_untrained.json", saved.STEPS, *_OF_THE_END)
            if any((self.folder / name).exists() for name in of_a_run):
                raise RunFolderError(
                    f"{self.folder} holds results but no {saved.CONFIG_FILE}; choose another --run_folder"
                )
            return False
        differing = saved.differing_settings(found, config)
        before, now, end = _length(found), _length(config), self.end()
        is_longer = differing.keys() <= _LENGTHS.keys() and any(now[x] > before[x] for x in now)
        if end:
            trained = {"epochs": end.get("complete_epochs", end.get("epochs")), "steps": end.get("steps")}
            is_longer &= all(now[x] > (trained[x] or 0) for x in now) and not end.get("timed_out")
        else:
            is_longer &= all(now[x] >= before[x] for x in now)
        if differing and not is_longer:
            raise self.other_run(differing, found)
        if data and self.data().get("fingerprint", data.get("fingerprint")) != data.get("fingerprint"):
            raise RunFolderError(
                f"{self.folder} already holds a run on other data: the prepared set has changed since; "
                "choose another --run_folder, or delete this one to train again"
            )
        return is_longer

    def other_run(self, differing: Iterable[str], config: Mapping[str, Any]) -> RunFolderError:
        """The error about settings that differ from the run's, with the commands that go on from that run."""
        advice = f"choose another --run_folder, or continue that run with --config {self.folder / saved.CONFIG_FILE}"
        if self.is_finished:
            advice = f"{self._advice_to_start_anew(config)}; that run is finished: {self.advice_to_go_on()}"
        return RunFolderError(
            f"{self.folder} already holds another run: its {saved.CONFIG_FILE} differs in "
            f"{', '.join(sorted(differing))}; {advice}"
        )

    def _advice_to_start_anew(self, config: Mapping[str, Any]) -> str:
        start = "choose another --run_folder"
        if "init_from" in (saved.setting(config, "model.init_args") or {}):
            start += f" and start from its weights by --model.init_args.init_from {self.folder}"
        return start

    def end(self) -> dict[str, Any]:
        """Content of fit.json; empty for a run that is not finished."""
        return saved.read_json(self.folder / FIT_FILE, _REMEDY) if self.is_finished else {}

    def _ended_by(self) -> str:
        """The setting at which a finished run came to its end; "" if a callback ended it."""
        end, length = self.end(), _length(self.saved_config())
        return next((x for x, unit in reversed(_LENGTHS.items()) if end.get(unit, 0) >= length[unit]), "")

    def advice_to_go_on(self) -> str:
        """Advice for a finished run that shall be trained longer."""
        config, end = self.saved_config(), self.end()
        if end.get("timed_out"):
            return f"its time (trainer.max_time) is used up; {self._advice_to_start_anew(config)}"
        name = self._ended_by()
        until = "" if name else f", until a callback ends it again, as in epoch {end.get('epochs')}"
        name = name or next(iter(_LENGTHS))
        return (
            f"--config {self.folder / saved.CONFIG_FILE} with a larger --{name} (it had "
            f"{saved.setting(config, name)}) trains it longer{until}"
        )

    def extend(self, config: Mapping[str, Any]) -> None:
        """Allow the run more epochs or steps; one process calls it, after `check`.

        Results of its earlier end are renamed (results_12_epochs.json), so that they are not taken for the longer
        run's. Killed at any moment, the same command does the rest.
        """
        self.require_last()
        if self.is_finished:
            unit = _LENGTHS.get(self._ended_by(), "epochs")
            self.set_aside(f"{self.end().get(unit)}_{unit}")
            # Before the configuration: a run with that of more epochs would be taken for finished.
            (self.folder / FIT_FILE).unlink()
        before = files.read_text(self.folder / saved.CONFIG_FILE).splitlines()
        config = {**config, "ckpt_path": self.saved_config().get("ckpt_path")}  # what it started from
        self._write_config(config, takewhile(lambda line: line.startswith("#"), before))

    def require_last(self) -> None:
        """Refuse to train a run longer that has no checkpoint to go on from."""
        if self.checkpoint_to_resume() is None:
            raise RunFolderError(
                f"{self.checkpoints} holds no last.ckpt: the run cannot be trained longer; choose another --run_folder"
            )

    def set_aside(self, end: str) -> list[str]:
        """Rename what was measured before training goes on, results.json to results_END.json, and return its names."""
        found = [path for path in (self.folder / name for name in _OF_THE_END) if path.exists()]
        for path in found:
            earlier = path.with_name(f"{path.stem}_{end}{path.suffix}")
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(path, earlier)
        return [path.name for path in found]

    def data(self) -> dict[str, Any]:
        """Content of data.json; empty where it is not known."""
        file = self.folder / DATA_FILE
        return saved.read_json(file, _REMEDY) if file.is_file() else {}

    def is_own(self, checkpoint: Path) -> bool:
        """True for a checkpoint of this run's training; for any checkpoint in a folder that holds no run."""
        owner = FoundModel(checkpoint).run
        is_there = owner is not None and owner.resolve() == self.folder.resolve()
        return not self.saved_config() or (is_there and checkpoint.name != UNTRAINED_CHECKPOINT)

    def folder_of_test(self, checkpoint: Path, other_set: str = "") -> Path:
        """Folder for results: the run's; steps/N for a kept step; in tests/ for another's checkpoint or another set."""
        parts = [f"on_{other_set}"] if other_set else []
        if self.is_own(checkpoint):
            steps = [step for step, file in self.kept_steps().items() if file.name == checkpoint.name]
            if not other_set:
                return self.folder.joinpath(*(f"{saved.STEPS}/{step}" for step in steps))
            parts = [*(f"step_{step}" for step in steps), *parts]
        else:
            path, owner = checkpoint.resolve(), FoundModel(checkpoint.resolve()).run
            parts = [
                *([owner.name] if owner else []),
                path.stem,
                files.digest(str(path).encode())[:6],
                *parts,
            ]
        return self.folder / TESTS / "_".join(parts)

    @contextmanager
    def locked(self) -> Iterator[str]:
        """Keep other processes from training in this folder; one process of a job calls it, after `check`.

        The lock is the system's and ends with this process, which leaves a note in the file. A run with a note but no
        lock is taken over, and so is one whose lock an earlier start of this requeued job holds.

        Yields:
            The process that the run is taken over from; "" for none.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file, own = self.folder / LOCK_FILE, _own_note()
        stream = file.open("a+", encoding="utf-8")
        is_other = _is_locked(stream)
        found = _note_in(stream)  # by this stream: closing another one would end the lock
        if is_other and found.get("job") == own["job"] and found.get("start", 0) < own["start"]:
            stream.close()
            file.unlink()
            stream = file.open("a+", encoding="utf-8")
            is_other = _is_locked(stream)
        with stream:
            named = f"process {found.get('process')} on {found.get('host')}, since {found.get('time')}"
            if is_other:
                raise RunFolderError(
                    f"{self.folder} is being trained by {named}; wait for its end, or choose another --run_folder. If "
                    f"that process is gone, delete {file}"
                )
            stream.truncate(0)
            stream.write(json.dumps(own))
            stream.flush()
            try:
                yield named if found else ""
            finally:
                file.unlink(missing_ok=True)

    def claim(
        self,
        config: Mapping[str, Any],
        data: Mapping[str, Any],
        images: pd.DataFrame | None = None,
        origins: Sequence[str] = (),
    ) -> bool:
        """Write config.yaml, data.json and data_images.parquet unless they exist; one process calls it, after `check`.

        `origins` become comments that open config.yaml: which of its settings came from packaged files.

        Returns:
            True if they were written.
        """
        if (self.folder / saved.CONFIG_FILE).is_file():
            return False
        files.write_json(data, self.folder / DATA_FILE)
        if images is not None:
            files.write_shared_parquet(images, self.folder / IMAGES_FILE)
        self._write_config(config, [f"# {line}" for line in origins])
        return True

    def _write_config(self, config: Mapping[str, Any], comments: Iterable[str]) -> None:
        text = yaml.safe_dump(dict(config), sort_keys=False)
        files.write_text("".join(f"{line}\n" for line in comments) + text, self.folder / saved.CONFIG_FILE)

    def give_up_claim(self) -> None:
        """Undo `claim` unless training has begun, so that the corrected command finds the folder free."""
        if (self.folder / METRICS_FILE).exists() or any(self.checkpoints.glob("*.ckpt")):
            return
        names = (
            saved.CONFIG_FILE,
            DATA_FILE,
            IMAGES_FILE,
            LOCK_FILE,
            INITIAL_WEIGHTS_FILE,
            CLASS_PROBABILITY_FILE,
        )
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / ARRAYS_FOLDER, ignore_errors=True)
        for folder in (self.checkpoints, self.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def checkpoint_to_resume(self) -> Path | None:
        """The last readable checkpoint; None if there is none yet."""
        return find_readable(self.checkpoints)


def run_of(config: Path) -> Path | None:
    """Run folder whose own configuration a file is; None for a template, beside which no run has written."""
    written = (DATA_FILE, METRICS_FILE, FIT_FILE, ASKED_FILE, CHECKPOINTS)
    is_own = config.name in (saved.CONFIG_FILE, saved.TEST_CONFIG)
    return config.parent if is_own and any((config.parent / name).exists() for name in written) else None


def stated_data(model: SavedModel) -> tuple[object, ...]:
    """What a model states of the data of its training, to be compared; of the table of images, the size."""
    folder = FoundModel(model.path).folder or model.path
    own = model.checkpoint.get(LINEAGE)
    return own, files.digest_of_file(folder / DATA_FILE), files.file_states([str(folder / IMAGES_FILE)])[0][0]


def _length(config: Mapping[str, Any]) -> dict[str, float]:
    """Epochs and steps at which a run ends; infinite where the setting is null or -1."""
    found = {unit: saved.setting(config, name) for name, unit in _LENGTHS.items()}
    return {unit: math.inf if value in (None, -1) else value for unit, value in found.items()}


def length_in_words(config: Mapping[str, Any]) -> str:
    """Epochs and steps at which a run ends, in words."""
    ends = [f"{value} {unit}" for unit, value in _length(config).items() if value < math.inf]
    return " or ".join(ends) or "trainer.max_time"


def _is_locked(stream: IO[str]) -> bool:
    """Lock a file for this process; True if another has it. Without locks the note in it decides, on one host."""
    try:
        # Not flock, whose lock a forked loader process keeps for some seconds after this one was killed.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        note = _note_in(stream)
        is_here = note.get("host") == socket.gethostname() and note["process"] != os.getpid()
        return is_here and Path(f"/proc/{note['process']}").exists()
    return False


def _note_in(stream: IO[str]) -> dict[str, Any]:
    stream.seek(0)
    try:
        return files.parse_json(stream.read())
    except ValueError:
        return {}


def _own_note() -> dict[str, Any]:
    """This process, and its job with the number of earlier starts."""
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": os.environ.get("SLURM_JOB_ID"),
        "start": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
    }
