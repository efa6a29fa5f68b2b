"""kill -9 of `shard` and `shard --undo`: the set is whole after each, and the same command ends like one not killed."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from data_prep import shard
from medclip_dcl.data.prepared import PreparedSet
from tests.data_prep.killing import Watch, changes, content, differing, run
from tests.data_prep.small_release import write_release
from tests.program import verb

pytestmark = pytest.mark.slow


def main(words: Sequence[str]) -> None:
    shard.SHARD_BYTES = 3_000
    verb("shard")(words)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of eleven images in files."""
    place = tmp_path_factory.mktemp("release")
    raw = write_release(place / "raw")
    words = ["--size", "16", "--workers", "1", "--rejected_share", "1"]
    verb("prepare mimic-cxr")(["--source", str(raw), "--output", str(place / "set"), *words])
    return place / "set"


def state(folder: Path) -> dict[str, bytes]:
    """All but the times of shards."""
    return {name: data for name, data in content(folder).items() if name != "shards/times.json"}


def require_whole(folder: Path, prepared: Path) -> None:
    """The set has every image, in files or in shards, and its fingerprint."""
    one, other = PreparedSet(prepared), PreparedSet(folder)
    assert other.fingerprint == one.fingerprint and other.changes == ""
    paths = one.table("images")["path"].tolist()
    found, expected = other.stored_images(paths), one.stored_images(paths)
    assert [found[place] for place in range(len(paths))] == [expected[place] for place in range(len(paths))]


def one_of_each(names: list[str]) -> dict[int, str]:
    """The last change of each kind: of a shard, an image, a folder; and every other one."""
    kinds = {re.sub(r"images/.*|shards/\d+|s/.[.]\d+", "", name): number for number, name in enumerate(names)}
    return {number: names[number] for number in sorted(kinds.values())}


@pytest.mark.parametrize("options", [[], ["--texts"], ["--undo"], ["--output"]])
def test_killed_between_changes(prepared, tmp_path, options):
    begun = tmp_path / "begun"
    shutil.copytree(prepared, begun)
    if "--undo" in options:
        main([str(begun)])
    whole, broken, copy = (tmp_path / name for name in ("whole", "broken", "copy"))
    shutil.copytree(begun, whole)

    def words(folder: Path) -> list[str]:
        return [str(folder), *options, *([str(copy)] if "--output" in options else [])]

    log, said = tmp_path / "log", tmp_path / "said"
    unfinished = tmp_path / f".copy.{PreparedSet(prepared).fingerprint}.shards.tmp"
    watched, written = (unfinished, copy) if "--output" in options else (whole, whole)
    assert run(main, words(whole), said, Watch(str(watched), log=str(log))) == 0, said.read_text()
    expected, names = state(written), one_of_each(changes(log))
    assert len(names) > 5, names
    watched, written = (watched, copy) if "--output" in options else (broken, broken)
    for number, name in names.items():
        for folder in (broken, copy, unfinished):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begun, broken)
        assert run(main, words(broken), said, Watch(str(watched), at=number)) == -signal.SIGKILL, name
        require_whole(broken, prepared)
        assert not copy.exists()
        finished = {file.name: file.stat().st_ino for file in watched.glob("shards/*.tar")}
        assert run(main, words(broken), said) == 0, (name, said.read_text())
        assert differing(state(written), expected) == [], name
        if "--undo" not in options:  # they are not written again
            assert finished.items() <= {f.name: f.stat().st_ino for f in written.glob("shards/*.tar")}.items()


def test_killed_at_random_moments(prepared, tmp_path):
    folder, said, log, draw = tmp_path / "set", tmp_path / "said", tmp_path / "log", random.Random(0)
    shutil.copytree(prepared, folder)

    def call(option: str, watch: Watch | None = None) -> int:
        ended = run(main, [str(folder), *filter(None, [option])], said, watch)
        assert ended == 0 or (watch and ended == -signal.SIGKILL), said.read_text()
        require_whole(folder, prepared)
        return ended

    for option, back in (("", "--undo"), ("--undo", "")):
        log.unlink(missing_ok=True)
        call(option, Watch(str(folder), log=str(log)))
        times = [float(line.split()[0]) for line in log.read_text().splitlines()]
        locked = next(n for n, line in enumerate(log.read_text().splitlines()) if "write .lock" in line)
        call(back)
        killed = 0
        for _ in range(12):
            seconds = draw.uniform(0, 0.7 * (times[-1] - times[locked]))
            if call(option, Watch(str(folder), begin="write .lock", seconds=seconds)):
                killed += 1
            else:  # it was faster: from the beginning again
                call(back)
        call(option)
        assert (folder / "images").exists() == (option == "--undo")
        assert (folder / "shards").exists() == (option == "")
        assert killed > 3, killed
