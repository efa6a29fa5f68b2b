"""A table with one row an image, in one CSV or Parquet file, that a killed command continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from medclip_dcl.errors import UserError
from medclip_dcl.files import write_bytes, write_json, write_parquet

IMAGE, ERROR, WARNING = "image", "error", "warning"
SUFFIXES = (".csv", ".parquet")

Row = dict[str, Any]


class ScoreTable:
    """Rows of scores, kept from their first batch on.

    Beside FILE lie FILE.json, which says what the scores are, and, until all rows are there, FILE.partial with a line
    for each finished one.

    Args:
        file: .csv or .parquet, see `check_table_file`.
        columns: of scores.
        meaning: what the scores depend on besides the image, in plain values. Rows of another meaning are refused.

    Raises:
        UserError: a file of other scores, or of another program; it cannot be read or written.
    """

    def __init__(self, file: Path, columns: Sequence[str], meaning: Mapping[str, Any]) -> None:
        self.file = file
        self.columns = list(columns)
        self._about = {"meaning": dict(meaning)}
        self._partial = file.with_name(f"{file.name}.partial")
        self._description = file.with_name(f"{file.name}.json")
        self._stream: BinaryIO | None = None
        self._has_partial = False
        self.rows = {**self._finished_rows(), **self._partial_rows()}

    def __enter__(self) -> ScoreTable:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def missing(self, images: Sequence[str]) -> list[str]:
        """Images without a row.

        Raises:
            UserError: there are rows of images that are not among them.
        """
        if others := self.rows.keys() - set(images):
            raise UserError(
                f"{self.file} has rows of {len(others):,} images that are not asked for now (first: {min(others)}); "
                "give them too, or another --output"
            )
        return [image for image in images if image not in self.rows]

    def add(self, rows: Iterable[Row]) -> None:
        """Keep finished rows, also if the process is killed afterwards."""
        new = {row[IMAGE]: row for row in rows}
        if self._stream is None:
            self._stream = self._opened()
        self._stream.write(b"".join(_line(row) for row in new.values()))
        self._stream.flush()
        self.rows.update(new)

    def _opened(self) -> BinaryIO:
        """FILE.partial, to append to.

        Raises:
            UserError: another command has begun it since this one looked.
        """
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
        frame = pd.DataFrame([self.rows[image] for image in images], columns=columns)
        frame = frame.astype({column: float for column in self.columns})
        write_json({**notes, **self._about}, self._description)
        if self.file.suffix == ".csv":
            write_bytes(frame.to_csv(index=False).encode(), self.file)
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
        self._require_same(self._description.read_bytes(), self._description)
        try:
            frame = self._read()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.file} cannot be read ({' '.join(str(error).split())}); remove it"
            ) from error
        plain = frame.astype(object).where(frame.notna(), None)
        return {
            row[0]: dict(zip(plain.columns, row, strict=True))
            for row in plain.itertuples(index=False, name=None)
        }

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
        self._require_same(first, self._partial)
        self._has_partial = True
        try:
            rows = [json.loads(line) for line in whole]
        except ValueError as error:
            raise UserError(f"{self._partial} is damaged ({error}); remove it") from error
        return {row[IMAGE]: row for row in rows}

    def _require_same(self, content: bytes, source: Path) -> None:
        """Refuse rows of another meaning."""
        try:
            found = json.loads(content)["meaning"]
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


def check_table_file(file: Path) -> None:
    """Refuse a file that cannot become a table.

    Raises:
        UserError: another suffix than .csv or .parquet, or a folder.
    """
    if file.suffix not in SUFFIXES or file.is_dir():
        raise UserError(f"--output {file}: scores are written to a file, .csv or .parquet")


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"
