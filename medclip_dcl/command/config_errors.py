"""The parser's errors in one line: the key, the value, the nearest valid key."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NoReturn

from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser

from medclip_dcl.command.settings import settings_of
from medclip_dcl.common.command_line import nearest, unknown_key
from medclip_dcl.common.errors import UserError

PROGRAM = "medclip-dcl"
_EXPECTED = r"Expected an? (.+?)(?:\. Got value: (.*))?$"
# Lines of jsonargparse that do not name the problem.
_FRAME = re.compile(
    r"Does not validate against|Subtypes: |Errors:$|Expected a path but |Given value type: |Given value: "
)


class ConfigParser(LightningArgumentParser):
    """The parser of the command line, whose errors are one line, not the whole usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("prog", PROGRAM)
        # Abbreviations work on the command line but not in a file.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def validate(
        self, namespace: Namespace, skip_unset: bool = True, skip_required: bool = False, **options: Any
    ) -> None:
        """Check a configuration; refuse null where a value is needed, which jsonargparse takes for an absent value."""
        try:
            super().validate(namespace, skip_required, skip_required, **options)
        except TypeError:
            super().validate(namespace, True, skip_required, **options)  # names what is required and absent
            raise

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a `UserError` of one line; a nested parser of a class raises jsonargparse's error."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        cause: BaseException | None = ex
        while not (cause is None or isinstance(cause, UserError)):
            cause = cause.__cause__
        raise UserError(str(cause or explain(message, _options(parser)))) from ex


def explain(message: str, options: Iterable[str]) -> str:
    """jsonargparse's message in one line; `options` are the known dotted keys outside of classes."""
    if unknown := re.match(r"unrecognized arguments: --([\w.+-]+)", message):
        return unknown_key(unknown[1].split("=")[0], options)
    if unknown := re.match(r"Subcommand '\w+' does not accept option '(.+)'", message):
        return unknown_key(unknown[1], options)
    if denied := re.search(r"Importing '([\w.]+)\.\w+' is not allowed", message):
        where = ".init_args.".join(re.findall(r'Parser key "([^"]+)"', message[: denied.start()]))
        return (
            f"{where}: a configuration file does not import {denied[1]}; if you trust that module, add --import "
            f"{denied[1]} to the command"
        )
    keys: list[str] = []
    class_path, leaf = "", ""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    for line in (rest := iter(lines)):
        if key := re.match(r'Parser key "([^"]+)":\s*', line):
            keys += ["init_args"] * bool(keys) + [key[1]]
            line = line[key.end() :]
        elif problem := re.match(r"Problem with given class_path '([^']+)':", line):
            class_path, line = problem[1], ""
        if line and not _FRAME.match(line):
            leaf = line
            break
    where, given = ".".join(keys), re.search(r"^ *Given value: (.*)", message, re.MULTILINE)
    unknown = re.match(r"Option '(.+)' is not accepted", leaf)
    if unknown and not class_path:
        return unknown_key(".".join([*keys, unknown[1]]), options)
    if unknown:
        name = class_path.rpartition(".")[2]
        known = inspect.signature(imported(class_path)).parameters
        return f"{where}.init_args.{unknown_key(unknown[1], known)} (a setting of {name})"
    if absent := re.match(r"No module named '([^']+)'", leaf):
        advice = "install it, run this from the folder that holds it, or add that folder to PYTHONPATH"
        return f"{where}: there is no module {absent[1]}, which {class_path} needs; {advice}"
    if absent := re.match(r"module '([^']+)' has no attribute '([^']+)'", leaf):
        there = importlib.import_module(absent[1])
        near = nearest(
            absent[2], (name for name in dir(there) if name[:1].isupper() == absent[2][:1].isupper())
        )
        return f"{where}: {absent[1]} has no {absent[2]} (class_path {class_path}){near}"
    # A line for each accepted type.
    expected = [*filter(None, takewhile(bool, (re.match(_EXPECTED, line) for line in (leaf, *rest))))]
    if expected and (unknown := re.match(r"dot import path string: (\w+)", expected[0][1])):
        return f"{where}: no class is known as {unknown[1]}; give its path, as medclip_dcl.networks.ResNetRegions"
    if expected:
        found = expected[0][2]
        kinds = _in_words(kind[1] for kind in (expected[:1] if found else expected))
        return f"{where}: expected {kinds}, found {_in_words([found or (given[1] if given else '')])}"
    missing = re.match(r"the following arguments are required: (.+)", leaf)
    if missing and class_path:
        return (
            f"{where}.init_args: {missing[1]} is missing, which {class_path.rpartition('.')[2]} needs; set it, or add "
            "a --config that does"
        )
    if missing and not where:
        return f"{missing[1]} missing; give them by a configuration, e.g. --config demo"
    if "_checkpoint_folder(run_folder)" in leaf and "invalid" in leaf:
        return "checkpoint.dirpath: it is the folder checkpoints of --run_folder; remove this option"
    if "_checkpoint_folder(run_folder)" in leaf:
        return "run_folder is missing: give --run_folder, the folder of this run, e.g. runs/NAME"
    whole = leaf if where else " ".join(line for line in lines if line)
    found = f", found {given[1]}" if where and given else ""
    return f"{where + ': ' if where else ''}{whole}{found}"


def imported(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _in_words(kinds: Iterable[str]) -> str:
    """<class 'int'>, typing.Literal['a', 'b'], None -> int, a, b, null."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", r"\1", ", ".join(kinds))
    text = re.sub(r"Literal\[(.*?)\]", lambda words: words[1].replace("'", ""), text)
    return re.sub(r"\bNone(Type)?\b", "null", text)


def _options(parser: Any) -> list[str]:
    own = [name.lstrip("-") for action in parser._actions for name in action.option_strings]
    return [*own, *(name.split()[0] for name in settings_of("fit"))]
