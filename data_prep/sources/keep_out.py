"""Patients that a list of names keeps out of every use, for ``--keep_out``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from data_prep.sources.source_tables import text_of
from data_prep.sources.spellings import plain_image, plain_name, plain_number
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.pictures.image_file import ENDINGS

Known: TypeAlias = dict[str, list[tuple[str, object]]]
"""Spelling -> column, and the value that it has there."""


def names_to_keep_out(file: Path) -> list[str]:
    """Lines of a file that are not empty, or of a prepared set its validate, test and grounding patients (images)."""
    if not file.is_dir():
        return [line.strip() for line in text_of(file, "correct it").splitlines() if line.strip()]
    prepared = PreparedSet(file)
    people = prepared.table("studies" if prepared.has("studies") else "images")
    people = people[~people["use"].isin(("train", "excluded"))]
    if not prepared.names_patients:
        return sorted(people["path"])  # with its ending, which no patient's number has
    named = prepared.patient_names(people["subject_id"])
    return sorted({*named})


def studies_to_keep_out(
    rows: pd.DataFrame, names: Sequence[str], names_of: Mapping[str, Mapping[int, str]]
) -> tuple[frozenset[int], dict[str, int]]:
    """Studies (study_id) of the patients who are named, or an image or study of whom is; counts of rows and of names.

    `names_of`: column, study_id or subject_id -> number -> name, of numbers that are not their own names.

    Raises:
        UserError: no name is known.
    """
    images: Known = {plain_image(name): [("dicom_id", name)] for name in rows["dicom_id"]}
    numbers: Known = {}
    for column, of_number in names_of.items():
        for number in rows[column].unique().tolist():
            key = plain_number(of_number.get(number, str(number)))
            numbers.setdefault(key, []).append((column, number))  # a study and a patient may have one number
    every = images | numbers
    found = [_hits(name, images, every) for name in names]
    if not any(found):
        raise UserError(
            "--keep_out: expected names of frontal images, studies or patients of the source, one a line, found none "
            f"in {len(names):,} lines; correct them"
        )
    is_named = pd.Series(False, rows.index)
    for column in ("dicom_id", *names_of):
        is_named |= rows[column].isin([one for hits in found for kind, one in hits if kind == column])
    studies = rows.loc[rows["subject_id"].isin(rows.loc[is_named, "subject_id"]), "study_id"]
    n = int(is_named.sum())
    counts = {"named": n, "others of their patients": len(studies) - n, "unknown names": found.count([])}
    return frozenset(studies), counts


def _hits(line: str, images: Known, every: Known) -> list[tuple[str, object]]:
    """What a line names, or its first cell: a number, or an image by the longest end of its path.

    The name of a file, with its ending, is no number of a patient or study.
    """
    for name in dict.fromkeys((line, re.split(r"[,;\t]", line, maxsplit=1)[0])):
        parts = plain_image(name).replace("\\", "/").split("/")
        ends = (joint.join(parts[start:]) for start in range(len(parts)) for joint in "/_")
        known = images if ENDINGS.search(plain_name(name)) else every
        for key in filter(None, (plain_number(name), *ends)):
            if key in known:
                return known[key]
    return []
