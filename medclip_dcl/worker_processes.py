"""The life of a worker process: it ends with its parent, also with one that was killed."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process


def begin_worker(*_: object) -> None:
    """Call first in a worker process; a loader's gives its number, which does not matter.

    Ctrl-C is left to the parent, and a thread ends the process once the parent is gone: a worker would otherwise wait
    forever for work, or for a reader of its results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
