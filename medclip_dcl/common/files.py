"""Atomic writing (a file is there whole or not at all, also after a kill or a power cut), and reading of YAML."""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import yaml

from medclip_dcl.common.errors import MissingFileError, UserError, quoted

if TYPE_CHECKING:
    import pandas as pd

_MAX_VALUES = 100_000
_THREADS = 16
# Also thumbnails and bins of network storage, Windows and macOS.
_HIDDEN = re.compile(r"\..*|@eaDir|[@#]recycle|#snapshot|\$RECYCLE\.BIN|__MACOSX", re.IGNORECASE)


@contextmanager
def replacing(file: Path, *, one_writer: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside `file` for writing, and rename it to `file` once its content is on the disk.

    Makes the folder if needed. When the block raises, the temporary file is removed and `file` stays as it was.

    Args:
        file: the file to write.
        one_writer: no two processes write this file at once; what a kill leaves behind is then overwritten by the next
            attempt. Otherwise the temporary name is unique among processes and machines.
        durable: wait until the disk has the content, without which a power cut may leave an empty file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp" if one_writer else f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, file)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        # torch.save hides a full disk, which names no file, behind an error of its own.
        fault = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(fault, OSError):
            fault.filename = str(file)
            if fault is not error:
                raise fault from None
        raise


class FolderContent(NamedTuple):
    """Files below a folder, the errors of folders that are not readable, and links to folders that were read before."""

    files: list[Path]
    closed: list[OSError]
    repeated: list[Path]


def files_below(folder: Path) -> FolderContent:
    """All that lies in a folder and its subfolders, sorted; without hidden files and folders.

    Linked folders are read, too, and each folder once, under its own name where that is below `folder`.
    """
    found = FolderContent([], [], [])
    read: set[str] = set()
    starts = [str(folder)]
    for start in starts:
        real_start = os.path.realpath(start)
        for parent, folders, names in os.walk(start, onerror=found.closed.append):
            folders[:] = sorted(name for name in folders if not _HIDDEN.fullmatch(name))
            if (real := real_start + parent[len(start) :]) in read:
                folders.clear()
                found.repeated.append(Path(parent))
                continue
            read.add(real)
            # Links come last: files are listed under the name of their own folder.
            starts += filter(os.path.islink, (os.path.join(parent, name) for name in folders))
            found.files.extend(Path(parent, name) for name in names if not name.startswith("."))
    return FolderContent(sorted(found.files), found.closed, found.repeated)


def file_states(files: Sequence[str]) -> list[tuple[int, int]]:
    """Size in bytes and time in ns of each file; -1, 0 where there is none, or a folder."""

    def states(first: int) -> list[tuple[int, int]]:
        return [_state(file) for file in files[first::_THREADS]]

    found = [(-1, 0)] * len(files)
    # File systems of a network answer many at once.
    with ThreadPoolExecutor(_THREADS) as pool:
        for first, part in enumerate(pool.map(states, range(_THREADS))):
            found[first::_THREADS] = part
    return found


def _state(file: str) -> tuple[int, int]:
    try:
        state = os.stat(file)
    except (OSError, ValueError):  # a name with a NUL
        return -1, 0
    return (-1, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)


@contextmanager
def new_folder(folder: Path, setting: str, content: str = "") -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it when the block ends.

    What a kill or an error left is begun again, or continued where `content` names all that the folder will hold.
    """
    if folder.is_file() or any(folder.glob("*")):
        raise UserError(f"{setting}: {folder} is there already; give a new folder, or delete this one")
    folder = folder.resolve()
    temporary = folder.with_name(f".{folder.name}{content and '.'}{content}.tmp")
    if not content:
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, folder)  # an empty one is replaced
    finally:
        if not content:
            shutil.rmtree(temporary, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Make a folder, and fail before the work if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def link(file: Path, name: Path) -> None:
    """Give a file another name atomically; a copy where the file system has no hard links."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(file, temporary)
    except OSError:
        shutil.copyfile(file, temporary)
    os.replace(temporary, name)
    temporary.unlink(missing_ok=True)  # it stays where both were links to one file already


def write_bytes(content: bytes, file: Path, *, durable: bool = True) -> None:
    """Write a file atomically; see `replacing`."""
    with replacing(file, durable=durable) as stream:
        stream.write(content)


def write_text(text: str, file: Path) -> None:
    """Write a text file in UTF-8 atomically."""
    write_bytes(text.encode(), file)


def write_json(value: Mapping[str, Any], file: Path) -> None:
    """Write strict JSON with sorted keys atomically."""
    write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", file)


def write_parquet(frame: pd.DataFrame, file: Path) -> None:
    """Write a table as Parquet atomically."""
    with replacing(file) as stream:
        frame.to_parquet(stream, index=False)


def write_shared_parquet(frame: pd.DataFrame, file: Path) -> None:
    """Write a large table atomically, compressed by zstd; where a neighbouring folder has it, as a hard link to that.

    Where the file system has no hard links it is a copy.
    """
    content = io.BytesIO()
    frame.to_parquet(content, index=False, compression="zstd")
    for other in sorted(file.parent.absolute().parent.glob(f"*/{file.name}")):
        if _state(str(other))[0] == content.tell() and digest_of_file(other) == digest(content.getbuffer()):
            file.parent.mkdir(parents=True, exist_ok=True)
            return link(other, file)
    write_bytes(content.getvalue(), file)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: a file that was renamed in it stays renamed after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_KINDS = {
    "a Parquet file": rb"PAR1",
    "a workbook or a zip archive": rb"PK\x03\x04|\xd0\xcf\x11\xe0",
    "a tar, 7z or rar archive": rb".{257}ustar|7z\xbc\xaf|Rar!",
    "a gzip file (perhaps a tar archive)": rb"\x1f\x8b",
    "a bzip2, xz or zstd file": rb"BZh\d1AY|\xfd7zXZ|\x28\xb5\x2f\xfd",
    "a DICOM image": rb".{128}DICM",
    "a picture": rb"\x89PNG|\xff\xd8\xff|II\*\0|MM\0\*",
    "a PDF": rb"%PDF-",
    "a database": rb"SQLite format 3",
    "a pickle": rb"\x80[\x02-\x05]",
    "JSON": rb"\s*(?:\[\s*)?\{\s*\"|\s*\[\s*\[",
    "HTML or XML": rb"(?i:\s*<(?:!doctype|html|table|\?xml))",
}


def kind_of_file(file: Path | bytes) -> str:
    """Kind of a file, or of its content, that is neither a text nor a table of separated values; "" for all others."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            file = stream.read(512)
    head = file[:512].removeprefix(codecs.BOM_UTF8)
    return next((kind for kind, start in _KINDS.items() if re.match(start, head, re.DOTALL)), "")


def encoding_of(content: bytes) -> str:
    """utf-8-sig, or UTF-16 by its byte order mark or by the zeros between letters."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    first, second = content[:256:2], content[1:256:2]
    zeros = {"utf-16-be": first.count(0), "utf-16-le": second.count(0)}
    likely = max(zeros, key=zeros.__getitem__)
    return likely if zeros[likely] > len(second) / 2 else "utf-8-sig"


def read_text(file: Path, encoding: str = "utf-8-sig") -> str:
    """Read a text file, by default in UTF-8, whatever the locale."""
    try:
        return file.read_text(encoding)
    except FileNotFoundError as error:
        raise MissingFileError(f"no file {file}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error}); save it in UTF-8") from error
    except OSError as error:
        raise UserError(f"{file} is not readable: {error}") from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses equal keys, such as 1 and 1.0, of which YAML would keep the last, and aliases that multiply a text."""

    def construct_document(self, node: yaml.Node) -> Any:
        sizes: dict[int, int] = {}
        if _size(node, sizes) > max(_MAX_VALUES, len(sizes)):
            raise UserError(
                f"its aliases (*) make more than {_MAX_VALUES:,} values of it; write out what is meant"
            )
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written: dict[Any, str] = {}
        for key, _ in node.value:
            is_scalar = isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")
            value = self.construct_object(key) if is_scalar else (key.tag, str(key.value))
            if value in written:
                both = dict.fromkeys([quoted(written[value])[1:-1], quoted(key.value)[1:-1]])
                raise UserError(
                    f"line {key.start_mark.line + 1}: {' = '.join(both)} is listed more than once; keep one"
                )
            written[value] = str(key.value)
        return super().construct_mapping(node, deep)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of values of a node with all that its aliases repeat; `sizes` has those of nodes that are known."""
    if id(node) not in sizes:
        sizes[id(node)] = _MAX_VALUES + 1  # where the node holds itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = itertools.chain.from_iterable(part if isinstance(part, tuple) else (part,) for part in parts)
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in inner)
    return sizes[id(node)]


def parse_yaml(text: str, where: object) -> Any:
    """Content of a YAML text, which `where` names in a `UserError`: not readable, or a duplicate key."""
    try:
        return yaml.load(text, _Loader)
    except UserError as error:
        raise UserError(f"{where}, {error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{where} is not readable YAML: {' '.join(str(error).split())}") from error


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of keys with values."""
    found = parse_yaml(read_text(file), file)
    if not isinstance(found, Mapping):
        raise UserError(f"{file}: expected keys with values, found {quoted(found)}")
    return dict(found)


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`; thousands of nested brackets are a ValueError, as all else that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def digest(*parts: Any) -> str:
    """Digest of bytes and contiguous arrays one after the other."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def digest_of_file(file: Path) -> str:
    """Digest of a file's bytes; "" for one that cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return ""
