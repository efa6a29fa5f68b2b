"""Read and check the tables and JSON files of a source.

Every column that is used is checked before any work begins; what is missing or invalid is a `UserError`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from data_prep.sources.spellings import code_points, plain_number
from data_prep.text.plain_text import PLACEHOLDER
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import encoding_of, kind_of_file, parse_json

T = TypeVar("T")
FRONTAL_VIEWS = ("AP", "PA")
SPLITS = ("train", "validate", "test")
SEPARATOR_LINE = re.compile(r"\Asep=(.)\r?\n")
"""Excel's own first line, which names the delimiter."""


def file_hash(file: Path) -> str:
    """First 16 digits of the SHA-256 of a file, to recognise a table that was used before."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); put a readable file there") from error


SHOWN = 5
"""Cases that a message lists behind the first one."""

SHORT = 40
"""Characters of a text that a message quotes."""

MAX_CELL = 2**17
"""Characters of a cell that is used."""

ROW = "row"
"""Name of an index that counts the rows of a file; its header is row 1."""


def is_placeholder(column: pd.Series) -> pd.Series:
    """True for cells that hold a `PLACEHOLDER` alone."""
    return column.str.strip(" .").str.fullmatch(PLACEHOLDER, case=False).astype(bool)


MAX_BYTES = 2**30
"""Of a table, unpacked: it is read as a whole, which takes several times its size in memory, and a few megabytes of a
damaged or hostile archive may unpack to any size."""


def unpacked(file: Path, advice: str) -> bytes:
    """Content of a file, packed by gzip or not, or of the table in a .zip; `advice`: what to do about a damaged one."""
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(2) == b"\x1f\x8b"
        with (gzip.open if is_packed else open)(file, "rb") as stream:
            content = bytes(stream.read(MAX_BYTES + 1))
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                tables = [name for name in archive.namelist() if re.fullmatch(r"(?!__MACOSX).*\.csv", name)]
                if len(tables) > 1:
                    raise UserError(
                        f"{file}: expected one .csv in it, found {', '.join(tables)}; unpack the one to read"
                    )
                content = archive.open(tables[0]).read(MAX_BYTES + 1) if tables else content
    except FileNotFoundError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); correct its path") from error
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read ({error}); {advice}") from error
    if len(content) > MAX_BYTES:
        raise UserError(
            f"{file}: expected a table of at most {MAX_BYTES / 2**30:g} GiB unpacked, found more; download "
            "it again if it should be smaller, or leave out columns that are not needed"
        )
    return content


@dataclass(frozen=True)
class CsvFile:
    """The text of a CSV file with a header; `advice` says what to do about a damaged one."""

    file: Path
    text: str
    advice: str
    delimiter: str = ","

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        csv.field_size_limit(2**31 - 1)  # cells that are used are held to `MAX_CELL`
        text = io.StringIO(SEPARATOR_LINE.sub("", self.text, count=1), newline="")
        lines = csv.reader(text, delimiter=self.delimiter, strict=True)
        first = 1
        try:
            for row in lines:
                yield lines.line_num, row
                first = lines.line_num + 1
        except csv.Error as error:
            place = f"{self.file}, row from line {first} on"
            raise UserError(f"{place} cannot be read ({error}); {self.advice}") from error

    def header(self) -> list[str]:
        return [name.strip() for name in next(self._lines(), (1, []))[1]]

    def read(
        self, columns: Iterable[str], other_columns: Iterable[str] = ()
    ) -> tuple[pd.DataFrame, list[str]]:
        """The columns as text ("" where empty), and those of the others that are there, by `ROW`.

        Lines with too many or too few values, or a value above `MAX_CELL`, are left out; they are returned as problems,
        with their numbers.
        """
        file, advice, wanted, header = self.file, self.advice, [*columns], self.header()
        if missing := [column for column in wanted if column not in header]:
            raise UserError(
                f"{file} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"found {listed(header) or 'an empty file'}"
            )
        wanted += [column for column in other_columns if column in header and column not in wanted]
        if twice := [column for column in wanted if header.count(column) > 1]:
            raise UserError(f"{file} has the column {twice[0]} twice; {advice}")
        places = [header.index(column) for column in wanted]
        # A delimiter at a line's end is no column, in the header or in a row.
        n_named = max(place for place, name in enumerate(["", *header]) if name or not place)
        rows, unequal = {}, []
        # A blank line, or an empty row of a spreadsheet, is not a row. One of another length would be shifted, or lose
        # its end.
        for number, (line, row) in enumerate(self._lines(), start=1):
            if number == 1 or not any(row):
                continue
            if len(row) < n_named or any(row[n_named:]):
                unequal.append(f"line {line}: {len(row)} values for {n_named} columns")
            elif long := [
                column for column, place in zip(wanted, places, strict=True) if len(row[place]) > MAX_CELL
            ]:
                unequal.append(f"line {line}: more than {MAX_CELL:,} characters in column {long[0]}")
            else:
                rows[number] = [row[place].strip() for place in places]
        if not rows:
            raise UserError(f"{file} holds no row; {advice}")
        table = pd.DataFrame.from_dict(rows, orient="index", columns=wanted, dtype=str)
        return table.rename_axis(ROW), unequal

    def require_rows(self, keys: Sequence[str]) -> None:
        """Refuse a quote that joins rows: a line in a cell with the header's number of delimiters.

        In a key column it has letters and digits where another row has them. Two columns with a comma between them look
        like prose: there two such lines must follow each other.
        """
        lines = io.StringIO(SEPARATOR_LINE.sub("", self.text, count=1), newline="").readlines()
        rows, header = dict(self._lines()), self.header()
        inner = {n: lines[n].split(self.delimiter) for n in {*range(1, len(lines))}.difference(rows)}
        places = [header.index(key) for key in keys if inner]

        def forms(cells: Sequence[str]) -> set[tuple[int, str]]:
            words = [(place, cells[place].strip(' "\r\n')) for place in places if place < len(cells)]
            return {(p, re.sub(r"[^\W\d]", "a", re.sub(r"\d", "0", word))) for p, word in words if word}

        known = set().union(*map(forms, [*rows.values()][1:]))
        alike = [n for n, cells in inner.items() if len(cells) == len(header) and known & forms(cells)]
        step = int((len(header), self.delimiter) == (2, ","))
        if found := [n + 1 for n in alike if n + step in alike]:
            raise UserError(f"{self.file}: line {min(found)} is a row inside of a quote; double that quote")


def unequal_lines(lines: Sequence[str]) -> str:
    """The problem of lines with too many or too few values, as `CsvFile.read` names them."""
    advice = (
        "a value that holds the delimiter or a line break must stand in quotes, and each column needs a name"
    )
    return f"{lines[0]}{and_others(lines[1:])} ({advice})"


def read_table(file: Path, columns: Iterable[str], other_columns: Iterable[str] | None = ()) -> pd.DataFrame:
    """`CsvFile.read` of a downloaded file; None for all its other columns."""
    advice = "download it again"
    table = CsvFile(file, text_of(file, advice), advice)
    if other_columns is None:
        other_columns = [name for name in table.header() if name]
    found, unequal = table.read(columns, other_columns)
    if unequal:
        raise UserError(f"{file}, {unequal_lines(unequal)}; {advice}")
    return found.reset_index(drop=True)


def text_of(file: Path, advice: str = "download it again") -> str:
    """Text of a downloaded file, packed by gzip or not, in UTF-8 or UTF-16."""
    content = unpacked(file, advice)
    if (kind := kind_of_file(content)) not in ("", "JSON"):
        raise UserError(f"{file} is {kind}; {OWN_FILE}")
    try:
        return content.decode(encoding_of(content))
    except UnicodeError as error:
        raise UserError(f"{file} cannot be read ({error}); {advice}") from error


def read_form(file: Path, form: str, read: Callable[[Any], T], lines: bool = False) -> T:
    """`read` of the content of a downloaded JSON file, which has this form; of JSON `lines` a list of them."""
    content = text_of(file)
    if lines:
        content = f"[{','.join(filter(str.strip, content.splitlines()))}]"
    try:
        return read(parse_json(content))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "download it again" if isinstance(error, json.JSONDecodeError) else OWN_FILE
        missing = "nothing named or numbered " if isinstance(error, KeyError) else ""
        raise UserError(
            f"{file}: expected {form}, found another form ({missing}{error}); {advice}"
        ) from error


LABELS = "1, 0, -1 or empty"

OWN_FILE = "take the release's own file, or write yours as it does"
"""Advice where a file is not damaged, but says the same in another way."""


def label_numbers(column: pd.Series) -> pd.Series:
    """Labels as numbers: 1, 0, -1 (uncertain) or NaN (not mentioned); infinity for anything else."""
    known = column.str.extract(r"^(-?1|0)(?:[.,]0+)?$", expand=False).astype("float64")
    return known.mask(known.isna() & (column != ""), math.inf)


def labels_of(column: pd.Series, file: Path) -> pd.Series:
    """`label_numbers` of a column that has nothing else."""
    numbers = label_numbers(column)
    require(column, numbers != math.inf, LABELS, file)
    return numbers


def read_label_table(
    file: Path,
    key: str,
    pattern: str,
    expected: str,
    findings: Iterable[str],
    other_findings: Iterable[str] = (),
) -> pd.DataFrame:
    """A column `key`, each value once and as `expected`, and the labels of findings as numbers."""
    frame = read_table(file, (key, *findings), other_findings)
    is_right = frame[key].str.fullmatch(pattern) & ~frame[key].duplicated()
    require(frame[key], is_right, f"{expected}, each study once", file)
    return frame.assign(**{name: labels_of(frame[name], file) for name in frame.columns.drop(key)})


def require(column: pd.Series, is_right: pd.Series, expected: str, file: Path) -> None:
    is_wrong = ~is_right.astype(bool)
    if is_wrong.any():
        raise UserError(f"{file}, {wrong_values(column, is_wrong, expected)}; {OWN_FILE}")


def wrong_values(column: pd.Series, is_wrong: pd.Series, expected: str) -> str:
    """The problem of a column with wrong values, with their rows where its index is named `ROW`."""
    wrong = column[is_wrong]
    alike: dict[str, list[tuple[str, str]]] = {}
    for value, rows in wrong.groupby(wrong, sort=False, dropna=False):
        numbers = f" in row{'s' * (len(rows) > 1)} {_first([*map(str, rows.index)])}"
        spelling = str(value), numbers if rows.index.name == ROW else ""
        alike.setdefault(plain_number(str(value)), []).append(spelling)
    first, *others = [
        f"{value[:60]!r}{code_points(value) if len(spellings) > 1 else ''}{row_numbers}"
        for spellings in alike.values()
        for value, row_numbers in spellings
    ]
    found = f"{first}{and_others(others)} ({len(wrong):,} of {len(column):,} rows)"
    return f"column {column.name}: expected {expected}, found {found}"


def listed(columns: Iterable[str]) -> str:
    """Names of columns for a message, each shortened: in a table without a header they are a patient's texts."""
    return ", ".join(name if len(name) <= SHORT else f"{name[:SHORT]}..." for name in columns)


def and_others(others: Sequence[str]) -> str:
    """End of a message behind the first case: the number of further cases, and some of them; "" for none."""
    return f", and {len(others):,} more: {_first(others)}" if others else ""


def _first(words: Sequence[str]) -> str:
    return ", ".join([*words[:SHOWN], *["..."] * (len(words) > SHOWN)])
