"""Shared by every `python -m data_prep.NAME`: options, errors without a traceback, a progress bar, workers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, NoReturn, TypeVar

from medclip_dcl.errors import UserError

Item = TypeVar("Item")


class WorkerKilledError(UserError):
    """A worker process was killed; finished work stays."""


def option(help: str, field_default: Any = dataclasses.MISSING, /, **argument: Any) -> Any:
    """A field of a settings dataclass that is an option of the command line, see `parse_options`.

    Args:
        help: for ``--help``, and the documentation of the field.
        field_default: leave it out for a required option.
        argument: for `argparse.ArgumentParser.add_argument`; `alias` is a second name of the option.
    """
    return dataclasses.field(default=field_default, metadata={"help": help, **argument})


def parse_options(
    settings: type[Item], program: str, description: str, arguments: Sequence[str] | None
) -> Item:
    """Parse the options that the fields of a settings dataclass declare."""
    parser = argparse.ArgumentParser(
        prog=f"python -m data_prep.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        argument = dict(field.metadata)
        names = [f"--{name}" for name in (field.name, argument.pop("alias", None)) if name]
        if field.default is False:
            argument["action"] = "store_true"
        elif field.default is dataclasses.MISSING:
            argument["required"] = True
        else:
            argument.setdefault("default", field.default)
        parser.add_argument(*names, dest=field.name, **argument)
    return settings(**vars(parser.parse_args(arguments)))


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for `argparse`."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


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
    """A pool of spawned processes, or None for one worker: the caller then works in its own process.

    Forking beside the threads of pyarrow or a progress bar may hang.

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
            "a worker process was killed (often because memory ran out); run the same command again with fewer "
            "--workers; a preparation continues where it stopped"
        ) from error
    finally:
        # After an error the rest of the queue is useless.
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    # The parent handles Ctrl-C; workers finish the items they have begun.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker whose parent was killed would wait for work forever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def progress(items: Iterable[Item], total: int, what: str, unit: str) -> Iterator[Item]:
    """Yield the items and show their number, the rate and the time left on standard error.

    A terminal gets a bar; a log file gets a line every 30 seconds and one at the end.

    Args:
        items: to count.
        total: number of items.
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
