"""Fields that an objective asks for by name: numeric columns of a prepared set, and of a Parquet file of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from pandas.api.types import is_bool_dtype, is_integer_dtype
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest_of_file
from medclip_dcl.common.finding_names import NAMES_FILE
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data import signs
from medclip_dcl.data.arrays import Arrays
from medclip_dcl.data.prepared import TABLES, PreparedDataError, PreparedSet, report_embedding
from medclip_dcl.data.ranking import PARTS


def _numeric(*tables: str) -> dict[str, str]:
    return {column: table for table in tables for column, kind in TABLES[table].items() if kind != "str"}


SENTENCE_FIELDS = {
    **_numeric("classes", "log_p", "sentences"),
    "sentence_embedding": "text_embedding",
    "sentence_ranking": "ranking",
    "sentence_posterior": "posterior",
    "signs": "sentences",
}
"""Fields of anchors (sentences) by name -> the table that they stand in."""

IMAGE_FIELDS = {
    **_numeric("labels", "images"),
    **{table: table for table in ("labels", "text_embedding", "image_classes")},
    "report_ranking": "ranking",
    "report_posterior": "posterior",
    "image_row": "images",
    "states": "labels",
}
"""Fields of candidates (images) by name -> the table that they stand in."""


class OwnFields(NamedTuple):
    """Fields of a Parquet file of the user's."""

    file: Path
    key: str
    """Column that says to what a row belongs: sentence_id or dicom_id."""
    columns: pd.DataFrame
    """Numeric columns, by key."""


class FieldFiles(NamedTuple):
    """Files of fields beside the set's tables: stem of each in its folder, None for the only one; and the user's."""

    log_p: str | None = None
    text_embedding: str | None = None
    ranking: str | None = None
    posterior: str | None = None
    own: OwnFields | None = None


class FieldRows:
    """A field by key: one array and the row of each key in it, which the processes of a loader share.

    Args:
        arrays: "value" (row,) or (row, dim), numbers, such as vectors of float16, or `Rows`, such as tokens; "key"
            (row,), int64, ascending: the sentence_id of each row. Without "key" the keys are rows, as the places of
            images; with "row" (key,) too, places whose rows these are: images of one study share its row.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def __getitem__(self, keys: Sequence[int] | np.ndarray) -> Tensor:
        """(key, ...) values of these keys; floating point as float32."""
        found = torch.from_numpy(self.exact(keys))
        return found.float() if found.is_floating_point() else found

    def exact(self, keys: Sequence[int] | np.ndarray) -> Any:
        """(key, ...) values of these keys as they stand in the array; a list of `Rows`."""
        rows = np.asarray(keys, dtype=np.int64)
        if "key" in self.arrays:
            rows = rows_of_keys(self.arrays["key"], rows)
        if "row" in self.arrays:
            rows = self.arrays["row"][rows]
        return self.arrays["value"][rows]


def rows_of_keys(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Place of each key among the known ones, which ascend; a KeyError names one that is not among them."""
    rows = np.searchsorted(known, keys)
    is_other = known[np.minimum(rows, len(known) - 1)] != keys if len(known) else np.ones(len(keys), bool)
    if is_other.any():
        raise KeyError(keys[is_other][0])
    return rows


def read_own_fields(file: str | Path) -> OwnFields:
    """The numeric columns of a Parquet file with one row for each sentence_id, or each dicom_id."""
    file = Path(file).expanduser()
    try:
        frame = pd.read_parquet(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.fields: {file} is not readable as Parquet ({error})") from error
    if frame.index.name is not None:
        frame = frame.reset_index()
    keys = [key for key in ("sentence_id", "dicom_id") if key in frame]
    repeated = [value for key in keys for value in frame.loc[frame[key].duplicated(), key]]
    if len(keys) != 1 or repeated:
        found = f"{len(repeated)} that repeat one (first: {repeated[0]})" if repeated else list(frame.columns)
        raise UserError(
            f"data.fields {file}: expected one column sentence_id or dicom_id, and one row for each of its values, "
            f"found {found}"
        )
    key = keys[0]
    columns = frame.set_index(key).select_dtypes(["number", "bool"], exclude=["timedelta"])
    is_bool = {
        name: "Int64" if columns[name].isna().any() else "int64"
        for name in columns
        if is_bool_dtype(columns[name])
    }
    return OwnFields(file, key, columns.astype(is_bool))


def check_fields(
    of_sentences: Sequence[str],
    of_images: Sequence[str],
    own: OwnFields | None = None,
    findings: Sequence[str] = (),
) -> None:
    """Refuse a field that the objective asks for and no table has, or two have; `findings` are label columns."""
    for kind, key, names, there in (
        ("sentences", "sentence_id", of_sentences, {*SENTENCE_FIELDS}),
        ("images", "dicom_id", of_images, {*IMAGE_FIELDS, *findings}),
    ):
        mine = list(own.columns) if own is not None and own.key == key else []
        for name in names:
            if (name in there) == (name in mine):
                raise UserError(
                    f"the objective asks for a field {name!r} of {kind}; expected it in the prepared set, which has "
                    f"{sorted(there)}, or else in data.fields, a Parquet file, which has {mine} by {key}"
                )


def sentence_field(prepared: PreparedSet, name: str, files: FieldFiles) -> dict[str, np.ndarray]:
    """Arrays of `FieldRows` of a column of the sentence tables, or of the user's.

    sentence_embedding: (sentence, dim), not normalised. sentence_ranking: (sentence, dim + 101), and
    sentence_posterior: (sentence, dim + 1), see `Ranking`. signs: (sentence, finding), of the set's findings by
    `signs.signs`. All others are numbers.
    """
    table = SENTENCE_FIELDS.get(name)
    if name == "sentence_embedding":
        found = prepared.text_embedding(files.text_embedding)
        return {"key": found.sentence_id, "value": found.embedding}
    if table in PARTS:
        ranked = prepared.ranking(getattr(files, table), table)
        return {"key": ranked.sentence_id, "value": ranked.sentences}
    if name == "signs":
        rows = prepared.table("sentences").sort_values("sentence_id")
        read = signs.signs(rows["text"].tolist(), prepared.findings)
        if not read.any():
            raise PreparedDataError(
                f"{prepared.folder}: no sentence names a finding of labels.parquet in English; take another objective"
            )
        return {"key": rows["sentence_id"].to_numpy(), "value": read}
    if table is None:
        column = _own_column(files.own, name, prepared.rows("sentences", ["sentence_id"])["sentence_id"])
    else:
        frame = prepared.log_p(files.log_p) if table == "log_p" else prepared.table(table)
        column = frame.set_index("sentence_id", drop=False)[name]
    column = column.sort_index()
    return {"key": column.index.to_numpy(), "value": column.to_numpy()}


def made_of(prepared: PreparedSet, fields: Mapping[str, str], name: str, files: FieldFiles) -> str:
    """Digest of the file that one of `SENTENCE_FIELDS` or `IMAGE_FIELDS`, or the user's field, stands in.

    "" for a field of the set's tables.
    """
    table = fields.get(name)
    if name == "signs":  # changes with the rules
        return " ".join(map(digest_of_file, (Path(signs.__file__), NAMES_FILE)))
    if table in PARTS:
        return " ".join(map(digest_of_file, prepared.ranking_files(getattr(files, table), table)))
    if table in ("log_p", "text_embedding"):
        return digest_of_file(prepared.file_of_model(table, getattr(files, table)))
    return digest_of_file(files.own.file) if files.own is not None and name in files.own.columns else ""


def image_field(
    prepared: PreparedSet, name: str, files: FieldFiles, images: pd.DataFrame
) -> dict[str, np.ndarray]:
    """Arrays of `FieldRows` of a field of images, (image, ...) in the order of `images`.

    labels: (image, 14), the CheXpert columns of the study, NaN where the labeller says nothing; states: (image,
    finding), those of the set's findings; each label column of the set by its own name (image,). text_embedding:
    (image, dim), the mean of the report's sentence embeddings. report_ranking, report_posterior: (image, dim), the
    report's vector of a `Ranking`. image_classes: (image, class), 1 where the class is true of the image. image_row:
    (image,), the row in images.parquet. All others are columns (image,): integers are int64, others float32.
    """
    if name in ("labels", "states"):
        return {"value": _labels(prepared, images, list(CHEXPERT) if name == "labels" else prepared.findings)}
    if name in prepared.findings or name in CHEXPERT:
        return {"value": _labels(prepared, images, [name])[:, 0]}
    if name == "text_embedding":
        return _report_embeddings(prepared, images, files.text_embedding)
    if (table := IMAGE_FIELDS.get(name)) in PARTS:
        ranked = prepared.ranking(getattr(files, table), table)
        return {"value": ranked.reports, "row": rows_of_keys(ranked.study_id, images["study_id"].to_numpy())}
    if name == "image_classes":
        return {"value": _image_classes(prepared, images)}
    if name == "image_row":
        return {"value": images.index.to_numpy(np.int64)}
    column = images[name] if name in IMAGE_FIELDS else _own_column(files.own, name, images["dicom_id"])
    return {"value": column.to_numpy(np.int64 if is_integer_dtype(column) else np.float32)}


def _own_column(own: OwnFields | None, name: str, keys: pd.Series) -> pd.Series:
    """A column of the user's file for these sentences or images, each of which needs a finite value."""
    assert own is not None  # see `check_fields`
    missing = ~keys.isin(own.columns.index)
    column = own.columns[name].loc[keys[~missing]]
    is_integer = is_integer_dtype(column)
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite there
        values = column.to_numpy(np.float64, na_value=np.nan).astype(np.float32)
    is_bad = ~np.isfinite(values) | (is_integer & (values >= 2.0**63))
    for problem, at in (
        ("no row", keys[missing].tolist()),
        ("no finite value, or no 64-bit integer,", column.index[is_bad].tolist()),
    ):
        if at:
            raise UserError(
                f"data.fields {own.file}: {len(at):,} of {len(keys):,} {own.key} of the prepared set have {problem} "
                f"for {name!r} (first: {at[0]})"
            )
    return column.astype("int64" if is_integer else "float64")


def _labels(prepared: PreparedSet, images: pd.DataFrame, names: list[str]) -> np.ndarray:
    # A few studies of the release have no row: as good as a row of blanks.
    rows = prepared.table("labels").set_index("study_id")[names].reindex(images["study_id"])
    if not rows.notna().any(axis=None):
        raise PreparedDataError(
            f"{prepared.folder}: labels.parquet has no {'CheXpert' if len(names) > 1 else names[0]} label for any of "
            f"{len(rows)} images, and the objective compares studies by their labels; prepare the set from a release "
            "with mimic-cxr-2.0.0-chexpert.csv"
        )
    return rows.to_numpy(np.float32)


def _report_embeddings(
    prepared: PreparedSet, images: pd.DataFrame, name: str | None
) -> dict[str, np.ndarray]:
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(images["study_id"])]
    studies, embedding = report_embedding(prepared.text_embedding(name), reports)
    return {
        "value": embedding,
        "row": np.searchsorted(studies, images["study_id"].to_numpy()).astype(np.int32),
    }


def _image_classes(prepared: PreparedSet, images: pd.DataFrame) -> np.ndarray:
    table = prepared.table("image_classes")
    classes = int(max(table["class_id"].max(), prepared.table("classes")["class_id"].max())) + 1
    row_of = pd.Series(np.arange(len(images)), index=images["dicom_id"])
    table = table[table["dicom_id"].isin(row_of.index)]
    found = np.zeros((len(images), classes), dtype=np.uint8)
    found[row_of[table["dicom_id"]].to_numpy(), table["class_id"].to_numpy()] = 1
    return found
