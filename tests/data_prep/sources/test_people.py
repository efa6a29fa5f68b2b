"""Sex and age from the words of tables, and from MIMIC-IV's patients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from data_prep.sources.people import ages, sexes, with_patients
from medclip_dcl.common.errors import UserError

IMAGES = pd.DataFrame(
    {
        "dicom_id": list("abcdefg"),
        "subject_id": [10000001, 10000001, 10000002, 10000003, 10000004, 10000005, 10000006],
        "study_date": ["21500131", "21520131", "21500131", "21500131", "21500131", "2150", "21500131"],
    }
)


def patients(folder: Path, **changed: list[str]) -> Path:
    rows = {
        "subject_id": ["10000001", "10000002", "10000003", "10000004", "10000005", "19999999"],
        "gender": ["F", "M", "", "other", "f", "M"],
        "anchor_age": ["52", "", "91", "fifty", "40", "30"],
        "anchor_year": ["2148", "2150", "2150", "2150", "2150", "2150"],
        "dod": [""] * 6,
    }
    file = folder / "patients.csv"
    pd.DataFrame(rows | changed).to_csv(file, index=False)
    return file


def test_words_of_sex_and_age():
    words = pd.Series(["F", " female", "MALE", "m", "O", "", "unknown", "1"])
    assert sexes(words).tolist() == ["F", "F", "M", "M", *["unknown"] * 4]
    words = pd.Series(["45", "45.5", "045Y", "006m", "0", "120", "121", "-3", "", "n/a", "4 5", "052W"])
    words = pd.concat([words, pd.Series([".75", "0.5", ",5 years", "45."])])
    expected = [45, 45.5, 45, 0.5, 0, 120, *[np.nan] * 5, 52 / 52.18, 0.75, 0.5, 0.5, 45]
    assert ages(words).tolist() == pytest.approx(expected, nan_ok=True)
    assert sexes(pd.Series(["weiblich", "Männlich", "W", "femme", "hombre", "divers"])).tolist() == [
        *"FMFFM",
        "unknown",
    ]
    words = pd.Series(
        [
            "45 ans",
            "9 anos",
            "8 anni",
            "7 jaar",
            "6 maanden",
            "3 mesi",
            "~45",
            "72 Jahre",
            "6 months",
            "45,5",
            "90+",
            ">89",
            "45+",
            "1961-03-02",
            "45 j",
        ]
    )
    expected = [45, 9, 8, 7, 0.5, 0.25, 45, 72, 0.5, 45.5, 90, 89, *[np.nan] * 3]
    assert ages(words).tolist() == pytest.approx(expected, nan_ok=True)
    assert ages(pd.Series(["45M", "62F", "6 months"])).tolist() == pytest.approx(
        [np.nan] * 2 + [0.5], nan_ok=True
    )


def test_m_is_ambiguous_beside_h_or_v():
    assert sexes(pd.Series(["M", "H"])).tolist() == ["unknown", "unknown"]
    assert sexes(pd.Series(["M", "V", "F"])).tolist() == ["M", "unknown", "F"]


def test_age_at_study_counts_from_the_anchor(tmp_path):
    found = with_patients(IMAGES, patients(tmp_path))
    # Image f has a broken date, patient 10000006 is not in the file.
    assert found["sex"].tolist() == ["F", "F", "M", "unknown", "unknown", "F", "unknown"]
    assert found["age"].tolist() == pytest.approx([54, 56, np.nan, 91, np.nan, np.nan, np.nan], nan_ok=True)
    assert list(found["dicom_id"]) == list("abcdefg")
    shuffled = with_patients(IMAGES.sample(frac=1, random_state=0), patients(tmp_path))
    pd.testing.assert_frame_equal(shuffled.sort_index(), found)


def test_without_study_dates_there_is_no_age(tmp_path):
    found = with_patients(IMAGES.drop(columns="study_date"), patients(tmp_path))
    assert "sex" in found and "age" not in found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"subject_id": ["10000001"] * 6}, "eight digits, each patient once, found '10000001'"),
        (
            {"subject_id": ["1", "2", "3", "4", "5", "6"]},
            "expected eight digits, each patient once, found '1'",
        ),
        ({"subject_id": [f"2000000{i}" for i in range(6)]}, "none of 6 patients of the images is in it"),
    ],
)
def test_a_file_of_other_patients_is_refused(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        with_patients(IMAGES, patients(tmp_path, **changed))
