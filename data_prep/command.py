"""What every `python -m data_prep.NAME` shares: errors without a traceback, a progress bar, workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import NoReturn, TypeVar

from medclip_dcl.errors import UserError

Item = TypeVar("Item")


class WorkerKilledError(UserError):
    """A process that shared the work is gone; what was finished stays."""


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command and end the process.

    A `UserError` goes to standard error in one line, and the exit status is 2. Anything else is a fault of the program
    and keeps its traceback. An interruption ends with 130; what was finished by then stays.

    Args:
        main: the command; it parses its own arguments.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(0)


def available_cores() -> int:
    """CPU cores that this process may use (a SLURM task sees its share, not the node's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def worker_processes(workers: int) -> Iterator[Executor | None]:
    """A pool of processes, or None where one process is asked for: the caller then works by itself.

    The processes are spawned: forking beside the threads of pyarrow or a progress bar may hang.

    Raises:
        WorkerKilledError: one of them was killed.
    """
    if workers <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise WorkerKilledError(
            "a process that shared the work was killed (often because memory ran out); run the same command again, "
            "with fewer --workers; a preparation continues where it stopped"
        ) from error
    finally:
        # After an error the rest of the queue is of no use to anybody.
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    # Ctrl-C is the parent's business: the workers finish what they have begun.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker whose parent was killed would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def progress(items: Iterable[Item], total: int, what: str, unit: str) -> Iterator[Item]:
    """Pass the items on and show how many there were, the rate and the time left, on standard error.

    A terminal gets a bar; a log file gets a line every 30 seconds and one at the end.

    Args:
        items: what is counted.
        total: how many items will come.
        what: description before the bar.
        unit: plural noun of the items, for the rate.
    """
    if sys.stderr.isatty():
        yield from _bar(items, total, what, unit)
        return
    start = last = time.monotonic()
    count = 0
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last > 30:
            last = now
            rate = count / (now - start)
            left = (total - count) / rate
            print(
                f"{what}: {count:,} of {total:,}, {rate:,.0f} {unit}/s, {left:,.0f} s left", file=sys.stderr
            )
    seconds = time.monotonic() - start
    rate = count / max(seconds, 1e-9)
    print(f"{what}: {count:,} {unit} in {seconds:,.1f} s ({rate:,.0f} {unit}/s)", file=sys.stderr)


def _bar(items: Iterable[Item], total: int, what: str, unit: str) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, rate="")
        for item in items:
            yield item
            speed = bar.tasks[0].speed
            bar.update(task, advance=1, rate=f"{speed:,.0f} {unit}/s" if speed else "")
