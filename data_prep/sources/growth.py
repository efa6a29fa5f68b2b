"""The source images, and rows of a table, from which a set was made, and what has changed in the source since.

They are kept in ``found.parquet`` of the set, outside of its fingerprint: a copy of the source has other times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa

from medclip_dcl.common.files import digest, file_states, write_parquet

FILE = "found.parquet"
_COLUMNS = ["name", "file", "bytes", "mtime_ns"]


class Found(NamedTuple):
    """Name, size in bytes and time in ns of the file of each image (by dicom_id) that has one; digests of rows."""

    images: dict[str, tuple[str, int, int]]
    rows: set[str]

    @classmethod
    def now(cls, images: pd.DataFrame, rows: Iterable[str]) -> Found:
        """Of the images and rows of a `Source`."""
        files = images["file"].tolist()
        states = zip(images["dicom_id"], files, file_states(files), strict=True)
        return cls(
            {name: (os.path.basename(f), *state) for name, f, state in states if state[0] >= 0}, {*rows}
        )

    @classmethod
    def of_set(cls, output: Path) -> Found | None:
        """What the set was made from; None if that is not there or not readable."""
        try:
            table = pd.read_parquet(output / FILE)[_COLUMNS]
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        of_images = table[table["bytes"] >= 0]
        name, *state = (of_images[column].tolist() for column in _COLUMNS)
        rows = table.loc[table["bytes"] < 0, "name"]
        return cls(dict(zip(name, zip(*state, strict=True), strict=True)), {*rows})

    def write(self, output: Path) -> None:
        rows = [(name, *state) for name, state in sorted(self.images.items())]
        rows += [(row, "", -1, 0) for row in sorted(self.rows)]
        types = {"name": "object", "file": "object", "bytes": "int64", "mtime_ns": "int64"}
        write_parquet(pd.DataFrame(rows, columns=_COLUMNS).astype(types), output / FILE)


def files_of_set(output: Path, folder: Path) -> dict[str, Path]:
    """dicom_id -> its file in a folder, of the images that a set was made from, which stay in it if they are gone."""
    found = Found.of_set(output)
    return {} if found is None else {name: folder / file for name, (file, *_) in found.images.items()}


def digests_of_rows(rows: pd.DataFrame) -> list[str]:
    """A digest of the values of each row."""
    return [digest(repr(values).encode()) for values in rows.itertuples(index=False, name=None)]


class Growth(NamedTuple):
    """Names of images and rows, by what has happened to them since a set was made.

    Images whose files are there by now, have changed or are gone, and that the source no longer chooses, as by --limit;
    further rows of a table, and those that have changed or are gone.
    """

    more: Sequence[str]
    changed: Sequence[str]
    gone: Sequence[str]
    unchosen: Sequence[str]
    more_rows: Sequence[str]
    lost_rows: Sequence[str]

    @classmethod
    def between(cls, kept: Found, now: Found, images: pd.DataFrame) -> Growth:
        """From what a set was made from to what is there now, for the images of the `Source`."""
        chosen, before = {*images["dicom_id"]}, kept.images
        return cls(
            more=sorted(now.images.keys() - before),
            changed=sorted(name for name, state in now.images.items() if before.get(name, state) != state),
            gone=sorted((before.keys() & chosen) - now.images.keys()),
            unchosen=sorted(before.keys() - chosen),
            more_rows=sorted(now.rows - kept.rows),
            lost_rows=sorted(kept.rows - now.rows),
        )

    @property
    def is_any(self) -> bool:
        """True if the source would now make another set."""
        return bool(self.more or self.changed or self.unchosen or self.more_rows)

    def __str__(self) -> str:
        parts = {
            "more images are there": self.more,
            "more rows are in the table": self.more_rows,
            "changed" if self.more else "images changed": self.changed,
            "images are no longer chosen": self.unchosen,
            "images are no longer there, which the set keeps": self.gone,
        }
        return ", ".join(f"{len(names):,} {what}" for what, names in parts.items() if names)
