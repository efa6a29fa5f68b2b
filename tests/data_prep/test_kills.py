"""kill -9 of a preparation before each change of a file: nothing half made counts as finished, and a rerun ends alike.

The slow tests kill all commands everywhere (tests/slow/test_preparation_kills.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from data_prep.sources.check import check_set
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.prepared import PreparedDataError
from tests.data_prep.killing import Watch, changes, content, differing, run
from tests.data_prep.small_release import write_release
from tests.program import verb

Main = Callable[[list[str]], None]


def nothing(folder: Path) -> None:
    """The folder does not exist before the command."""


def everywhere(names: list[str]) -> list[int]:
    return list(range(len(names)))


def kill_and_finish(
    main: Main,
    arguments: Callable[[Path], list[str]],
    place: Path,
    begin: Callable[[Path], object] = nothing,
    chosen: Callable[[list[str]], list[int]] = everywhere,
    require: Callable[[Path, dict[str, bytes]], None] | None = None,
) -> list[str]:
    """Kill a command before each chosen change, look at what it left, run it again, and compare every byte.

    Args:
        main: of the command.
        arguments: of it, for a folder to prepare.
        place: an empty folder.
        begin: brings the folder into the state in which the command finds it.
        chosen: numbers of the changes, from the names of all of them.
        require: what must hold after a kill, given the content that the folder has to have in the end.

    Returns:
        the changes before which it was killed.
    """
    log, said, whole, broken = (place / name for name in ("log", "said", "whole", "broken"))
    begin(whole)
    assert run(main, arguments(whole), said, Watch(str(whole), log=str(log))) == 0, said.read_text()
    expected, names = content(whole), changes(log)
    numbers = chosen(names)
    for number in numbers:
        begin(broken)
        ended = run(main, arguments(broken), said, Watch(str(broken), at=number))
        assert ended == -signal.SIGKILL, (names[number], said.read_text())
        (require or require_honest)(broken, expected)
        assert run(main, arguments(broken), said) == 0, (names[number], said.read_text())
        assert differing(content(broken), expected) == [], names[number]
        broken.rename(place / "done")
        remove(place / "done")
    return [names[number] for number in numbers]


def remove(folder: Path) -> None:
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()


def require_honest(folder: Path, expected: dict[str, bytes]) -> None:
    """A set that a kill left is either not taken for one, or is all there."""
    if not (folder / "dataset.json").exists():
        for opened in (check_set, training):
            with pytest.raises(PreparedDataError, match="does not exist|not a prepared set, or unfinished"):
                opened(folder)
        return
    found = content(folder)
    assert set(differing(found, expected)) <= {"unfinished.json"}
    assert check_set(folder, full=True)[1] == []


def training(folder: Path) -> None:
    ImageTextDataModule(str(folder), image_size=16, crop_size=16, num_workers=0).setup("fit")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_release(tmp_path / "raw")


def with_boxes(raw: Path, folder: Path) -> list[str]:
    options = ["--ms_cxr", str(raw / "boxes.json"), "--size", "16", "--workers", "1"]
    return ["--source", str(raw), "--output", str(folder), *options]


def at_moments(*moments: str) -> Callable[[list[str]], list[int]]:
    return lambda names: [names.index(name) for name in moments]


@pytest.mark.slow
def test_killed_preparation_ends_with_the_same_bytes(raw: Path, tmp_path: Path) -> None:
    """tests/slow kills before every change."""
    chosen = at_moments("rename images.parquet")
    kill_and_finish(verb("prepare mimic-cxr"), partial(with_boxes, raw), tmp_path, chosen=chosen)


def test_leftovers_of_reports_alone_are_not_mixed(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("patient,split,image,text\n1,train,a.png,Clear.\n2,validate,b.png,Clear.\n")
    for name, level in (("a.png", 90), ("b.png", 200)):
        Image.linear_gradient("L").point(lambda grey, level=level: grey * level // 255).save(tmp_path / name)
    arguments = ["--table", str(table), "--output", str(tmp_path / "set"), "--size", "16", "--workers", "1"]
    said = tmp_path / "said"
    watch = Watch(str(tmp_path / "set"), begin="rename reports.parquet", everything=False)
    assert run(verb("prepare folder"), [*arguments, "--text_only"], said, watch) < 0
    assert (tmp_path / "set/studies.parquet").exists()
    assert run(verb("prepare folder"), arguments, said) != 0
    assert "partly prepared set that was made differently" in said.read_text()
