"""Arrays of a prepared set that processes share: Arrow files in SET/arrays, mapped into memory.

The first start computes them from the set's tables, in SET/arrays/FINGERPRINT/DIGEST.arrow: the fingerprint is the
set's, the digest covers all else that they depend on. They hold what the tables hold: names, sentences as tokens.
DIGEST.digest has the digest of that file's bytes, which each start compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from medclip_dcl.common.files import digest, digest_of_file, replacing, write_bytes
from medclip_dcl.data.vectors import as_arrow
from medclip_dcl.runs.run_folder import ARRAYS_FOLDER

_FORMAT = 2
"""Changes with the meaning of any of the arrays."""


class Arrays:
    """Named arrays of any lengths: (row,) or (row, dim) numbers of numpy that cannot be written; others as `Rows`.

    Those of a file are mapped into memory, so that the processes of a machine share them. The file's name is all that
    is pickled of them; without a file they are pickled whole.

    Args:
        source: a file that `write_arrays` wrote, or the arrays, of Arrow or numpy.
    """

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        self.source = source if isinstance(source, Path) else _as_table(source)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}

    @cached_property
    def arrow(self) -> dict[str, pa.Array]:
        """The arrays as Arrow has them."""
        table = self.source
        if isinstance(table, Path):
            with pa.memory_map(str(table)) as stream:
                table = pa.ipc.open_file(stream).read_all()
        return {name: table[name].chunk(0).values for name in table.column_names}

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        return {name: self._of(name, array) for name, array in self.arrow.items()}

    def _of(self, name: str, array: pa.Array) -> Any:
        if pa.types.is_primitive(array.type):
            return array.to_numpy()
        if pa.types.is_fixed_size_list(array.type):
            return array.values.to_numpy().reshape(len(array), array.type.list_size)
        return Rows(self, name)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.arrow


class Rows(Sequence[Any]):
    """Texts, or lists of whole numbers as (number,) int64, of `Arrays` by position; pickled with them."""

    def __init__(self, arrays: Arrays, name: str) -> None:
        self._arrays, self._name = arrays, name

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self._arrays, self._name)

    @property
    def arrow(self) -> pa.Array:
        return self._arrays.arrow[self._name]

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:
        return self.arrow if type is None else self.arrow.cast(type)

    def __len__(self) -> int:
        return len(self.arrow)

    def __getitem__(self, index: Any) -> Any:
        """The row at a place; the list of those of a slice, or at several places."""
        if isinstance(index, slice):
            return self.arrow[index].to_pylist()
        if not isinstance(index, int | np.integer):
            return [self[place] for place in index]
        if self._lists is None:
            return self.arrow[int(index)].as_py()
        (offsets, numbers), place = self._lists, range(len(self))[index]
        return numbers[offsets[place] : offsets[place + 1]].astype(np.int64)

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Where each list begins, and the numbers; a scalar of Arrow for each takes loaders several times as long."""
        return (self.arrow.offsets.to_numpy(), self.flat) if pa.types.is_list(self.arrow.type) else None

    @property
    def lengths(self) -> np.ndarray:
        """(row,) numbers of each list."""
        return self.arrow.value_lengths().to_numpy()

    @property
    def flat(self) -> np.ndarray:
        """The numbers of all lists, one after the other."""
        return self.arrow.values.to_numpy()

    def take(self, places: np.ndarray) -> Rows:
        """The rows at some places, in memory."""
        return Arrays({"rows": self.arrow.take(pa.array(places))})["rows"]


def as_lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """Lists of these lengths one after the other, for `Rows`; the values in the narrowest type that holds them."""
    ends = values.min(initial=0), values.max(initial=0)
    offsets = pa.array(np.append(0, np.cumsum(lengths))).cast(pa.int32())
    narrow = values.astype(np.promote_types(*map(np.min_scalar_type, ends)))
    return pa.ListArray.from_arrays(offsets, narrow)


def write_arrays(arrays: Mapping[str, Any], file: Path) -> None:
    """Write arrays for `Arrays`, atomically, and then their digest."""
    table = _as_table(arrays)
    with replacing(file, durable=False) as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    write_bytes(_noted(file), file.with_suffix(".digest"), durable=False)


def _as_table(arrays: Mapping[str, Any]) -> pa.Table:
    """One row, whose columns are lists: arrays of several lengths in one file."""
    found = {name: x if isinstance(x, pa.Array) else as_arrow(x) for name, x in arrays.items()}
    return pa.table({name: pa.LargeListArray.from_arrays([0, len(x)], x) for name, x in found.items()})


def kept_arrays(
    folders: Sequence[Path], fingerprint: str, what: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]
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
    make, problem = cache(make), ""
    sound = next(filter(is_sound, files), None)
    for file in files if sound is None else [sound, *files]:
        try:
            if file != sound:
                made, contents, is_new = make(), file.parent.parent, not file.parent.exists()
                if not is_sound(file):  # else another machine has made it meanwhile
                    if file.exists():
                        rank_zero_info(f"data: {file} differs from its digest, or has none: it is made again")
                    write_arrays(made, file)
                earlier = sorted(folder.name for folder in contents.iterdir() if folder != file.parent)
                if is_new and earlier:
                    rank_zero_info(
                        f"data: {contents} also has arrays of earlier contents of the set, {', '.join(earlier)}; "
                        "delete these folders once no run reads them"
                    )
            kept = Arrays(file)
            _ = kept.arrow  # an OSError says that it cannot be mapped
        except OSError as error:
            problem = str(error)
            continue
        if problem:
            rank_zero_info(f"data: {problem}: the arrays of its tables are kept in {file.parent}")
        return kept
    rank_zero_warn(
        f"data: {problem or 'no folder'}: each process keeps the arrays of the tables in its own memory"
    )
    return Arrays(make())


def is_sound(file: Path) -> bool:
    """True if the arrays of a file are as they were written."""
    with suppress(OSError):
        return file.with_suffix(".digest").read_bytes() == _noted(file)
    return False


def _noted(file: Path) -> bytes:
    """Digest of a file's bytes, and its names, which tell it from arrays of another set."""
    return f"{digest_of_file(file)} {file.parent.name}/{file.name}\n".encode()
