"""Sex and age of patients: from words of a table, and from MIMIC-IV's ``patients.csv.gz``.

Values that cannot be read are "unknown" (sex) or NaN (age); they are counted, and their images stay.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_prep.sources.releases import ReleaseError, matches, once, read_table, require

OLDEST = 120
"""Larger ages, in years, are not believed."""

_SEXES = {"F": "F", "FEMALE": "F", "M": "M", "MALE": "M"}
_PER_YEAR = {"Y": 1, "M": 12, "W": 52.18, "D": 365.25}
"""Units of DICOM's ages, as in 045Y and 006M."""


def sexes(words: pd.Series) -> pd.Series:
    """F, M or unknown, from F, M, female and male in any case; anything else, such as O, is unknown."""
    return words.str.strip().str.upper().map(_SEXES).fillna("unknown")


def ages(words: pd.Series) -> pd.Series:
    """Years from a number of years ("45", "45.5") or DICOM's format ("045Y", "006M"); NaN beyond 0 to `OLDEST`."""
    parts = words.str.strip().str.upper().str.extract(r"^(\d+(?:\.\d+)?)\s*([YMWD]?)$")
    years = pd.to_numeric(parts[0]) / parts[1].replace("", "Y").map(_PER_YEAR).astype("float64")
    return years.where(years.between(0, OLDEST)).astype("float64")


def with_patients(images: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The images with the sex of MIMIC-IV's patients, and their age where the images have a `study_date`.

    The age at the study is anchor_age + (year of the study - anchor_year). MIMIC-IV gives every age above 89 as 91.

    Args:
        images: subject_id, and study_date (YYYYMMDD) if the release has it.
        file: patients.csv(.gz) of MIMIC-IV: subject_id, gender, anchor_age, anchor_year.

    Raises:
        ReleaseError: the file cannot be read or lacks a column, names a patient twice, or none of the images' patients.
    """
    table = read_table(file, ("subject_id", "gender", "anchor_age", "anchor_year"))
    require(table, "subject_id", matches(r"\d{8}"), "eight digits", file)
    require(table, "subject_id", once, "each patient once", file)
    of_patient = table.set_index(table["subject_id"].astype("int64"))
    found = of_patient.reindex(images["subject_id"]).set_axis(images.index)
    if found["gender"].isna().all():
        raise ReleaseError(
            f"{file}: none of {images['subject_id'].nunique():,} patients of the images is in it; --patients expects "
            "hosp/patients.csv.gz of MIMIC-IV"
        )
    images = images.assign(sex=sexes(found["gender"]))
    if "study_date" not in images:
        return images
    study_year = _whole(images["study_date"].str.extract(r"^(\d{4})\d{4}$", expand=False))
    age = _whole(found["anchor_age"]) + study_year - _whole(found["anchor_year"])
    return images.assign(age=age.where(age.between(0, OLDEST)))


def _whole(words: pd.Series) -> pd.Series:
    """Whole numbers of at least 0 as floats; NaN for anything else."""
    return pd.to_numeric(words.where(words.str.fullmatch(r"\d{1,9}").fillna(False).astype(bool))).astype(
        "float64"
    )
