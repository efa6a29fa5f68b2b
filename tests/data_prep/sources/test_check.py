"""Verification of a prepared set: a sound one has no problem, and each kind of damage is named."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.mimic_cxr import prepare
from data_prep.options import MimicCxr
from data_prep.sources.check import check_set
from medclip_dcl.data.arrays import kept_arrays
from medclip_dcl.data.identity import describe
from medclip_dcl.data.prepared import (
    TABLES,
    PreparedSet,
    TextEmbedding,
    case_table,
    write_text_embedding,
)
from tests.data_prep.small_release import dicom, image_path, report_path, write_release
from tests.program import verb


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set of the small release, with scores and embeddings, one report left out."""
    folder = tmp_path_factory.mktemp("check")
    raw = write_release(folder / "raw")
    report_path(raw, 50000010).write_text(" INDICATION:  Cough.\n")
    prepare(MimicCxr(source=raw, output=folder / "set", ms_cxr=raw / "boxes.json", size=16))
    sentences = len(PreparedSet(folder / "set").table("sentences"))
    scores = pd.DataFrame({"sentence_id": range(sentences), "n_tokens": 3, "log_p": -1.5})
    (folder / "set" / "log_p").mkdir()
    scores.to_parquet(folder / "set" / "log_p" / "a.parquet", index=False)
    vectors = TextEmbedding(np.arange(sentences), np.ones((sentences, 4), np.float32))
    write_text_embedding(vectors, folder / "set" / "text_embedding" / "a.parquet", {})
    return folder / "set"


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))


def edit(folder: Path, table: str, change: Callable[[pd.DataFrame], pd.DataFrame], seal: bool = True) -> None:
    """Change a table; `seal` makes the digests fit, so that the other checks are what notices."""
    file = folder / f"{table}.parquet"
    change(pd.read_parquet(file)).to_parquet(file, index=False)
    if seal:
        names = [name for name in TABLES if (folder / f"{name}.parquet").exists()]
        found = {name: pd.read_parquet(folder / f"{name}.parquet") for name in names}
        info = json.loads((folder / "dataset.json").read_text())
        info |= describe(folder, found)
        (folder / "dataset.json").write_text(json.dumps(info))


def put(frame: pd.DataFrame, row: int, **values: Any) -> pd.DataFrame:
    for column, value in values.items():
        frame.loc[frame.index[row], column] = value
    return frame


def test_arrays_of_another_content_are_named(damaged: Path) -> None:
    kept_arrays([damaged], "a", {}, lambda: {"value": np.arange(5)})
    assert check_set(damaged)[1] == []
    (file,) = damaged.rglob("*.arrow")
    file.write_bytes(file.read_bytes().replace(np.int64(3).tobytes(), np.int64(4).tobytes()))
    assert re.match(
        rf"arrays differ from, or lack, their digests; delete them.*: 1 \(first: {file}\)",
        check_set(damaged)[1][0],
    )


def test_page_of_a_sound_set(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb("check")([str(whole), "--full", "--workers", "1"])
    page = capsys.readouterr().out
    assert page.rstrip().endswith("no problem found")
    for line in (
        "  images     11 frontal of 12 (train 3, validate 1, test 2, grounding 4, excluded 1)",
        "  by use     patients: train 1, validate 1, test 2, grounding 3, excluded 1",
        "  boxes      3",
        "  release: images                           12     377,110   differs",
        "  release: validate                          2       2,991   differs",
        "  frontal images with a report              10     234,073   differs",
        "  MS-CXR: image_sentence_pairs               3       1,162   differs",
        "         1 report  report has no findings or impression",
        "  log_p      a",
    ):
        assert line in page
    # Nothing of the reports.
    for text in PreparedSet(whole).table("sentences")["text"]:
        assert text not in page


def test_published_counts_that_are_met_do_not_differ(damaged: Path) -> None:
    file = damaged / "dataset.json"
    info = json.loads(file.read_text())
    info["counts"]["release"] |= {"images": 377_110, "train": 368_960}
    file.write_text(json.dumps(info))
    page, problems = check_set(damaged)
    assert problems == []
    assert "  release: images                      377,110     377,110\n" in page


DAMAGES = [
    ("images", lambda frame: frame.drop(columns="view"), r"table images: expected the columns .*'view'.*, found "),
    ("images", lambda frame: frame.astype({"height": float}), "table images, column height: expected int64"),
    ("images", lambda frame: put(frame, 4, subject_id=10000001), "patients with two uses: 1 .first: 10000001."),
    ("images", lambda frame: put(frame, 5, use="train"), f"a phrase whose use is not grounding: 1 .*{dicom(7)}"),
    ("reports", lambda frame: put(frame, 0, sentence_id=99), "not in sentences.parquet: 1 .first: 99."),
    ("labels", lambda frame: frame.iloc[3:], "contradict labels.parquet and images.parquet: "),
    ("cases", lambda frame: put(frame, 0, label=0), f"contradict labels.parquet and .*: 1 of 6 .*{dicom(5)}"),
    ("cases", lambda frame: put(frame, 0, use="test"), "contradict labels.parquet and images.parquet: 1 of 6 "),
    ("cases", lambda frame: put(frame, 0, finding="Fracture"), "contradict labels.parquet .*: 2 of 6 .*Fracture"),
    ("cases", lambda frame: frame.iloc[:-2], "contradict labels.parquet and images.parquet: 2 of 4 "),
    ("boxes", lambda frame: put(frame, 0, w=40.0), f"boxes that are not inside their image: 1 of 3 .*{dicom(7)}"),
    ("boxes", lambda frame: put(frame, 2, x=float("nan")), "boxes that are not inside their image: 1 of 3 "),
]  # fmt: skip


@pytest.mark.parametrize(("table", "change", "message"), DAMAGES)
def test_each_damage_to_a_table_is_named(
    damaged: Path, table: str, change: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    edit(damaged, table, change)
    _, problems = check_set(damaged)
    assert any(pd.Series([problem]).str.contains(message).item() for problem in problems), problems


def test_a_changed_table_has_another_fingerprint(damaged: Path) -> None:
    edit(damaged, "images", lambda frame: put(frame, 0, view="AP"), seal=False)
    _, problems = check_set(damaged)
    assert problems == ["changed, added or removed after the set was made: images"]


def test_missing_unreadable_and_unknown_files_are_named(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def file(number: int) -> Path:
        return damaged / "images" / image_path(Path(), number)

    file(1).unlink()
    file(3).write_bytes(b"no image")
    file(6).write_bytes(file(6).read_bytes()[:-20])
    (damaged / "images" / "other.jpg").write_bytes(b"")
    (damaged / "labels.parquet").write_bytes(b"PAR1")
    (damaged / "log_p" / "b.parquet").write_bytes(b"")
    scores = pd.read_parquet(damaged / "log_p" / "a.parquet")
    put(scores, 2, log_p=0.5).iloc[1:].to_parquet(damaged / "log_p" / "c.parquet", index=False)
    put(scores, 2, log_p=0.5).to_parquet(damaged / "log_p" / "d.parquet", index=False)
    of_images = [
        f"images/: a file is missing: 1 of 11 (first: {image_path(Path(), 1)})",
        "images/: a file was changed after the set was made: 2 of 11 "
        f"(first: {image_path(Path(), 3)}, {image_path(Path(), 6)})",
        "images/: files that are not in images.parquet: 1 (first: other.jpg)",
    ]
    assert check_set(damaged)[1][-3:] == of_images
    with pytest.raises(SystemExit) as stop:
        verb("check")([str(damaged), "--full", "--workers", "1"])
    assert stop.value.code == 1
    shown = capsys.readouterr().out
    (damaged / "image_files.parquet").write_bytes(b"PAR1")
    assert any("image_files.parquet: " in problem for problem in check_set(damaged)[1])
    for part in (
        *of_images,
        "labels.parquet: ",
        "b.parquet: ",
        "1 of 9 sentences have no row",
        "others in 1 of 9 rows",
    ):
        assert part in shown, shown


def test_images_whose_content_was_changed_are_named(damaged: Path) -> None:
    """A decoder takes nearly any byte for a picture."""
    root = damaged / "images"
    turned, times = root / image_path(Path(), 3), (damaged / "dataset.json").stat()
    content = bytearray(turned.read_bytes())
    content[-20] ^= 0x55
    turned.write_bytes(content)
    os.utime(turned, ns=(times.st_mtime_ns - 1, times.st_mtime_ns - 1))  # of the same size and not newer
    assert check_set(damaged)[1] == []
    # Saved again: the pixels are not quite the same.
    Image.open(root / image_path(Path(), 5)).save(root / image_path(Path(), 5))
    changed = "images/: a file was changed after the set was made"
    assert check_set(damaged)[1] == [f"{changed}: 1 of 11 (first: {image_path(Path(), 5)})"]
    assert check_set(damaged, full=True)[1] == [
        f"{changed}: 2 of 11 (first: {image_path(Path(), 3)}, {image_path(Path(), 5)})"
    ]


def test_identical_images_are_found(damaged: Path) -> None:
    table = pd.read_parquet(damaged / "images.parquet")

    def copy(first: pd.Series, second: pd.Series) -> str:
        shutil.copy(damaged / "images" / first["path"], damaged / "images" / second["path"])
        files = pd.read_parquet(damaged / "image_files.parquet").set_index("path")
        for column in ("bytes", "digest"):
            files.loc[second["path"], column] = files.loc[first["path"], column]
        edit(damaged, "image_files", lambda _: files.reset_index())
        return " = ".join(
            f"{row['path']} ({row['use']}, patient {row['subject_id']})" for row in (first, second)
        )

    rows = [row for _, row in table.iterrows()]
    trained = [row for row in rows if row["use"] == "train"]
    tested = [row for row in rows if row["use"] == "test"]
    # Two images of one patient may be the same picture.
    assert trained[0]["subject_id"] == trained[1]["subject_id"]
    copy(trained[0], trained[1])
    assert "warning" not in check_set(damaged)[0]
    page, problems = check_set(damaged, full=True)
    assert problems == [] and "warning" not in page
    # Two patients of one purpose: told, and no problem.
    assert tested[0]["subject_id"] != tested[1]["subject_id"]
    patients = copy(tested[0], tested[1])
    for full in (False, True):
        page, problems = check_set(damaged, full)
        assert problems == [] and f"several files of different patients: 1 (first: {patients})" in page
    # Training and evaluation.
    purposes = copy(trained[2], next(row for row in rows if row["use"] == "validate"))
    for full in (False, True):
        page, problems = check_set(damaged, full)
        assert len(problems) == 1
        assert "with different uses" in problems[0] and problems[0].endswith(f": 1 (first: {purposes})")
        assert f"several files of different patients: 1 (first: {patients})" in page


def test_balanced_cases_need_not_be_all(damaged: Path) -> None:
    prepared = PreparedSet(damaged)
    balanced = case_table(prepared.table("images"), prepared.table("labels"), "balanced")
    assert len(balanced) < 6
    info = json.loads((damaged / "dataset.json").read_text())
    info["options"]["cases"] = "balanced"
    (damaged / "dataset.json").write_text(json.dumps(info))
    edit(damaged, "cases", lambda _: balanced)
    assert check_set(damaged)[1] == []
