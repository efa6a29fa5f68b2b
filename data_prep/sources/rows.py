"""Make a `Source` from rows of image, text, patient and study, for `folder` and `openi`."""

from __future__ import annotations

import argparse
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from data_prep.command import option
from data_prep.sources import preparation, tables
from data_prep.sources.people import ages, sexes
from data_prep.sources.preparation import Source
from data_prep.sources.releases import SHOWN, SPLITS, ReleaseError, and_others, require
from data_prep.text.reports import Report
from data_prep.text.sections import Section
from medclip_dcl.findings import CHEXPERT

TEXTS = ("text", "findings", "impression")
"""Columns of `rows_source` that hold text: a whole report, or its sections."""

SHARES = (0.8, 0.1, 0.1)
"""Of the patients, for train, validate and test, where a source has no split."""

ROW = "row"
"""Name of an index that counts the rows of the file; its header is row 1."""

IDENTIFIERS = "identifiers.csv"
"""In a prepared set: the source's names of patients and studies that are not whole numbers, with their numbers."""

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validate": ("validate", "validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_PATIENT_ADVICE = "put all rows of a patient into one split"
PEOPLE = ("sex", "age")
"""Optional columns of `rows_source`: as the table says them; they may be empty."""

_IMAGE_COLUMNS = ["dicom_id", "subject_id", "study_id", "view", "official_split", "path", "file"]


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or not all(0 <= share <= 1 for share in shares) or not math.isclose(sum(shares), 1):
        raise argparse.ArgumentTypeError(f"{text!r}: expected three shares whose sum is 1, as in 0.8,0.1,0.1")
    return shares


@dataclass(frozen=True, kw_only=True)
class Settings(preparation.Settings):
    """Options of sources that are tables of rows."""

    text_only: bool = option(
        "a set of reports alone: for language models, scores and embeddings of sentences", False
    )
    split_shares: tuple[float, float, float] | None = option(
        "of the patients, for train,validate,test, where there is no split (0.8,0.1,0.1)",
        None,
        type=_shares,
        metavar="SHARES",
    )
    split_seed: int | None = option("of that draw (0)", None, type=int, metavar="SEED")

    def split_options(self, has_split: bool) -> Any:
        """The split, for dataset.json."""
        if not has_split:
            return {"shares": list(self.split_shares or SHARES), "seed": self.split_seed or 0}
        if self.split_shares is not None or self.split_seed is not None:
            raise ReleaseError(
                "--split_shares and --split_seed draw a split, but the table has a column for it; leave them out, or "
                "the column"
            )
        return "column"


def rows_source(
    rows: pd.DataFrame, settings: Settings, file: Path, source_counts: Mapping[str, Any]
) -> Source:
    """A source of rows; `file` names the table in messages.

    A row is an image, or a report without one, of texts: image (path below ``images/`` of the set without its ending;
    "" for none), file (of the original), patient, study, view, split ("" in all rows: it is drawn), columns of `TEXTS`
    and `PEOPLE`.
    Columns of floats are labels of findings. An index of the name `ROW` says in which row of the file they stand.
    """
    _require_consistent(rows, file)
    rows = rows.assign(split=_splits(rows, settings, file))
    subject, names_of_patients = _numbers(rows["patient"], "patient")
    study, names_of_studies = _numbers(rows["study"], "study")
    rows = rows.assign(subject_id=subject, study_id=study).rename(columns={"split": "official_split"})
    rows = rows.sort_values(["subject_id", "study_id", "image"], ignore_index=True)
    rows = preparation.take_patients(rows, settings.limit, rows["official_split"])
    images = rows[rows["image"] != ""].reset_index(drop=True)
    rejects: list[tables.Reject] = []
    studies = None
    if settings.text_only:
        studies = rows.drop_duplicates("study_id")[["study_id", "subject_id", "official_split"]]
        images, wanted = images.iloc[:0], rows
    else:
        has_image = rows["study_id"].isin(images["study_id"])
        alone = rows.loc[~has_image].drop_duplicates("study_id")
        rejects = [("report", str(study), "its study has no image") for study in alone["study_id"]]
        wanted = rows[has_image]
        if images.empty:
            raise ReleaseError(
                f"{file}: no row has a frontal image; for a set of reports alone pass --text_only"
            )
    reports = _reports(wanted)
    identifiers = pd.concat([names_of_patients, names_of_studies])
    images = images.assign(dicom_id=images["image"], path=_prepared_paths(images["image"]))
    return Source(
        images=_with_people(images[[*_IMAGE_COLUMNS, *(name for name in PEOPLE if name in images)]], file),
        reports=reports,
        n_reports=len(reports),
        no_reports=f"{file}: no row has any text",
        labels=_labels(rows),
        studies=studies,
        counts=source_counts,
        rejects=rejects,
        files={IDENTIFIERS: identifiers.to_csv(index=False, lineterminator="\n")} if len(identifiers) else {},
        advice=_PATIENT_ADVICE,
    )


def _require_consistent(rows: pd.DataFrame, file: Path) -> None:
    """Check that rows of a study agree where they are not empty, and that each image occurs once."""
    for column in ("patient", "study"):
        if (rows[column] == "").any():
            nameless = rows[rows[column] == ""]
            raise ReleaseError(
                f"{file}: {len(nameless):,} rows name no {column}{_row_numbers(nameless)}; every row needs one"
            )
        _require_one_spelling(rows[column], column, file)
    _require_apart(rows.loc[rows["image"] != "", "image"], file)
    for column in ("patient", "split", *TEXTS, *label_columns(rows)):
        if column in rows:
            said = rows[(rows[column] != "") & rows[column].notna()]
            differing = said.groupby("study")[column].nunique()
            if (differing > 1).any():
                first, *others = differing.index[differing > 1]
                raise ReleaseError(
                    f"{file}: {len(others) + 1:,} studies have rows that disagree about {column} (first: "
                    f"study {first}){and_others(others)}; rows of one study must agree"
                )


def _row_numbers(rows: pd.DataFrame | pd.Series) -> str:
    """Row numbers in the file, if the index has them."""
    if rows.index.name != ROW:
        return ""
    numbers = ", ".join(str(number) for number in rows.index[:SHOWN])
    return f" (row{'s' * (len(rows) > 1)} {numbers}{', ...' if len(rows) > SHOWN else ''})"


def _require_one_spelling(names: pd.Series, kind: str, file: Path) -> None:
    """Require one spelling of a number: the patients "7", "007" and "7.0" may be one, in training and in test."""
    distinct = pd.Series(names.unique(), dtype=str)
    number = distinct.str.extract(r"^0*([0-9]+)(?:\.0+)?$", expand=False)
    first = distinct.groupby(number).transform("first")
    pairs = [
        f"{a!r} beside {b!r}" for a, b in zip(first, distinct, strict=True) if a != b and isinstance(a, str)
    ]
    if pairs:
        raise ReleaseError(
            f"{file}: expected one way of writing the number of a {kind}, found {pairs[0]}{and_others(pairs[1:])}; "
            "write both in the same way if they are the same, or add a letter to one of them if they are not"
        )


def _require_apart(images: pd.Series, file: Path) -> None:
    """Check that each image occurs once, and has a prepared file of its own."""
    twice = images[images.duplicated(keep=False)].groupby(images, sort=False)
    if repeated := [f"{image!r} again{_row_numbers(rows)}" for image, rows in twice]:
        raise ReleaseError(
            f"{file}: expected each image once, found {repeated[0]}{and_others(repeated[1:])}; leave one row of each"
        )
    # "a" and "a.jpg" would both become "a.jpg".
    paths = _prepared_paths(images)
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    shared = paths.duplicated(keep=False) | paths.isin(folders)
    if shared.any():
        first, *others = map(str, paths[shared].unique())
        names = images[(paths == first) | images.str.startswith(f"{first}/")]
        raise ReleaseError(
            f"{file}: expected images that have prepared files of their own, found {names.iloc[0]!r} and "
            f"{names.iloc[1]!r}, which both need {first!r}{and_others(others)}; rename one of them, in the folder "
            "and in the table"
        )


def _prepared_paths(images: pd.Series) -> pd.Series:
    """Paths of the prepared images: the originals' names, with .jpg appended where needed."""
    is_jpeg = images.str.lower().str.endswith((".jpg", ".jpeg")).astype(bool)
    return images.where(is_jpeg, images + ".jpg")


def split_names(column: pd.Series, file: Path) -> pd.Series:
    """train, validate or test, by the names that are usual for them."""
    known = {name: split for split, names in _SPLIT_NAMES.items() for name in names}
    splits = column.str.lower().map(known)
    require(
        column.to_frame("split"), "split", lambda _: splits.notna(), " | ".join(SPLITS), file, "fix the table"
    )
    return splits


def _splits(rows: pd.DataFrame, settings: Settings, file: Path) -> pd.Series:
    if (rows["split"] != "").any():
        return rows["split"]
    shares = settings.split_shares or SHARES
    drawn = draw_split(rows["patient"], shares, settings.split_seed or 0)
    for split, share in zip(SPLITS, shares, strict=True):
        if share > 0 and not (drawn == split).any():
            raise ReleaseError(
                f"{file}: of {rows['patient'].nunique():,} patients none was drawn for {split}; give the table a "
                "column split, or choose other --split_shares or another --split_seed"
            )
    return drawn


def draw_split(patients: pd.Series, shares: Sequence[float], seed: int) -> pd.Series:
    """Draw train, validate or test for each patient, by a hash of seed and name.

    A patient's split depends on nothing else: it stays when the table grows.
    """
    bounds = (shares[0], shares[0] + shares[1])

    def draw(name: str) -> str:
        place = int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:13], 16) / 16**13
        return SPLITS[sum(place >= bound for bound in bounds)]

    return patients.map({name: draw(name) for name in patients.unique()})


def _numbers(names: pd.Series, kind: str) -> tuple[pd.Series, pd.DataFrame]:
    """Names as whole numbers: themselves if all are such, else counted from 1 in the order of the names.

    Returns:
        the numbers; and the table of `IDENTIFIERS`, empty where the names are numbers.
    """
    distinct = sorted(set(names))
    if all(re.fullmatch(r"0|[1-9][0-9]{0,17}", name) for name in distinct):
        return names.astype("int64"), pd.DataFrame(columns=["kind", "name", "number"])
    number = {name: place for place, name in enumerate(distinct, start=1)}
    named = pd.DataFrame({"kind": kind, "name": distinct, "number": range(1, len(distinct) + 1)})
    return names.map(number).astype("int64"), named


def _with_people(images: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Sex and age as a prepared set has them; a column in which no value can be read is an error."""
    read = {
        "sex": (sexes, "F, M, female or male"),
        "age": (ages, "years, as 45, or 045Y or 006M as DICOM has them"),
    }
    for name, (read_values, expected) in read.items():
        if name not in images:
            continue
        said, values = images[name], read_values(images[name])
        is_known = values.notna() & (values != "unknown")
        if (said != "").any() and not is_known.any():
            found = ", ".join(repr(value[:20]) for value in said[said != ""].unique()[:SHOWN])
            raise ReleaseError(
                f"{file}: expected {expected} in the column of {name}, found {found}; fix the table, or name another "
                f"column by --{name}_column"
            )
        images = images.assign(**{name: values})
    return images


def _reports(rows: pd.DataFrame) -> list[Report]:
    """One report for each study, in the order of their numbers."""
    names = [name for name in TEXTS if name in rows]
    # Rows of a study agree, but for those that say nothing.
    joined = rows.groupby("study_id", as_index=False)[names].max()
    reports = []
    for study, *texts in joined.itertuples(index=False):
        if names == ["text"] and texts[0]:
            reports.append(Report(int(study), content=texts[0].encode()))
        else:
            sections = [Section(*section) for section in zip(names, texts, strict=True) if section[1]]
            reports.append(Report(int(study), sections=tuple(sections)))
    return reports


def label_columns(rows: pd.DataFrame) -> list[str]:
    """Columns of rows that hold labels, CheXpert's first."""
    given = rows.select_dtypes("float64").columns
    return [*(name for name in CHEXPERT if name in given), *(name for name in given if name not in CHEXPERT)]


def _labels(rows: pd.DataFrame) -> pd.DataFrame:
    """CheXpert's columns and the others of the studies that have any label column; NaN where no row has a value."""
    given = label_columns(rows)
    if not given:
        return pd.DataFrame({"study_id": pd.Series(dtype="int64"), **dict.fromkeys(CHEXPERT, math.nan)})
    labels = rows.groupby("study_id", as_index=False)[given].max()
    findings = dict.fromkeys([*CHEXPERT, *given])
    return labels.reindex(columns=["study_id", *findings]).astype(dict.fromkeys(findings, "float64"))


def image_paths(names: pd.Series, root: Path, file: Path) -> list[str]:
    """Paths of images below the images' folder, as a table names them, "" where there is none.

    Names are relative to `root`, or absolute below it, with "/" or "\\" between folders. One error lists all others.
    """
    paths = [_path_below(name, root) if name else "" for name in names]
    wrong = [repr(name[:80]) for name, path in zip(names, paths, strict=True) if path is None]
    if wrong:
        raise ReleaseError(
            f"{file}: image {wrong[0]} is not a path below {root}; expected paths relative to --images, without "
            f"'..' and with names of at most 200 bytes{and_others(wrong[1:])}"
        )
    return [path or "" for path in paths]


def _path_below(name: str, root: Path) -> str | None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() and path.is_relative_to(root.absolute().as_posix()):
        path = path.relative_to(root.absolute().as_posix())
    # The prepared file has the same name, perhaps with .jpg at its end, and a temporary one before.
    is_long = any(len(part.encode("utf-8", "replace")) > 200 for part in path.parts)
    is_wrong = path.is_absolute() or ".." in path.parts or not path.parts or is_long or not name.isprintable()
    return None if is_wrong else str(path)
