"""A table with one row an image, in one CSV or Parquet file, that a killed command continues."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_bytes, write_json, write_parquet

IMAGE, ERROR, WARNING = "image", "error", "warning"
SUFFIXES = (".csv", ".parquet")

Row = dict[str, Any]


def shown(name: str) -> str:
    """A path as tables hold it: bytes that are not UTF-8 as backslash escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


class ScoreTable:
    """Rows of scores, kept from their first batch on.

    Beside FILE lie FILE.json, which says what the scores are, and, until all rows are there, FILE.partial with a line
    for each finished one. A row belongs to the absolute path of its image, and to the file that was there: one that
    has changed since is asked about again.

    Args:
        file: .csv or .parquet, see `check_table_file`.
        columns: of scores.
        meaning: what the scores depend on besides the image, in plain values. Rows of another meaning are refused.
    """

    def __init__(self, file: Path, columns: Sequence[str], meaning: Mapping[str, Any]) -> None:
        self.file = file
        self.columns = list(columns)
        self._about = {"meaning": dict(meaning), "folder": os.getcwd(), "begun": time.time()}
        self._partial = file.with_name(f"{file.name}.partial")
        self._description = file.with_name(f"{file.name}.json")
        self._stream: BinaryIO | None = None
        self._has_partial = False
        self.rows = {**self._finished_rows(), **self._partial_rows()}

    def __enter__(self) -> ScoreTable:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            # What a full disk did not take is still in the buffer; its rows are asked for again.
            with suppress(OSError):
                self._stream.close()

    def missing(self, images: Sequence[str]) -> list[str]:
        """Images without a row."""
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
        if self._stream is None:
            self._stream = self._opened()
        self._stream.write(b"".join(_line(row) for row in new.values()))
        self._stream.flush()
        self.rows.update(new)

    def _opened(self) -> BinaryIO:
        """FILE.partial, to append to."""
        if self._has_partial:
            return self._partial.open("ab")
        try:
            stream = self._partial.open("xb")
        except FileExistsError as error:
            raise UserError(
                f"another command is writing {self.file}; wait for it, or give another --output"
            ) from error
        stream.write(_line(self._about))
        return stream

    def finish(self, images: Sequence[str], **notes: Any) -> pd.DataFrame:
        """Write the table in the order of the images, and what it is; returns it."""
        columns = [IMAGE, *self.columns, ERROR, WARNING]
        rows = [{**self.rows[_absolute(image)], IMAGE: shown(image)} for image in images]
        frame = pd.DataFrame(rows, columns=columns)
        frame = frame.astype({column: float for column in self.columns})
        write_json({**notes, **self._about}, self._description)
        if self.file.suffix == ".csv":
            # pandas does not quote a carriage return by itself.
            is_needed = frame[IMAGE].str.contains("\r").any()
            quoting: Any = csv.QUOTE_NONNUMERIC if is_needed else csv.QUOTE_MINIMAL
            write_bytes(frame.to_csv(index=False, quoting=quoting).encode(), self.file)
        else:
            write_parquet(frame, self.file)
        self._partial.unlink(missing_ok=True)
        return frame

    def is_finished(self, images: Sequence[str]) -> bool:
        """True if the file is written and has a row for each of the images."""
        return self.file.is_file() and not self._partial.is_file() and not self.missing(images)

    def _finished_rows(self) -> dict[str, Row]:
        if not self.file.is_file():
            return {}
        if not self._description.is_file():
            raise UserError(
                f"{self.file} was not written by this command ({self._description.name} is missing); give another "
                "--output, or remove it"
            )
        about = self._require_same(self._description.read_bytes(), self._description)
        try:
            frame = self._read()
            if list(frame.columns) != [IMAGE, *self.columns, ERROR, WARNING]:
                raise ValueError("it has other columns")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.file} cannot be read ({' '.join(str(error).split())}); remove it"
            ) from error
        plain = frame.astype(object).where(frame.notna(), None)
        return _unchanged(plain.to_dict("records"), about)  # type: ignore[arg-type]

    def _read(self) -> pd.DataFrame:
        if self.file.suffix == ".parquet":
            return pd.read_parquet(self.file)
        texts = dict.fromkeys((IMAGE, ERROR, WARNING), str)
        blank = {column: [""] for column in (*self.columns, ERROR, WARNING)}
        return pd.read_csv(self.file, dtype=texts, na_values=blank, keep_default_na=False)

    def _partial_rows(self) -> dict[str, Row]:
        if not self._partial.is_file():
            return {}
        # What follows the last line break was cut off by a kill.
        *whole, cut = self._partial.read_bytes().split(b"\n")
        if cut:
            with self._partial.open("r+b") as stream:
                stream.truncate(self._partial.stat().st_size - len(cut))
        if not whole:
            self._partial.unlink()
            return {}
        first, *whole = whole
        about = self._require_same(first, self._partial)
        self._has_partial = True
        try:
            return _unchanged(map(json.loads, whole), about)
        except ValueError as error:
            raise UserError(f"{self._partial} is damaged ({error}); remove it") from error

    def _require_same(self, content: bytes, source: Path) -> dict[str, Any]:
        """Refuse rows of another meaning; what the file says about its rows."""
        try:
            about = json.loads(content)
            found = about["meaning"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{source} does not say what its scores are; remove it and {self.file}"
            ) from error
        asked = json.loads(_line(self._about))["meaning"]
        differing = sorted(key for key in {**found, **asked} if found.get(key) != asked.get(key))
        if differing:
            raise UserError(
                f"{self.file} has scores of another {', '.join(differing)} (see {source.name}); give another --output, "
                f"or remove {self.file} and {source}"
            )
        return about


def check_table_file(file: Path) -> None:
    """Refuse a file that cannot become a table."""
    if file.suffix not in SUFFIXES or file.is_dir():
        raise UserError(f"--output {file}: scores are written to a file, .csv or .parquet")


def _absolute(image: str, folder: str = "") -> str:
    """Absolute path of an image, as tables hold it; a relative one starts in `folder`, or in the current one."""
    return os.path.abspath(os.path.join(folder, shown(image)))


def _unchanged(rows: Iterable[Row], about: Mapping[str, Any]) -> dict[str, Row]:
    """Rows by the absolute path of their image, without those whose file has changed since they were begun."""
    found = {}
    for row in rows:
        path = _absolute(row[IMAGE], about.get("folder", ""))
        found[path] = row
        with suppress(OSError):
            status = os.stat(path)
            # One that could not be read may have other rights now.
            if about.get("begun", 0) < max(status.st_mtime, status.st_ctime if row[ERROR] else 0):
                del found[path]
    return found


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"
