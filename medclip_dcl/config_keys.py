"""Misspelt keys and missing files of a configuration, found before Lightning is imported, which takes seconds.

Keys are looked up in the sources. Only what certainly is no key is named; everything else, and every value, is left to
the parser (`config_errors`).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

TOP = (
    "checkpoint", "checkpoint_minutes", "ckpt_path", "config", "data", "ema_decay", "help", "model", "print_config",
    "return_predictions", "run_folder", "seed_everything", "share_patient_data", "trainer", "verbose", "weights_only",
)  # fmt: skip
"""Top-level keys of all commands."""
_COMMANDS = ("fit", "validate", "test", "predict")
_PACKAGE = Path(__file__).resolve().parent


def unknown_key(arguments: Sequence[str]) -> str | None:
    """The first key that no class of this package and no Trainer has, or file that is missing; None: none is found.

    Args:
        arguments: of the command line.
    """
    if not arguments or arguments[0] not in _COMMANDS:
        return None
    classes: dict[str, str | None] = {}
    words = [part for word in arguments[1:] for part in re.split(r"(?<=^--config)=|(?<=^-c)=", word)]
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word in ("--config", "-c"):
            found = _in_file(value, classes)
        elif word.startswith("--"):
            name, _, given = word[2:].partition("=")
            found = _in_option(name, given or value, classes)
        else:
            continue
        if found is not None:
            return found
    return None


def message(key: str, known: Iterable[str]) -> str:
    """The line about a key that there is not."""
    return f"{key}: there is no such key{nearest(key, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that was perhaps meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _in_file(name: str, classes: dict[str, str | None]) -> str | None:
    file = Path(name)
    if file.suffix in (".yaml", ".yml") and "://" not in name and not file.exists():
        return f"config: File does not exist: {str(file.absolute())!r}"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(content, dict) or any(key in _COMMANDS for key in content):
        return None
    for key, value in content.items():
        found = _check_option(str(key))
        if found is None and key == "trainer" and isinstance(value, dict):
            found = next((x for name in value if (x := _check_option(f"trainer.{name}"))), None)
        if found is None and key in ("model", "data"):
            found = _in_class(key, value, classes)
        if found is not None:
            return found
    return None


def _in_class(path: str, value: Any, classes: dict[str, str | None]) -> str | None:
    """Check the settings of a class, and of the classes among them; remembers which class stands where."""
    if not isinstance(value, dict):
        classes[path] = None
        return None
    if not value.keys() & {"class_path", "init_args"}:
        return None
    classes[path] = value.get("class_path", classes.get(path))
    settings = value.get("init_args")
    for key, inner in settings.items() if isinstance(settings, dict) else ():
        found = _check_setting(path, str(key), classes) or _in_class(
            f"{path}.init_args.{key}", inner, classes
        )
        if found is not None:
            return found
    return None


def _in_option(name: str, value: str, classes: dict[str, str | None]) -> str | None:
    if name.split(".")[0] not in ("model", "data"):
        return _check_option(name)
    if re.fullmatch(r"\w+(\.init_args\.\w+)+", name):
        path, _, key = name.rpartition(".init_args.")
        if found := _check_setting(path, key, classes):
            return found
    # Another class perhaps, below which other keys are known.
    for path in [path for path in classes if path == name or path.startswith(f"{name}.")]:
        classes[path] = None
    if value.startswith("medclip_dcl."):
        classes[name] = value
    return None


def _check_option(name: str) -> str | None:
    """A key outside of classes: top-level, or of the trainer."""
    top, _, rest = name.rstrip("+").partition(".")
    if top not in TOP:
        return message(name, TOP)
    known = _parameters("pytorch_lightning.trainer.trainer.Trainer")
    if top == "trainer" and rest and known is not None and rest.split(".")[0] not in known:
        return message(name, [f"trainer.{key}" for key in known])
    return None


def _check_setting(path: str, key: str, classes: dict[str, str | None]) -> str | None:
    class_path = classes.get(path)
    known = None if class_path is None else _parameters(class_path)
    if class_path is None or known is None or key.rstrip("+") in known:
        return None
    name = class_path.rpartition(".")[2]
    return f"{path}.init_args.{message(key, known)} (a setting of {name})"


@cache
def _parameters(class_path: str) -> tuple[str, ...] | None:
    """Arguments of a class by its source; None where it cannot be told."""
    module, _, name = class_path.rpartition(".")
    package, *parts = module.split(".")
    if package == "medclip_dcl":
        folder = _PACKAGE
    elif package == "pytorch_lightning" and (spec := find_spec(package)) is not None and spec.origin:
        folder = Path(spec.origin).parent
    else:
        return None
    file = folder.joinpath(*parts).with_suffix(".py")
    if not parts or not file.is_file():
        return None
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kind = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    for node in [] if kind is None else kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            if node.args.kwarg or node.args.vararg:
                return None
            return tuple(argument.arg for argument in (*node.args.args[1:], *node.args.kwonlyargs))
    return None
