"""Read classes from their sources, without importing them: arguments, types, names."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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


@cache
def source_of(module: str) -> ast.Module | None:
    """The source of a module or package of this project, or of Lightning; None of any other."""
    package, *parts = module.split(".")
    if package not in (PACKAGE.name, "pytorch_lightning") or not all(map(str.isidentifier, parts)):
        return None
    spec = find_spec(package)
    folder = Path(spec.origin if spec and spec.origin else "").parent.joinpath(*parts)
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
