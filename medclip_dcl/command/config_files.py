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

from medclip_dcl.common.command_line import search_working_directory, yaml_value
from medclip_dcl.common.files import parse_yaml, read_text, read_yaml
from medclip_dcl.common.packaged import find_configuration
from medclip_dcl.runs.run_folder import run_of
from medclip_dcl.runs.saved import CONFIG_FILE

KNOWN = ("medclip_dcl", "pytorch_lightning", "lightning_fabric", "torch.nn", "torch.optim")
"""Packages whose classes a configuration may name; others of torch start programs."""

_TYPED = ("--run_folder", "--ckpt_path", "--share_patient_data")
"""Options that win over configurations wherever they are typed: the parser would let a later file replace them."""
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
    if packages:
        search_working_directory()
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

    A value of ``--config`` that is YAML itself, or ``-`` for standard input, stays. A run's own configuration means
    the run in whose folder it lies, as does this folder in place of the first option.

    Raises:
        MissingFileError: neither a file nor such a name.
    """
    found, last, origins, before = list[str](), list[str](), list[str](), ""
    words = with_nulls(arguments)
    if words[1:] and not words[1].startswith("-"):
        words[1:2] = [f"--config={Path(words[1], CONFIG_FILE)}", f"--run_folder={words[1]}"]
    for word in words:
        is_typed = {before, word.partition("=")[0]} & {*_TYPED}
        option, separator, value = word.partition("=") if word.startswith("--config=") else ("", "", word)
        implied: list[str] = []
        if (separator or before in ("--config", "-c")) and isinstance(yaml_value(value), str):
            file = find_configuration(value, "", "--config")
            origins += [file.origin] if file.origin else []
            value = str(file.path)
            if run := run_of(file.path):
                implied = [f"--run_folder={run}"]
                if words[0] != "fit" and file.path.name == CONFIG_FILE:
                    # Its training began at that checkpoint, and the sender of a run shares no patients of others.
                    implied += ["--ckpt_path=null", "--share_patient_data=false"]
                named = str(read_yaml(file.path).get("run_folder", run))
                if "--run_folder" not in " ".join(words) and Path(named).resolve() != run.resolve():
                    origins.append(f"{value} lies in {run} and names {named}: read as --run_folder {run}")
        (last if is_typed else found).extend([f"{option}{separator}{value}", *implied])
        before = word
    return [*found, *last], origins


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
