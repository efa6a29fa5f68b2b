"""Patients that ``--keep_out`` names are in no use, by every command that prepares a set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from data_prep import mimic_cxr
from data_prep.folder import prepare
from data_prep.options import Folder, MimicCxr
from data_prep.sources import check
from data_prep.sources.keep_out import studies_to_keep_out
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet
from tests.data_prep.small_release import dicom, write_release

# dicom_id, study_id, subject_id; patients 1 to 4 have names in `PATIENTS`.
ROWS = [
    ("patient00001_study1_view1_frontal", 11, 1),
    ("patient00001_study2_view1_frontal", 12, 1),
    ("a/1", 13, 2),
    ("b/1", 14, 2),
    ("1.png", 15, 3),
    ("last", 3, 4),
]
PATIENTS = {1: "patient00001", 2: "Doe, John", 3: "3", 4: "X 4"}


@pytest.mark.parametrize(
    ("lines", "studies", "counts"),
    [
        (["CheXpert-v1.0/train/patient00001/study2/view1_frontal.jpg,Male,45"], {11, 12}, (1, 1, 0)),
        (["patient00001/study1", "PATIENT00001", "Path"], {11, 12}, (2, 0, 2)),
        (["Doe, John"], {13, 14}, (2, 0, 0)),
        (['"Doe, John"', "nobody"], {13, 14}, (2, 0, 1)),
        (["x\\b\\1.jpeg"], {13, 14}, (1, 1, 0)),
        (["elsewhere/1.png"], {15}, (1, 0, 0)),
        (["13"], {13, 14}, (1, 1, 0)),
        (["0003"], {15, 3}, (2, 0, 0)),  # a patient and a study of another one: both
        (["x 4", "LAST.PNG"], {3}, (1, 0, 0)),
        (["3\t13", "15;3"], {15, 3}, (2, 0, 0)),
    ],
)
def test_a_line_names_a_patient_a_study_or_an_image(lines, studies, counts) -> None:
    rows = pd.DataFrame(ROWS, columns=["dicom_id", "study_id", "subject_id"])
    found, numbers = studies_to_keep_out(rows, lines, {"study_id": {}, "subject_id": PATIENTS})
    assert found == studies and tuple(numbers.values()) == counts


@pytest.mark.parametrize(
    ("line", "studies", "n_unknown"),
    [("12.png", {1}, 0), ("12.png,x", {1}, 0), ("12", {2}, 0), ("test/3.png", {3}, 1)],
)
def test_the_name_of_a_file_is_no_number_of_a_patient(line, studies, n_unknown) -> None:
    rows = pd.DataFrame(
        {"dicom_id": ["12.png", "5.png", "x/7.png"], "study_id": [1, 2, 3], "subject_id": [3, 12, 9]}
    )
    lines = [line, "x/7.png"] if n_unknown else [line]
    found, counts = studies_to_keep_out(rows, lines, {"study_id": {}, "subject_id": {}})
    assert found == studies and counts["unknown names"] == n_unknown


def table(folder: Path, n: int = 12) -> Path:
    """Reports of patients P1 to P6, of two rows each, two patients in each split."""
    splits = ("train", "validate", "test")
    rows = [
        (f"P{row // 2}", splits[row // 4], f"Heart of report {row} is {'big' if row % 2 else 'small'}.")
        for row in range(n)
    ]
    folder.mkdir()
    pd.DataFrame(rows, columns=["patient", "split", "text"]).to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


def made(file: Path, name: str, **options: Any) -> PreparedSet:
    prepare(Folder(table=file, output=file.parent / name, text_only=True, workers=1, **options))
    return PreparedSet(file.parent / name)


def uses(prepared: PreparedSet) -> dict[str, set[str]]:
    studies = prepared.table("studies")
    names = prepared.patient_names(studies["subject_id"])
    return {str(name): {*of} for name, of in studies["use"].groupby(names)}


def test_reports_of_named_patients_are_in_no_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = table(tmp_path / "a")
    names = tmp_path / "names.txt"
    names.write_text("\ufeffpatient\n\nP1\nP4\n11\n")  # a study without a name has the number of its row
    prepared = made(file, "set", keep_out=names)
    said = "kept out   named 4, others of their patients 0, unknown names 2\n"
    assert said in capsys.readouterr().out and said in check.check_set(prepared.folder)[0]
    assert check.check_set(prepared.folder)[1] == []
    is_out = {name for name, of in uses(prepared).items() if of == {"excluded"}}
    assert is_out == {"P1", "P4"} and not any(
        "excluded" in uses(prepared)[name] for name in ("P0", "P2", "P5")
    )
    texts = set(prepared.table("sentences")["text"])
    assert {int(text.split()[3]) for text in texts} == {0, 1, 4, 5, 6, 7, 10, 11}
    plain = made(file, "plain")
    assert "keep_out" not in plain.info["options"] and plain.fingerprint != prepared.fingerprint
    for wrong, message in (
        ("P2\n", "keep_out: names.txt .* there, names.txt .* now"),
        ("Q1\n", "found none in 1 "),
    ):
        names.write_text(wrong)
        with pytest.raises(UserError, match=message):
            made(file, "set" if wrong == "P2\n" else "other", keep_out=names)
    with pytest.raises(UserError, match="gone.txt cannot be read"):
        made(file, "other", keep_out=tmp_path / "gone.txt")


def test_held_out_patients_of_a_set_are_kept_out(tmp_path: Path) -> None:
    """The set that a model was refused on: its train patients may train here as well."""
    tested = made(table(tmp_path / "a"), "set")
    other = table(tmp_path / "b")
    frame = pd.read_csv(other).assign(split=lambda rows: ["train"] * 10 + ["test"] * 2)
    frame.replace({"patient": {"P5": "P9"}}).to_csv(other, index=False)
    held_out = {name for name, of in uses(tested).items() if of != {"train"}}
    assert held_out == {"P2", "P3", "P4", "P5"}
    prepared = made(other, "set", keep_out=tested.folder)
    assert prepared.info["counts"]["kept_out"] == {
        "named": 6,
        "others of their patients": 0,
        "unknown names": 1,
    }
    assert {name for name, of in uses(prepared).items() if of == {"excluded"}} == {"P2", "P3", "P4"}


def test_boxes_of_patients_who_are_kept_out(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw")
    (tmp_path / "names").write_text(f"{dicom(9)}\n50000006\n{dicom(2)}\n")
    names, boxes = tmp_path / "names", raw / "boxes.json"
    mimic_cxr.prepare(MimicCxr(source=raw, ms_cxr=boxes, output=tmp_path / "set", size=16, keep_out=names))
    prepared = PreparedSet(tmp_path / "set")
    images = prepared.table("images")
    excluded = set(images.loc[images["use"] == "excluded", "dicom_id"])
    assert excluded == {dicom(n) for n in (7, 8, 9, 10)}  # the lateral image is of no set
    assert list(prepared.table("boxes")["dicom_id"]) == [dicom(11)]
    assert prepared.info["counts"]["kept_out"] == {
        "named": 2,
        "others of their patients": 2,
        "unknown names": 1,
    }
    assert check.check_set(tmp_path / "set")[1] == []
