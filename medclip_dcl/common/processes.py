"""Processes of the commands: torch's threads sleep while they wait, workers end with their parent; locks of files.

Imported before torch, for whose OpenMP the first is set.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

WAIT_POLICY = "OMP_WAIT_POLICY"
_KNOWN = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait: the standard's, GCC's and Intel's."""


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other, unless the environment says how they wait.

    By default they spin, which is a little faster while each has a core of its own, and several times slower as soon as
    another program takes one (tests/benchmarks/RESULTS.md, "Threads that wait"). Processes started later inherit it.
    """
    if not any(name in os.environ for name in _KNOWN):
        os.environ[WAIT_POLICY] = "PASSIVE"


def begin_worker(*_: object) -> None:
    """Call first in a worker process; a loader's gives its number, which does not matter.

    Ctrl-C is left to the parent, and the process ends once the parent is gone: a worker would otherwise wait forever
    for work, or for a reader of its results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is None:
        return
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Code that keeps the interpreter's lock, as a regular expression does, keeps that thread from running. Linux ends
    # the process all the same: by SIGIO, sent once the other end of this pipe is closed.
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if not parent.is_alive():  # it was closed before
        os._exit(1)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def stop(number: int, _: object) -> NoReturn:
    """Handler of a signal that ends the command by its status."""
    raise SystemExit(128 + number)


@contextmanager
def locked(file: Path) -> Iterator[int | None]:
    """Lock a file for this process and those that inherit its descriptor; None where another process has the lock.

    The system frees the lock when the last of them ends. A file system without locks has none, which is said.
    """
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError as error:
            print(
                f"{file} cannot be locked ({error.strerror}): see that no other process works there",
                file=sys.stderr,
            )
        yield stream.fileno()
