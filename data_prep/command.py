"""Shared by every `python -m data_prep.NAME`: options, errors without a traceback, a progress bar, workers."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from medclip_dcl.command_line import add_import_option, one_line_errors, progress_bar
from medclip_dcl.errors import UserError
from medclip_dcl.processes import begin_worker

Item = TypeVar("Item")


def option(help: str, field_default: Any = dataclasses.MISSING, /, **argument: Any) -> Any:
    """A field of a settings dataclass that is an option of the command line, see `parse_options`.

    Args:
        help: for ``--help``, and the documentation of the field.
        field_default: leave it out for a required option.
        argument: for `argparse.ArgumentParser.add_argument`.
    """
    return dataclasses.field(default=field_default, metadata={"help": help, **argument})


def parse_options(
    settings: type[Item],
    program: str,
    description: str,
    arguments: Sequence[str] | None,
    has_own_classes: bool = False,
) -> Item:
    """Parse the options that the fields of a settings dataclass declare; ``--import`` where a model is loaded."""
    parser = argparse.ArgumentParser(
        prog=f"python -m data_prep.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        argument = dict(field.metadata)
        if field.default is False:
            argument["action"] = "store_true"
        elif field.default is dataclasses.MISSING:
            argument["required"] = True
        else:
            argument.setdefault("default", field.default)
        parser.add_argument(f"--{field.name}", **argument)
    if has_own_classes:
        add_import_option(parser)
    options = vars(parser.parse_args(arguments))
    return settings(**{name: value for name, value in options.items() if name != "imported"})


def number(most: float) -> Callable[[str], float]:
    """Parser of a number from 0 to `most`, for `argparse`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to {most:g}")
        return value

    return parse


def run_command(main: Callable[[], None]) -> None:
    """Run a command.

    A `UserError` goes to standard error in one line, and the exit status is 2. Anything else is a fault of the program
    and keeps its traceback. An interruption ends with 130; what was finished by then stays.

    Args:
        main: the command; it parses its own arguments.
    """
    try:
        with one_line_errors("error"):
            main()
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def worker_processes(workers: int) -> Iterator[Executor | None]:
    """A pool of spawned processes, or None for one worker: the caller then works in its own process.

    Forking beside the threads of pyarrow or a progress bar may hang.

    Raises:
        UserError: one of them was killed; finished work stays.
    """
    if workers <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=begin_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (often because memory ran out); run the same command again with fewer "
            "--workers; a preparation continues where it stopped"
        ) from error
    finally:
        # After an error the rest of the queue is useless.
        pool.shutdown(wait=True, cancel_futures=True)


def progress(items: Iterable[Item], total: int, what: str, unit: str) -> Iterator[Item]:
    """Yield the items and show their number, the rate and the time left on standard error; in a log every 30 s."""
    yield from progress_bar(iterable=items, desc=what, total=total, unit=f" {unit}")
