"""Public names of a package, whose modules are imported when somebody asks for them."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package whose ``__init__.py`` is `file`.

    Public is each name that the file imports as itself (``from MODULE import Name as Name``). Under ``TYPE_CHECKING``
    such an import is for type checkers, and MODULE is imported when the name is first used: a light module of a package
    can be imported without what the others need (torch, Lightning, transformers).
    """
    imports = (
        node
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    )
    modules = {
        alias.name: node.module for node in imports for alias in node.names if alias.name == alias.asname
    }

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(str(modules[name])), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(modules), __getattr__, lambda: sorted(modules)
