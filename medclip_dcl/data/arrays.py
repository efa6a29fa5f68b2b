"""Arrays of a prepared set that processes share: Arrow files in SET/arrays, mapped into memory.

The first start computes them from the set's tables, in SET/arrays/FINGERPRINT/DIGEST.arrow: the fingerprint is the
set's, the digest covers all else that they depend on. They hold what the tables hold: names, sentences as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from medclip_dcl.common.files import digest, replacing
from medclip_dcl.runs.run_folder import ARRAYS_FOLDER

_FORMAT = 1
"""Changes with the meaning of any of the arrays."""

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
            with pa.memory_map(str(table)) as stream:
                table = pa.ipc.open_file(stream).read_all()
        shapes = json.loads((table.schema.metadata or {})[_SHAPES])
        found = {name: table[name].chunk(0).values for name in table.column_names}
        return {
            name: values if shapes[name] is None else values.to_numpy().reshape(shapes[name])
            for name, values in found.items()
        }

    def __getitem__(self, name: str) -> Any:
        found = self._found[name]
        return Texts(self, name) if isinstance(found, pa.Array) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Texts(Sequence[str]):
    """Texts of `Arrays` by position; pickled with them."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        self._arrays, self._name = arrays, name

    @property
    def values(self) -> pa.LargeStringArray:
        return self._arrays._found[self._name]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        """The text at a place; the list of those of a slice."""
        found = self.values[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:
        return self.values if type is None else self.values.cast(type)

    def tolist(self) -> list[str]:
        return self.values.to_pylist()

    def where(self, is_chosen: np.ndarray) -> Texts:
        """The texts at which (text,) is True."""
        return self if is_chosen.all() else Arrays({"text": self.values.filter(pa.array(is_chosen))})["text"]


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


def kept_arrays(
    folders: Sequence[Path],
    fingerprint: str,
    what: Mapping[str, Any],
    make: Callable[[], Mapping[str, np.ndarray | pa.LargeStringArray]],
) -> Arrays:
    """Arrays that an earlier call kept, or else those of `make`, kept in the first folder that can be written.

    Args:
        folders: the prepared set, and the run folder in case the set cannot be written.
        fingerprint: of the set; arrays of an earlier content stay, as a run may have mapped them.
        what: all else that the arrays depend on, as JSON.
        make: computes them.
    """
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

    name = digest(json.dumps([_FORMAT, what], sort_keys=True).encode())
    files = [folder / ARRAYS_FOLDER / fingerprint / f"{name}.arrow" for folder in folders]
    made, problem = None, ""
    for file in sorted(files, key=lambda file: not file.is_file()):
        try:
            if (kept := _mapped(file)) is None:
                made = make() if made is None else made
                contents, is_new = file.parent.parent, not file.parent.exists()
                if _mapped(file) is None:  # else another machine has made and mapped it meanwhile
                    write_arrays(made, file)
                earlier = sorted(folder.name for folder in contents.iterdir() if folder != file.parent)
                if is_new and earlier:
                    rank_zero_info(
                        f"data: {contents} also has arrays of earlier contents of the set, {', '.join(earlier)}; "
                        "delete these folders once no run reads them"
                    )
                kept = _mapped(file)
        except OSError as error:
            problem = str(error)
            continue
        if kept is not None:
            if problem:
                rank_zero_info(f"data: {problem}: the arrays of its tables are kept in {file.parent}")
            return kept
    rank_zero_warn(
        f"data: {problem or 'no folder'}: each process keeps the arrays of the tables in its own memory"
    )
    return Arrays(make() if made is None else made)


def _mapped(file: Path) -> Arrays | None:
    """The arrays of a file; None where there is none, or a damaged one. An OSError says that it cannot be mapped."""
    arrays = Arrays(file)
    try:
        len(arrays)
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
    return arrays


class Lists:
    """Lists of whole numbers of several lengths: one array of values, and where each list begins.

    Args:
        arrays: NAME, the values of all lists, and NAME_offsets (list + 1,).
    """

    def __init__(self, arrays: Arrays, name: str) -> None:
        self._arrays, self._name = arrays, name

    def __len__(self) -> int:
        return len(self._arrays[f"{self._name}_offsets"]) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        start, stop = self._arrays[f"{self._name}_offsets"][index : index + 2]
        return self._arrays[self._name][start:stop].astype(np.int64)


def as_lists(name: str, values: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays of `Lists`, of these lengths one after the other; the values in the narrowest type that holds them."""
    least, most = (values.min(), values.max()) if len(values) else (0, 0)
    kinds = (kind for kind in (np.uint16, np.int32, np.int64) if np.iinfo(kind).min <= least)
    narrow = next(kind for kind in kinds if most <= np.iinfo(kind).max)
    return {name: values.astype(narrow), f"{name}_offsets": np.concatenate([[0], np.cumsum(lengths)])}
