"""Images of a prepared set as they are stored: JPEG files below ``images/``, or members of a few tar files.

A shard, ``shards/NNNNN.tar``, is a plain ustar archive. Its member NNNNNNNN.jpg is the image of this row, from 0, of
the table "image_files": other readers take all after a name's first dot for its ending. ``shards.parquet`` is the
index: for each row path, shard, offset of the data and bytes; its metadata have size and digest of each shard and a
digest of all this, and ``shards/times.json`` the time of each shard when it was compared. A set with an index is read
from its shards; the fingerprint depends on neither.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file, file_states, parse_json, replacing, write_json

FOLDER, INDEX, TIMES = "shards", "shards.parquet", "times.json"
HEADER = 512
"""Bytes of a member's header in a tar file, before its data."""
COLUMNS = {"path": pa.string(), "shard": pa.int64(), "offset": pa.int64(), "bytes": pa.int64()}
_ABOUT = b"medclip_dcl_shards"
_REMEDY_OF_INDEX = (
    "make it again from the shards: medclip-dcl shard {} (with --texts, if they were made with it)"
)
_REMEDY = "restore it from a copy of the set, or prepare the set again into a new folder"


def shard_file(folder: Path, shard: int) -> Path:
    """Tar file of a shard of a set."""
    return folder / FOLDER / f"{shard:05d}.tar"


def member(row: int, ending: str = "jpg") -> str:
    """Name of an image, or of its report, in its shard."""
    return f"{row:08d}.{ending}"


class StoredImages:
    """Encoded images by position, each in a file below `folder`.

    Attributes:
        places: path of each image.
    """

    places: Any
    remedy = "delete it and run the command that made the set again"

    def __init__(self, folder: Path, places: Sequence[str]) -> None:
        self.folder, self.places = folder, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> bytes:
        """Content of the JPEG file; an OSError if it is missing or not as it was written."""
        return (self.folder / self.places[index]).read_bytes()

    def problem(self, index: int, error: OSError) -> str:
        """What is wrong with an image, and what to do."""
        return f"prepared image {self.folder}/{self.where(index)} cannot be read ({error}); {self.remedy}"

    def where(self, index: int) -> str:
        """Name of an image below `folder`."""
        return self.places[index]

    def part(self, start: int, stop: int | None = None) -> StoredImages:
        """The images from `start` until `stop`."""
        found = copy.copy(self)
        found.places = self.places[start:stop]
        return found


def stored_images(folder: Path, paths: Sequence[str]) -> StoredImages:
    """Images of these paths of a set, in this order; a `UserError` about shards without an index."""
    if (index := ShardIndex.read(folder)) is not None:
        return index.images(paths)
    if (folder / FOLDER).is_dir() and not (folder / "images").is_dir():
        raise UserError(f"{folder} has shards but no {INDEX}; {_REMEDY_OF_INDEX.format(folder)}")
    return StoredImages(folder / "images", paths)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """``shards.parquet`` of a set.

    Attributes:
        rows: `COLUMNS` of each image.
        shards: size in bytes and digest of each shard.
        texts: True if the report of an image, where there is one, follows it as NNNNNNNN.txt.
        image_files: digest of the table "image_files" of the set.
    """

    folder: Path
    rows: pa.Table
    shards: list[tuple[int, str]]
    texts: bool
    image_files: str

    @classmethod
    def read(cls, folder: Path) -> ShardIndex | None:
        """The index of a set, or None for a set of files; a `UserError` about a damaged one."""
        if not (file := folder / INDEX).is_file():
            return None
        try:
            rows = pq.read_table(file, partitioning=None)
            if (found := dict(zip(rows.schema.names, rows.schema.types, strict=True))) != COLUMNS:
                raise ValueError(f"expected the columns {COLUMNS}, found {found}")
            about = dict(parse_json((rows.schema.metadata or {}).get(_ABOUT, b"{}")))
            noted = about.pop("digest", "")
            if (index := cls(folder, rows, **about)).digest() != noted:
                raise ValueError(f"expected the index that was written, of digest {noted}, found another")
            return index
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:
            raise UserError(f"{file}: {error}; {_REMEDY_OF_INDEX.format(folder)}") from error

    def digest(self) -> str:
        """Digest of the rows, and of what is known of the shards."""
        paths, *numbers = self.rows.columns
        rows = pa.ListArray.from_arrays([0, len(paths)], paths.combine_chunks())
        about = json.dumps([self.shards, self.texts]).encode()
        return digest(about, pc.binary_join(rows, "\n")[0].as_buffer(), *map(np.asarray, numbers))

    def write(self) -> None:
        """Write and read the index of shards whose digests have just been compared."""
        files = [shard_file(self.folder, shard) for shard in range(len(self.shards))]
        write_json({file.name: file.stat().st_mtime_ns for file in files}, self.folder / FOLDER / TIMES)
        about = {"shards": self.shards, "texts": self.texts, "image_files": self.image_files}
        about["digest"] = self.digest()
        with replacing(self.folder / INDEX) as stream:
            pq.write_table(self.rows.replace_schema_metadata({_ABOUT: json.dumps(about)}), stream)
        self.read(self.folder)

    def images(self, paths: Sequence[str]) -> ShardedImages:
        """Images of these paths, in this order."""
        found = pc.index_in(pa.array(paths, pa.string()), value_set=self.rows["path"].combine_chunks())
        if found.null_count:
            missing = pa.array(paths, pa.string()).filter(found.is_null())
            raise UserError(
                f"{self.folder / INDEX}: {len(missing):,} of {len(paths):,} images are missing (first: {missing[0]}); "
                f"{_REMEDY}"
            )
        rows = found.to_numpy()
        places = [self.rows[name].to_numpy()[rows] for name in COLUMNS if name != "path"]
        return ShardedImages(self.folder, self.shards, np.stack([rows, *places], axis=1))

    def require_sound(self, image_files: str, kept: Sequence[Path]) -> None:
        """Refuse an index of other images, and a shard of another size, or of another digest if its time is another.

        Args:
            image_files: digest of the set's table "image_files".
            kept: files of times, the set's own first; the first that can be written gets new times.
        """
        if self.image_files != image_files:
            raise UserError(
                f"{self.folder / INDEX}: expected the index of this set's shards, found that of another set; "
                + _REMEDY_OF_INDEX.format(self.folder)
            )
        known = set[tuple[str, int]]()
        for file in kept:
            with suppress(OSError, ValueError, TypeError):
                known.update(dict(parse_json(file.read_bytes())).items())
        files = [shard_file(self.folder, shard) for shard in range(len(self.shards))]
        states = file_states([*map(str, files)])
        later = [shard for shard, (_, time) in enumerate(states) if (files[shard].name, time) not in known]
        for shard, (size, _) in enumerate(states):
            if size != self.shards[shard][0]:
                raise self._other(shard, "no file" if size < 0 else f"{size:,} bytes")
        for shard in later:  # which takes minutes
            if digest_of_file(files[shard]) != self.shards[shard][1]:
                raise self._other(shard, "another content of this size")
        if not later:
            return
        print(
            f"{self.folder}: {len(later):,} of {len(files):,} shards have other times, as in a copy; their digests "
            "were compared and are equal",
            file=sys.stderr,
        )
        times = {file.name: time for file, (_, time) in zip(files, states, strict=True)}
        for file in kept:
            with suppress(OSError):  # a set of another user, or read-only
                return write_json(times, file)

    def _other(self, shard: int, found: str) -> UserError:
        paths = self.rows["path"].filter(pc.equal(self.rows["shard"], shard))
        return UserError(
            f"{shard_file(self.folder, shard)}: expected {self.shards[shard][0]:,} bytes as they were written, found "
            f"{found}; its {len(paths):,} images ({paths[0]} to {paths[-1]}) cannot be used: {_REMEDY}"
        )


class ShardedImages(StoredImages):
    """Images in shards, read by `os.pread`: a process opens each shard once, and forked ones may share it.

    Attributes:
        places: row in the index, shard, offset and bytes of each image.
    """

    remedy = _REMEDY

    def __init__(self, folder: Path, shards: list[tuple[int, str]], places: np.ndarray) -> None:
        self.folder, self.shards, self.places = folder, shards, places
        self._open: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def __getitem__(self, index: int) -> bytes:
        row, shard, offset, size = self.places[index].tolist()
        if (stream := self._open.get(shard)) is None:
            stream, expected = io.FileIO(shard_file(self.folder, shard)), self.shards[shard][0]
            if (found := os.fstat(stream.fileno()).st_size) != expected:
                raise OSError(f"expected a shard of {expected:,} bytes, found {found:,}")
            stream = self._open.setdefault(shard, stream)  # another thread may have been first
        content = os.pread(stream.fileno(), HEADER + size, offset - HEADER)
        if len(content) != HEADER + size or not content.startswith(member(row).encode()):
            raise OSError(f"expected {member(row)} of {size:,} bytes at {offset:,}, found another content")
        return content[HEADER:]

    def where(self, index: int) -> str:
        row, shard = self.places[index, :2].tolist()
        path = pq.read_table(self.folder / INDEX, columns=["path"])["path"][row]
        return f"{FOLDER}/{shard_file(self.folder, shard).name}: {member(row)} ({path})"
