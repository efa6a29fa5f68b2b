"""Identity of a prepared set: what changes its fingerprint, and how many files are read for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from medclip_dcl.data import identity, prepared
from medclip_dcl.data.prepared import PreparedSet

IMAGE = "files/p1/s5025/00000019-0.jpg"


def invert(folder: Path) -> None:
    with Image.open(folder / "images" / IMAGE) as image:
        image.point(lambda grey: 255 - grey).save(folder / "images" / IMAGE)


def turn_a_bit(folder: Path) -> None:
    file = folder / "images" / IMAGE
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def edit(table: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        file = folder / f"{table}.parquet"
        change(pd.read_parquet(file)).to_parquet(file, index=False)

    return apply


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (invert, IMAGE),
        (turn_a_bit, IMAGE),
        (lambda folder: (folder / "images" / IMAGE).unlink(), IMAGE),
        (edit("images", lambda frame: frame[::-1]), "images.parquet"),
        (edit("labels", lambda frame: frame.assign(Edema=1.0)), "labels.parquet"),
        (lambda folder: (folder / "boxes.parquet").unlink(), "boxes.parquet"),
    ],
)
def test_a_changed_set_has_another_fingerprint(copy, small_set, change, named):
    before = PreparedSet(copy)
    assert before.fingerprint == before.info["fingerprint"] and before.changes == ""
    change(copy)
    now = PreparedSet(copy)
    assert now.fingerprint != before.fingerprint
    assert f"was changed after it was prepared: 1 (first: {named})" in now.changes


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_copy_of_other_times_is_hashed_once(copy, tmp_path, monkeypatch, is_writable):
    expected, hashed = PreparedSet(copy).fingerprint, []
    for file in (copy / "images").rglob("*.jpg"):
        os.utime(file, (2e9, 2e9))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    set_time, digest_of_file = os.utime, identity.digest_of_file

    def refuse(file: Path, *times: Any, **options: Any) -> None:
        if copy in Path(file).parents and not is_writable:
            raise PermissionError
        set_time(file, *times, **options)

    def counted(file: Path) -> str:
        hashed.append(file.suffix)
        return digest_of_file(file)

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(identity, "digest_of_file", counted)
    for n_images in (42, 0):
        hashed.clear()
        assert PreparedSet(copy).fingerprint == expected
        assert hashed.count(".jpg") == n_images
    assert (tmp_path / "cache").exists() != is_writable


def test_a_table_as_written_is_checked_by_its_schema(copy, small_set, monkeypatch):
    """Its rows were checked when it was written; those of a changed table, and of scores, are checked when read."""
    checked: list[str] = []

    def note(name: str, tables: Any) -> list[str]:
        checked.append(f"rows of {name}")
        return []

    monkeypatch.setattr(prepared, "check_table", lambda frame, table: checked.append(table))
    monkeypatch.setattr(prepared, "damage", note)
    for use in ("table", "rows"):
        checked.clear()
        as_written = PreparedSet(small_set)
        for table in ("images", "reports", "labels"):
            assert len(getattr(as_written, use)(table)) == len(
                pd.read_parquet(small_set / f"{table}.parquet")
            )
        assert checked == []
        as_written.log_p()
        assert checked == ["log_p"]
    edit("sentences", lambda frame: frame[::-1])(copy)
    changed = PreparedSet(copy)
    changed.table("reports"), changed.rows("images", use=["train"])
    assert checked == ["log_p", "sentences", "rows of reports"]


def test_rows_of_a_table(copy):
    wanted: dict[str, list[Any]] = {"use": ["test", "validate"], "subject_id": [110, 112, 116]}
    part = PreparedSet(copy).rows("images", ["dicom_id", "use"], **wanted)
    held_out = [(24, "validate"), (25, "validate"), (32, "test"), (33, "test")]
    assert part.values.tolist() == [[f"{number:08x}-0", use] for number, use in held_out]
    edit("images", lambda frame: frame.assign(view="AP"))(copy)
    assert part.equals(PreparedSet(copy).rows("images", ["dicom_id", "use"], **wanted))
    assert PreparedSet(copy).rows("images", use=[]).empty
