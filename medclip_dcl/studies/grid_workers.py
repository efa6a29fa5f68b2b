"""Processes that train side by side; each imports Lightning once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from medclip_dcl.common.command_line import available_cores
from medclip_dcl.common.processes import begin_worker
from medclip_dcl.studies.one_run import End, Run, failed, run_one

CONTEXT: Any = multiprocessing.get_context("spawn")
_SECONDS_TO_SAVE = 300.0
"""Allowed to training for saving at a signal: it waits for the end of its step."""


def run_ones(
    runs: Iterable[Run],
    commands: Sequence[str],
    keeps_checkpoints: bool,
    workers: int,
    check: Callable[[], object],
) -> Generator[End]:
    """Train runs in `workers` processes and yield how each ended; when the caller stops early, training is saved.

    `check` is called before each run; an error that it raises stops all of them. See `run_one` for the others.
    """
    waiting = deque(runs)
    running: dict[Connection, tuple[_Worker, Run]] = {}
    idle = [_Worker(place, workers) for place in range(min(workers, len(waiting)))]
    try:
        while waiting or running:
            while waiting and idle:
                check()
                worker, run = idle.pop(0), waiting.popleft()
                worker.connection.send((run, commands, keeps_checkpoints))
                running[worker.connection] = worker, run
            for connection in wait(list(running)):
                worker, run = running.pop(cast(Connection, connection))
                try:
                    end = worker.connection.recv()
                except EOFError:
                    end = worker.end_of(run)
                    worker = _Worker(worker.place, workers)
                idle.append(worker)
                yield end
    finally:
        for worker, _ in running.values():
            worker.process.terminate()
        everyone = [*idle, *(worker for worker, _ in running.values())]
        for worker in everyone:
            worker.connection.close()  # by which an idle process ends, and releases what tqdm and torch hold
        for worker in everyone:
            worker.process.join(_SECONDS_TO_SAVE)
            worker.process.kill()


class _Worker:
    """A process that runs one run after the other."""

    def __init__(self, place: int, workers: int) -> None:
        self.place = place
        self.connection, theirs = CONTEXT.Pipe()
        threads = max(1, available_cores() // workers)
        self.process = CONTEXT.Process(target=_serve, args=(theirs, place, threads))
        self.process.start()
        theirs.close()  # so that the end of the process ends the pipe

    def end_of(self, run: Run) -> End:
        """Outcome of the run with which this process died."""
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGTERM:
            return End(run, "stopped")
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return failed(
            run, f"its process ended with {how}" + ("; out of memory?" if code == -signal.SIGKILL else "")
        )


def _serve(connection: Connection, place: int, threads: int) -> None:
    begin_worker()
    # As Ctrl-C: the parent answers it, and training while it can save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    with suppress(EOFError, BrokenPipeError):  # the parent has gone
        while True:
            connection.send(run_one(*connection.recv()))
