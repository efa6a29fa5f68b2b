"""Run, continue and report a grid of runs."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from medclip_dcl.common.command_line import in_words
from medclip_dcl.common.devices import usable_device
from medclip_dcl.runs.saved import setting
from medclip_dcl.studies.grid import Experiment, merged
from medclip_dcl.studies.grid_choice import write_choices
from medclip_dcl.studies.grid_curve import write_verdicts
from medclip_dcl.studies.grid_page import write_report
from medclip_dcl.studies.grid_plan import check_cells, read_experiment
from medclip_dcl.studies.grid_results import claim_folder, write_table
from medclip_dcl.studies.grid_workers import run_ones
from medclip_dcl.studies.one_run import LOG_FILE, End, Run, is_done
from medclip_dcl.studies.options import Study


def run(options: Study) -> None:
    """Run and report the grid; status 1 where a run failed, 128 + the signal's number if stopped."""
    experiment, n_failed = read_experiment(options.file), 0
    if options.report_only:
        claim_folder(experiment, writes=False)
    else:
        usable_device(options.device)
        runs = _on_device(experiment.runs()[options.task :: options.tasks], options)
        n_failed = _run(experiment, options.workers, runs, options.imported)
    table = write_table(experiment)
    chosen = table[table["chosen"]]
    for line in write_choices(experiment, chosen):
        print(f"choice: {line}")
    for line in (verdicts := write_verdicts(experiment, chosen)):
        print(f"learning curve: {line}")
    print(f"report: {write_report(experiment, table, verdicts)}")
    if n_failed:
        raise SystemExit(1)


def _run(experiment: Experiment, workers: int, runs: Sequence[Run], modules: Sequence[str]) -> int:
    """Train the runs that are not done; the number of those that failed."""
    check_cells(experiment, modules, needs_sources=True)
    claim_folder(experiment)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _stop)
    keeps = experiment.checkpoints == "keep"
    waiting = [
        run
        for run in runs
        if not is_done(run, experiment.commands) or (not keeps and (run.folder / "checkpoints").exists())
    ]
    earlier = write_table(experiment).drop_duplicates("run")[["fit_seconds", "test_seconds"]].sum(axis=1)
    n_waiting, here = len(waiting), list[float]()
    counts = dict.fromkeys(("done", "failed", "stopped", "busy"), 0) | {"done": len(runs) - len(waiting)}
    line = f"{experiment.folder}: {len(runs)} runs, {counts['done']} of them done"
    print(*experiment.optional, line, sep="\n", flush=True)
    # A configuration file that is edited in between would mix settings in one grid.
    check = functools.partial(claim_folder, experiment, writes=False)
    with contextlib.closing(run_ones(waiting, experiment.commands, keeps, workers, check)) as ends:
        for end in ends:
            counts[end.state] += 1
            n_waiting -= 1
            here += [] if end.seconds is None else [end.seconds]
            if end.state == "done":
                write_table(experiment)
            until = _until(here or list(earlier), n_waiting, workers)
            line = f"{time.strftime('%H:%M:%S')} {_described(end)}"
            print(f"{line}; {counts['done']} of {len(runs)} done{until}", flush=True)
    if counts["busy"]:
        print(f"{counts['busy']} runs are trained by another command on this folder")
    return counts["failed"] + counts["stopped"]


def _on_device(runs: Sequence[Run], options: Study) -> list[Run]:
    """The runs with the options of each of their commands: --import, and --device unless a run chooses its own."""
    imported = tuple(f"--import={module}" for module in options.imported)
    kind, _, number = options.device.partition(":")
    if kind == "auto":
        return [replace(run, of_each=imported) for run in runs]
    device = (f"--trainer.accelerator={kind}", f"--trainer.devices={f'[{number}]' if number else 1}")

    @functools.cache
    def accelerator(argument: str) -> str | None:
        return setting(merged((argument,)), "trainer.accelerator")

    placed, others = [], dict[str, None]()
    for run in runs:
        chooser = next((one for one in reversed(run.arguments) if accelerator(one)), "")
        if not chooser or accelerator(chooser) == "auto":
            placed.append(replace(run, of_each=(*imported, *device)))
        else:
            placed.append(replace(run, of_each=imported))
            others[f"{accelerator(chooser)} by {chooser.removeprefix('--')}"] = None
    if others:
        print(
            f"--device {options.device} is not used where trainer.accelerator is set: {', '.join(others)}",
            flush=True,
        )
    return placed


def _described(end: End) -> str:
    if end.state == "failed":
        return f"{end.run.name} FAILED: {end.error} (log: {end.run.folder / LOG_FILE})"
    if end.state == "busy":
        return f"{end.run.name} is trained by another command"
    return f"{end.run.name} {end.state}" + (f" in {in_words(end.seconds)}" if end.seconds is not None else "")


def _until(times: Sequence[float], n_waiting: int, workers: int) -> str:
    """The time that the other runs take, by the mean of those that are finished."""
    if not times:
        return ""
    seconds = sum(times) / len(times) * n_waiting / min(workers, max(1, n_waiting))
    return f", about {in_words(seconds)} left"


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the workers, which let training save."""
    name = signal.Signals(number).name
    print(f"stopped by {name}; the same command continues", file=sys.stderr)
    raise SystemExit(128 + number)
