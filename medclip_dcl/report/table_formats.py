"""A table as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from medclip_dcl.report.tables import Cell, Row, Table

_LATEX = {
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


def to_markdown(table: Table) -> str:
    """GitHub's Markdown; a heading of a group stands before each of its columns' headings."""
    groups = [name for name, span in table.groups for _ in range(span)] or [""] * len(table.columns)
    # A group that tells columns of the same heading apart is named with them.
    repeated = len(set(table.columns)) < len(table.columns)
    headings = [
        f"{group}: {heading}" if repeated and group else heading
        for group, heading in zip(groups, table.columns, strict=True)
    ]
    lines = [f"### {table.title}", "", _markdown_line(["", *map(markdown_text, headings)])]
    lines.append("|---|" + "---:|" * len(headings))
    for divider, row in _with_dividers(table):
        if divider:
            lines.append(_markdown_line([f"*{markdown_text(divider)}*", *[""] * len(headings)]))
        lines.append(_markdown_line([markdown_text(row.label), *(_joined(cell) for cell in row.cells)]))
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def to_latex(table: Table) -> str:
    """A LaTeX table environment (package booktabs); an interval stands below its number."""
    n_columns = len(table.columns)
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{latex_text(table.title)}. {latex_text(table.note)}}}",
        rf"\begin{{tabular}}{{l{'r' * n_columns}}}",
        r"\toprule",
    ]
    if table.groups:
        lines += _latex_groups(table.groups)
    lines += [_latex_line(["", *(latex_text(heading) for heading in table.columns)]), r"\midrule"]
    for divider, row in _with_dividers(table):
        if divider:
            lines += [
                r"\midrule",
                rf"\multicolumn{{{n_columns + 1}}}{{l}}{{\emph{{{latex_text(divider)}}}}} \\",
            ]
        lines.append(_latex_line([latex_text(row.label), *(_latex_cell(cell) for cell in row.cells)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def markdown_text(text: str) -> str:
    """The text with Markdown's own characters escaped, but for underscores, which do nothing inside a word."""
    return re.sub(r"([\\|*<>`\[\]])", r"\\\1", text)


def latex_text(text: str) -> str:
    """The text with LaTeX's own characters escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def _with_dividers(table: Table) -> Iterator[tuple[str, Row]]:
    """Each row with the line above it, if it is the first of a kind that has one."""
    before = ""
    for row in table.rows:
        yield (table.dividers.get(row.kind, "") if row.kind != before else ""), row
        before = row.kind


def _joined(cell: Cell) -> str:
    return f"{cell.text} {cell.interval}" if cell.interval else cell.text


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _latex_groups(groups: Sequence[tuple[str, int]]) -> list[str]:
    headings = [rf"\multicolumn{{{span}}}{{c}}{{{latex_text(name)}}}" for name, span in groups]
    rules, first = [], 2
    for _, span in groups:
        rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
        first += span
    return [_latex_line(["", *headings]), "".join(rules)]


def _latex_cell(cell: Cell) -> str:
    text = re.sub(r"(?<![\d.])-(?=[.\d])", "−", cell.text)
    if not cell.interval:
        return latex_text(text)
    interval = re.sub(r"(?<![\d.])-(?=[.\d])", "−", cell.interval)
    return rf"\shortstack[r]{{{latex_text(text)}\\{{\scriptsize {latex_text(interval)}}}}}"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
