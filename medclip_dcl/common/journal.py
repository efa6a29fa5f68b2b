"""What a command has finished, line by line, so that the same command goes on after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from medclip_dcl.common.command_line import progress_bar
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import parse_json


class Journal:
    """A file that grows by a line for each finished piece of work, below a first one that says what all depend on.

    A kill cuts off the last line at most. A journal of other work is refused, and so is one that another process has
    begun since this one looked.

    Args:
        file: the journal; made by the first `add`.
        meaning: what the work depends on, in plain values.
        remedy: what a user can do about a file of other work.
        is_own: False reads the entries of a journal that another process may be writing, and changes nothing.

    Attributes:
        about: content of the first line.
        entries: those of earlier processes.
    """

    def __init__(self, file: Path, meaning: Mapping[str, Any], remedy: str, *, is_own: bool = True) -> None:
        self.file, self.remedy, self.is_own = file, remedy, is_own
        self.about: dict[str, Any] = json.loads(_line({"meaning": dict(meaning)}))
        self.entries: list[dict[str, Any]] = []
        self._stream: BinaryIO | None = None
        if file.is_file():
            self._read()

    def _read(self) -> None:
        *lines, cut = self.file.read_bytes().split(b"\n")
        if cut and self.is_own:
            os.truncate(self.file, self.file.stat().st_size - len(cut))
        if not lines:
            if self.is_own:
                self.file.unlink()
            return
        try:
            about, *entries = map(parse_json, lines)
        except ValueError as error:
            raise UserError(f"{self.file} is damaged ({error}); remove it") from error
        self.require_same(about, self.file)
        self.entries = entries
        if self.is_own:
            self._stream = self.file.open("ab")

    def require_same(self, about: Any, source: Path) -> None:
        """Refuse what another file says about its work, unless it is the same work."""
        found, asked = about.get("meaning") if isinstance(about, dict) else None, self.about["meaning"]
        if not isinstance(found, dict):
            raise UserError(f"{source} does not say what it is of; {self.remedy}")
        if differing := sorted(key for key in {**found, **asked} if found.get(key) != asked.get(key)):
            raise UserError(f"{source} differs in {', '.join(differing)}; {self.remedy}")

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Keep entries, also if the process is killed afterwards."""
        if self._stream is None:
            try:
                self._stream = self.file.open("xb")
            except FileExistsError as error:
                raise UserError(
                    f"another command is writing {self.file}; wait for it, or give another name"
                ) from error
            self._stream.write(_line(self.about))
        self._stream.write(b"".join(map(_line, entries)))
        self._stream.flush()

    def close(self) -> None:
        """Close the file; what a full disk did not take is done again."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()

    def remove(self) -> None:
        """Remove the file: all work is done."""
        self.close()
        self.file.unlink(missing_ok=True)


def work_through(
    parts: Iterable[tuple[int, Mapping[str, Any]]],
    kept: Journal | None,
    every: float = 0.0,
    save: Callable[[], None] = lambda: None,
    **shown: Any,
) -> None:
    """Compute the parts of some work, each an amount and an entry, and keep the entries in a journal, if there is one.

    Args:
        every: seconds between two notes in the journal, the most that a kill may cost; 0 keeps each part at once.
        save: makes the results durable that the entries name, before they are noted.
        shown: options of the progress bar.
    """
    finished: list[Mapping[str, Any]] = []

    def note() -> float:
        if kept is not None and finished:
            save()
            kept.add(finished)
        finished.clear()
        return time.monotonic()

    with progress_bar(**shown) as bar:
        noted_at = time.monotonic()
        try:
            for amount, entry in parts:
                finished.append(entry)
                bar.update(amount)
                if time.monotonic() - noted_at >= every:
                    noted_at = note()
        finally:
            note()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"
