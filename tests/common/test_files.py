"""Files below a folder with links and without rights, tables that share a file, YAML whose keys or aliases deceive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from medclip_dcl.common.errors import UserError, quoted
from medclip_dcl.common.files import (
    encoding_of,
    files_below,
    kind_of_file,
    parse_json,
    parse_yaml,
    write_parquet,
    write_shared_parquet,
)
from medclip_dcl.common.journal import Journal
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.metrics.calibration import Calibration
from medclip_dcl.networks.bert_folder import read_folder_json
from medclip_dcl.runs.saved import read_json


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_folder_json),
        ("calibration.json", Calibration.read),
        ("dataset.json", lambda file: PreparedSet(file.parent)),
        ("results.json", read_json),
        ("entries.jsonl", lambda file: Journal(file, {}, "remove it")),
    ],
)
def test_nested_brackets_are_one_line(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    file = tmp_path / name
    for content in ("[" * 100_000, '{"a":' * 100_000):
        file.write_text(f"{content}\n")
        with pytest.raises(UserError, match="its brackets are nested too deeply") as error:
            read(file)
        assert name in str(error.value) and len(str(error.value)) < 500
        with pytest.raises(UserError, match="^mine.yaml is not readable YAML: .* depth"):
            parse_yaml(content, "mine.yaml")
    assert parse_json("[" * 500 + "]" * 500)
    with pytest.raises(UserError, match="^mine.yaml is not readable YAML: .* depth"):
        parse_yaml("[" * 900 + "]" * 900, "mine.yaml")


def test_each_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two links to the folder itself are 2^40 paths, and a file below a link has the name of its own folder."""
    top, outside = tmp_path / "top", tmp_path / "outside"
    for file in (top / "z/1.png", top / "closed/2.png", outside / "deep/3.png", top / ".hidden/4.png"):
        file.parent.mkdir(parents=True)
        file.touch()
    links = {"a": top, "b": top, "c": top / "z", "d": outside}
    for name, target in links.items():
        (top / name).symlink_to(target)
    (outside / "back").symlink_to(top)
    scandir = os.scandir

    def refusing(place: str) -> object:
        if os.path.basename(place) == "closed":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    found = files_below(top)
    assert [str(file.relative_to(top)) for file in found.files] == ["d/deep/3.png", "z/1.png"]
    assert [error.filename for error in found.closed] == [str(top / "closed")]
    assert {file.name for file in found.repeated} == {"a", "b", "c", "back"}


def test_folders_of_systems_are_left_out(tmp_path: Path) -> None:
    systems = ("@eaDir/a.png", "$RECYCLE.BIN", "sub/$Recycle.Bin", "#recycle", "@Recycle", "__MACOSX")
    for folder in (*systems, "eaDir", "@eaDirs", "#1", "recycle"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.png").touch()
    found = [file.relative_to(tmp_path).parts[0] for file in files_below(tmp_path).files]
    assert found == ["#1", "@eaDirs", "eaDir", "recycle"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("1: a\n1.0: b", "1 = 1.0"),
        ("1: a\n0x1: b", "1 = 0x1"),
        ("1: a\nb: {true: a, yes: b}", "true = yes"),
        ("0: a\nfalse: b", "0 = false"),
        ("010: a\n8: b", "010 = 8"),
        ("a: 1\n'a': 2", "a"),
        (f"{'x' * 1000}: 1\n{'x' * 1000}: 2", r"x+\.\.\.x+"),
    ],
)
def test_equal_keys_are_refused(text: str, keys: str) -> None:
    with pytest.raises(UserError, match=f"^mine.yaml, line 2: {keys} is listed more than once; keep one$"):
        parse_yaml(text, "mine.yaml")


def test_keys_that_differ_and_merged_ones_stay() -> None:
    assert parse_yaml("1: a\n'1': b\n1.5: c", "") == {1: "a", "1": "b", 1.5: "c"}
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}", "") == {"a": {"x": 1}, "b": {"x": 2}}


def test_aliases_multiply_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [
        f"{name}: &{name} [{', '.join(['*' + of] * 9)}]"
        for of, name in zip("abcdefg", "bcdefgh", strict=True)
    ]
    for text in ("\n".join(["a: &a [x, x]", *lists]), "a: &a [*a]"):
        with pytest.raises(UserError, match=r"^mine.yaml, its aliases \(\*\) make more than 100,000 values"):
            parse_yaml(text, "mine.yaml")
    # A long file without aliases is not one.
    monkeypatch.setattr("medclip_dcl.common.files._MAX_VALUES", 100)
    assert len(parse_yaml("[" + "x," * 200 + "]", "")) == 200


@pytest.mark.parametrize("value", ["x" * 10_000, [["x"] * 900] * 900, {n: [n] for n in range(900)}])
def test_quoted_values_are_short(value: object) -> None:
    assert len(quoted(value)) <= 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"PK\x03\x04", "a workbook or a zip archive"),
        (b"\xd0\xcf\x11\xe0\xa1", "a workbook or a zip archive"),
        (bytes(257) + b"ustar", "a tar, 7z or rar archive"),
        (b"\x1f\x8b\x08", "a gzip file (perhaps a tar archive)"),
        (bytes(128) + b"DICM", "a DICOM image"),
        (b"SQLite format 3\0", "a database"),
        (b'\xef\xbb\xbf[\n {"image": 1}]', "JSON"),
        (b'{"image": 1}\n{"image": 2}', "JSON"),
        (b"<html><table>", "HTML or XML"),
        (b"\n<?xml version='1.0'?>", "HTML or XML"),
        (b"image,text\n", ""),
        (b"<5 mm nodule.\n", ""),
        (b"[1] Clear.\n", ""),
        (b"", ""),
    ],
)
def test_kinds_of_files(content: bytes, kind: str) -> None:
    assert kind_of_file(content) == kind


def test_encodings_by_mark_and_by_zeros() -> None:
    text = "id;Größe\n1;Kein Erguss.\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"):
        content = text.encode(encoding)
        assert content.decode(encoding_of(content)) == text
    assert encoding_of(b"") == "utf-8-sig"


@pytest.mark.parametrize("has_links", [True, False])
def test_equal_tables_of_neighbouring_folders_are_one_file(tmp_path, monkeypatch, has_links):
    frame = pd.DataFrame({"path": [f"files/p{number:08}.jpg" for number in range(5000)]})
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    files = [tmp_path / f"runs/{number}/images.parquet" for number in range(3)]
    for number, file in enumerate(files):
        write_shared_parquet(frame if number < 2 else frame[::-1].reset_index(drop=True), file)
    assert [file.stat().st_ino == files[0].stat().st_ino for file in files] == [True, has_links, False]
    for file, expected in zip(files, (frame, frame, frame[::-1].reset_index(drop=True)), strict=True):
        assert pd.read_parquet(file).equals(expected)
    write_parquet(frame, tmp_path / "by_snappy.parquet")
    assert files[0].stat().st_size < 0.6 * (tmp_path / "by_snappy.parquet").stat().st_size
    write_shared_parquet(frame[:9], files[0])  # another content: the neighbour keeps its own
    assert len(pd.read_parquet(files[1])) == 5000
