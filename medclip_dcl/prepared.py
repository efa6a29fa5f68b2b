"""The format of a prepared data set: one folder that `data_prep` writes and everything later reads.

The tables and their columns are listed in `TABLES`; `dataset.json` names the format version, the source, every
option that the content depends on, counts and a fingerprint of the content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from medclip_dcl.findings import CHEXPERT

FORMAT_VERSION = 1

TABLES: dict[str, dict[str, str]] = {
    "images": {
        "dicom_id": "str",
        "subject_id": "int64",
        "study_id": "int64",
        "view": "str",
        "official_split": "str",
        "use": "str",
        "path": "str",
        "height": "int64",
        "width": "int64",
    },
    "sentences": {"sentence_id": "int64", "text": "str", "n_reports": "int64"},
    "reports": {"study_id": "int64", "section": "str", "position": "int64", "sentence_id": "int64"},
    "labels": {"study_id": "int64", **dict.fromkeys(CHEXPERT, "float64")},
    "chex5": {"dicom_id": "str", "finding": "str", "label": "int64", "use": "str"},
    "boxes": {
        "dicom_id": "str",
        "category": "str",
        "phrase": "str",
        "x": "float64",
        "y": "float64",
        "w": "float64",
        "h": "float64",
    },
    "classes": {"sentence_id": "int64", "class_id": "int64", "rho": "float64", "sentence_share": "float64"},
    "image_classes": {"dicom_id": "str", "class_id": "int64"},
    "log_p": {"sentence_id": "int64", "n_tokens": "int64", "log_p": "float64"},
}
"""Table name -> column -> type ("str" columns hold no missing values)."""

USES = ("train", "validate", "test", "grounding", "excluded")

_MADE_BY = {
    "boxes": "python -m data_prep.mimic_cxr with --ms_cxr FILE",
    "classes": "python -m data_prep.mimic_cxr on a phantom release (only there the truth is known)",
    "image_classes": "python -m data_prep.mimic_cxr on a phantom release (only there the truth is known)",
    "log_p": "python -m data_prep.score_sentences --data SET --model FOLDER",
}


class PreparedDataError(ValueError):
    """A prepared data set is missing, broken, or not what the caller needs; the message says what to do."""


def check_table(frame: pd.DataFrame, table: str) -> None:
    """Compare a table's columns and types with `TABLES`.

    Raises:
        PreparedDataError: a column is missing, unknown, of another type, or holds missing text.
    """
    expected = TABLES[table]
    if list(frame.columns) != list(expected):
        raise PreparedDataError(
            f"table {table}: expected the columns {list(expected)}, found {list(frame.columns)}"
        )
    for column, kind in expected.items():
        found = frame[column].dtype
        if kind == "str":
            is_right = all(isinstance(value, str) for value in frame[column])
        else:
            is_right = str(found) == kind
        if not is_right:
            raise PreparedDataError(f"table {table}, column {column}: expected {kind}, found {found}")


def write_table(frame: pd.DataFrame, file: Path, table: str) -> None:
    """Write a table of the prepared set as Parquet: checked, then under a temporary name, then renamed.

    Raises:
        PreparedDataError: the frame does not have the columns and types of `TABLES[table]`.
    """
    check_table(frame, table)
    write_parquet(frame, file)


def write_parquet(frame: pd.DataFrame, file: Path) -> None:
    """Write any frame as Parquet, atomically; the folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    frame.to_parquet(temporary, index=False)
    os.replace(temporary, file)


def write_text(text: str, file: Path) -> None:
    """Write a text file, atomically; the folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def write_json(value: Mapping[str, Any], file: Path) -> None:
    """Write strict JSON with sorted keys, atomically.

    Raises:
        ValueError: a number is NaN or infinite (JSON has neither; write null).
    """
    write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", file)


class PreparedSet:
    """A prepared data set, opened for reading.

    Args:
        folder: what `data_prep.mimic_cxr` wrote.

    Raises:
        PreparedDataError: the folder does not exist, holds no finished set, or one of another format version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / "dataset.json"
        if not file.is_file():
            state = "holds no dataset.json (not a prepared set, or unfinished)"
            if not self.folder.is_dir():
                state = "does not exist"
            raise PreparedDataError(
                f"prepared data set {self.folder} {state}; make it with: "
                f"python -m data_prep.mimic_cxr --source RAW --output {self.folder}"
            )
        self.info: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = self.info.get("format_version")
        if found != FORMAT_VERSION:
            raise PreparedDataError(
                f"{file}: format version {found}, this program reads version {FORMAT_VERSION}; "
                "prepare the set again with data_prep.mimic_cxr into a new folder"
            )
        self._tables: dict[str, pd.DataFrame] = {}

    @property
    def is_phantom(self) -> bool:
        """True if the set comes from the digital phantom: no patient data, the truth is known."""
        return bool(self.info["phantom"])

    def has(self, table: str) -> bool:
        """True if the table was written."""
        return (self.folder / f"{table}.parquet").is_file()

    def table(self, table: str) -> pd.DataFrame:
        """One table of `TABLES`, read once; do not change it in place.

        Raises:
            PreparedDataError: the table is not there (names the command that makes it) or malformed.
        """
        if table not in self._tables:
            file = self.folder / f"{table}.parquet"
            if not file.is_file():
                command = _MADE_BY.get(table, "python -m data_prep.mimic_cxr")
                raise PreparedDataError(f"{self.folder} has no table {table}.parquet; made by: {command}")
            frame = pd.read_parquet(file)
            check_table(frame, table)
            self._tables[table] = frame
        return self._tables[table]

    def log_p(self, name: str | None = None) -> pd.DataFrame:
        """Sentence scores of one language model: columns sentence_id, n_tokens, log_p (natural logarithm).

        Args:
            name: stem of the file in ``log_p/``; None takes the only one there.

        Raises:
            PreparedDataError: no such file, none at all, several without a name, or sentences without a row.
        """
        frame = pd.read_parquet(self.log_p_file(name))
        check_table(frame, "log_p")
        missing = ~self.table("sentences")["sentence_id"].isin(frame["sentence_id"])
        if missing.any():
            raise PreparedDataError(
                f"{self.log_p_file(name)}: {int(missing.sum())} of {len(missing)} sentences have no score; "
                f"delete the file and make it again with: {_MADE_BY['log_p']}"
            )
        return frame

    def log_p_file(self, name: str | None = None) -> Path:
        """The file that `log_p` reads; the same errors for its choice."""
        folder = self.folder / "log_p"
        names = sorted(file.stem for file in folder.glob("*.parquet") if not file.name.startswith("."))
        if name is None and len(names) == 1:
            return folder / f"{names[0]}.parquet"
        if name is not None and name in names:
            return folder / f"{name}.parquet"
        there = ", ".join(names) if names else "none"
        if name is not None:
            problem = f"no sentence scores named {name} in {folder} (there: {there})"
        elif names:
            problem = (
                f"{folder} holds several sentence scores ({there}); name one of them (data: log_p: NAME)"
            )
        else:
            problem = f"{self.folder} has no sentence scores"
        raise PreparedDataError(f"{problem}; scores are made by: {_MADE_BY['log_p']}")

    def image_file(self, path: str) -> Path:
        """Where the prepared JPEG of an image lies; `path` as in images.parquet."""
        return self.folder / "images" / path

    @cached_property
    def patients_in_training_and_evaluation(self) -> list[int]:
        """Patients who stand both in training and in evaluation; training refuses a set with any."""
        images = self.table("images")
        train = set(images.loc[images["use"] == "train", "subject_id"])
        held_out = set(images.loc[images["use"].isin(("validate", "test", "grounding")), "subject_id"])
        return sorted(train & held_out)
