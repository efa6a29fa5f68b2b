"""Find, read and validate the tables of MIMIC-CXR-JPG and MS-CXR.

Only the version number differs between the file names of releases (``mimic-cxr-2.0.0-split.csv.gz``); unpacked
``.csv`` files work too. Every column that is used is checked before any work begins; what is missing or invalid is a
`ReleaseError`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT

LABELERS = ("chexpert", "negbio")
FRONTAL_VIEWS = ("AP", "PA")
SPLITS = ("train", "validate", "test")

_DICOM_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_RELEASE_FILE = re.compile(r"mimic-cxr-(\d+\.\d+\.\d+)-([a-z]+)\.csv(\.gz)?")
SEPARATOR_LINE = re.compile(r"\Asep=(.)\r?\n")
"""Excel's own first line, which names the delimiter."""
_BOX = ("x", "y", "w", "h", "image_width", "image_height")


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
    """Find the tables of a release in the folder that holds ``files``; `labeler` chooses between `LABELERS`."""
    if not folder.is_dir():
        raise ReleaseError(f"source {folder} is not a folder; --source expects the folder of MIMIC-CXR-JPG")
    found: dict[str, dict[str, Path]] = {}
    # Sorted: of a packed and an unpacked table, the packed one (the original) comes last and is used.
    for file in sorted(folder.iterdir()):
        if match := _RELEASE_FILE.fullmatch(file.name):
            found.setdefault(match[1], {})[match[2]] = file
    wanted = ("metadata", "split", labeler)
    versions = [version for version, tables in found.items() if set(tables) & set(wanted)]
    if len(versions) > 1:
        raise ReleaseError(
            f"{folder} holds tables of the versions {' and '.join(versions)}; keep those of one version"
        )
    version = versions[0] if versions else "2.0.0"
    tables = found.get(version, {})
    missing = [f"mimic-cxr-{version}-{name}.csv.gz" for name in wanted if name not in tables]
    if missing:
        raise ReleaseError(
            f"{folder} lacks {', '.join(missing)} (or .csv); they are next to the folder 'files' on the download "
            "page of MIMIC-CXR-JPG"
        )
    return Release(f"mimic-cxr-{version}", *(tables[name] for name in wanted))


def read_images(release: Release) -> pd.DataFrame:
    """Every image of the release, of any view, sorted by patient, study and image.

    Returns:
        dicom_id, subject_id, study_id, view, rows, columns (pixels by the metadata), official_split, path; study_date
        where the metadata have it.
    """
    columns = ("dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "Columns")
    metadata = read_table(release.metadata, columns, other_columns=("StudyDate",))
    split = read_table(release.split, ("dicom_id", "study_id", "subject_id", "split"))
    for file, frame in ((release.metadata, metadata), (release.split, split)):
        require(frame, "dicom_id", matches(_DICOM_ID), "five groups of eight hex digits", file)
        require(frame, "subject_id", matches(r"\d{8}"), "eight digits", file)
        require(frame, "study_id", matches(r"\d{8}"), "eight digits", file)
        require(frame, "dicom_id", once, "each image once", file)
    for column in ("Rows", "Columns"):
        require(metadata, column, matches(r"[1-9]\d{0,5}"), "a number of pixels", release.metadata)
    require(split, "split", lambda column: column.isin(SPLITS), " | ".join(SPLITS), release.split)
    _require_same_images(metadata, split, release)
    images = metadata.merge(split[["dicom_id", "split"]], on="dicom_id", validate="one_to_one")
    patient, study = images["subject_id"], images["study_id"]
    images["path"] = (
        "files/p" + patient.str[:2] + "/p" + patient + "/s" + study + "/" + images["dicom_id"] + ".jpg"
    )
    images = images.astype({"subject_id": "int64", "study_id": "int64", "Rows": "int64", "Columns": "int64"})
    names = {"ViewPosition": "view", "Rows": "rows", "Columns": "columns", "StudyDate": "study_date"}
    images = images.rename(columns={**names, "split": "official_split"})
    images = images.sort_values(["subject_id", "study_id", "dicom_id"], ignore_index=True)
    patients_of_study = images.groupby("study_id")["subject_id"].nunique()
    if (patients_of_study > 1).any():
        raise ReleaseError(
            f"{release.metadata}: study {patients_of_study.idxmax()} belongs to several patients; the file is damaged"
        )
    return images


def read_labels(release: Release) -> pd.DataFrame:
    """The 14 labels of each study: study_id and `CHEXPERT`, 1, 0, -1 (uncertain) or NaN (not mentioned)."""
    frame = read_table(release.labels, ("study_id", *CHEXPERT))
    require(frame, "study_id", matches(r"\d{8}"), "eight digits", release.labels)
    require(frame, "study_id", once, "each study once", release.labels)
    for finding in CHEXPERT:
        require(frame, finding, lambda column: label_numbers(column) != math.inf, LABELS, release.labels)
        frame[finding] = label_numbers(frame[finding])
    return frame.astype({"study_id": "int64"})[["study_id", *CHEXPERT]]


def read_ms_cxr(file: Path) -> pd.DataFrame:
    """The boxes of MS-CXR 1.0.0 or 1.1.0, from its JSON (COCO) or CSV file, one row each, not yet compared with images.

    Returns:
        box_id (text, unique), dicom_id, subject_id (0 where the file does not say), category, phrase, x, y, w, h
        (pixels of the original image; NaN where the file has no number), image_width, image_height.
    """
    frame = _ms_cxr_json(file) if file.suffix == ".json" else _ms_cxr_csv(file)
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
    frame = read_table(file, columns, other_columns=("path", "subject_id"))
    frame = frame.rename(columns={"category_name": "category", "label_text": "phrase"})
    frame["box_id"] = [f"row {row} {dicom_id}" for row, dicom_id in enumerate(frame["dicom_id"], start=1)]
    return frame.assign(**{name: "" for name in ("path", "subject_id") if name not in frame})


def _ms_cxr_json(file: Path) -> pd.DataFrame:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in content["images"]}
        categories = {category["id"]: category["name"] for category in content["categories"]}
        rows = [
            (
                f"annotation {box['id']} {Path(image['file_name']).stem}",
                Path(image["file_name"]).stem,
                image.get("path", ""),
                image.get("subject_id", ""),
                categories[box["category_id"]],
                box["label_text"],
                *_four(box["bbox"]),
                image["width"],
                image["height"],
            )
            for box in content["annotations"]
            for image in [images[box["image_id"]]]
        ]
    # RecursionError: thousands of nested brackets; ValueError: not JSON or UTF-8, or a number of thousands of digits.
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        missing = "nothing named or numbered " if isinstance(error, KeyError) else ""
        raise ReleaseError(
            f"{file} is not in the format of MS-CXR ({missing}{error}); expected JSON with the COCO keys images, "
            "annotations (image_id, category_id, bbox, label_text) and categories; download it again"
        ) from error
    columns = ("box_id", "dicom_id", "path", "subject_id", "category", "phrase", *_BOX)
    return pd.DataFrame(rows, columns=list(columns))


def _four(box: Any) -> list[Any]:
    if not isinstance(box, list) or len(box) != 4:
        raise TypeError(f"bbox is not a list of x, y, width, height but {box!r}"[:200])
    return box


def truth_files(folder: Path) -> list[Path]:
    """The files of the phantom's truth below a release, for real releases none."""
    truth = folder / "phantom_truth"
    if not truth.is_dir():
        return []
    # The marker is the last file that the generator writes.
    files = [truth / name for name in ("phantom.json", "sentences.csv", "classes.csv", "image_classes.csv")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ReleaseError(
            f"{truth} lacks {', '.join(missing)}: this phantom is unfinished; run its data_prep.phantom command again"
        )
    return files


def phantom_rates(folder: Path) -> dict[str, Any]:
    """Options by which a phantom's rates are not the catalogue's, as its marker names them; {} for all others."""
    file = folder / "phantom_truth" / "phantom.json"
    if not file.is_file():
        return {}
    marker = json.loads(file.read_text(encoding="utf-8"))
    return {name: marker[name] for name in ("false_negatives", "rare_findings") if name in marker}


def read_truth(folder: Path) -> dict[str, pd.DataFrame] | None:
    """The true classes of the phantom's images and sentences; None for a real release.

    Returns:
        "sentences" (text, class_id), "classes" (class_id, rho, sentence_share), "image_classes" (dicom_id, class_id).
    """
    files = truth_files(folder)
    if not files:
        return None
    columns = {
        "sentences": {"text": "object", "class_id": "int64"},
        "classes": {"class_id": "int64", "rho": "float64", "sentence_share": "float64"},
        "image_classes": {"dicom_id": "object", "class_id": "int64"},
    }
    tables = zip(files[1:], columns.items(), strict=True)
    return {name: read_table(file, types).astype(types) for file, (name, types) in tables}


def file_hash(file: Path) -> str:
    """First 16 digits of the SHA-256 of a file, to recognise a table that was used before."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ReleaseError(f"{file} cannot be read ({error.strerror}); put a readable file there") from error


SHOWN = 5
"""Cases that a message lists behind the first one."""

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


@dataclass(frozen=True)
class CsvFile:
    """A CSV file with a header, packed by gzip or not; `advice` says what to do about a damaged one."""

    file: Path
    advice: str = "download it again"
    delimiter: str = ","
    encoding: str = "utf-8-sig"

    def text(self) -> str:
        """The whole content."""
        try:
            unpacked = gzip.open if self.file.suffix == ".gz" else open
            with unpacked(self.file, "rt", encoding=self.encoding, newline="") as stream:
                return str(stream.read())
        except (OSError, EOFError, zlib.error, UnicodeError) as error:
            raise ReleaseError(f"{self.file} cannot be read ({error}); {self.advice}") from error

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        text = SEPARATOR_LINE.sub("", self.text(), count=1)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
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
        self, columns: Iterable[str], other_columns: Iterable[str] = (), wrong: list[str] | None = None
    ) -> pd.DataFrame:
        """The columns as text ("" where empty), and those of the others that are there, by `ROW`.

        Lines with too many or too few values are appended to `wrong`, with their numbers; without it they are an error.
        """
        file, advice, wanted = self.file, self.advice, [*columns]
        lines = self._lines()
        header = [name.strip() for name in next(lines, (1, []))[1]]
        if missing := [column for column in wanted if column not in header]:
            raise ReleaseError(
                f"{file} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"found {', '.join(header) or 'an empty file'}"
            )
        wanted += [column for column in other_columns if column in header and column not in wanted]
        if twice := [column for column in wanted if header.count(column) > 1]:
            raise ReleaseError(f"{file} has the column {twice[0]} twice; {advice}")
        places = [header.index(column) for column in wanted]
        rows, unequal = {}, []
        # A blank line, or an empty row of a spreadsheet, is not a row. One of another length would be shifted, or lose
        # its end.
        for number, (line, row) in enumerate(lines, start=2):
            if any(row) and len(row) == len(header):
                rows[number] = [row[place].strip() for place in places]
            elif any(row):
                unequal.append(f"line {line}: {len(row)} values for {len(header)} columns")
        if wrong is not None:
            wrong += unequal
        elif unequal:
            raise ReleaseError(f"{file}, {unequal_lines(unequal)}; {advice}")
        if not rows:
            raise ReleaseError(f"{file} holds no row; {advice}")
        return pd.DataFrame.from_dict(rows, orient="index", columns=wanted, dtype=str).rename_axis(ROW)


def unequal_lines(lines: Sequence[str]) -> str:
    """The problem of lines with too many or too few values, as `CsvFile.read` names them."""
    return f"{lines[0]}{and_others(lines[1:])} (a value that holds the delimiter or a line break must stand in quotes)"


def read_table(file: Path, columns: Iterable[str], other_columns: Iterable[str] = ()) -> pd.DataFrame:
    """`CsvFile.read` of a downloaded file in UTF-8."""
    return CsvFile(file).read(columns, other_columns).reset_index(drop=True)


LABELS = "1, 0, -1 or empty"


def label_numbers(column: pd.Series) -> pd.Series:
    """Labels as numbers: 1, 0, -1 (uncertain) or NaN (not mentioned); infinity for anything else."""
    known = column.str.extract(r"^(-?1|0)(?:[.,]0+)?$", expand=False).astype("float64")
    return known.mask(known.isna() & (column != ""), math.inf)


def matches(pattern: str) -> Callable[[pd.Series], pd.Series]:
    """Condition for `require`: each whole value matches a regular expression."""
    return lambda column: column.str.fullmatch(pattern)


def once(column: pd.Series) -> pd.Series:
    """Condition for `require`: no value is there twice."""
    return ~column.duplicated()


def require(
    frame: pd.DataFrame,
    column: str,
    holds: Callable[[pd.Series], pd.Series],
    expected: str,
    file: Path,
) -> None:
    """Check every value of a column."""
    right = holds(frame[column]).astype(bool)
    if not right.all():
        raise ReleaseError(
            f"{file}, {wrong_values(frame[column], ~right, expected)}; download the file again"
        )


def wrong_values(column: pd.Series, is_wrong: pd.Series, expected: str) -> str:
    """The problem of a column with wrong values, with their rows where its index is named `ROW`."""
    wrong = column[is_wrong]
    first, *others = [
        f"{str(value)[:60]!r}{_row_numbers(of_value)}" for value, of_value in wrong.groupby(wrong, sort=False)
    ]
    found = f"{first}{and_others(others)} ({len(wrong):,} of {len(column):,} rows)"
    return f"column {column.name}: expected {expected}, found {found}"


def _row_numbers(rows: pd.Series) -> str:
    if rows.index.name != ROW:
        return ""
    numbers = ", ".join(map(str, rows.index[:SHOWN]))
    return f" in row{'s' * (len(rows) > 1)} {numbers}{', ...' if len(rows) > SHOWN else ''}"


def and_others(others: Sequence[str]) -> str:
    """End of a message behind the first case: the number of further cases, and some of them; "" for none."""
    if not others:
        return ""
    some = ", ".join(case[:100] for case in others[:SHOWN])
    return f", and {len(others):,} more: {some}{', ...' if len(others) > SHOWN else ''}"


def _require_same_images(metadata: pd.DataFrame, split: pd.DataFrame, release: Release) -> None:
    both = metadata.merge(split, on="dicom_id", how="outer", suffixes=("", "_split"), indicator=True)
    alone = both[both["_merge"] != "both"]
    if len(alone):
        lacking = release.split if alone["_merge"].iloc[0] == "left_only" else release.metadata
        raise ReleaseError(
            f"{release.metadata.name} and {release.split.name} list different images: {len(alone):,} are in one of "
            f"them only (first: {alone['dicom_id'].iloc[0]}, not in {lacking.name}); take both from one download"
        )
    differs = (both["subject_id"] != both["subject_id_split"]) | (both["study_id"] != both["study_id_split"])
    if differs.any():
        raise ReleaseError(
            f"{release.metadata.name} and {release.split.name} disagree about patient or study of "
            f"{int(differs.sum()):,} images (first: {both.loc[differs, 'dicom_id'].iloc[0]}); take both from one "
            "download"
        )
