"""Arrays of a prepared set that processes share: Arrow files in SET/arrays, mapped into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import replacing

_SHAPES = b"shapes"


class Arrays(Mapping[str, Any]):
    """Named arrays of any lengths: numbers (row, ...) as numpy arrays that cannot be written, texts as `Texts`.

    Those of a file are mapped into memory, so that the processes of a machine share them. The file's name is all that
    is pickled of them; without a file they are pickled whole.

    Args:
        source: a file that `write_arrays` wrote, or the arrays.
    """

    def __init__(self, source: Path | Mapping[str, np.ndarray | pa.LargeStringArray]) -> None:
        self.source = source if isinstance(source, Path) else _as_table(source)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}

    @cached_property
    def _found(self) -> dict[str, Any]:
        table = self.source
        if isinstance(table, Path):
            try:
                with pa.memory_map(str(table)) as stream:
                    table = pa.ipc.open_file(stream).read_all()
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"{table} cannot be mapped into memory ({error}); delete it, or put the prepared set and the run "
                    "folder on a file system with mmap"
                ) from error
        shapes, found = json.loads((table.schema.metadata or {})[_SHAPES]), {}
        for name in table.column_names:
            values = table[name].chunk(0).values
            is_text = values.type == pa.large_string()
            found[name] = Texts(self, name, values) if is_text else values.to_numpy().reshape(shapes[name])
        return found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Texts:
    """Texts of `Arrays` by position; pickled with them."""

    def __init__(self, arrays: Arrays, name: str, values: pa.LargeStringArray | None = None) -> None:
        self._arrays, self._name = arrays, name
        if values is not None:
            self.values = values

    def __getstate__(self) -> dict[str, Any]:
        return {"_arrays": self._arrays, "_name": self._name}

    @cached_property
    def values(self) -> pa.LargeStringArray:
        return self._arrays[self._name].values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> str:
        return self.values[index].as_py()

    def tolist(self) -> list[str]:
        return self.values.to_pylist()


def write_arrays(arrays: Mapping[str, np.ndarray | pa.LargeStringArray], file: Path) -> None:
    """Write arrays for `Arrays`, atomically."""
    table = _as_table(arrays)
    with replacing(file, durable=False) as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)


def _as_table(arrays: Mapping[str, np.ndarray | pa.LargeStringArray]) -> pa.Table:
    """One row, whose columns are lists: arrays of several lengths in one file."""
    columns, shapes = {}, {}
    for name, array in arrays.items():
        is_text = isinstance(array, pa.Array)
        flat = array if is_text else pa.array(np.ascontiguousarray(array).reshape(-1))
        columns[name] = pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat)
        shapes[name] = None if is_text else array.shape
    return pa.table(columns).replace_schema_metadata({_SHAPES: json.dumps(shapes)})
