"""Finding, reading and checking the tables of a release."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import source_tables
from data_prep.sources.releases import (
    find_release,
    read_images,
    read_labels,
    read_ms_cxr,
)
from data_prep.sources.source_tables import CsvFile
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT

A, B = "0000000a-00000000-00000000-00000000-00000001", "0000000b-00000000-00000000-00000000-00000002"
METADATA = (
    "dicom_id,subject_id,study_id,PerformedProcedureStepDescription,ViewPosition,Rows,Columns\n"
    f'{B},10000002,50000002,"CHEST, PA",PA,2544,3056\n{A},10000001,50000001,,,300,200\n'
)
SPLIT = f"dicom_id,study_id,subject_id,split\n{A},50000001,10000001,train\n{B},50000002,10000002,validate\n"
LABELS = (
    "subject_id,study_id," + ",".join(CHEXPERT) + "\n" + "10000001,50000001,1.0,0.0,-1.0" + "," * 11 + "\n"
)


def write(folder: Path, number: str = "2.0.0", ending: str = ".csv.gz", **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"metadata": METADATA, "split": SPLIT, "chexpert": LABELS, **changed}.items():
        data = content.encode()
        file = folder / f"mimic-cxr-{number}-{name}{ending}"
        file.write_bytes(gzip.compress(data) if ending == ".csv.gz" else data)
    return folder


@pytest.mark.parametrize("number", ["2.0.0", "2.1.0"])
@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_tables_of_either_version_packed_or_not(tmp_path: Path, number: str, ending: str) -> None:
    folder = write(tmp_path, number, ending)
    # The only new table of 2.1.0: other labels of test studies, of no use here.
    (folder / "mimic-cxr-2.1.0-test-set-labeled.csv").write_text("study_id,Edema\n50000001,1.0\n")
    release = find_release(folder)
    assert release.name == f"mimic-cxr-{number}"
    images = read_images(release)
    assert images["dicom_id"].tolist() == [A, B]
    assert images["view"].tolist() == ["", "PA"]
    assert images["official_split"].tolist() == ["train", "validate"]
    assert images["path"][0] == f"files/p10/p10000001/s50000001/{A}.jpg"
    labels = read_labels(release)
    assert labels["study_id"].tolist() == [50000001]
    np.testing.assert_array_equal(labels.loc[0, list(CHEXPERT)].to_numpy(float), [1, 0, -1] + [np.nan] * 11)


def test_other_labels_have_their_own_file(tmp_path: Path) -> None:
    folder = write(tmp_path, negbio=LABELS.replace("50000001", "50000009"))
    assert read_labels(find_release(folder, "negbio"))["study_id"].tolist() == [50000009]


FIRST, SECOND = SPLIT.splitlines()[:2]
QUOTES = "(a value that holds the delimiter or a line break must stand in quotes, "
DAMAGED = [
    (dict(metadata=METADATA.replace("ViewPosition", "View")), "metadata.csv.gz lacks the column ViewPosition; found"),
    (dict(split=SPLIT.replace("study_id,subject_id", "a,b")), "lacks the columns subject_id, study_id; found"),
    (dict(split=""), "dicom_id, subject_id, study_id, split; found an empty file"),
    (dict(chexpert=LABELS.replace(",Edema", ",Oedema")), "chexpert.csv.gz lacks the column Edema"),
    (dict(split=SPLIT.replace(",train", ",train,x")), f"split.csv.gz, line 2: 5 values for 4 columns {QUOTES}"),
    (dict(split=SPLIT.replace(",train", "")), "split.csv.gz, line 2: 3 values for 4 columns"),
    (dict(split=SPLIT.replace("split\n", "split,split\n")), "split.csv.gz has the column split twice; download it"),
    (dict(split=SPLIT + '"'), "split.csv.gz, row from line 4 on cannot be read (unexpected end of data); download it"),
    (dict(split=FIRST + "\n"), "split.csv.gz holds no row; download it again"),
    (
        dict(split=SPLIT.replace(",train", ",training")),
        "train | validate | test, found 'training' (1 of 2 rows); take the release's own file, or write yours as",
    ),
    (dict(metadata=METADATA.replace(A, "../../etc")), "column dicom_id: expected five groups of eight hex digits"),
    (dict(metadata=METADATA.replace("10000001", "x")), "column subject_id: expected eight digits, found 'x'"),
    (dict(split=f"{SPLIT}{SECOND}\n"), "eight hex digits, each image once, found"),
    (dict(split=f"{FIRST}\n{SECOND}\n"), f"patients and studies, found 1 rows in one of them only (first: {B})"),
    (dict(split=SPLIT.replace("10000002", "10000003")), f"found 2 rows in one of them only (first: {B})"),
    (
        {name: text.replace("50000001", "50000002") for name, text in (("metadata", METADATA), ("split", SPLIT))},
        "column study_id: expected studies of one patient, found '50000002' (2 of 2 rows)",
    ),
    (dict(chexpert=LABELS.replace("-1.0", "2.0")), "Consolidation: expected 1, 0, -1 or empty, found '2.0'"),
    (dict(chexpert=LABELS + LABELS.splitlines()[1]), "column study_id: expected eight digits, each study once, found"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), DAMAGED)
def test_damaged_table_is_named(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    release = find_release(write(tmp_path, **changed))
    with pytest.raises(UserError) as error:
        read_images(release)
        read_labels(release)
    assert message in str(error.value)


def test_a_comma_at_a_lines_end_is_no_column(tmp_path: Path) -> None:
    whole = read_images(find_release(write(tmp_path / "whole")))
    commas = read_images(find_release(write(tmp_path / "commas", split=SPLIT.replace(",train", ",train,"))))
    assert commas.equals(whole)
    shifted = SPLIT.replace("split\n", "split,,\n").replace(",train", ",train,x")
    with pytest.raises(UserError, match="line 2: 5 values for 4 columns"):
        read_images(find_release(write(tmp_path / "shifted", split=shifted)))


def test_missing_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: expected mimic-cxr-2.0.0-.*, found none; they are next"):
        find_release(tmp_path / "nowhere")
    folder = write(tmp_path / "raw", "2.1.0")
    (folder / "mimic-cxr-2.1.0-split.csv.gz").unlink()
    with pytest.raises(UserError, match=r"metadata,split,chexpert.*found mimic-cxr-2.1.0-chexpert"):
        find_release(folder)
    write(folder, "2.0.0")
    with pytest.raises(UserError, match=r"of one version, found .*2\.0\.0.*2\.1\.0"):
        find_release(folder)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"PK" + data, lambda data: data[:12] + b"\xff" * 30]
)
def test_a_damaged_archive_is_an_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = write(tmp_path)
    file = folder / "mimic-cxr-2.0.0-split.csv.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"split\.csv\.gz cannot be read .* download it again"):
        read_images(find_release(folder))


@pytest.mark.parametrize(
    ("text", "delimiter", "line"),
    [
        ('id\ttext\n1\t"Normal.\n2\tNo effusion.\n3\tEdema."\n44\tx\n', "\t", 3),
        ('text;id\r\n"Clear;7\r\nTube";8\r\nEdema;9\r\n', ";", 3),
        ('image,id,text\na1.png,p1,"Big\na2.png,q2,Clear\n"\n', ",", 3),
        # Prose with as many commas; of two columns two lines of it tell.
        ('id,text,note\np1,"Big, clear,\nno nodules, no tube, no\nline, wire, stent",\np2,x,y\n', ",", 0),
        ('id,text\nab,"Big,\nno, no effusion"\ncd,x\n', ",", 0),
        ('id,text\nab,"Big,\ncd, no effusion\nef, no tube"\ngh,x\n', ",", 3),
        # A cell that is empty elsewhere is not a form.
        ('id,text,note\np1,"Big\n, and, so"\n,x,y\n', ",", 0),
        ('id,text\n\n1,"two\nlines"\n\n', ",", 0),
    ],
)
def test_a_quote_that_joins_rows_is_refused(text: str, delimiter: str, line: int) -> None:
    table = CsvFile(Path("table.csv"), text, "", delimiter)
    with pytest.raises(UserError, match=f"table.csv: line {line} is a row") if line else nullcontext():
        table.require_rows(["id"])


@pytest.mark.parametrize(("name", "pack"), [("a.csv", bytes), ("a.csv.gz", gzip.compress)])
def test_a_table_without_end_is_refused(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_tables, "MAX_BYTES", 2**20)
    (tmp_path / name).write_bytes(pack(b"a" * 2**20))
    assert len(source_tables.unpacked(tmp_path / name, "")) == 2**20
    (tmp_path / name).write_bytes(pack(b"a" * (2**20 + 1)))
    with pytest.raises(
        UserError, match=rf"{name}: expected a table of at most 0.00\d* GiB unpacked, found more"
    ):
        source_tables.unpacked(tmp_path / name, "")


COCO = {
    "images": [
        {
            "id": 7,
            "file_name": f"{A}.jpg",
            "path": f"files/p10/p10000001/s50000001/{A}.jpg",
            "width": 200,
            "height": 300,
        }
    ],
    "annotations": [
        {"id": 3, "image_id": 7, "category_id": 1, "bbox": [1, 2.5, 30, 40], "label_text": " left  effusion"}
    ],
    "categories": [{"id": 1, "name": "Pleural Effusion"}],
}
CSV = (
    "dicom_id,category_name,label_text,path,x,y,w,h,image_width,image_height\n"
    f"{A},Pleural Effusion, left  effusion,files/p10/p10000001/s50000001/{A}.jpg,1,2.5,30,40,200,300\n"
)


def test_boxes_are_the_same_from_json_and_csv(tmp_path: Path) -> None:
    (tmp_path / "boxes.json").write_text(json.dumps(COCO))
    (tmp_path / "boxes.csv").write_text(CSV)
    columns = ["dicom_id", "category", "phrase", *"xywh", "image_width", "image_height", "subject_id"]
    expected = [A, "Pleural Effusion", "left effusion", 1.0, 2.5, 30.0, 40.0, 200.0, 300.0, 10000001]
    for file in ("boxes.json", "boxes.csv"):
        assert read_ms_cxr(tmp_path / file)[columns].to_numpy().tolist() == [expected]


def test_boxes_of_version_110_name_patients(tmp_path: Path) -> None:
    header, row = CSV.splitlines()
    newer = f"{header},split,subject_id,study_id\n{row},val,10000007,50000001\n"
    (tmp_path / "boxes.csv").write_text(newer)
    assert read_ms_cxr(tmp_path / "boxes.csv")["subject_id"].tolist() == [10000007]
    coco = {**COCO, "images": [{**COCO["images"][0], "subject_id": 10000007}]}
    (tmp_path / "boxes.json").write_text(json.dumps(coco))
    assert read_ms_cxr(tmp_path / "boxes.json")["subject_id"].tolist() == [10000007]
    # What is no patient's number is looked up in the path.
    (tmp_path / "boxes.json").write_text(json.dumps(coco).replace("10000007", '"p10000007"'))
    assert read_ms_cxr(tmp_path / "boxes.json")["subject_id"].tolist() == [10000001]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "{",
            "a.json: expected the COCO keys images, annotations (image_id, category_id, bbox, label_text) and",
        ),
        ("[]", "and categories, found another form (list indices"),
        ("[" * 100_000, "another form (its brackets are nested too deeply"),
        (json.dumps(COCO).replace("2.5", "9" * 5000), "found another form (Exceeds the limit"),
        (json.dumps({**COCO, "categories": []}), "another form (nothing named or numbered 1)"),
        ('{"images": []}', "nothing named or numbered 'categories'); take the release's own file"),
        (json.dumps(COCO).replace("[1, 2.5, 30, 40]", "[1, 2]"), "another form (not enough values to unpack"),
    ],
)
def test_a_wrong_box_file_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError) as error:
        read_ms_cxr(tmp_path / "a.json")
    assert message in str(error.value)
