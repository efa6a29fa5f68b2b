"""Parts of a model that describe themselves in plain values, and are rebuilt from their description."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest

Part = TypeVar("Part")

_TOKENIZER_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
"""Entries of a tokenizer.json that decide how a text is split, and the tokens' ids."""


def part_config(part: Any) -> dict[str, Any]:
    """Class path and arguments of a part, in plain values, for a checkpoint."""
    return {"class_path": class_path(type(part)), "init_args": part.config()}


def class_path(kind: type) -> str:
    """Shortest path from which a class can be imported, as configurations name it."""
    name, parts = kind.__qualname__, kind.__module__.split(".")
    homes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    home = next((x for x in homes if getattr(sys.modules.get(x), name, None) is kind), kind.__module__)
    return f"{home}.{name}"


def build_part(config: dict[str, Any], base: type[Part]) -> Part:
    """Rebuild a part from its `part_config`, without importing or calling anything else that a checkpoint names."""
    return part_class(config["class_path"], base)(**config["init_args"])


def part_class(class_path: str, base: type[Part]) -> type[Part]:
    """The class that a checkpoint names."""
    module_name, _, class_name = class_path.rpartition(".")
    if module_name.split(".")[0] == "medclip_dcl":
        with suppress(ModuleNotFoundError):  # of another version
            importlib.import_module(module_name)
    kind = getattr(sys.modules.get(module_name), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(
            f"the checkpoint names {class_path}, which is not a known {base.__name__}; if the class is your own, add "
            f"--import {module_name} to the command (in Python: import {module_name} before loading)"
        )
    return kind


def differing_arguments(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which two descriptions of a part differ, by dotted name; none where they are one architecture.

    `there` is rebuilt first, as other versions of libraries state more or fewer defaults. A tokenizer counts by a
    digest of how it splits a text, and by the side on which it truncates.
    """
    if there["class_path"] == here["class_path"] and there != here:
        with torch.device("meta"):
            there = part_config(build_part(dict(there), object))
    a, b = _flat(there), _flat(here)
    return {
        name: (a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    }


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "tokenizer" and str(value).startswith("{"):
            raw = json.loads(value)
            flat[f"{prefix}truncation_side"] = (raw.get("truncation") or {}).get("direction")
            value = digest(json.dumps([raw.get(part) for part in _TOKENIZER_PARTS], sort_keys=True).encode())
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        flat.update(inner)
    return flat
