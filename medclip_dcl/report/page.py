"""Rendering of the templates in this folder as HTML, Markdown and LaTeX."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from medclip_dcl.report.tables import Cell

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "[": "{[}",
        "]": "{]}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "η": r"$\eta$",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "−": "$-$",
        "–": "--",
    }
)


def render_template(template: str, content: Mapping[str, Any], folder: Path | None = None) -> str:
    """Fill in a template of this folder; HTML is escaped by itself, Markdown and LaTeX by the filters `md` and `tex`.

    Other packages keep theirs in a `folder` of their own. A variable stands in {{ }}, in LaTeX in << >>. One that is
    not given is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*([folder] if folder else ()), Path(__file__).parent]),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    if template.endswith(".tex"):
        environment = environment.overlay(variable_start_string="<<", variable_end_string=">>")
    environment.filters |= {"md": markdown_text, "tex": latex_text, "tex_cell": _latex_cell}
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title).lower()
    environment.filters["python"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.get_template(template).render(content)


def markdown_text(text: str) -> str:
    """Escape Markdown's own characters, but for underscores, which do nothing inside a word."""
    return re.sub(r"([\\|*<>`\[\]])", r"\\\1", text)


def latex_text(text: str) -> str:
    """Escape LaTeX's own characters."""
    return text.translate(_LATEX)


def _latex_cell(cell: Cell) -> str:
    """The number, its interval below it."""
    text, interval = map(latex_text, cell)
    return rf"\shortstack[r]{{{text}\\{{\scriptsize {interval}}}}}" if interval else text
