"""The way in which torch's threads wait for each other, set before torch is imported."""

from __future__ import annotations

import os
import sys

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


def let_threads_of_a_command_sleep() -> None:
    """`let_threads_sleep` where Python is about to run ``python -m PACKAGE...``; nothing where a package is a library.

    For the ``__init__`` of a package with commands: OpenMP reads its variables once, when a command's own imports load
    torch. While Python looks for the module to run, ``sys.argv[0]`` is "-m".
    """
    if sys.argv[:1] == ["-m"]:
        let_threads_sleep()
