"""Shared by the command lines: mistakes of the user in one line, whole numbers, progress, the cores of this process."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tqdm import tqdm  # type: ignore[import-untyped]

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file

Item = TypeVar("Item")
_SYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Print a `UserError` as one line, which `program` opens, and end with its status; so a full disk, or no rights."""
    try:
        yield
    except UserError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(error.status) from error
    except OSError as error:
        if error.errno not in _SYSTEM:
            raise
        print(
            f"{program}: {f'{error.filename}: ' if error.filename else ''}{error.strerror}", file=sys.stderr
        )
        raise SystemExit(2) from error


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--import MODULE``, for classes of the user's own: checkpoints and configuration files import nothing."""
    words = "import this module of yours, whose classes the model uses; may be given several times"
    parser.add_argument("--import", dest="imported", action=_Import, default=(), metavar="MODULE", help=words)


class _Import(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, given: Any, _: Any = None) -> None:
        module = given.removeprefix("./").removesuffix(".py")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # it imports another that is missing
            advice = "run this from the folder that holds it, or add that folder to PYTHONPATH"
            parser.error(f"--import {module}: there is no module {error.name}; {advice}")
        namespace.imported = (*namespace.imported, module)


def digests_of_imports(modules: Iterable[str]) -> dict[str, str]:
    """Digest of the files of each module of ``--import``: what it computes changes with them."""
    found = {}
    for name in modules:
        file = Path(sys.modules[name].__file__ or "")
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        found[name] = digest(*(digest_of_file(one).encode() for one in files))
    return found


def take_imports(arguments: Sequence[str], program: str) -> tuple[Sequence[str], list[str]]:
    """Import the modules of ``--import``; return their names and the other arguments."""
    parser = argparse.ArgumentParser(
        prog=program, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False
    )
    add_import_option(parser)
    options, others = parser.parse_known_args(arguments)
    return options.imported, others


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The line about an unknown key."""
    return f"{key}: there is no such key{nearest(key, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Closest known name in any case, as a question."""
    plain = {word.casefold(): word for word in known}
    near = difflib.get_close_matches(name.casefold(), plain, n=1)
    return f"; did you mean {plain[near[0]]}?" if near else ""


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Parser of a whole number of at least `least` and at most `most`, for `argparse`."""
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdecimal()
        if not (is_number and int(text) >= least and (most is None or int(text) <= most)):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {wanted}")
        return int(text)

    return parse


def progress_bar(**options: Any) -> Any:
    """A bar of tqdm, with its options, on standard error; without a terminal, as in a log, a line every 30 s."""
    return tqdm(mininterval=0.5 if sys.stderr.isatty() else 30.0, dynamic_ncols=True, **options)


def available_cores() -> int:
    """CPU cores that this process may use (a SLURM task sees its share, not the node's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_words(seconds: float) -> str:
    """12 s, 3 min, 2 h 05 min, 1 d 3 h."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def yaml_value(text: str) -> Any:
    """A value of the command line; the text itself where it is no YAML, as with the name of an axis in braces."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def option(help: str, field_default: Any = dataclasses.MISSING, /, **argument: Any) -> Any:
    """A field of a settings dataclass that is an option of the command line, required without a default.

    `argument` is for `argparse.ArgumentParser.add_argument`.
    """
    return dataclasses.field(default=field_default, metadata={"help": help, **argument})


def parse_options(
    settings: type[Item],
    program: str,
    description: str,
    arguments: Sequence[str] | None,
    has_own_classes: bool = False,
) -> Item:
    """Parse the options that the fields of a settings dataclass declare; ``--import`` where a model is loaded."""
    parser = argparse.ArgumentParser(
        prog=f"medclip-dcl {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        argument = dict(field.metadata)
        if field.default is False:
            argument["action"] = "store_true"
        elif field.default is dataclasses.MISSING:
            argument["required"] = True
        else:
            argument.setdefault("default", field.default)
        parser.add_argument(f"--{field.name}", **argument)
    if has_own_classes:
        add_import_option(parser)
    options = vars(parser.parse_args(arguments))
    return settings(**{name: value for name, value in options.items() if name != "imported"})


def number(most: float) -> Callable[[str], float]:
    """Parser of a number from 0 to `most`, for `argparse`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to {most:g}")
        return value

    return parse


def run_command(main: Callable[[], None]) -> None:
    """Run a command with `one_line_errors`; an interruption ends with 130, and what was finished by then stays."""
    try:
        with one_line_errors("error"):
            main()
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise SystemExit(130) from None
