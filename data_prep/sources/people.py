"""Sex and age of patients: from words of a table, and from MIMIC-IV's ``patients.csv.gz``.

Values that cannot be read are "unknown" (sex) or NaN (age); their images stay.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_prep.sources.source_tables import read_table, require
from medclip_dcl.common.errors import UserError

OLDEST = 120
"""Larger ages, in years, are not believed."""

_SEX_WORDS = {
    "F": "F FEMALE WOMAN W WEIBLICH FRAU FEMME FÉMININ FEMININ FEMENINO FEMENINA MUJER FEMININO "
    "FEMININA MULHER FEMMINA FEMMINILE DONNA VROUW VROUWELIJK",
    "M": "M MALE MAN MÄNNLICH MAENNLICH MANN HOMME MASCULIN MASCULINO MASCULINA HOMBRE VARÓN VARON HOMEM MASCHIO "
    "MASCHILE UOMO MANNELIJK",
}
_SEXES = {word: sex for sex, words in _SEX_WORDS.items() for word in words.split()}
_UNITS = {
    1: "Y YR YRS YEAR YEARS YO Y/O JAHR JAHRE A AN ANS AÑO AÑOS ANO ANOS ANNO ANNI JAAR JAREN",
    12: "M MO MOS MONTH MONTHS MONAT MONATE MOIS MES MESES MÊS MESE MESI MAAND MAANDEN",
    52.18: "W WK WKS WEEK WEEKS WOCHE WOCHEN SEMAINE SEMAINES SEMANA SEMANAS SETTIMANA SETTIMANE WEKEN",
    365.25: "D DAY DAYS TAG TAGE JOUR JOURS DÍA DÍAS DIA DIAS GIORNO GIORNI DAG DAGEN",
}
_PER_YEAR = {"": 1, **{word: number for number, words in _UNITS.items() for word in words.split()}}


def sexes(words: pd.Series) -> pd.Series:
    """F, M or unknown, from `_SEX_WORDS` in any case; anything else, such as O, is unknown.

    M is unknown beside H or V where nothing is F: it stands for mujer in one language and man in another.
    """
    words = words.str.strip(" .").str.upper()
    found = words.map(_SEXES).fillna("unknown")
    is_ambiguous = words.isin(["H", "V"]).any() and not (words == "F").any()
    return found.mask(words == "M", "unknown") if is_ambiguous else found


def ages(words: pd.Series) -> pd.Series:
    """Years from "45", "45.5", ".75", "~45", "45 years", "6 months", DICOM's "045Y", or "90+" and ">89" of the oldest.

    NaN for other words, beyond 0 to `OLDEST`, and for "45M" beside "62F", which are a sex.
    """
    words = words.str.strip().str.rstrip(" .").str.upper()
    words = words.str.replace(r"^>\s*(89|9\d)$|^(89|9\d)\s*\+$", r"\1\2", regex=True)
    if words.str.fullmatch(r"\d+\s*F").any():  # 62F: there 45M is a man
        words = words.mask(words.str.fullmatch(r"\d+\s*M"))
    parts = words.str.extract(r"^~?\s*(\d+(?:[.,]\d+)?|[.,]\d+)\s*([^\W\d_/]*(?:/O)?)$")
    years = pd.to_numeric(parts[0].str.replace(",", ".")) / parts[1].map(_PER_YEAR).astype("float64")
    return years.where(years.between(0, OLDEST)).astype("float64")


def with_patients(images: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The images with the sex of MIMIC-IV's patients and, where they have a `study_date`, their age.

    It is the age in an anchor year, 91 for all above 89, and the years since.
    """
    table = read_table(file, ("subject_id", "gender", "anchor_age", "anchor_year"))
    patients = table["subject_id"]
    is_right = patients.str.fullmatch(r"\d{8}") & ~patients.duplicated()
    require(patients, is_right, "eight digits, each patient once", file)
    of_patient = table.set_index(patients.astype("int64"))
    found = of_patient.reindex(images["subject_id"]).set_axis(images.index)
    if found["gender"].isna().all():
        raise UserError(
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
