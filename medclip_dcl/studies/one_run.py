"""The run folder of a run: whether it is done, and its commands in this process."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.files import write_text
from medclip_dcl.common.processes import locked
from medclip_dcl.runs.run_folder import FIT_FILE
from medclip_dcl.runs.saved import CONFIG_FILE, RESULTS_FILE, read_config

LOG_FILE, ERROR_FILE = "log.txt", "error.txt"
_LOCK_FILE = ".lock"


@dataclass(frozen=True)
class Run:
    """A run: name of its level by axis of a grid, run folder, arguments of the first command and of each command."""

    levels: Mapping[str, str]
    folder: Path
    arguments: tuple[str, ...]
    of_each: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class End:
    """Outcome of a run: busy where another command trains it; seconds where all of it ran."""

    run: Run
    state: Literal["done", "failed", "stopped", "busy"]
    seconds: float | None = None
    error: str = ""


def is_done(run: Run, commands: Sequence[str]) -> bool:
    """True if the last output of each command exists: an unfinished training may have been tested, too."""
    files = {"fit": FIT_FILE, "test": RESULTS_FILE}
    return all((run.folder / files[name]).is_file() for name in commands if name in files)


def error_of(run: Run) -> str | None:
    """The line that says why a run failed; None for one that did not, or that was begun again since."""
    file = run.folder / ERROR_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def run_one(
    run: Run,
    commands: Sequence[str],
    keeps_checkpoints: bool = True,
    prepare: Callable[[], None] | None = None,
) -> End:
    """Run the commands of a run, their output in log.txt; leave alone what is done or trained by another command.

    `prepare` is called first, while no other command has the run.
    """
    from medclip_dcl.command.cli import lightning_cli

    run.folder.mkdir(parents=True, exist_ok=True)
    with locked(run.folder / _LOCK_FILE) as lock:
        if lock is None:
            return End(run, "busy")
        if prepare is not None:
            prepare()
        is_new, started = not (run.folder / CONFIG_FILE).exists(), time.monotonic()
        was_done = is_done(run, commands)
        if not was_done:
            (run.folder / ERROR_FILE).unlink(missing_ok=True)
            lightning_cli()  # Lightning's log handlers keep the standard error of its import
            with _output_to(run.folder / LOG_FILE):
                end = _run_commands(run, commands)
            gc.collect()
            if end is not None:
                return end
        if not keeps_checkpoints:
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        return End(run, "done", time.monotonic() - started if is_new and not was_done else None)


def failed(run: Run, error: str) -> End:
    """Note why a run failed, for the report and for those who look into its folder."""
    error = " ".join(error.split())
    write_text(f"{error}\n", run.folder / ERROR_FILE)
    return End(run, "failed", error=error)


def _run_commands(run: Run, commands: Sequence[str]) -> End | None:
    """None if all of them came to their end."""
    from medclip_dcl.command.cli import main

    for command in commands:
        if command == "fit" and (run.folder / FIT_FILE).is_file():
            continue
        # Later commands evaluate the run as it was trained.
        own = run.arguments if command == commands[0] else (f"--config={run.folder / CONFIG_FILE}",)
        arguments = [command, *own, f"--run_folder={run.folder}", "--trainer.enable_progress_bar=false"]
        if command != commands[0] and (read_config(run.folder) or {}).get("share_patient_data"):
            arguments.append("--share_patient_data=true")  # trained here: no sender's choice
        arguments += run.of_each
        print(f"medclip-dcl {shlex.join(arguments)}", flush=True)
        try:
            main(arguments, are_typed=False)  # the experiment file holds them
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:
                return End(run, "stopped")
            if end.code:
                return failed(run, _last_line(run.folder / LOG_FILE))
        except Exception as error:
            traceback.print_exc()
            return failed(run, traceback.format_exception_only(error)[-1])
    return None if is_done(run, commands) else failed(run, f"{commands[-1]} ended without its results")


def _last_line(log: Path) -> str:
    sys.stderr.flush()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Append what this process writes to the terminal to a file, also what libraries write."""
    before = [os.dup(1), os.dup(2)]
    try:
        with log.open("a", encoding="utf-8", buffering=1) as stream:
            _redirect([stream.fileno(), stream.fileno()])
            # In a notebook these do not write to the descriptors.
            with redirect_stdout(stream), redirect_stderr(stream):
                yield
    finally:
        _redirect(before)
        for descriptor in before:
            os.close(descriptor)


def _redirect(descriptors: Sequence[int]) -> None:
    for stream, descriptor, own in zip((sys.stdout, sys.stderr), descriptors, (1, 2), strict=True):
        stream.flush()
        os.dup2(descriptor, own)
