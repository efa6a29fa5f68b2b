"""Tables of vectors as Parquet: ascending keys, vectors as lists of a fixed size, and the digest of each column."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from medclip_dcl.common.files import digest, replacing

_DIGESTS = "medclip_dcl_digests"


def as_arrow(array: np.ndarray) -> pa.Array:
    """(row,) numbers, or (row, dim) as lists of a fixed size."""
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def write_vectors(parts: Iterable[Mapping[str, np.ndarray]], file: Path, metadata: Mapping[str, str]) -> None:
    """Write parts of a table, one after the other, atomically: (row,) int64 keys and (row, dim) vectors."""
    with replacing(file) as stream:
        writer: Any = None
        digests: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
        for part in parts:
            for name, values in part.items():
                digests[name].update(np.ascontiguousarray(values))
            columns = {name: as_arrow(values) for name, values in part.items()}
            table = pa.table(columns).replace_schema_metadata(dict(metadata))
            # Vectors neither repeat nor compress.
            writer = writer or pq.ParquetWriter(
                stream, table.schema, use_dictionary=False, compression="none"
            )
            writer.write_table(table)
        writer.add_key_value_metadata({_DIGESTS: " ".join(found.hexdigest() for found in digests.values())})
        writer.close()


def read_vectors(file: Path, columns: Mapping[str, str], may_lack_digests: bool = False) -> list[np.ndarray]:
    """Keys and vectors of the columns, each with the type of its numbers; the key comes first.

    Raises:
        ValueError: other columns, keys that do not ascend, or numbers that are not finite or not as they were written.
    """
    # Folder names such as a=b are not columns.
    table = pq.read_table(file, partitioning=None)
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    key, values = next(iter(columns)), list[np.ndarray]()
    is_good = np.ones(len(table), dtype=bool)
    for name, of in columns.items():
        dim = getattr(types.get(name), "list_size", 0)
        expected = pa.type_for_alias(of) if name == key else pa.list_(pa.type_for_alias(of), dim)
        if types.get(name) != expected or len(types) != len(columns):
            found = str(table.schema.remove_metadata()).replace("\n", ", ")
            raise ValueError(f"expected {columns}, all but the first lists of a fixed size, found {found}")
        if name == key:
            values.append(table[name].to_numpy())
            is_good[1:] = np.diff(values[0]) > 0
            continue
        values.append(np.empty((len(table), dim), dtype=of))
        start = 0
        for chunk in table[name].chunks:
            rows = chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), dim)
            values[-1][start : (start := start + len(chunk))] = rows
        is_good &= np.isfinite(values[-1]).all(axis=1)
    if not is_good.all():
        raise ValueError(
            f"expected ascending {key} and finite numbers, found others in {int((~is_good).sum()):,} of "
            f"{len(table):,} rows (first: {key} {values[0][~is_good][0]})"
        )
    noted = (pq.read_metadata(file).metadata or {}).get(_DIGESTS.encode())
    if noted != " ".join(map(digest, values)).encode() and not (may_lack_digests and noted is None):
        raise ValueError("expected numbers with the digest of what was written, found others, or no digest")
    return values
