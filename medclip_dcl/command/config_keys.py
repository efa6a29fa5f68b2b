"""Mistakes in a configuration that are found in the sources, before Lightning is imported, which takes seconds.

Misspelt keys, classes of this package that do not exist, values that are not of a plain type, files, data sets and
prompts that are missing or do not fit. Only what
is certainly wrong is named, in the words of the parser (`config_errors`); everything else is left to it.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

TOP = (
    "checkpoint", "checkpoint_minutes", "ckpt_path", "config", "data", "ema_decay", "help", "model",
    "prediction_format", "print_config", "prompts", "return_predictions", "run_folder", "seed_everything",
    "share_patient_data", "trainer", "verbose", "weights_only",
)  # fmt: skip
"""Top-level keys of all commands."""
_COMMANDS = ("fit", "validate", "test", "predict")
_PACKAGE = Path(__file__).resolve().parents[1]
_TRAINER = "pytorch_lightning.trainer.trainer.Trainer"
_NUMBER = re.compile(r"[-+.\d]|inf|nan|null|none", re.IGNORECASE)


def first_mistake(arguments: Sequence[str]) -> str | None:
    """The first thing that is certainly wrong; None where nothing is found.

    Args:
        arguments: of the command line.
    """
    if len(arguments) > 2 and arguments[0] in ("--config", "-c") and not _has_command(arguments[1]):
        return f"{arguments[0]}: give the command first, {' | '.join(_COMMANDS)}, then its options"
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
    runs = not any(word in ("-h", "--help") or word.startswith("--print_config") for word in words)
    # The folder of another's datamodule may be anything.
    if runs and str(classes.get("data")).startswith(f"{_PACKAGE.name}."):
        folder, prompts = _last(words, "data.init_args.folder"), _last(words, "prompts")
        return _in_files(folder, prompts, needs_labels=arguments[0] != "predict")
    return None


def _has_command(name: str) -> bool:
    """A file may hold the settings of several commands, each under its name."""
    content = _content(name)
    return content is None or any(key in _COMMANDS for key in content)


def _last(words: Sequence[str], option: str) -> Any:
    """The last value of a setting, of the command line or of a file that it names."""
    last = None
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word in ("--config", "-c"):
            found: Any = _content(value)
            for key in option.split("."):
                found = found.get(key) if isinstance(found, dict) else None
            last = last if found is None else found
        elif word == f"--{option}":
            last = value
        elif word.startswith(f"--{option}="):
            last = word.partition("=")[2]
    return last


def _in_files(folder: Any, prompts: Any, needs_labels: bool) -> str | None:
    """A prepared set that is not there; prompts that cannot be read, or of findings that the set does not label."""
    from medclip_dcl.errors import UserError
    from medclip_dcl.findings import read_prompts, require_labelled

    try:
        pairs = read_prompts(prompts) if isinstance(prompts, str) and prompts not in ("null", "~") else {}
        if isinstance(folder, str) and (pairs or not (Path(folder) / "dataset.json").is_file()):
            from medclip_dcl.data.prepared import PreparedSet

            labelled = PreparedSet(folder).findings
            if labelled and needs_labels:
                require_labelled(pairs, labelled, "ZeroShotClassification: prompts")
    except UserError as error:
        return str(error)
    return None


def message(key: str, known: Iterable[str]) -> str:
    """The line about a key that there is not."""
    return f"{key}: there is no such key{nearest(key, known)}"


def one_of(kinds: Sequence[str]) -> str:
    """The types that a setting may have, in words."""
    named = sorted(set(kinds) - {"None", "NoneType"}) + ["null"] * bool({"None", "NoneType"} & set(kinds))
    return " or ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that was perhaps meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _in_file(name: str, classes: dict[str, str | None]) -> str | None:
    file = Path(name)
    if file.suffix in (".yaml", ".yml") and "://" not in name and not file.exists():
        return f"config: File does not exist: {str(file.absolute())!r}"
    content = _content(name)
    if content is None or any(key in _COMMANDS for key in content):
        return None
    for key, value in content.items():
        found = _check_option(str(key))
        if found is None and key == "trainer" and isinstance(value, dict):
            found = next((x for y in value.items() if (x := _in_trainer(*y, classes))), None)
        if found is None and key in ("model", "data"):
            found = _in_class(key, value, classes)
        if found is not None:
            return found
    return None


def _content(name: str) -> dict[str, Any] | None:
    """A configuration file; None where it cannot be read as one."""
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def _in_trainer(name: str, value: Any, classes: dict[str, str | None]) -> str | None:
    key = f"trainer.{name}"
    if found := _check_option(key) or _check_value(key, value, _parameters(_TRAINER)):
        return found
    callbacks = value if name.rstrip("+") == "callbacks" and isinstance(value, list) else []
    return next(
        (x for callback in callbacks if (x := _in_class("trainer.callbacks", callback, classes))), None
    )


def _in_class(path: str, value: Any, classes: dict[str, str | None]) -> str | None:
    """Check the settings of a class, and of the classes among them; remembers which class stands where."""
    if not isinstance(value, dict):
        classes[path] = None
        return None
    if not value.keys() & {"class_path", "init_args"}:
        return None
    classes[path] = value.get("class_path", classes.get(path))
    if found := _check_class(path, classes[path]):
        return found
    settings = value.get("init_args")
    for key, inner in settings.items() if isinstance(settings, dict) else ():
        found = _check_setting(path, str(key), inner, classes) or _in_class(
            f"{path}.init_args.{key}", inner, classes
        )
        if found is not None:
            return found
    return None


def _in_option(name: str, value: str, classes: dict[str, str | None]) -> str | None:
    if name.split(".")[0] not in ("model", "data"):
        wrong = _check_option(name)
        return wrong or _check_value(name, _loaded(value), _parameters(_TRAINER))
    if re.fullmatch(r"\w+(\.init_args\.\w+)+", name):
        path, _, key = name.rpartition(".init_args.")
        if found := _check_setting(path, key, _loaded(value), classes):
            return found
    # Another class perhaps, below which other keys are known.
    for path in [path for path in classes if path == name or path.startswith(f"{name}.")]:
        classes[path] = None
    if not value.startswith("medclip_dcl."):
        return None
    place = name.removesuffix(".class_path")
    classes[place] = value
    return _check_class(place, value)


def _loaded(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _check_option(name: str) -> str | None:
    """A key outside of classes: top-level, or of the trainer."""
    top, _, rest = name.rstrip("+").partition(".")
    if top not in TOP:
        return message(name, TOP)
    known = _parameters(_TRAINER)
    if top == "trainer" and rest and known is not None and rest.split(".")[0] not in known:
        return message(name, [f"trainer.{key}" for key in known])
    return None


def _check_setting(path: str, key: str, value: Any, classes: dict[str, str | None]) -> str | None:
    class_path = classes.get(path)
    known = None if class_path is None else _parameters(class_path)
    if class_path is None or known is None:
        return None
    if key.rstrip("+") in known:
        return _check_value(f"{path}.init_args.{key}", value, known)
    name = class_path.rpartition(".")[2]
    return f"{path}.init_args.{message(key, known)} (a setting of {name})"


def _check_value(path: str, value: Any, known: dict[str, str] | None) -> str | None:
    """A value of a setting that takes numbers, true and false alone."""
    kinds = (known or {}).get(path.rpartition(".")[2], "").split(" | ")
    if not set(kinds) <= {"int", "float", "bool", "None"} or value is None or str(value).startswith("--"):
        return None  # of another type, null, or no value but the next option
    is_right = isinstance(value, bool) if "bool" in kinds else False
    if not is_right and not isinstance(value, bool):
        if isinstance(value, int | float):
            is_right = "float" in kinds or ("int" in kinds and math.isfinite(value) and int(value) == value)
        else:
            # Numbers have many spellings.
            is_right = isinstance(value, str) and _NUMBER.match(value) is not None
    return None if is_right else f"{path}: expected {one_of(kinds)}, found {value}"


def _check_class(path: str, class_path: str | None) -> str | None:
    """A class of this package that does not exist."""
    parts = (class_path or "").split(".")
    if parts[0] != _PACKAGE.name:
        return None
    for place in range(1, len(parts)):
        module = ".".join(parts[:place])
        source = _source(module)
        if source is None:
            return None
        inner = {file.stem for file in _folder(module).glob("*")} if place < len(parts) - 1 else set()
        is_class = parts[place][:1].isupper()
        names = {name for name in _names(source) | inner if name[:1].isupper() == is_class}
        if parts[place] not in names:
            return f"{path}: {module} has no {parts[place]} (class_path {class_path}){nearest(parts[place], names)}"
    return None


@cache
def _parameters(class_path: str) -> dict[str, str] | None:
    """Arguments of a class and their types by its source; None where it cannot be told."""
    module, _, name = class_path.rpartition(".")
    source = _source(module)
    if source is None:
        return None
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            return _parameters(f"{node.module}.{name}")
    kind = next((node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    for node in [] if kind is None else kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            if node.args.kwarg or node.args.vararg:
                return None
            arguments = (*node.args.args[1:], *node.args.kwonlyargs)
            return {x.arg: _kind(x.annotation) for x in arguments}
    return None


def _kind(annotation: ast.expr | None) -> str:
    """A type as alternatives: Optional[Union[int, float]] is int | float | None."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if annotation.value.id in ("Optional", "Union"):
            return " | ".join([*map(_kind, inner), *(["None"] if annotation.value.id == "Optional" else [])])
    return "" if annotation is None else ast.unparse(annotation)


def _names(source: ast.Module) -> set[str]:
    """Names that a module has, also those that it imports when they are asked for."""
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def _folder(module: str) -> Path:
    package, *parts = module.split(".")
    if package == _PACKAGE.name:
        return _PACKAGE.joinpath(*parts)
    spec = find_spec(package)
    return Path(spec.origin if spec and spec.origin else "").parent.joinpath(*parts)


@cache
def _source(module: str) -> ast.Module | None:
    """The source of a module or package of this project, or of Lightning; None of any other."""
    if module.split(".")[0] not in (_PACKAGE.name, "pytorch_lightning"):
        return None
    folder = _folder(module)
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
