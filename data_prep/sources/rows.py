"""Make a `Source` from rows of image, text, patient and study, for `folder` and `openi`."""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from data_prep.options import PrepareRows, PrepareSplit
from data_prep.sources import preparation, set_tables
from data_prep.sources.people import ages, sexes
from data_prep.sources.preparation import Source
from data_prep.sources.source_tables import SPLITS, wrong_values
from data_prep.sources.spellings import plain_name, plain_number
from data_prep.sources.splits import draw_split
from data_prep.text.reports import Report
from data_prep.text.sections import Section
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import IDENTIFIERS

TEXTS = ("text", "findings", "impression")
"""Columns of `rows_source` that hold text: a whole report, or its sections."""

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validate", "validation", "valid", "val", "dev"), "validate"),
    **dict.fromkeys(("test", "testing"), "test"),
}
PEOPLE = ("sex", "age")
"""Optional columns of `rows_source`: as the table says them; they may be empty."""

NO_REPORT = "no_report"
"""Optional column of `rows_source`: why a cell of the row is no report, "" for none."""

_IMAGE_COLUMNS = ["dicom_id", "subject_id", "study_id", "view", "official_split", "path", "file"]


@dataclass
class TableCheck:
    """Problems of a table, which one error lists, and the rows that it leaves out.

    With `drop_bad_rows` bad rows are rejects and not problems; it is None where the command has no such option.
    `columns` has the names of columns in the file by their content, where they differ.
    """

    file: Path
    drop_bad_rows: bool | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rejects: list[set_tables.Reject] = field(default_factory=list)

    def require(
        self, rows: pd.DataFrame, column: str, is_right: pd.Series, expected: str, refuse: bool = True
    ) -> pd.DataFrame:
        """The rows that are right; without `refuse` the others are left out in any case, unless none is right."""
        is_right = is_right.astype(bool)
        if is_right.all():
            return rows
        problem = wrong_values(rows[column].rename(self.columns.get(column, column)), ~is_right, expected)
        if (refuse and not self.drop_bad_rows) or not is_right.any():
            self.problems.append(problem)
        else:
            self.warn(f"{problem}; left out")
        for row, image in rows.loc[~is_right, "image"].items():
            reason = f"row {row}, column {self.columns.get(column, column)}: expected {expected}"
            self.rejects.append(("image" if image else "report", image or f"row {row}", reason))
        return rows[is_right] if is_right.any() else rows

    def warn(self, text: str) -> None:
        print(f"warning: {self.file}: {text}", file=sys.stderr)

    def finish(self) -> None:
        """Raise the problems in one `UserError`, if there are any."""
        if not self.problems:
            return
        said = self.problems[0]
        if len(self.problems) > 1:
            numbered = [f"({number}) {problem}" for number, problem in enumerate(self.problems, start=1)]
            said = f"{len(self.problems)} problems: {'; '.join(numbered)}"
        can_drop = self.rejects and self.drop_bad_rows is False
        option = ", or leave out bad rows by --drop_bad_rows" if can_drop else ""
        raise UserError(f"{self.file}: {said}; fix the table{option}")


def rows_source(
    rows: pd.DataFrame, settings: PrepareSplit, check: TableCheck, source_counts: Mapping[str, Any]
) -> Source:
    """A source of rows, without reports if no column is one of `TEXTS`.

    A row is an image, or a report without one, of texts: image (path below ``images/`` of the set without its ending;
    "" for none), file (of the original), patient, study, view, split ("" in all rows: it is drawn), columns of `TEXTS`
    and `PEOPLE`.
    Columns of floats are labels of findings. An index of the name `ROW` says in which row of the file they stand.
    """
    file = check.file
    rows = _with_people(_consistent(rows, check), check)
    check.finish()
    rows = rows.assign(split=_splits(rows, settings, check))
    subject, names_of_patients = _numbers(rows["patient"], "patient")
    study, names_of_studies = _numbers(rows["study"], "study")
    rows = rows.assign(subject_id=subject, study_id=study).rename(columns={"split": "official_split"})
    rows = rows.sort_values(["subject_id", "study_id", "image"], ignore_index=True)
    rows = preparation.take_patients(rows, settings.limit, rows["official_split"])
    images = rows[rows["image"] != ""].reset_index(drop=True)
    rejects = [*check.rejects]
    studies = None
    if isinstance(settings, PrepareRows) and settings.text_only:
        studies = rows.drop_duplicates("study_id")[["study_id", "subject_id", "official_split"]]
        images, wanted = images.iloc[:0], rows
    else:
        has_image = rows["study_id"].isin(images["study_id"])
        alone = rows.loc[~has_image].drop_duplicates("study_id")
        rejects += [("report", study, "its study has no image") for study in alone["study"]]
        wanted = rows[has_image]
        if images.empty:
            raise UserError(f"{file}: no row has a frontal image; for reports alone pass --text_only")
    reports = _reports(wanted, rejects) if {*TEXTS} & {*rows} else None
    identifiers = pd.concat([names_of_patients, names_of_studies])
    images = images.assign(dicom_id=images["image"], path=_prepared_paths(images["image"]))
    return Source(
        images=images[[*_IMAGE_COLUMNS, *(name for name in PEOPLE if name in images)]],
        reports=reports,
        n_reports=len(reports or ()),
        no_reports=f"{file}: no row has any text",
        labels=_labels(rows),
        studies=studies,
        counts=source_counts,
        rejects=rejects,
        study_names=dict(names_of_studies[["number", "name"]].to_numpy().tolist()),
        patient_names=dict(names_of_patients[["number", "name"]].to_numpy().tolist()),
        files={IDENTIFIERS: identifiers.to_csv(index=False, lineterminator="\n")} if len(identifiers) else {},
    )


def _consistent(rows: pd.DataFrame, check: TableCheck) -> pd.DataFrame:
    """Rows with names of their own for patients, studies and images, that agree with the others of their study."""
    rows = check.require(rows, "study", rows["study"] != "", "a name in every row")
    # The patients "7", "007" and "7.0" may be one, in training and in test. Files may differ in case and in zeros.
    for name, plain in (("patient", plain_number), ("study", plain_number), ("image", plain_name)):
        plain_of = {spelling: plain(spelling) for spelling in rows[name].unique()}
        if name != "image":
            is_rounded = rows[name].map(plain_of).str.fullmatch(r"\d(?:[.,]\d+)?e\+\d+")
            rows = check.require(rows, name, ~is_rounded, "all digits (export the numbers as text)")
        is_one = rows[name].groupby(rows[name].map(plain_of)).transform("nunique") == 1
        advice = "write them in the same way if they are the same, or add a letter to one if they are not"
        rows = check.require(rows, name, is_one, f"one way of writing a name ({advice})")
    is_first = ~rows["image"].duplicated(keep=False) | (rows["image"] == "")
    rows = check.require(rows, "image", is_first, "each image once")
    # "a" and "a.jpg" would both become "a.jpg".
    paths = _prepared_paths(rows["image"])
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    is_apart = ~(paths.duplicated(keep=False) | paths.isin(folders)) | (rows["image"] == "")
    rows = check.require(rows, "image", is_apart, "names that differ by more than .jpg at their end")
    for name in ("patient", "split", *TEXTS, *label_columns(rows)):
        if name in rows:
            values = rows[name].replace("", None).groupby(rows["study"]).transform("nunique")
            rows = check.require(rows, "study", values <= 1, f"studies whose rows have one {name}")
    splits = rows.groupby("patient")["split"].transform("nunique")
    return check.require(rows, "patient", splits <= 1, "patients whose rows have one split")


def _prepared_paths(images: pd.Series) -> pd.Series:
    """Paths of the prepared images: the originals' names, with .jpg appended where needed."""
    is_jpeg = images.str.lower().str.endswith((".jpg", ".jpeg")).astype(bool)
    return images.where(is_jpeg, images + ".jpg")


def _splits(rows: pd.DataFrame, settings: PrepareSplit, check: TableCheck) -> pd.Series:
    if (rows["split"] != "").any():
        return rows["split"]
    drawn = draw_split(rows["patient"], settings.shares, settings.seed)
    for split, share in zip(SPLITS, settings.shares, strict=True):
        if share > 0 and not (drawn == split).any():
            # A user's own table alone can have one.
            column = "give the table a column split, or " if check.drop_bad_rows is not None else ""
            raise UserError(
                f"{check.file}: no patient of {rows['patient'].nunique():,} was drawn for {split}; {column}choose "
                "other --split_shares or another --split_seed"
            )
    return drawn


def _numbers(names: pd.Series, kind: str) -> tuple[pd.Series, pd.DataFrame]:
    """Names as whole numbers (themselves if all are such, else their places), and the table of `IDENTIFIERS`."""
    distinct = sorted(set(names))
    if all(re.fullmatch(r"0|[1-9][0-9]{0,17}", name) for name in distinct):
        return names.astype("int64"), pd.DataFrame(columns=["kind", "name", "number"])
    number = {name: place for place, name in enumerate(distinct, start=1)}
    named = pd.DataFrame({"kind": kind, "name": distinct, "number": range(1, len(distinct) + 1)})
    return names.map(number).astype("int64"), named


def _with_people(rows: pd.DataFrame, check: TableCheck) -> pd.DataFrame:
    """Sex and age as a prepared set has them; a column in which no value can be read is a problem."""
    read = {
        "sex": (sexes, "F, M, female or male", "give --sex_values WORD=F,WORD=M"),
        "age": (ages, "years, as 45, or 045Y or 006M as DICOM has them", "say --language de or nl for J."),
    }
    for name, (read_values, expected, remedy) in read.items():
        if name not in rows:
            continue
        values = read_values(rows[name])
        is_unread = (rows[name] != "") & (values.isna() | (values == "unknown"))
        if is_unread.any():
            said = rows[name].str[:20].rename(check.columns.get(name, name))
            problem = wrong_values(said, is_unread, expected)
            # One sex alone beside a frequent word, which may be the other; "45 J." in an unknown language.
            is_alone = name == "sex" and len({*values} - {"unknown"}) == 1 and check.drop_bad_rows is not None
            is_halved = is_alone and said[is_unread].value_counts().iloc[0] >= 0.05 * len(rows)
            is_in_j = said.str.contains(r"\d ?J\.?$", case=False).any()
            if is_halved or is_in_j or (is_unread | (rows[name] == "")).all():
                check.problems.append(f"{problem}; name another column by --{name}_column, or {remedy}")
            else:
                check.warn(f"{problem}; counted as unknown")
        rows = rows.assign(**{name: values})
    return rows


def _reports(rows: pd.DataFrame, rejects: list[set_tables.Reject]) -> list[Report]:
    """One report for each study, in the order of their numbers; a lost cell of one that has others is a reject."""
    names = [name for name in TEXTS if name in rows]
    rows = rows if NO_REPORT in rows else rows.assign(**{NO_REPORT: ""})
    # Rows of a study agree, but for those that say nothing.
    joined = rows.groupby("study_id", as_index=False)[["study", *names, NO_REPORT]].max()
    reports = []
    for study, study_name, *texts, reason in joined.itertuples(index=False):
        sections = [Section(*section) for section in zip(names, texts, strict=True) if section[1]]
        reports.append(Report(int(study), sections=tuple(sections), reason="" if sections else reason))
        if sections and reason:
            rejects.append(("report", study_name, reason))
    return reports


def label_columns(rows: pd.DataFrame) -> list[str]:
    """Columns of rows that hold labels, CheXpert's first."""
    given = rows.select_dtypes("float64").columns.difference([*PEOPLE], sort=False)
    return [*(name for name in CHEXPERT if name in given), *(name for name in given if name not in CHEXPERT)]


def _labels(rows: pd.DataFrame) -> pd.DataFrame:
    """CheXpert's columns and the others of the studies that have any label column; NaN where no row has a value."""
    given = label_columns(rows)
    if not given:
        return pd.DataFrame({"study_id": pd.Series(dtype="int64"), **dict.fromkeys(CHEXPERT, math.nan)})
    labels = rows.groupby("study_id", as_index=False)[given].max()
    findings = dict.fromkeys([*CHEXPERT, *given])
    return labels.reindex(columns=["study_id", *findings]).astype(dict.fromkeys(findings, "float64"))


def with_image_paths(rows: pd.DataFrame, root: Path, check: TableCheck) -> pd.DataFrame:
    """The rows with paths of images below the images' folder in place of the table's names, "" where there is none.

    Names are relative to `root`, or absolute below it, with "/" or "\\" between folders; Excel may write ="a.png".
    """
    names = rows["image"].str.replace(r'^="(.*)"$', r"\1", regex=True)
    paths = names.map(lambda name: _path_below(name, root) if name else "")
    expected = f"paths below {root}, without '..' and with names of at most 200 bytes"
    return check.require(rows, "image", paths.notna(), expected).assign(image=paths.fillna(rows["image"]))


def _path_below(name: str, root: Path) -> str | None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() and path.is_relative_to(root.absolute().as_posix()):
        path = path.relative_to(root.absolute().as_posix())
    # The prepared file has the same name, perhaps with .jpg at its end, and a temporary one before.
    is_long = any(len(part.encode("utf-8", "replace")) > 200 for part in path.parts)
    is_printable = all(c.isprintable() or unicodedata.category(c) in ("Cf", "Zs") for c in name)
    is_wrong = path.is_absolute() or ".." in path.parts or not path.parts or is_long or not is_printable
    return None if is_wrong else str(path)
