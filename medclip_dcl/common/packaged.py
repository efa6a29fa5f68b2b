"""Configurations, prompts and batch files that come with the package, found by their names."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from medclip_dcl.common.command_line import near_names
from medclip_dcl.common.errors import MissingFileError
from medclip_dcl.common.find_model import RUN_FILE

CONFIGS = Path(__file__).parent.parent / "configs"
Kind: TypeAlias = Literal["", "experiments", "prompts", "slurm"]
"""Folder below `CONFIGS` in which names are looked up."""


class FoundFile(NamedTuple):
    """A file of the user, or one of the package with the line that says so.

    Attributes:
        path: the file.
        origin: such as "mimic_cxr: packaged with medclip_dcl 0.2.0"; "" for a file of the user.
    """

    path: Path
    origin: str = ""

    def say_origin(self) -> Path:
        """Print the origin on standard error; return the path."""
        if self.origin:
            print(self.origin, file=sys.stderr)
        return self.path


def packaged_files(kind: Kind | None = None) -> dict[str, Path]:
    """Files of this kind by name, the path below its folder without .yaml; without a kind all, below `CONFIGS`."""
    folder = CONFIGS / (kind or "")
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*.*"))}
    others = tuple(f"{one}/" for one in get_args(Kind) if one and kind == "")
    return {name.removesuffix(".yaml"): file for name, file in files.items() if not name.startswith(others)}


def find_configuration(given: str | Path, kind: Kind, setting: str) -> FoundFile:
    """The file of this path or, where none exists, the packaged one of this name.

    Args:
        given: path or name.
        kind: where the name is looked up.
        setting: opens an error, such as "--config".

    Raises:
        MissingFileError: neither; it lists near names.
    """
    path = Path(given).expanduser()
    if path.exists() and not path.is_dir():
        return FoundFile(path)
    own = f", such as {path / RUN_FILE}," if not kind and (path / RUN_FILE).is_file() else ""
    file = find_packaged(given, kind, f"{setting}: expected a file{own} or the name of a packaged one")
    return FoundFile(file, f"{given}: packaged with medclip_dcl {importlib.metadata.version('medclip_dcl')}")


def find_packaged(
    given: str | Path, kind: Kind | None = None, expected: str = "NAME: expected a packaged one"
) -> Path:
    """The packaged file of this name.

    Raises:
        MissingFileError: none; opened by `expected`, it lists near names.
    """
    files = packaged_files(kind)
    if file := files.get(str(given)):
        return file
    last = {name: name.rpartition("/")[2] for name in files}
    near = near_names(Path(given).name.removesuffix(".yaml"), last.values(), 3)
    names = [name for one in near for name in files if last[name] == one]
    raise MissingFileError(
        f"{expected} (medclip-dcl configs lists them), found {given}"
        + (f"; did you mean {' or '.join(names)}?" if names else "")
    )
