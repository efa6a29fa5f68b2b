"""Progress bars, worker processes and the lock of a set, of the commands."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from medclip_dcl.common.command_line import Item, progress_bar
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.processes import begin_worker

_LOCK = ".lock"


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


@contextmanager
def one_process_in(output: Path) -> Iterator[None]:
    """Keep other processes from writing the same set; the lock ends with this process, however it ends.

    What a killed run was writing is removed, but not where the file system has no locks: others may be at work.
    """
    output.mkdir(parents=True, exist_ok=True)
    # A file opened for writing, since NFS does not share locks of folders. It is never removed: another process may
    # just have locked it.
    file = os.open(output / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output {output} is being written by another process; wait for it to finish, or choose "
                "another --output"
            ) from error
        except OSError as error:
            print(f"{output} cannot be locked ({error.strerror}): see that no other process prepares it")
        else:
            for leftover in list(output.rglob(".*.tmp")):
                leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(file)
