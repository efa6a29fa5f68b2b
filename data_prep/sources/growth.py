"""The source images, and rows of a table, from which a set was made, and what has changed in the source since.

They are kept in ``found.parquet`` of the set, outside of its fingerprint: a copy of the source has other times.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa

from medclip_dcl.common.files import digest, file_states, write_parquet
from medclip_dcl.data.shards import ShardIndex

FILE = "found.parquet"
_COLUMNS = ["path", "file", "bytes", "mtime_ns"]

State = tuple[str, int, int]
"""Name, size in bytes and time in ns of a file."""


class SourceState(NamedTuple):
    """State of the file of each image that has one, by path of the prepared image; digests of rows."""

    images: Mapping[str, State]
    rows: Collection[str]

    @classmethod
    def now(cls, images: pd.DataFrame, rows: Iterable[str]) -> SourceState:
        """Of the images and rows of a `Source`."""
        files = images["file"].tolist()
        states = zip(images["path"], files, file_states(files), strict=True)
        return cls(
            {path: (os.path.basename(f), *state) for path, f, state in states if state[0] >= 0}, {*rows}
        )

    @classmethod
    def of_set(cls, output: Path) -> SourceState | None:
        """What the set was made from; None if that is not there or not readable."""
        try:
            table = pd.read_parquet(output / FILE)[_COLUMNS]
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        of_images = table[table["bytes"] >= 0]
        path, *state = (of_images[column].tolist() for column in _COLUMNS)
        rows = table.loc[table["bytes"] < 0, "path"]
        return cls(dict(zip(path, zip(*state, strict=True), strict=True)), {*rows})

    def write(self, output: Path) -> None:
        rows = [(path, *state) for path, state in sorted(self.images.items())]
        rows += [(row, "", -1, 0) for row in sorted(self.rows)]
        table = pd.DataFrame(rows, columns=_COLUMNS).astype({"bytes": "int64", "mtime_ns": "int64"})
        write_parquet(table, output / FILE)


def files_of_set(output: Path) -> dict[str, str]:
    """Path of each prepared image -> name of its original: images that stay in the set if their files are gone."""
    found = SourceState.of_set(output)
    return {} if found is None else {path: found.images[path][0] for path in _prepared(output, found.images)}


def _prepared(output: Path, paths: Iterable[str]) -> list[str]:
    """Those of the images that the set has: others were left out of it."""
    paths, index = sorted(paths), ShardIndex.read(output)
    if index is not None:
        return sorted({*paths} & {*index.rows["path"].to_pylist()})
    states = file_states([f"{output}/images/{path}" for path in paths])
    return [path for path, (size, _) in zip(paths, states, strict=True) if size >= 0]


def digests_of_rows(rows: pd.DataFrame) -> list[str]:
    """A digest of the values of each row and, of equal rows, of its number among them."""
    numbers = rows.groupby([*rows], dropna=False).cumcount()
    values = zip(numbers, rows.itertuples(index=False, name=None), strict=True)
    return [digest(repr(row).encode()) for row in values]


class Growth(NamedTuple):
    """Paths of prepared images, and digests of rows, by what has happened to them since a set was made.

    Images whose files are there by now, have changed or are gone (with their states of before), and that the source no
    longer chooses, as by --limit; further rows of a table, and those that have changed or are gone; prepared images
    that are missing or not as they were written.
    """

    more: Sequence[str]
    changed: Sequence[str]
    gone: Mapping[str, State]
    unchosen: Sequence[str]
    more_rows: Sequence[str]
    lost_rows: Sequence[str]
    damaged: Collection[str] = ()

    @classmethod
    def between(cls, kept: SourceState, now: SourceState, chosen: Iterable[str], output: Path) -> Growth:
        """From what a set was made from to what is there now, for the images that the `Source` chooses."""
        before = kept.images
        absent = dict.fromkeys(_prepared(output, before.keys() - now.images.keys()))
        return cls(
            more=sorted(now.images.keys() - before.keys()),
            changed=sorted(path for path, state in now.images.items() if before.get(path, state) != state),
            gone={path: before[path] for path in chosen if path in absent},
            unchosen=sorted(absent.keys() - {*chosen}),
            more_rows=sorted({*now.rows} - {*kept.rows}),
            lost_rows=sorted({*kept.rows} - {*now.rows}),
        )

    @property
    def is_any(self) -> bool:
        """True if the source would now make another set."""
        return bool(self.more or self.changed or self.unchosen or self.more_rows)

    @property
    def stale(self) -> set[str]:
        """Prepared images, if they are there, of other files than those of now, or of none."""
        return {*self.more, *self.changed, *self.unchosen, *self.damaged}

    def __str__(self) -> str:
        parts: dict[str, Collection[str]] = {
            "further image{s}": self.more,
            "further row{s} of the table": self.more_rows,
            "changed image{s}": self.changed,
            "image{s} no longer chosen": self.unchosen,
            "image{s} no longer in the source, kept in the set": self.gone,
            "prepared image{s} missing or changed": self.damaged,
        }
        return ", ".join(
            f"{len(names):,} {what.format(s='s' * (len(names) > 1))}"
            for what, names in parts.items()
            if names
        )
