"""Arrays that processes share, and the fields that stand in them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from medclip_dcl.data.arrays import Arrays, as_lists, is_sound, kept_arrays, write_arrays
from medclip_dcl.data.fields import FieldRows

VECTORS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16)


def test_arrays_of_a_file_are_pickled_as_its_name(tmp_path):
    some = {
        "value": np.arange(100_000),
        "text": pa.array(["a", "", "é"], pa.large_string()),
        "none": np.zeros((0, 3)),
        "lists": as_lists(np.array([1, -2, 70_000]), np.array([2, 0, 1])),
    }
    write_arrays(some, tmp_path / "a.arrow")
    mapped, own = Arrays(tmp_path / "a.arrow"), Arrays(some)
    for arrays in (mapped, own, pickle.loads(pickle.dumps(mapped)), pickle.loads(pickle.dumps(own))):
        assert np.array_equal(arrays["value"], some["value"]) and arrays["none"].shape == (0, 3)
        assert (arrays["text"][:], arrays["text"][2], len(arrays["text"])) == (["a", "", "é"], "é", 3)
        lists = arrays["lists"]
        assert [row.tolist() for row in lists[[2, 0]]] == [[70_000], [1, -2]] and len(lists[1]) == 0
        assert lists.flat.tolist() == [1, -2, 70_000] and lists.lengths.tolist() == [2, 0, 1]
        assert lists.take(np.array([2, 1])).lengths.tolist() == [1, 0]
    assert len(pickle.dumps(mapped)) < 1000 < len(pickle.dumps(own))
    lists = mapped["lists"]
    assert [row.tolist() for row in lists] == [[1, -2], [], [70_000]] and lists[-3].tolist() == [1, -2]
    with pytest.raises(IndexError):
        lists[3]
    texts, lists = (pickle.dumps(mapped[name]) for name in ("text", "lists"))
    assert max(len(texts), len(lists)) < 1000
    assert pickle.loads(texts)[2] == "é" and pickle.loads(lists)[2].tolist() == [70_000]
    assert not mapped["value"].flags.writeable


class Made:
    """A maker of arrays that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"value": np.arange(self.calls)}


def test_arrays_are_kept_until_what_they_depend_on_changes(tmp_path, caplog):
    make = Made()
    caplog.set_level("INFO", "pytorch_lightning")

    def length(fingerprint: str, **what: object) -> int:
        return len(kept_arrays([tmp_path], fingerprint, what, make)["value"])

    assert [length("a", of="x"), length("a", of="x"), length("a", of="y"), length("a", of="x")] == [
        1,
        1,
        2,
        1,
    ]
    assert sorted(path.name for path in (tmp_path / "arrays").iterdir()) == ["a"]
    (damaged,) = [file for file in tmp_path.rglob("*.arrow") if len(Arrays(file)["value"]) == 2]
    damaged.write_bytes(damaged.read_bytes()[:100])  # as a power cut may leave it
    assert length("a", of="y") == 3 == make.calls
    assert "earlier contents" not in caplog.text
    assert length("b", of="x") == 4  # another content of the set: a run may read the earlier one's arrays
    assert "arrays of earlier contents of the set, a; delete" in caplog.text
    assert length("a", of="x") == 1


def reverse(file: Path) -> None:
    arrays = {"value": Arrays(file)["value"][::-1].copy()}
    digest = file.with_suffix(".digest").read_bytes()
    write_arrays(arrays, file)
    file.with_suffix(".digest").write_bytes(digest)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(np.arange(3, 7).tobytes()) + 8] ^= 1
    file.write_bytes(content)


def take_other(file: Path) -> None:
    other = file.with_name("other.arrow")  # of equal length, with its own digest
    write_arrays({"value": np.arange(17)[::-1].copy()}, other)
    for ending in (".arrow", ".digest"):
        shutil.copy(other.with_suffix(ending), file.with_suffix(ending))


@pytest.mark.parametrize(
    "damage", [reverse, flip, take_other, lambda file: file.with_suffix(".digest").unlink()]
)
@pytest.mark.parametrize("is_writable", [True, False])
def test_damaged_arrays_are_made_again_once(tmp_path, monkeypatch, caplog, damage, is_writable):
    made: list[int] = []

    def values() -> list[int]:
        found = kept_arrays([tmp_path / "set", tmp_path / "run"], "a", {}, make)
        return found["value"].tolist()

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"value": np.arange(17)}

    def write(arrays: Mapping[str, np.ndarray], file: Path) -> None:
        if not is_writable and tmp_path / "set" in file.parents:
            raise PermissionError(13, "Permission denied", str(file))
        write_arrays(arrays, file)

    caplog.set_level("INFO", "pytorch_lightning")
    assert values() == [*range(17)]
    (file,) = tmp_path.rglob("*.arrow")
    damage(file)
    assert not is_sound(file)
    monkeypatch.setattr("medclip_dcl.data.arrays.write_arrays", write)
    assert values() == values() == [*range(17)] and len(made) == 2
    assert is_sound(file) == is_writable and (tmp_path / "run").exists() != is_writable
    assert caplog.text.count(f"{file} differs from its digest, or has none") == 1


def test_arrays_that_another_machine_made_meanwhile_stay(tmp_path):
    def make_after_another() -> dict[str, np.ndarray]:
        kept_arrays([tmp_path], "a", {}, Made())
        (file,) = tmp_path.rglob("*.arrow")
        made.append(file.stat().st_ino)
        return {"value": np.arange(1)}

    made: list[int] = []
    kept_arrays([tmp_path], "a", {}, make_after_another)
    assert [file.stat().st_ino for file in tmp_path.rglob("*.arrow")] == made


def test_arrays_of_a_set_that_cannot_be_written_stand_in_the_run(tmp_path, monkeypatch):
    (tmp_path / "set").write_text("no folder: nothing can be written below it")
    folders, make = [tmp_path / "set", tmp_path / "run"], Made()
    for _ in range(2):
        assert len(kept_arrays(folders, "a", {}, make)["value"]) == make.calls == 1
    assert len(list((tmp_path / "run/arrays/a").glob("*.arrow"))) == 1

    def no_mmap(*_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(pa, "memory_map", no_mmap)
    with pytest.warns(UserWarning, match=r"No such device.* each process keeps the arrays .* own memory"):
        found = kept_arrays(folders, "a", {}, make)
    assert len(found["value"]) == 2


@pytest.mark.parametrize("is_file", [False, True])
def test_field_by_key_and_by_shared_row(tmp_path, is_file):
    def rows(**arrays: np.ndarray) -> FieldRows:
        write_arrays(arrays, tmp_path / "a.arrow")
        return pickle.loads(pickle.dumps(FieldRows(Arrays(tmp_path / "a.arrow" if is_file else arrays))))

    of_sentences = rows(key=np.array([2, 3, 5, 8, 2**60]), value=VECTORS)
    found = of_sentences[[2**60, 2, 2]]
    assert found.dtype == torch.float32 and torch.equal(found, torch.tensor(VECTORS[[4, 0, 0]]).float())
    for missing in (4, 2**61, -1):
        with pytest.raises(KeyError, match=str(missing)):
            of_sentences[[2, missing]]
    of_images = rows(value=VECTORS, row=np.array([4, 4, 0], dtype=np.int32))
    assert torch.equal(of_images[[1, 2]], torch.tensor(VECTORS[[4, 0]]).float())
    counts = rows(value=np.array([7, 9]))[np.array([1])]
    assert counts.dtype == torch.int64 and counts.tolist() == [9]
