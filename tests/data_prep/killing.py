"""kill -9 at chosen moments: when a process is about to touch a chosen file, as the interpreter itself reports it.

Audit events (PEP 578) come before a file is touched, whatever Python code opens, renames or removes it. A kill at the
n-th change of a file is therefore also one after the change before it, and all of them together leave the disk in every
state that a kill can leave, but for half-written files; these have temporary names, and a kill before such a file gets
its own name cuts it in two first.

Only the standard library is imported: `Watch.start` runs as ``sitecustomize`` in every process of a real command.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EVENTS = {"os.rename": "rename", "os.remove": "remove", "os.mkdir": "make"}


def touched(folder: str, event: str, arguments: tuple[Any, ...]) -> tuple[str, str] | None:
    """The operation that is about to happen below a folder, and its file; None elsewhere.

    Returns:
        "write .images.parquet.tmp", "rename images.parquet", "remove unfinished.json", "make images" or
        "read images/a.jpg"; and the path of the file that it happens to, before it is renamed.
    """
    if event == "open":
        is_changed = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        verb, place, named = "write" if is_changed else "read", arguments[0], arguments[0]
    elif event in _EVENTS:
        verb, place, named = _EVENTS[event], arguments[0], arguments[1 if event == "os.rename" else 0]
    else:
        return None
    if not isinstance(named, str | os.PathLike) or not os.fspath(named).startswith(folder):
        return None
    if (verb == "make" and os.path.isdir(named)) or (verb == "remove" and not os.path.exists(named)):
        return None
    name = os.path.relpath(os.fspath(named), folder)
    return f"{verb} {re.sub(r'[.][0-9a-f]+[.]tmp$', '.tmp', name)}", os.fspath(place)


@dataclass(frozen=True)
class Watch:
    """Reaction to operations on a folder's files.

    Attributes:
        folder: of the prepared set.
        log: a file to which the time and name of everything touched is added, outside of `folder`; "" for none.
        at: kill at the change of this number, from 0; None for another moment.
        begin: pattern of what is touched where a time begins that ends with the kill; "" for none.
        count: it is touched for so many times in this process.
        seconds: how long the time is.
        end: pattern of what ends the time before.
        everything: kill all processes of the command, not only this one: its group, which must be its own.
    """

    folder: str
    log: str = ""
    at: int | None = None
    begin: str = ""
    count: int = 1
    seconds: float = 0.0
    end: str = "$^"
    everything: bool = False

    def start(self) -> None:
        """Watch this process from now on."""
        changes, begun = 0, 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes, begun
            found = touched(self.folder, event, arguments)
            if found is None:
                return
            name, file = found
            if self.log:
                with open(self.log, "a") as log:
                    log.write(f"{time.time():.6f} {name}\n")
            if not name.startswith("read "):
                if changes == self.at:
                    if name.startswith("rename "):
                        os.truncate(file, os.path.getsize(file) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                changes += 1
            if self.begin and re.match(self.begin, name):
                begun += 1
                if begun == self.count:
                    self._begin()
            if begun >= self.count and re.match(self.end, name):
                self._kill()

        sys.addaudithook(hook)

    def _begin(self) -> None:
        if self.seconds <= 0:
            self._kill()
        timer = threading.Timer(self.seconds, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        if self.everything:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables with which every process of a Python command watches; `folder` is made to hold what they need."""
        folder.mkdir(exist_ok=True)
        source = Path(__file__).read_text(encoding="utf-8")
        (folder / "sitecustomize.py").write_text(f"{source}\n\n{self!r}.start()\n")
        return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def run(
    main: Callable[[list[str]], None],
    arguments: list[str],
    said: Path,
    watch: Watch | None = None,
    timeout: float = 120,
) -> int:
    """Run a command's main function in a process of its own; what it says goes to a file.

    Returns:
        its exit status, negative for the signal that killed it.

    Raises:
        TimeoutError: it did not end in `timeout` seconds, and was killed.
    """
    from tests.processes import FRESH  # imports torch

    assert watch is None or not watch.everything, "the process is of the group of the tests"
    process = FRESH.Process(target=_run, args=(main, arguments, said, watch))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"it did not end in {timeout:g} s; what it said is in {said}")
    assert process.exitcode is not None
    return process.exitcode


def _run(main: Callable[[list[str]], None], arguments: list[str], said: Path, watch: Watch | None) -> None:
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if watch is not None:
        watch.start()
    main(arguments)


def changes(log: Path) -> list[str]:
    """Changes of a watched run, in order."""
    names = [line.partition(" ")[2] for line in log.read_text().splitlines()]
    return [name for name in names if not name.startswith("read ")]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, also hidden ones."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Names of files that are not in both, or not the same."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
