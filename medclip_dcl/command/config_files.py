"""Configuration files: UTF-8 and each key once, as `files.read_yaml`; the classes that they may name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from unittest.mock import patch

import jsonargparse
from jsonargparse import set_parsing_settings

from medclip_dcl.common.command_line import yaml_value
from medclip_dcl.common.files import parse_yaml, read_text
from medclip_dcl.common.packaged import find_configuration

KNOWN = ("medclip_dcl", "pytorch_lightning", "lightning_fabric", "torch.nn", "torch.optim")
"""Packages whose classes a configuration may name; others of torch start programs."""

_NAMED = ("data", "evaluation", "models", "networks", "objectives", "unimodal")
_NESTED_NULL = re.compile(r"\A(--[\w.+]+?\.init_args\.\w+)\.init_args\.(\w+)=null\Z")
_PREFIXES = tuple(f"{package}." for package in KNOWN)


def allow_imports(modules: Sequence[str]) -> None:
    """Let class paths name classes of `KNOWN` and of the packages of these modules, for the rest of the process.

    A configuration comes with a run folder that somebody sends, and a checkpoint names classes, too: neither may decide
    what is imported. The parser would also build classes that stand in place of plain values. It
    knows classes by their names alone once they are imported, as the public ones are here.
    """
    for package in (importlib.import_module(f"medclip_dcl.{name}") for name in _NAMED):
        for name in package.__all__:
            getattr(package, name)
    packages = [module.split(".")[0] for module in modules if not module.startswith(_PREFIXES)]
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*KNOWN, *packages],
        instantiate_subclass_spec_in_any=False,
    )


def import_options(config: object) -> str:
    """The options that import the modules of a configuration's classes, beside those of `KNOWN`."""
    modules = dict.fromkeys(re.findall(r"class_path='([\w.]+)\.\w+'", str(config)))
    return "".join(f" --import {name}" for name in modules if not f"{name}.".startswith(_PREFIXES))


def with_nulls(args: Sequence[str]) -> list[str]:
    """The arguments with null for a setting of a class within a class as JSON: jsonargparse would read it as "None"."""
    found: list[str] = []
    for word in args:
        if word == "null" and found and found[-1].startswith("--"):
            word = f"{found.pop()}=null"
        found.append(_NESTED_NULL.sub(r'\1={"init_args": {"\2": null}}', word))
    return found


def with_packaged_files(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with files in place of names of packaged configurations, and the lines that say so.

    A value of ``--config`` that is YAML itself, or ``-`` for standard input, stays.

    Raises:
        MissingFileError: neither a file nor such a name.
    """
    found, origins, before = list[str](), list[str](), ""
    for word in with_nulls(arguments):
        option, separator, value = word.partition("=") if word.startswith("--config=") else ("", "", word)
        if (separator or before in ("--config", "-c")) and isinstance(yaml_value(value), str):
            file = find_configuration(value, "", "--config")
            origins += [file.origin] if file.origin else []
            value = str(file.path)
        found.append(f"{option}{separator}{value}")
        before = word
    return found, origins


@contextmanager
def unambiguous_files() -> Iterator[None]:
    """Read configuration files as UTF-8 (jsonargparse: by the locale), and refuse a duplicate key.

    What ``--print_config`` writes into a file is UTF-8, too.
    """

    def read(file: jsonargparse.Path) -> str:
        text = read_text(Path(file.absolute))
        parse_yaml(text, file)
        return text

    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")
    with patch.object(jsonargparse.Path, "read_text", read):
        yield
