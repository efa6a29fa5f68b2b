"""Cells of a text column that hold another thing than a text: what a program wrote of its own objects."""

from __future__ import annotations

import ast
import base64
import re
import warnings
from typing import Any

import pandas as pd

from data_prep.sources.rows import NO_REPORT, TableCheck
from medclip_dcl.common.files import encoding_of, kind_of_file

# Beginnings of cells; a text may begin with "[**Name**]" or "(portable)".
_QUOTE = r"(?:np\.\w+_\()?[bru]?['\"]"
_KINDS = {
    "bytes": re.compile(r"(?:bytearray\(|memoryview\()?[bB]r?['\"]|<memory at 0x|(?:0x|\\x)[0-9A-Fa-f]{16}"),
    "JSON or a Python dict": re.compile(r"\[?\s*\{\s*(?:['\"]|\})"),
    "a Python list": re.compile(
        rf"(?:array\()?\[\s*(?:{_QUOTE}|(?:nan|None|null)\s*[,\]]|\[)|np\.\w+_\("
        rf"|\(\s*{_QUOTE}(?s:.*)['\"]\)?,?\s*\)$|\[[-+\d.,eE\s]*\]$"
    ),
    "XML": re.compile(r"<\?xml\b|<ClinicalDocument\b"),
    "HL7 segments": re.compile(r"(?:MSH|[FB]HS|EVN|PID|PV1|ORC|OBR|OBX|NTE|TXA)\|"),
}
_BASE64 = re.compile(r"(?:data:[\w./+-]*;base64,)?([A-Za-z0-9+/_-]{10,}(?:\r?\n[A-Za-z0-9+/_-]+)*={0,2})")
# Between two texts of numpy, which writes no commas; Python would join them.
_GAP = re.compile(r"(?<=['\"])\s+(?=[bru]?['\"])")
_REMEDY = (
    "write the report's own text into each cell: decode it, join lists, take it out of JSON, XML or segments"
)


def kind_of_cell(text: str) -> str:
    """Kind of what a cell holds instead of a text, by its beginning; "" for a text."""
    for kind, beginning in _KINDS.items():
        if beginning.match(text):
            return kind
    return "base64" if _is_base64(text) else ""


def _is_base64(text: str) -> bool:
    match = _BASE64.fullmatch(text)
    if match is None:
        return False
    packed = re.sub(r"\s", "", match[1]).translate(str.maketrans("-_", "+/"))
    # A word of letters is one as well, though hardly of a text; a cell that was cut off is long.
    if len(packed) < (12 if packed.endswith("=") else 16) or (len(packed) % 4 and len(packed) < 64):
        return False
    content = base64.b64decode(packed[: len(packed) // 4 * 4])
    plain = content.decode(encoding_of(content), "replace")
    n_odd = sum(c == "\ufffd" or not (c.isprintable() or c.isspace()) for c in plain)
    is_text = n_odd <= 0.1 * len(plain) * (" " in plain)
    return len(packed) > 200 or bool(kind_of_file(content)) or is_text


def value_of_cell(text: str) -> Any:
    """The value that Python or numpy wrote so; None for anything else."""
    inner = re.sub(r"(?s)^(?:array|bytearray)\((.*?)(?:,\s*dtype=\S+)?\)$", r"\1", text)
    inner = _GAP.sub(", ", re.sub(r"\bnp\.\w+_\((['\"].*?['\"])\)", r"\1", inner))
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.literal_eval(inner)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def text_of_cell(text: str) -> str | None:
    """The text in bytes, or in a list of one text; None for anything else."""
    value = None if _GAP.search(text) else value_of_cell(text)
    if isinstance(value, list | tuple) and len(value) <= 1:
        value = value[0] if value else ""
    if isinstance(packed := value, bytes):
        try:
            value = packed.decode(encoding_of(packed))
        except UnicodeDecodeError:
            value = packed.decode("cp1252", "replace")
    return value.strip() if isinstance(value, str) and not kind_of_cell(value.strip()) else None


def with_texts(rows: pd.DataFrame, column: str, check: TableCheck) -> pd.DataFrame:
    """The rows with texts in a column; why a cell is no report stands in `NO_REPORT`.

    A column of which half the cells or more are no texts is a problem of the table.
    """
    kinds = rows[column].map(kind_of_cell)
    is_other = kinds != ""
    if not is_other.any():
        return rows
    name, n_cells = check.columns.get(column, column), int((rows[column] != "").sum())
    found = ", ".join(f"{kind} {number:,}" for kind, number in kinds[is_other].value_counts().items())
    found = f"column {name}: expected texts, found {found} ({is_other.sum():,} of {n_cells:,} cells"
    found += f", first in row {rows.index[is_other][0]})"
    if 2 * is_other.sum() >= n_cells:
        check.problems.append(f"{found}; {_REMEDY}")
        return rows
    texts = rows.loc[is_other, column].map(text_of_cell)
    is_lost = texts.isna()
    lost = f"; no reports: {is_lost.sum():,}; {_REMEDY}" if is_lost.any() else ""
    check.warn(f"{found}; read, as bytes or lists of one: {(~is_lost).sum():,}{lost}")
    reasons = [f"row {row}, column {name}: {kinds[row]}, not a text" for row in texts.index[is_lost]]
    rows = rows.copy()
    rows.loc[texts.index, column] = texts.fillna("")
    rows[NO_REPORT] = rows.get(NO_REPORT, pd.Series("", index=rows.index))
    rows.loc[texts.index[is_lost], NO_REPORT] = reasons
    return rows
