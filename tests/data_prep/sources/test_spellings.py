"""One identity for all spellings of a name, and files found under another spelling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from data_prep.sources.spellings import find_files, plain_name, plain_number

ALIKE = {
    "Q-7": ["Q\u20107", "Q\u20117", "Q\u22127", "\ufeffQ-7", "Q\u200b-7", "Q-7\u00ad", "\uff31-\uff17", "'Q-7"],
    "M\u00fcller 3": ["Mu\u0308ller 3", "M\u00fcller\u00a03", "M\u00fcller   3", "M\u00fcller\u2009\t3"],
    "001005": ['="001005"', "'001005", "\uff10\uff10\uff11\uff10\uff10\uff15", "001,005", "\u0660\u0660\u0661005"],
    "12005": ["12,005", '="12,005"', "12005\u200e"],
    "1234567.png": ["1,234,567.png"],
    "O'Neill": ["O\u2019Neill"],
}  # fmt: skip
APART = [
    "Q-7", "Q7", "Q_7", "q-7", "Q-07", "Q 7", "1,2", "12", "1,23456", "123456", "1.005", "1005", "12,0055", "Muller",
]  # fmt: skip


@pytest.mark.parametrize(("name", "spellings"), ALIKE.items())
def test_spellings_of_one_name(name: str, spellings: list[str]) -> None:
    assert {plain_name(spelling) for spelling in spellings} == {name}


def test_names_that_differ_stay_apart() -> None:
    assert len({plain_name(name) for name in APART}) == len(APART)
    assert {plain_number(name) for name in ("7", "007", "7.0", "\uff17", "'07")} == {"7"}
    assert plain_number("Q-07") != plain_number("q-7") == plain_number("Q\u20107")


def test_files_under_another_spelling_or_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = [
        "a/Q-1.png",
        "b.PNG",
        "c.png",
        "d.png",
        "d.dcm",
        "e.png",
        "Mu\u0308.jpg",
        "f.txt",
        "12005.png",
        "1.2.3.dcm",
    ]
    there += ["g/1.png", "g.png"]
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = {
        "a/Q\u20101.png": "a/Q-1.png",
        "b.png": "b.PNG",
        "c.jpg": "c.png",
        "d.jpg": "d.jpg",  # of two files either may be meant
        "e.png": "e.png",
        "e.jpg": "e.jpg",  # e.png is another image of the table
        "M\u00fc.jpg": "Mu\u0308.jpg",
        "f.jpg": "f.jpg",  # a text
        "12,005.png": "12005.png",
        "1.2.3": "1.2.3.dcm",
        "g": "g.png",  # and not the folder
        "": "",
    }
    found = find_files(pd.Series(list(wanted)), tmp_path)
    assert [Path(file) for file in found] == [tmp_path / name for name in wanted.values()]
    said = capsys.readouterr().out
    assert "images found by another spelling: 4 (first: 'a/Q\u20101.png' is 'a/Q-1.png')" in said
    assert "images found by another ending: 3 (first: 'c.jpg' is 'c.png')" in said


def test_an_image_in_a_closed_folder_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as a user to whom no folder is closed."""
    look = os.stat

    def refusing(place: Any, *options: Any, **more: Any) -> os.stat_result:
        if str(place).endswith("closed/a.png"):
            raise PermissionError(13, "Permission denied", str(place))
        return look(place, *options, **more)

    monkeypatch.setattr(os, "stat", refusing)
    assert find_files(pd.Series(["closed/a.png"]), tmp_path).tolist() == [str(tmp_path / "closed/a.png")]
