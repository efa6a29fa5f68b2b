"""Read classes from their sources, without importing them: arguments, types, defaults, names."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


@cache
def constructors(class_path: str) -> list[ast.FunctionDef]:
    """The constructor of a class and those of its bases, by their sources."""
    module, _, name = class_path.rpartition(".")
    source = source_of(module)
    for node in () if source is None else ast.walk(source):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE.name):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return constructors(f"{node.module}.{alias.name}")
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
            # A generic base is subscripted: Base[Requirements].
            plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            bases = [base.id for base in plain if isinstance(base, ast.Name)]
            return own + [init for base in bases for init in constructors(f"{module}.{base}")]
    return []


def constructor_arguments(init: ast.FunctionDef) -> list[ast.arg]:
    return [*init.args.args[1:], *init.args.kwonlyargs]


def defaults(init: ast.FunctionDef) -> dict[str, Any]:
    """The defaults that are plain values."""
    both = [
        *zip(
            constructor_arguments(init)[: len(init.args.args) - 1][::-1],
            init.args.defaults[::-1],
            strict=False,
        )
    ]
    both += [
        (x, y) for x, y in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if y is not None
    ]
    return {x.arg: y.value for x, y in both if isinstance(y, ast.Constant)}


@cache
def parameters(class_path: str) -> dict[str, str] | None:
    """Arguments of a class and their types by its source; None where it cannot be told."""
    found = constructors(class_path)
    if not found or found[0].args.kwarg or found[0].args.vararg:
        return None
    return {x.arg: _kind(x.annotation) for x in constructor_arguments(found[0])}


def _kind(annotation: ast.expr | None) -> str:
    """A type as alternatives: Optional[Union[int, float]] is int | float | None."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if annotation.value.id in ("Optional", "Union"):
            return " | ".join([*map(_kind, inner), *(["None"] if annotation.value.id == "Optional" else [])])
    return "" if annotation is None else ast.unparse(annotation)


def names_in(source: ast.Module) -> set[str]:
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


def folder_of(module: str) -> Path:
    package, *parts = module.split(".")
    if package == PACKAGE.name:
        return PACKAGE.joinpath(*parts)
    spec = find_spec(package)
    return Path(spec.origin if spec and spec.origin else "").parent.joinpath(*parts)


@cache
def source_of(module: str) -> ast.Module | None:
    """The source of a module or package of this project, or of Lightning; None of any other."""
    if module.split(".")[0] not in (PACKAGE.name, "pytorch_lightning"):
        return None
    folder = folder_of(module)
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
