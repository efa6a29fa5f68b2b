"""Write measured numbers into README.md and docs/*.md from the tables in docs/results: `make numbers`.

A page has `<!--NAME-->0.575 [0.542, 0.605]<!--/-->`; docs/results/quoted/PAGE.yaml says where NAME comes from: the
table, the row by the values of its columns, and a format:

    NAME: 'nih.csv model=random metric=auc => {value:.3f} [{low:.3f}, {high:.3f}]'

Where several rows fit, `{value.min:.2f}`, `{value.max:.2f}` and `{value.mean:.3f}` are over their magnitudes; `a|b`
fits either value. A `+` gives differences a sign (`quantity` is then not mean), and `{significant:*}` is a star where
the column says yes. `table FILE.csv` makes a whole table: a row for each value of one column, `rows COLUMN: VALUE,
VALUE (shown name), ...`, and a line for each of its other columns, `NAME: row => format`.
"""

from __future__ import annotations

import csv
import re
import shlex
import string
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parents[1]
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
MARKED = re.compile(r"<!--([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)
_QUERY = re.compile(r"(table )?(\w+\.csv)\b(.*)", re.DOTALL)
Rows = list[dict[str, str]]


class _Format(string.Formatter):
    def get_field(self, name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        column, _, over = name.partition(".")
        values = [row[column] for row in kwargs["rows"]]
        if over:
            numbers = [abs(float(value)) for value in values]
            return {"min": min, "max": max, "mean": lambda all: sum(all) / len(all)}[over](numbers), column
        if len(values) != 1:
            raise ValueError(f"{{{name}}}: expected one row, found {len(values)}")
        return values[0], column

    def format_field(self, value: Any, spec: str) -> str:
        if spec == "*":
            return "*" if value == "yes" else ""
        if not spec or not value:  # a table may have empty cells
            return str(value)
        text = format(float(value), spec)
        zero = format(0.0, spec.lstrip("+"))
        return zero if text.lstrip("+-") == zero else text.replace("-", "−")

    def check_unused_args(self, *used: Any) -> None:
        pass


def selected(rows: Rows, conditions: str) -> Rows:
    """Rows whose columns have the values that the words COLUMN=VALUE name."""
    for word in shlex.split(conditions):
        column, _, value = word.partition("=")
        rows = [row for row in rows if row[column] in value.split("|")]
    return rows


def filled(rows: Rows, words: str) -> str:
    """Text of `CONDITIONS => FORMAT`."""
    conditions, _, form = words.partition("=> ")
    rows = selected(rows, conditions)
    if not rows:
        raise ValueError(f"no row has {conditions.strip()}")
    if rows[0].get("quantity") == "mean":
        form = form.replace(":+", ":")
    return _Format().vformat(form.strip(), (), {"rows": rows})


def table(rows: Rows, lines: Sequence[str]) -> Iterator[str]:
    """Lines of the table that the lines of a marker describe."""
    (key, names), *cells = [line.split(": ", 1) for line in lines]
    column = key.removeprefix("rows ")
    yield "| " + " | ".join(["", *(name for name, _ in cells)]).strip() + " |"
    yield "|" + "---|" * (len(cells) + 1)
    for name in names.split(", "):
        value, _, shown = name.rstrip(")").partition(" (")
        of_row = [row for row in rows if row[column] == value]
        yield "| " + " | ".join([shown or value, *(filled(of_row, words) for _, words in cells)]) + " |"


def queries(page: Path) -> dict[str, str]:
    """Name of each quoted number or table of a page -> its query."""
    file = DOCS / "results/quoted" / f"{page.stem}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def written(page: Path) -> str:
    """Text of a page with each quoted number as its table has it."""
    of_page = queries(page)

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        try:
            is_table, file, words = _QUERY.fullmatch(of_page[name]).groups()
            with (DOCS / "results" / file).open(encoding="utf-8", newline="") as lines:
                rows = list(csv.DictReader(lines))
            text = "\n".join(table(rows, words.strip().splitlines())) if is_table else filled(rows, words)
        except (AttributeError, KeyError, ValueError) as error:
            raise SystemExit(f"{page.name}, {name}: {error}") from error
        return f"<!--{name}-->\n{text}\n<!--/-->" if is_table else f"<!--{name}-->{text}<!--/-->"

    return MARKED.sub(replaced, page.read_text(encoding="utf-8"))


def main() -> None:
    """Rewrite the pages, and name those that changed."""
    for page in PAGES:
        text = written(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: numbers written", file=sys.stderr)


if __name__ == "__main__":
    main()
