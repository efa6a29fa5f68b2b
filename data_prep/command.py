"""Progress bars and worker processes of the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from medclip_dcl.common.command_line import Item, progress_bar
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.processes import begin_worker


@contextmanager
def worker_processes(workers: int) -> Iterator[Executor | None]:
    """A pool of spawned processes, or None for one worker: the caller then works in its own process.

    Forking beside the threads of pyarrow or a progress bar may hang.
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
