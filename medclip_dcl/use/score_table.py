"""A table with one row an image, in one CSV or Parquet file, that a killed command continues."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest_of_file, parse_json, write_bytes, write_json, write_parquet
from medclip_dcl.common.journal import Journal

IMAGE, ERROR, WARNING, STATE = "image", "error", "warning", "file"
SUFFIXES = (".csv", ".parquet")

Row = dict[str, Any]


def shown(name: str) -> str:
    """A path as tables hold it: bytes that are not UTF-8 as backslash escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


class FileState(NamedTuple):
    """Size, times and number (of the inode) of a file, and the digest of its bytes.

    None for a file without such numbers, "" for one whose bytes cannot be read. Copies that keep their time (cp -p,
    rsync -a) and renamed files may be older than the file that they replace, so that all is compared for equality.
    """

    size: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    inode: int | None = None
    digest: str = ""

    @classmethod
    def of(cls, name: str) -> FileState:
        """The state without the digest."""
        try:
            status = os.stat(name)
        except OSError:
            return cls()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino % 2**63)

    @classmethod
    def read(cls, name: str) -> FileState:
        """The state with the digest, to be taken before the file is used: a later change then shows in the next one."""
        state = cls.of(name)
        is_file = os.path.isfile(name)  # a pipe would be waited for
        return state._replace(digest=digest_of_file(Path(name))) if is_file else state

    def after(self, name: str) -> FileState | None:
        """The state of a file that has the same bytes; None if they have changed."""
        now = FileState.of(name)
        if now.size is None or now == self._replace(digest=""):
            return self  # of a file that is not there now, the row is kept
        now = FileState.read(name)
        return now if self.digest and now.digest == self.digest else None


class ScoreTable:
    """Rows of scores, kept from their first batch on.

    Beside FILE lie FILE.json, which says what the scores are, FILE.files.parquet with the state of each image file and,
    until all rows are there, FILE.partial with a line for each finished one. A row belongs to the absolute path of its
    image, and to the file that was there: one that has changed since is asked about again. `meaning` is what the scores
    depend on besides the image, in plain values; rows of another meaning are refused.
    """

    def __init__(self, file: Path, columns: Sequence[str], meaning: Mapping[str, Any]) -> None:
        self.file = file
        self.columns = list(columns)
        self._all_columns = [IMAGE, *columns, ERROR, WARNING]
        self._description = file.with_name(f"{file.name}.json")
        partial = file.with_name(f"{file.name}.partial")
        self._states = file.with_name(f"{file.name}.files.parquet")
        remedy = f"give another --output, or remove {file.name}, {self._description.name} and {partial.name}"
        self._journal = Journal(partial, meaning, remedy)
        self._about = {**self._journal.about, "folder": os.getcwd()}
        self.rows = self._finished_rows() | {row[IMAGE]: row for row in self._journal.entries}

    def __enter__(self) -> ScoreTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def missing(self, images: Sequence[str]) -> list[str]:
        """Images without a row; rows of files that have changed since are dropped, and counted on stderr."""
        n_rows, changed, moved = len(self.rows), 0, False
        for image in images:
            if (row := self.rows.get(path := _absolute(image))) is None:
                continue
            known = FileState(*row[STATE]) if row.get(STATE) else None
            if known is None or (now := known.after(image)) is None:
                del self.rows[path]
                changed += 1
            elif now != known:
                row[STATE], moved = now, True
        if changed:
            print(
                f"{self.file}: {changed:,} of {n_rows:,} rows are asked again: their files have changed since, or "
                f"{self._states.name} does not know them",
                file=sys.stderr,
            )
        elif moved and self.is_written:
            self._write_states()
        others = self.rows.keys() - set(map(_absolute, images))
        if any(not self.rows[path][ERROR] for path in others):
            raise UserError(
                f"{self.file} has rows of {len(others):,} images that are not asked for now (first: {min(others)}); "
                "give them too, or another --output"
            )
        return [image for image in images if _absolute(image) not in self.rows]

    def add(self, rows: Iterable[Row]) -> None:
        """Keep finished rows, also if the process is killed afterwards."""
        new = {(path := _absolute(row[IMAGE])): {**row, IMAGE: path} for row in rows}
        self._journal.add(new.values())
        self.rows.update(new)

    def finish(self, images: Sequence[str], **notes: Any) -> pd.DataFrame:
        """Write the table in the order of the images, and what it is; returns it."""
        rows = [{**self.rows[_absolute(image)], IMAGE: shown(image)} for image in images]
        frame = pd.DataFrame(rows, columns=self._all_columns)
        frame = frame.astype({column: float for column in self.columns})
        write_json({**notes, **self._about}, self._description)
        if self.file.suffix == ".csv":
            # pandas does not quote a carriage return by itself.
            is_needed = frame[IMAGE].str.contains("\r").any()
            quoting: Any = csv.QUOTE_NONNUMERIC if is_needed else csv.QUOTE_MINIMAL
            write_bytes(frame.to_csv(index=False, quoting=quoting).encode(), self.file)
        else:
            write_parquet(frame, self.file)
        self._write_states()
        self._journal.remove()
        return frame

    @property
    def is_written(self) -> bool:
        """True if the file has all finished rows."""
        return self.file.is_file() and not self._journal.file.is_file()

    def _write_states(self) -> None:
        rows = [(path, *(row.get(STATE) or FileState())) for path, row in self.rows.items()]
        frame = pd.DataFrame(rows, columns=[IMAGE, *FileState._fields])
        write_parquet(frame.astype(dict.fromkeys(FileState._fields[:-1], "Int64")), self._states)

    def _read_states(self) -> dict[str, FileState]:
        """States of the files; none where the file of states is missing or damaged."""
        try:
            frame = pd.read_parquet(self._states)[[IMAGE, *FileState._fields]].astype(object)
        except (OSError, ValueError, KeyError):
            return {}
        rows = frame.where(frame.notna(), None).itertuples(index=False, name=None)
        return {image: FileState(*state) for image, *state in rows}

    def _finished_rows(self) -> dict[str, Row]:
        if not self.file.is_file():
            return {}
        if not self._description.is_file():
            raise UserError(
                f"{self.file} was not written by this command ({self._description.name} is missing); give another "
                "--output, or remove it"
            )
        try:
            about, frame = parse_json(self._description.read_bytes()), self._read()
            states = self._read_states()
        except (OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise UserError(
                f"{self.file} or {self._description} cannot be read ({said}); remove both"
            ) from error
        self._journal.require_same(about, self._description)
        if list(frame.columns) != self._all_columns:
            raise UserError(f"{self.file} has other columns than it was written with; remove it")
        plain = frame.astype(object).where(frame.notna(), None)
        records: Any = plain.to_dict("records")
        rows = {_absolute(row[IMAGE], about.get("folder", "")): row for row in records}
        return {path: {**row, STATE: states.get(path)} for path, row in rows.items()}

    def _read(self) -> pd.DataFrame:
        if self.file.suffix == ".parquet":
            return pd.read_parquet(self.file)
        texts = dict.fromkeys((IMAGE, ERROR, WARNING), str)
        blank = {column: [""] for column in self._all_columns[1:]}
        return pd.read_csv(self.file, dtype=texts, na_values=blank, keep_default_na=False)


def _absolute(image: str, folder: str = "") -> str:
    """Absolute path of an image, as tables hold it; a relative one starts in `folder`, or in the current one."""
    return os.path.abspath(os.path.join(folder, shown(image)))
