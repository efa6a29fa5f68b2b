"""Shared by the command lines: mistakes of the user in one line, whole numbers, progress, the cores of this process."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import importlib.util
import inspect
import os
import re
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from tqdm import tqdm  # type: ignore[import-untyped]

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file

Item = TypeVar("Item")
MODEL = "run folder, checkpoint, exported folder or Hugging Face repository (owner/name)"
CALIBRATION = "file of calibrate --output, in place of the model's"
PROMPTS = "YAML file of finding: [negative, positive], or a packaged one by its name, public or chexpert14"
ENSEMBLE = "several prompts a side: the mean of scores or of embeddings"
_SYNONYMS = {"train": "fit", "evaluate": "test", "lr": "learning_rate", "epochs": "max_epochs"}
"""Words of other programs -> those of this one."""
_SYSTEM = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTDIR),  # a file in place of a folder
}


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Print a `UserError` as one line after `program` and end with its status; also a full disk, or no permission."""
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


def search_working_directory() -> None:
    """Let imports find modules of the working directory, last: a console script searches its own folder instead."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())


class _Import(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, given: Any, _: Any = None) -> None:
        module = given.removeprefix("./").removesuffix(".py")
        search_working_directory()
        package = module.partition(".")[0]
        own = [x.resolve() for x in (Path(f"{package}.py"), Path(package, "__init__.py")) if x.is_file()]
        spec = importlib.util.find_spec(package) if own else None
        if spec and Path(spec.origin or "").resolve() not in own:
            parser.error(f"--import {module}: expected {own[0]}, found {spec.origin}; rename your module")
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
    parser.add_argument("--import", dest="imported", action=_Import, default=())
    options, others = parser.parse_known_args(arguments)
    return options.imported, others


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The line about an unknown key."""
    return f"{key}: there is no such key{nearest(key, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Closest known name in any case, as a question."""
    near = near_names(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def near_names(name: str, known: Iterable[str], n: int) -> list[str]:
    """The `n` closest known names in any case, whole or by their last parts; fewer where the others are not close."""
    whole = {word.casefold(): word for word in known}
    by_last = {word.rpartition(".")[2]: name for word, name in whole.items()}
    last = name.casefold().rpartition(".")[2]
    near = [by_last[word] for word in (last, _SYNONYMS.get(last)) if word in by_last]
    near += [whole[word] for word in difflib.get_close_matches(name.casefold(), whole, n=n)]
    near += [by_last[word] for word in difflib.get_close_matches(last, by_last, n=n)]
    return [*dict.fromkeys(near)][:n]


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Parser of a whole number of at least `least` and at most `most`, for `argparse`."""
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdecimal()
        if not (is_number and int(text) >= least and (most is None or int(text) <= most)):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {wanted}")
        return int(text)

    return parse


def require_task(task: int, tasks: int) -> None:
    """Raise if a task of several commands that share some work is not one of them."""
    if task >= tasks:
        raise UserError(f"--task counts from 0: expected less than --tasks {tasks}, found {task}")


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
    """A field of a dataclass that is an option of a verb, required without a default.

    `argument` is for `argparse.ArgumentParser.add_argument`; a `default` there is that of the command line alone.
    """
    return dataclasses.field(default=field_default, metadata={"help": help, **argument})


def positional(help: str, field_default: Any = dataclasses.MISSING, /, **argument: Any) -> Any:
    """A field that is a positional argument of a verb, in the order of the fields."""
    return option(help, field_default, flag=None, **argument)


def positive(help: str, field_default: Any = dataclasses.MISSING, /, **argument: Any) -> Any:
    """An option that is a whole number of at least 1."""
    return option(help, field_default, type=whole_number(1), **{"metavar": "N", **argument})


def worker_count() -> Any:
    """The option ``--workers``: processes that work beside each other."""
    return positive("processes (as many as there are cores)", 1, default=available_cores())


def device(note: str = "") -> Any:
    """The option ``--device``; `medclip_dcl.common.devices.usable_device` reads it."""
    help = f"cpu, cuda, cuda:1, ...; auto takes a GPU if there is one (auto){note}"
    return option(help, "auto", type=_device, metavar="DEVICE")


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, cpu, cuda or cuda:N")
    return text


def imports() -> Any:
    """The option ``--import MODULE``, for classes of the user's own: checkpoints and configurations import nothing."""
    help = "import this module of yours, whose classes the model uses; may be given several times"
    return option(help, (), flag="--import", action=_Import, metavar="MODULE")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists the options\n")


class _Help(argparse.HelpFormatter):
    """Help on one screen: at most 98 columns, paragraphs filled, lines of indented tables broken if too long."""

    def __init__(self, prog: str) -> None:
        width = min(98, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=30, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            "\n".join(
                textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip())))
                for line in (block.splitlines() if "\n " in f"\n{block}" else [block])
            )
            for block in text.split("\n\n")
        )


def parse_options(settings: type[Item], program: str, arguments: Sequence[str]) -> Item:
    """Parse the arguments that the fields of a dataclass declare; its docstring describes the command.

    Where an option names no type and no choices, the annotation of its field does: Path, int, float, or a Literal.
    """
    hints = get_type_hints(settings)
    description = inspect.cleandoc(settings.__doc__ or "")
    parser = _Parser(prog=program, description=description, formatter_class=_Help)
    needed = [program]
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        argument = {**_of_annotation(hints[field.name]), **field.metadata}
        flag = argument.pop("flag", f"--{field.name}")
        if field.default is False:
            argument["action"] = "store_true"
        elif field.default is not dataclasses.MISSING:
            argument.setdefault("default", field.default)
        elif flag:
            argument["required"] = True
        if flag:
            argument["dest"] = field.name
        action = parser.add_argument(flag or field.name, **argument)
        if action.required or not flag:
            word = " ".join(
                [
                    *action.option_strings,
                    str(action.metavar or action.dest.upper()),
                    *["..."] * (action.nargs in ("+", "*")),
                ]
            )
            needed.append(word if action.required else f"[{word}]")
    parser.usage = f"{' '.join(needed)} [options]"
    return settings(**vars(parser.parse_intermixed_args(arguments)))


def _of_annotation(hint: Any) -> dict[str, Any]:
    """Type or choices of an argument, from the annotation of its field."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        return {"choices": parts}
    if len(parts) == 1:  # X | None, Sequence[X]
        return _of_annotation(parts[0])
    if hint is Path:
        return {"type": hint, "metavar": "FILE"}
    return {"type": hint} if hint in (int, float) else {}


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


def run_command(program: str, main: Callable[[], None]) -> None:
    """Run a command: errors and warnings of one line; an interruption ends with 130, and what was finished stays."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        with one_line_errors(f"{program}: error"):
            main()
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            os.write(1, b"\n")
        except BrokenPipeError:  # of the output: a reader such as head has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise
    except KeyboardInterrupt:
        print("interrupted; what is finished stays, and the same command makes the rest", file=sys.stderr)
        raise SystemExit(130) from None
