"""Prepare a folder of images with a table, as a hospital exports them.

    python -m data_prep.folder --table FILE.csv --output SET [--images DIR]

FILE.csv (or .csv.gz) has a header and one row for each image, in these columns, which options may name otherwise:

    image        path of the image below DIR (the table's own folder), in any format that can be read
    text         the report; or findings and impression, its sections, each in a column of its own
    patient      name or number; all rows of a patient are used for the same purpose
    study        optional, name or number; rows of one study share their report. Without it every row is a study
    view         optional; images of other views than PA, AP and FRONTAL (option --views) are left out
    sex, age     optional, for tables of results by group: F, M, female or male, else unknown; age at the study in
                 years, or as DICOM has it (045Y, 006M), else unknown
    split        optional: train, validate or test. Without it patients are drawn by --split_seed and --split_shares
    Atelectasis, Cardiomegaly, ... (CheXpert's names, in any case): optional labels: 1, 0, -1 (uncertain) or empty;
                 so are the columns of other findings that --label_columns names

With --text_only there are no images, and images.parquet is empty: the set serves the language model, sentence scores
and embeddings, and cannot train or evaluate a model of images. Names of patients and studies that are not whole
numbers get numbers, listed in ``identifiers.csv`` of the set. Nothing is written outside SET; see
`data_prep.sources.preparation`.
"""

from __future__ import annotations

import argparse
import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.command import option, parse_options, run_command
from data_prep.sources import preparation
from data_prep.sources import rows as row_tables
from data_prep.sources.preparation import Source
from data_prep.sources.releases import CsvFile, ReleaseError, labels_as_numbers
from data_prep.sources.rows import PEOPLE, ROW, TEXTS, image_paths, label_columns, rows_source, split_names
from medclip_dcl.data.prepared import TABLES
from medclip_dcl.findings import CHEXPERT

VIEWS = ("PA", "AP", "FRONTAL")
"""Frontal views, in upper or lower case."""

_ADVICE = "fix the table"
_READING_ADVICE = f"{_ADVICE}, or name its --encoding (as cp1252 or utf-16) and its --delimiter"
_COLUMNS = ("image", *TEXTS, "patient", "study", "view", "split", *PEOPLE)
_RESERVED = {*_COLUMNS, "file", *(column for columns in TABLES.values() for column in columns)} - set(
    CHEXPERT
)
"""Names that a finding cannot have."""


def _encoding(text: str) -> str:
    try:
        name = codecs.lookup(text).name
        "".encode(name)
    except (LookupError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a text encoding that Python knows") from error
    return "utf-8-sig" if name == "utf-8" else name


def _delimiter(text: str) -> str:
    text = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r}: expected one character, or tab")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _column(name: str) -> Any:
    return option(f"column of the table ({name})", None, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Settings(row_tables.Settings):
    """Options of the command."""

    table: Path = option("CSV file with a header", type=Path, metavar="FILE")
    images: Path | None = option(
        "folder below which the images lie (the table's)", None, type=Path, metavar="DIR"
    )
    image_column: str | None = _column("image")
    text_column: str | None = _column("text")
    findings_column: str | None = _column("findings")
    impression_column: str | None = _column("impression")
    patient_column: str | None = _column("patient")
    study_column: str | None = _column("study")
    view_column: str | None = _column("view")
    split_column: str | None = _column("split")
    sex_column: str | None = _column("sex")
    age_column: str | None = _column("age")
    label_columns: Sequence[str] = option(
        "columns of labels of other findings than CheXpert's; the columns' names are the findings'",
        (),
        nargs="+",
        metavar="NAME",
    )
    views: tuple[str, ...] = option(
        "frontal views of the view column (PA,AP,FRONTAL)", VIEWS, type=_names, metavar="NAMES"
    )
    delimiter: str = option("between two values (,)", ",", type=_delimiter)
    encoding: str = option("of the table (utf-8)", "utf-8-sig", type=_encoding)

    @property
    def csv(self) -> CsvFile:
        """The table."""
        return CsvFile(self.table, _READING_ADVICE, self.delimiter, self.encoding)


def prepare(settings: Settings) -> None:
    """Prepare a set, finish a broken one, or say that it is finished."""
    if not settings.table.is_file():
        raise ReleaseError(f"--table {settings.table} does not exist; it expects a CSV file with a header")
    columns = _columns(settings)
    made_from = preparation.made_from(
        settings,
        "folder of images with a table" if "image" in columns else "table of reports",
        False,
        [settings.table],
        {
            "columns": columns,
            "split": settings.split_options("split" in columns),
            "views": list(settings.views) if "view" in columns else None,
            "delimiter": settings.delimiter,
            "encoding": settings.encoding,
        },
    )
    preparation.prepare_set(settings, made_from, lambda: _read(settings, columns))


def _columns(settings: Settings) -> dict[str, str]:
    """Content -> name of its column in the table."""
    header = settings.csv.header()
    named = {name: getattr(settings, f"{name}_column") for name in _COLUMNS}
    if settings.text_only and (named["image"] or settings.images or settings.views != VIEWS):
        raise ReleaseError("--text_only has no images: leave out --image_column, --images and --views")
    if settings.text_only and (named["sex"] or named["age"]):
        raise ReleaseError("--text_only has no images to group: leave out --sex_column and --age_column")
    # If an option names one kind of text, the other is not looked up by its default name.
    skipped = {"image", "view", *PEOPLE} if settings.text_only else set()
    if named["text"] is not None:
        skipped |= {"findings", "impression"}
    elif named["findings"] is not None or named["impression"] is not None:
        skipped.add("text")
    columns = {}
    for name in _COLUMNS:
        column = named[name] or name
        if column in header and (named[name] is not None or name not in skipped):
            columns[name] = column
        elif named[name] is not None:
            raise _lacks(settings, column, header, f"--{name}_column names one that is there")
    if "patient" not in columns:
        advice = "without it nothing keeps training and evaluation apart; name it by --patient_column"
        raise _lacks(settings, "patient", header, advice)
    if "image" not in columns and not settings.text_only:
        raise _lacks(settings, "image", header, "name it by --image_column, or pass --text_only")
    if "text" in columns and ("findings" in columns or "impression" in columns):
        raise ReleaseError(
            f"{settings.table} has a column text beside findings or impression; say which to take by --text_column, "
            "or by --findings_column and --impression_column"
        )
    if not set(TEXTS) & set(columns):
        advice = "name it by --text_column, or by --findings_column and --impression_column"
        raise _lacks(settings, "text", header, advice)
    if "view" not in columns and settings.views != VIEWS:
        advice = "--views chooses by it: name it by --view_column, or leave out --views"
        raise _lacks(settings, "view", header, advice)
    return columns | _label_columns(settings, header)


def _label_columns(settings: Settings, header: Sequence[str]) -> dict[str, str]:
    """Findings -> their columns: CheXpert's by name ("pleural_effusion" is "Pleural Effusion"), others as named."""
    found: dict[str, str] = {}
    others = [name for name in settings.label_columns if _plain(name) not in map(_plain, CHEXPERT)]
    for finding in (*CHEXPERT, *others):
        alike = [name for name in header if _plain(name) == _plain(finding)]
        if len(alike) > 1:
            raise ReleaseError(
                f"{settings.table}: expected one column of {finding}, found {' and '.join(alike)}; {_ADVICE}"
            )
        if alike and finding in (*CHEXPERT, *alike):
            found[finding] = alike[0]
    for name in settings.label_columns:
        if name not in found.values():
            raise _lacks(settings, name, header, "--label_columns names columns that are there")
        if name in _RESERVED:
            raise ReleaseError(
                f"{settings.table}: the column {name} of --label_columns has another meaning in a prepared set; "
                "rename it in the table"
            )
    return found


def _plain(name: str) -> str:
    """The same for names that differ in case, spaces and underscores."""
    return " ".join(re.split(r"[\s_]+", name)).strip().lower()


def _lacks(settings: Settings, column: str, header: Sequence[str], advice: str) -> ReleaseError:
    others = [
        sign for sign in ";\t|," if sign != settings.delimiter and len(header) == 1 and sign in header[0]
    ]
    if others:
        advice = f"its columns seem to be separated by {others[0]!r}: say --delimiter"
    return ReleaseError(
        f"{settings.table} lacks the column {column}; found {', '.join(header)[:300] or 'an empty file'}; {advice}"
    )


def _read(settings: Settings, columns: dict[str, str]) -> Source:
    """Read and check the table."""
    file = settings.table
    if unused := [name for name in settings.csv.header() if name not in columns.values()]:
        print(
            f"{file}: columns that are not used: {', '.join(unused)} (--label_columns takes labels of findings)"
        )
    # Two purposes may share a column: a table whose rows are studies of patients that it does not name.
    table = settings.csv.read(dict.fromkeys(columns.values()))
    rows = pd.DataFrame({name: table[column] for name, column in columns.items()})
    # Texts may hold line breaks: these are rows as a spreadsheet counts them, not lines.
    rows.index = pd.RangeIndex(2, len(rows) + 2, name=ROW)
    for finding in [name for name in columns if name not in _COLUMNS]:
        labels_as_numbers(rows, finding, file, _ADVICE)
    if "study" not in rows:
        rows["study"] = [str(row) for row in range(1, len(rows) + 1)]
    rows["split"] = split_names(rows["split"], file) if "split" in rows else ""
    n_images = int((rows["image"] != "").sum()) if "image" in rows else 0
    if "view" in rows:
        views = {view.upper() for view in settings.views}
        is_frontal = rows["view"].str.upper().isin(views) | (rows["image"] == "")
        if not is_frontal.any():
            raise ReleaseError(
                f"{file}: no row has one of the views {', '.join(settings.views)}; found "
                f"{', '.join(sorted(set(rows['view']))[:10])} (option --views)"
            )
        rows = _shared_by_study(rows, is_frontal)[is_frontal]
    rows = rows.assign(**{name: "" for name in ("image", "view") if name not in rows})
    root = settings.images if settings.images is not None else file.parent
    if not settings.text_only and not root.is_dir():
        raise ReleaseError(f"--images {root} is not a folder")
    rows["image"] = image_paths(rows["image"], root, file)
    rows["file"] = [str(root / name) for name in rows["image"]]
    frontal = int((rows["image"] != "").sum())
    return rows_source(
        rows, settings, file, {"images_in_release": n_images, "images_not_frontal": n_images - frontal}
    )


def _shared_by_study(rows: pd.DataFrame, is_frontal: pd.Series) -> pd.DataFrame:
    """Texts, labels, sex and age in all rows of their study: only the row of the lateral image may have the report."""
    rows = rows.copy()
    # Values of a frontal row take precedence.
    order = (~is_frontal).sort_values(kind="stable").index
    study = [rows.loc[order, "patient"], rows.loc[order, "study"]]
    for column in (*TEXTS, *PEOPLE, *label_columns(rows)):
        if column in rows:
            said = rows[column].replace("", None)
            shared = said.loc[order].groupby(study).transform("first").reindex(rows.index)
            rows[column] = rows[column].where(said.notna(), shared)
            if column in (*TEXTS, *PEOPLE):
                rows[column] = rows[column].fillna("")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    prepare(parse_options(Settings, "folder", __doc__, arguments))


if __name__ == "__main__":
    run_command(main)
