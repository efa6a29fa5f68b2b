"""The whole way on the digital phantom by one command: ``medclip-dcl demo``."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from medclip_dcl.command.options import Demo
from medclip_dcl.common.command_line import in_words
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.processes import locked, stop

PROGRAM = (sys.executable, "-m", "medclip_dcl")
RAW, SET, LANGUAGE_MODEL, RUN = "data/phantom_raw", "data/phantom", "runs/demo_language_model", "runs/demo"
ENVIRONMENT = {
    # One thread is as fast as two for networks so small, and twice as fast while another program uses a core.
    "OMP_NUM_THREADS": "1",
    # glibc keeps the memory that a training step frees for the next one: to get it anew takes 4% of a step.
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
"""Variables of the steps, unless the user sets them (tests/benchmarks/RESULTS.md, "The demo, stage by stage")."""
_DISK, _MEMORY = "0.4 GB", "2.6 GB"
"""Of all files, 344 MiB; of test and calibrate together, 1,362 and 1,134 MiB; no other process took more than 2,017."""
_LOCK = ".demo.lock"


class Step(NamedTuple):
    """A command of the demo.

    Attributes:
        product: pattern of the file that the command writes last.
        seconds: duration on an idle AMD EPYC core with bfloat16.
        words: verb and options; paths are relative to the demo's folder.
    """

    product: str
    seconds: int
    words: str


STAGES = (
    (
        Step(
            f"{RAW}/phantom_truth/phantom.json",
            35,
            f"phantom --output {RAW} --studies 2600 --seed 0 --size 256",
        ),
    ),
    (
        Step(
            f"{SET}/dataset.json",
            7,
            f"prepare mimic-cxr --source {RAW} --output {SET} --ms_cxr {RAW}/MS_CXR_Local_Alignment_v1.0.0.json "
            f"--patients {RAW}/patients.csv.gz",
        ),
    ),
    (
        Step(
            f"{LANGUAGE_MODEL}/fit.json",
            74,
            f"fit --config language_model_small --run_folder {LANGUAGE_MODEL} --data.init_args.folder {SET}",
        ),
    ),
    (
        Step(
            f"{SET}/log_p/language_model-*.parquet", 8, f"score {SET} --model {LANGUAGE_MODEL}/language_model"
        ),
    ),
    (Step(f"{SET}/eta/eta.png", 4, f"eta {SET}"),),
    (
        Step(
            f"{RUN}/fit.json",
            166,
            "fit --config demo --config objective/dcl_lm "
            f"--config {SET}/eta/class_probability.yaml --run_folder {RUN}",
        ),
    ),
    (
        Step(f"{RUN}/results_untrained.json", 21, f"test --config {RUN}/config.yaml"),
        Step(f"{RUN}/predictions/validate_classification.parquet", 12, f"calibrate {RUN}"),
    ),
    (Step(f"{RUN}/report.html", 7, f"report {RUN}"),),
)
"""Steps that run one after the other; those of a stage run at once."""


def run(options: Demo) -> None:
    """Run the steps that are not finished.

    Raises:
        UserError: a step failed, or another demo runs in the folder.
    """
    signal.signal(signal.SIGTERM, stop)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    # Steps inherit the lock, so that it also holds while one outlives a killed demo.
    with locked(folder / _LOCK) as lock:
        if lock is None:
            raise UserError(
                f"--folder {folder}: a demo, or a step of one that was killed, runs there; wait for its end"
            )
        stages = due(folder)
        count, total = (sum(map(len, steps)) for steps in (stages, STAGES))
        if count:
            seconds = sum(max(step.seconds for step in stage) for stage in stages if stage)
            print(
                f"demo in {folder}: {count} of {total} steps, about {in_words(seconds)} on two idle CPU cores (AMD "
                f"EPYC; an Intel Xeon took 1.6 times that), {_DISK} of disk, {_MEMORY} of memory",
                flush=True,
            )
        for stage in stages:
            _run_at_once(stage, folder, lock)
    print(f"open {folder / RUN / 'report.html'}")


def due(folder: Path) -> list[list[Step]]:
    """Steps without a product, or with one that is older than the stage before, and all steps after these."""
    found, before = [], 0.0
    for stage in STAGES:
        # Of several products the oldest (scores by other models come later); 0 if there is none.
        files = {step: folder.glob(step.product) for step in stage}
        times = {step: min((x.stat().st_mtime for x in files[step]), default=0.0) for step in stage}
        found.append([step for step, time in times.items() if time < before or not time])
        before = math.inf if found[-1] else max(times.values())
    return found


def _run_at_once(steps: Sequence[Step], folder: Path, lock: int) -> None:
    """Run the steps of a stage; the first failure, and an interruption, ends the others."""
    running: dict[subprocess.Popen[bytes], Step] = {}
    # The package that runs here, also where the working folder of the steps, which -m would put first, holds another.
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    try:
        for step in steps:
            print(f"medclip-dcl {step.words}", flush=True)
            words = [*PROGRAM, *shlex.split(step.words)]
            running[subprocess.Popen(words, cwd=folder, env=environment, pass_fds=[lock])] = step
        while running:
            for process, step in list(running.items()):
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(0.1)
                    del running[process]
                    _finish(step, folder, status)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _finish(step: Step, folder: Path, status: int) -> None:
    products = list(folder.glob(step.product))
    if status or not products:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise UserError(
            f"demo stops: medclip-dcl {step.words} ended with {how}"
            f"{'' if status else f' and without {step.product}'}; the same command goes on, once that is mended"
        )
    for product in products:  # newer than what it was made from, also where the step had nothing to do
        os.utime(product)
