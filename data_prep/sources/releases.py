"""Find, read and check the tables of MIMIC-CXR-JPG and MS-CXR, and CSV files of any source.

Every column that is used is checked before any work begins; what is missing or invalid is a `ReleaseError`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from data_prep.sources.spellings import code_points, plain_number
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import encoding_of, kind_of_file, parse_json
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.runs.saved import read_json

T = TypeVar("T")
FRONTAL_VIEWS = ("AP", "PA")
SPLITS = ("train", "validate", "test")

_DICOM_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_NUMBER = r"[0-9]{8}"
SEPARATOR_LINE = re.compile(r"\Asep=(.)\r?\n")
"""Excel's own first line, which names the delimiter."""
_BOX = ("x", "y", "w", "h", "image_width", "image_height")
_COCO = "the COCO keys images, annotations (image_id, category_id, bbox, label_text) and categories"


class ReleaseError(UserError):
    """A file of a release is missing or invalid; the message says what to do."""


@dataclass(frozen=True)
class Release:
    """A release in the layout of MIMIC-CXR-JPG: its name with the version ("mimic-cxr-2.0.0"), and its tables."""

    name: str
    metadata: Path
    split: Path
    labels: Path


def find_release(folder: Path, labeler: str = "chexpert") -> Release:
    """Find the tables of a release in the folder that holds ``files``; `labeler`: chexpert or negbio."""
    if folder.is_file():
        found = kind_of_file(folder) or "a file"
        raise ReleaseError(f"--source {folder} is {found}; expected the folder of MIMIC-CXR-JPG, unpacked")
    tables: dict[str, Path] = {}
    names: set[str] = set()
    for kind in ("metadata", "split", labeler):
        # Of a packed and an unpacked table, the packed one (the original) is used.
        for end in ("csv", "csv.gz"):
            for file in folder.glob(f"mimic-cxr-*-{kind}.{end}"):
                tables[kind] = file
                names.add(file.name.partition(f"-{kind}.csv")[0])
    if len(names) != 1 or len(tables) != 3:
        found = ", ".join(sorted(file.name for file in folder.glob("mimic-cxr-*.csv*"))) or "none"
        raise ReleaseError(
            f"--source {folder}: expected mimic-cxr-2.0.0-{{metadata,split,{labeler}}}.csv.gz (or .csv), of one "
            f"version, found {found}; they are next to the folder 'files' on the download page of MIMIC-CXR-JPG"
        )
    return Release(names.pop(), *tables.values())


def read_images(release: Release) -> pd.DataFrame:
    """Every image of the release, of any view, sorted by patient, study and image.

    Returns:
        dicom_id, subject_id, study_id, view, rows, columns (pixels by the metadata), official_split, path; study_date
        where the metadata have it.
    """
    keys = ["dicom_id", "subject_id", "study_id"]
    metadata = read_table(
        release.metadata, (*keys, "ViewPosition", "Rows", "Columns"), other_columns=("StudyDate",)
    )
    split = read_table(release.split, (*keys, "split"))
    for file, frame in ((release.metadata, metadata), (release.split, split)):
        is_right = frame["dicom_id"].str.fullmatch(_DICOM_ID) & ~frame["dicom_id"].duplicated()
        require(frame["dicom_id"], is_right, "five groups of eight hex digits, each image once", file)
        for column in ("subject_id", "study_id"):
            require(frame[column], frame[column].str.fullmatch(_NUMBER), "eight digits", file)
    for column in ("Rows", "Columns"):
        is_right = metadata[column].str.fullmatch(r"[1-9]\d{0,5}")
        require(metadata[column], is_right, "a number of pixels", release.metadata)
    require(split["split"], split["split"].isin(SPLITS), " | ".join(SPLITS), release.split)
    images = metadata.merge(split, on=keys, how="outer", indicator="place")
    alone = images[images["place"] != "both"]
    if len(alone):
        raise ReleaseError(
            f"{release.metadata.name} and {release.split.name}: expected the same images, patients and studies, found "
            f"{len(alone):,} rows in one of them only (first: {alone['dicom_id'].iloc[0]}); take both from one download"
        )
    patients = images.groupby("study_id")["subject_id"].transform("nunique")
    require(images["study_id"], patients == 1, "studies of one patient", release.metadata)
    patient, study = images["subject_id"], images["study_id"]
    images["path"] = (
        "files/p" + patient.str[:2] + "/p" + patient + "/s" + study + "/" + images["dicom_id"] + ".jpg"
    )
    images = images.astype({"subject_id": "int64", "study_id": "int64", "Rows": "int64", "Columns": "int64"})
    names = {"ViewPosition": "view", "Rows": "rows", "Columns": "columns", "StudyDate": "study_date"}
    images = images.rename(columns={**names, "split": "official_split"})
    return images.sort_values(["subject_id", "study_id", "dicom_id"], ignore_index=True)


def read_labels(release: Release) -> pd.DataFrame:
    """The 14 labels of each study: study_id and `CHEXPERT`, 1, 0, -1 (uncertain) or NaN (not mentioned)."""
    frame = read_label_table(release.labels, "study_id", _NUMBER, "eight digits", CHEXPERT)
    return frame.astype({"study_id": "int64"})


def radiologist_table(folder: Path) -> Path:
    """The labels of test studies by a radiologist, which MIMIC-CXR-JPG 2.1.0 has."""
    if files := sorted(folder.glob("mimic-cxr-*-test-set-labeled.csv*")):
        return files[-1]
    raise ReleaseError(
        f"--test_labels radiologist: expected mimic-cxr-2.1.0-test-set-labeled.csv in {folder}, found none; "
        "MIMIC-CXR-JPG 2.1.0 has it beside the other tables"
    )


def with_radiologist(labels: pd.DataFrame, file: Path, tested: Iterable[int]) -> pd.DataFrame:
    """Labels in which those of the studies of the test split are a radiologist's; others of that split have none."""
    names = (*CHEXPERT, "Airspace Opacity")
    read = read_label_table(file, "study_id", _NUMBER, "eight digits", (), names).astype(
        {"study_id": "int64"}
    )
    given = ", ".join(read.columns.drop("study_id")) or "none"
    read = read.rename(columns={"Airspace Opacity": "Lung Opacity"})
    if given == "none" or not read.columns.is_unique:
        raise ReleaseError(f"{file}: expected a column for each finding of CheXpert, found {given}")
    test_studies = {*tested}
    is_tested = read["study_id"].isin(test_studies)
    if not is_tested.any():
        raise ReleaseError(
            f"{file}: expected studies of the official test split, found none; take it from the release of the images"
        )
    missing = ", ".join(name for name in CHEXPERT if name not in read)
    others = f"; rows of other studies, not used: {(~is_tested).sum():,}" if not is_tested.all() else ""
    print(
        f"note: labels of test by {file.name}, which labels {f'all findings but {missing}' if missing else 'all'}: "
        f"{is_tested.sum():,} of {len(test_studies):,} studies, the others have none{others}",
        file=sys.stderr,
    )
    return pd.concat([labels[~labels["study_id"].isin(test_studies)], read[is_tested]], ignore_index=True)


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


def read_ms_cxr(file: Path) -> pd.DataFrame:
    """The boxes of MS-CXR 1.0.0 or 1.1.0, from its JSON (COCO) or CSV file, one row each, not yet compared with images.

    Returns:
        box_id (text, unique), dicom_id, subject_id (0 where the file does not say), split (as 1.1.0 says it, else ""),
        category, phrase, x, y, w, h (pixels of the original image; NaN where the file has no number), image_width,
        image_height.
    """
    frame = read_form(file, _COCO, _ms_cxr_json) if file.suffix == ".json" else _ms_cxr_csv(file)
    for column in _BOX:
        frame[column] = pd.to_numeric(frame[column], errors="coerce").astype("float64")
    for column in ("dicom_id", "category", "phrase"):
        # JSON's null must not become the phrase "None".
        frame[column] = frame[column].map(
            lambda text: " ".join(text.split()) if isinstance(text, str) else ""
        )
    # Version 1.1.0 names the patient; 1.0.0 only has them in the image's path.
    in_path = pd.to_numeric(frame["path"].astype(str).str.extract(r"/p(\d{8})/", expand=False))
    named = pd.to_numeric(frame["subject_id"], errors="coerce").where(
        lambda number: number.between(1, 99_999_999)
    )
    frame["subject_id"] = named.fillna(in_path).fillna(0).astype("int64")
    return frame.drop(columns="path")


def _ms_cxr_csv(file: Path) -> pd.DataFrame:
    columns = ("dicom_id", "category_name", "label_text", *_BOX)
    frame = read_table(file, columns, other_columns=("path", "subject_id", "split"))
    frame = frame.rename(columns={"category_name": "category", "label_text": "phrase"})
    frame["box_id"] = [f"row {row} {dicom_id}" for row, dicom_id in enumerate(frame["dicom_id"], start=1)]
    return frame.assign(**{name: "" for name in ("path", "subject_id", "split") if name not in frame})


def _ms_cxr_json(content: Any) -> pd.DataFrame:
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"]: category["name"] for category in content["categories"]}
    rows = []
    for box in content["annotations"]:
        image, (x, y, w, h) = images[box["image_id"]], box["bbox"]
        dicom_id = Path(image["file_name"]).stem
        rows.append(
            {
                "box_id": f"annotation {box['id']} {dicom_id}",
                "dicom_id": dicom_id,
                "path": image.get("path", ""),
                "subject_id": image.get("subject_id", ""),
                "split": str(image.get("split") or box.get("split") or ""),
                "category": categories[box["category_id"]],
                "phrase": box["label_text"],
                **dict(zip(_BOX, (x, y, w, h, image["width"], image["height"]), strict=True)),
            }
        )
    columns = ("box_id", "dicom_id", "path", "subject_id", "split", "category", "phrase", *_BOX)
    return pd.DataFrame(rows, columns=list(columns))


def truth_files(folder: Path) -> list[Path]:
    """The files of the phantom's truth below a release, for real releases none."""
    truth = folder / "phantom_truth"
    names = ("phantom.json", "sentences.csv", "classes.csv", "image_classes.csv")
    return [truth / name for name in names] if truth.is_dir() else []


def phantom_rates(folder: Path) -> dict[str, Any]:
    """Options by which a phantom's rates are not the catalogue's, as its marker names them; {} for all others."""
    file = folder / "phantom_truth" / "phantom.json"
    if not file.is_file():
        return {}
    marker = read_json(file, "generate the phantom again")
    return {name: marker[name] for name in ("false_negatives", "rare_findings") if name in marker}


def read_truth(folder: Path) -> dict[str, pd.DataFrame] | None:
    """The true classes of the phantom's images and sentences; None for a real release.

    Returns:
        "sentences" (text, class_id), "classes" (class_id, rho, sentence_share), "image_classes" (dicom_id, class_id).
    """
    columns = {
        "sentences": {"text": "object", "class_id": "int64"},
        "classes": {"class_id": "int64", "rho": "float64", "sentence_share": "float64"},
        "image_classes": {"dicom_id": "object", "class_id": "int64"},
    }
    files = truth_files(folder)[1:]
    found = {file.stem: read_table(file, columns[file.stem]).astype(columns[file.stem]) for file in files}
    return found or None


def file_hash(file: Path) -> str:
    """First 16 digits of the SHA-256 of a file, to recognise a table that was used before."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ReleaseError(f"{file} cannot be read ({error.strerror}); put a readable file there") from error


SHOWN = 5
"""Cases that a message lists behind the first one."""

MAX_CELL = 2**17
"""Characters of a cell that is used."""

ROW = "row"
"""Name of an index that counts the rows of a file; its header is row 1."""

PLACEHOLDER = (
    r"-?nan|\(?null\)?|nil|none|n/?a|n\.a|<na>|nat|\\n|#n/?[av]|#[a-z/]+0?[!?]|undefined|missing|unk(?:nown)?|unbekannt"
    r"|anonym(?:ous|i[sz]ed)"
)
"""Words of exports and spreadsheets that alone in a cell stand for a missing value."""


def is_placeholder(column: pd.Series) -> pd.Series:
    """True for cells that hold a `PLACEHOLDER` alone."""
    return column.str.strip(" .").str.fullmatch(PLACEHOLDER, case=False).astype(bool)


MAX_BYTES = 2**30
"""Of a table, unpacked: it is read as a whole, which takes several times its size in memory, and a few megabytes of a
damaged or hostile archive may unpack to any size."""


def unpacked(file: Path, advice: str) -> bytes:
    """Content of a file, packed by gzip or not; `advice` says what to do about a damaged one."""
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(2) == b"\x1f\x8b"
        with (gzip.open if is_packed else open)(file, "rb") as stream:
            content = bytes(stream.read(MAX_BYTES + 1))
    except FileNotFoundError as error:
        raise ReleaseError(f"{file} cannot be read ({error.strerror}); correct its path") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ReleaseError(f"{file} cannot be read ({error}); {advice}") from error
    if len(content) > MAX_BYTES:
        raise ReleaseError(
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
            raise ReleaseError(f"{place} cannot be read ({error}); {self.advice}") from error

    def header(self) -> list[str]:
        """The column names."""
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
            raise ReleaseError(
                f"{file} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"found {', '.join(header) or 'an empty file'}"
            )
        wanted += [column for column in other_columns if column in header and column not in wanted]
        if twice := [column for column in wanted if header.count(column) > 1]:
            raise ReleaseError(f"{file} has the column {twice[0]} twice; {advice}")
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
            raise ReleaseError(f"{file} holds no row; {advice}")
        table = pd.DataFrame.from_dict(rows, orient="index", columns=wanted, dtype=str)
        return table.rename_axis(ROW), unequal


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
        raise ReleaseError(f"{file}, {unequal_lines(unequal)}; {advice}")
    return found.reset_index(drop=True)


def text_of(file: Path, advice: str = "download it again") -> str:
    """Text of a downloaded file, packed by gzip or not, in UTF-8 or UTF-16."""
    content = unpacked(file, advice)
    if (kind := kind_of_file(content)) not in ("", "JSON"):
        raise ReleaseError(f"{file} is {kind}; {OWN_FILE}")
    try:
        return content.decode(encoding_of(content))
    except UnicodeError as error:
        raise ReleaseError(f"{file} cannot be read ({error}); {advice}") from error


def read_form(file: Path, form: str, read: Callable[[Any], T]) -> T:
    """`read` of the content of a downloaded JSON file, which has this form."""
    content = text_of(file)
    try:
        return read(parse_json(content))
    except ReleaseError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "download it again" if isinstance(error, json.JSONDecodeError) else OWN_FILE
        missing = "nothing named or numbered " if isinstance(error, KeyError) else ""
        raise ReleaseError(
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


def require(column: pd.Series, is_right: pd.Series, expected: str, file: Path) -> None:
    """Check every value of a column."""
    is_wrong = ~is_right.astype(bool)
    if is_wrong.any():
        raise ReleaseError(f"{file}, {wrong_values(column, is_wrong, expected)}; {OWN_FILE}")


def wrong_values(column: pd.Series, is_wrong: pd.Series, expected: str) -> str:
    """The problem of a column with wrong values, with their rows where its index is named `ROW`."""
    wrong = column[is_wrong]
    alike: dict[str, list[tuple[str, str]]] = {}
    for value, of_value in wrong.groupby(wrong, sort=False, dropna=False):
        alike.setdefault(plain_number(str(value)), []).append((str(value), _row_numbers(of_value)))
    first, *others = [
        f"{value[:60]!r}{code_points(value) if len(spellings) > 1 else ''}{row_numbers}"
        for spellings in alike.values()
        for value, row_numbers in spellings
    ]
    found = f"{first}{and_others(others)} ({len(wrong):,} of {len(column):,} rows)"
    return f"column {column.name}: expected {expected}, found {found}"


def _row_numbers(rows: pd.Series) -> str:
    if rows.index.name != ROW:
        return ""
    return f" in row{'s' * (len(rows) > 1)} {_first([*map(str, rows.index)])}"


def and_others(others: Sequence[str]) -> str:
    """End of a message behind the first case: the number of further cases, and some of them; "" for none."""
    return f", and {len(others):,} more: {_first(others)}" if others else ""


def _first(words: Sequence[str]) -> str:
    return ", ".join([*words[:SHOWN], *["..."] * (len(words) > SHOWN)])
