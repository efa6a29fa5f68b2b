"""Prepare a folder of images with a table: what a hospital has.

    python -m data_prep.folder --table FILE.csv --output SET [--images DIR]

FILE.csv (or .csv.gz) has a header and one row for each image, in these columns, which options may name otherwise:

    image        path of the image below DIR (the table's own folder), in any format that can be read
    text         the report; or findings and impression, its sections, each in a column of its own
    patient      name or number; all rows of a patient are used for the same purpose
    study        optional, name or number; rows of one study share their report. Without it every row is a study
    view         optional; images of other views than PA, AP and FRONTAL (option --views) are left out
    split        optional: train, validate or test. Without it patients are drawn by --split_seed and --split_shares
    Atelectasis, Cardiomegaly, ... (CheXpert's names, in any case): optional labels: 1, 0, -1 (uncertain) or empty;
                 so are the columns of other findings that --label_columns names

With --text_only there are no images, and images.parquet is empty: the set serves the language model, sentence scores
and embeddings, and cannot train or evaluate a model of images. Names of patients and studies that are no whole numbers
are numbered; ``identifiers.csv`` of the set says how. Nothing is written outside SET; see
`data_prep.sources.preparation`.
"""

from __future__ import annotations

import argparse
import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from data_prep.command import run_command
from data_prep.sources import preparation
from data_prep.sources import rows as row_tables
from data_prep.sources.preparation import Source
from data_prep.sources.releases import ReleaseError, header_of, matches, read_table, require
from data_prep.sources.rows import ROW, TEXTS, image_paths, label_columns, rows_source, split_names
from medclip_dcl.data.prepared import TABLES
from medclip_dcl.findings import CHEXPERT

VIEWS = ("PA", "AP", "FRONTAL")
"""Views that are frontal, whatever the case of their letters."""

_ADVICE = "mend the table"
_READING_ADVICE = f"{_ADVICE}, or name its --encoding (as cp1252 or utf-16) and its --delimiter"
_COLUMNS = ("image", *TEXTS, "patient", "study", "view", "split")
_RESERVED = {*_COLUMNS, "file", *(column for columns in TABLES.values() for column in columns)} - set(
    CHEXPERT
)
"""Names that a finding cannot have."""


@dataclass(frozen=True, kw_only=True)
class Settings(row_tables.Settings):
    """What the command line says.

    Attributes:
        table: the CSV file.
        images: folder of the images; None for the table's own.
        image_column, text_column, findings_column, impression_column, patient_column, study_column, view_column,
            split_column: names in the table; None for the name before "_column".
        label_columns: of labels of findings that are not CheXpert's.
        views: frontal views, where there is a column for it.
        delimiter: between two values of the table.
        encoding: of the table.
    """

    table: Path
    images: Path | None = None
    image_column: str | None = None
    text_column: str | None = None
    findings_column: str | None = None
    impression_column: str | None = None
    patient_column: str | None = None
    study_column: str | None = None
    view_column: str | None = None
    split_column: str | None = None
    label_columns: Sequence[str] = ()
    views: tuple[str, ...] = VIEWS
    delimiter: str = ","
    encoding: str = "utf-8-sig"


def prepare(settings: Settings) -> None:
    """Prepare a set, finish a broken one, or say that it is finished.

    Raises:
        ReleaseError: the table lacks something, or what it holds cannot be right.
        PreparedDataError: the output folder holds another set, or something else.
    """
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
    """What the table holds -> the column's name in it.

    Raises:
        ReleaseError: a column is missing, or it is not clear which holds the text.
    """
    header = header_of(
        settings.table, advice=_READING_ADVICE, delimiter=settings.delimiter, encoding=settings.encoding
    )
    named = {name: getattr(settings, f"{name}_column") for name in _COLUMNS}
    if settings.text_only and named["image"] is not None:
        raise ReleaseError("--text_only has no images: leave out --image_column")
    if settings.text_only and settings.images is not None:
        raise ReleaseError("--text_only has no images: leave out --images")
    if settings.text_only and settings.views != VIEWS:
        raise ReleaseError("--text_only has no images: leave out --views")
    if settings.text_only and settings.memory_map:
        raise ReleaseError("--text_only has no images: leave out --memory_map")
    # Where one kind of text is named, the other is not looked for by its usual name.
    if named["text"] is not None:
        skipped = {"findings", "impression"}
    elif named["findings"] is not None or named["impression"] is not None:
        skipped = {"text"}
    else:
        skipped = set()
    if settings.text_only:
        skipped |= {"image", "view"}
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
        raise _lacks(settings, "image", header, "name it by --image_column, or say --text_only")
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
    """Findings -> their columns: CheXpert's by name ("pleural_effusion" is "Pleural Effusion"), others as named.

    Raises:
        ReleaseError: a finding has several columns; a column of --label_columns is missing, or cannot be a finding.
    """
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
    header = header_of(file, advice=_READING_ADVICE, delimiter=settings.delimiter, encoding=settings.encoding)
    if unused := [name for name in header if name not in columns.values()]:
        print(
            f"{file}: columns that are not used: {', '.join(unused)} (--label_columns takes labels of findings)"
        )
    # Two purposes may share a column: a table whose rows are studies of patients that it does not name.
    table = read_table(
        file,
        dict.fromkeys(columns.values()),
        advice=_READING_ADVICE,
        delimiter=settings.delimiter,
        encoding=settings.encoding,
    )
    rows = pd.DataFrame({name: table[column] for name, column in columns.items()})
    # Texts may hold line breaks: these are rows as a spreadsheet counts them, not lines.
    rows.index = pd.RangeIndex(2, len(rows) + 2, name=ROW)
    for finding in [name for name in columns if name not in _COLUMNS]:
        require(rows, finding, matches(r"(?:-?1(?:\.0)?|0(?:\.0)?)?"), "1, 0, -1 or empty", file, _ADVICE)
        rows[finding] = pd.to_numeric(rows[finding].replace("", None)).astype("float64")
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
    """Texts and labels in all rows of their study: a report may stand beside the lateral image alone."""
    rows = rows.copy()
    # What a frontal row says comes first.
    order = (~is_frontal).sort_values(kind="stable").index
    study = [rows.loc[order, "patient"], rows.loc[order, "study"]]
    for column in (*TEXTS, *label_columns(rows)):
        if column in rows:
            said = rows[column].replace("", None)
            shared = said.loc[order].groupby(study).transform("first").reindex(rows.index)
            rows[column] = rows[column].where(said.notna(), shared)
            if column in TEXTS:
                rows[column] = rows[column].fillna("")
    return rows


def _encoding(text: str) -> str:
    try:
        name = codecs.lookup(text).name
        "".encode(name)
    except (LookupError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no text encoding that Python knows") from error
    return "utf-8-sig" if name == "utf-8" else name


def _delimiter(text: str) -> str:
    text = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r}: expected one character, or tab")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="CSV file with a header")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="folder below which the images lie (the table's)"
    )
    for name in _COLUMNS:
        parser.add_argument(f"--{name}_column", metavar="NAME", help=f"column of the table ({name})")
    parser.add_argument(
        "--label_columns",
        nargs="+",
        default=(),
        metavar="NAME",
        help="columns of labels of other findings than CheXpert's; the columns' names are the findings'",
    )
    parser.add_argument(
        "--views",
        type=lambda text: tuple(view.strip() for view in text.split(",")),
        default=VIEWS,
        metavar="NAMES",
        help="frontal views of the view column (PA,AP,FRONTAL)",
    )
    parser.add_argument("--delimiter", type=_delimiter, default=",", help="between two values (,)")
    parser.add_argument("--encoding", type=_encoding, default="utf-8-sig", help="of the table (utf-8)")
    row_tables.add_arguments(parser)
    prepare(Settings(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    run_command(main)
