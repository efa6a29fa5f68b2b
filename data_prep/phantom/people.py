"""Sex and age of a phantom's patients, in the columns of MIMIC-IV's ``patients.csv.gz``; no finding depends on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

PATIENTS_FILE = "patients.csv.gz"
PATIENT_COLUMNS = ("subject_id", "gender", "anchor_age", "anchor_year", "anchor_year_group", "dod")
SEXES = ("F", "M")

_YOUNGEST, _OLDEST = 18, 92
_STREAM = 15


def draw_sex(seed: int, subject_id: int) -> str:
    """F or M, alike likely."""
    return SEXES[_draw(seed, subject_id)[0]]


def patient_rows(seed: int, studies: Iterable[tuple[int, int]]) -> Iterator[list[object]]:
    """A row for each patient, from (subject_id, year) of each study; the anchor is the year of the first study."""
    years: dict[int, list[int]] = defaultdict(list)
    for subject_id, year in studies:
        years[subject_id].append(year)
    for subject_id, of_patient in sorted(years.items()):
        first = min(of_patient)
        # Studies lie as far apart as 90 years: a patient with several is young at the first.
        latest = max(_YOUNGEST, _OLDEST - (max(of_patient) - first))
        sex, place = _draw(seed, subject_id)
        age = _YOUNGEST + int(place * (latest + 1 - _YOUNGEST))
        yield [subject_id, SEXES[sex], age, first, "", ""]


def _draw(seed: int, subject_id: int) -> tuple[int, float]:
    """Place among the sexes, and among the ages in [0, 1)."""
    rng = np.random.default_rng([seed, subject_id, _STREAM])
    return int(rng.integers(len(SEXES))), float(rng.random())
