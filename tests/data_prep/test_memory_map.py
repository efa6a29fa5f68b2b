"""The memory map of a prepared set: written beside the JPEG files, equal to them, and of no other set."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep import memory_map as writing
from data_prep.memory_map import write_memory_map
from data_prep.sources import images as image_files
from data_prep.sources.images import ImageStageError
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.images import Images
from medclip_dcl.data.memory_map import DESCRIPTION, PIXELS, open_memory_map
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.files import write_json
from medclip_dcl.pictures.transforms import load_grey


@pytest.fixture
def folder(small_set: Path, tmp_path: Path) -> Path:
    """A set of 42 images of 40 x 40, with its size among its options."""
    copied = shutil.copytree(small_set, tmp_path / "set")
    info = json.loads((copied / "dataset.json").read_text())
    write_json({**info, "options": {"size": 40}}, copied / "dataset.json")
    return copied


def pixels(folder: Path) -> np.ndarray:
    """The JPEG files' grey levels in the order of the table."""
    prepared = PreparedSet(folder)
    return np.stack([load_grey(prepared.image_file(path), 40) for path in prepared.table("images")["path"]])


def test_the_map_holds_the_pixels_of_the_files_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_AT_ONCE", 5)  # 42 is no multiple of it
    assert write_memory_map(folder)
    np.testing.assert_array_equal(np.load(folder / PIXELS), pixels(folder))
    header = (folder / PIXELS).stat().st_size - 42 * 40 * 40
    assert 0 < header <= 128
    found = open_memory_map(PreparedSet(folder))
    assert found is not None and found.side == 40
    np.testing.assert_array_equal(found[17], pixels(folder)[17])
    assert not list(folder.glob(".*"))
    assert not write_memory_map(folder), "it is there already"


def test_several_workers_write_the_same_bytes(folder: Path) -> None:
    write_memory_map(folder)
    alone = [(folder / name).read_bytes() for name in (PIXELS, DESCRIPTION)]
    (folder / DESCRIPTION).unlink()
    with ThreadPoolExecutor(3) as pool:
        assert write_memory_map(folder, pool)
    assert [(folder / name).read_bytes() for name in (PIXELS, DESCRIPTION)] == alone


def test_training_reads_the_map_where_images_are_not_scaled(folder: Path) -> None:
    write_memory_map(folder)
    expected = {size: load_all(folder, size) for size in (40, 32)}
    # From here on the map differs from the files, so that it shows which of them was read.
    with (folder / PIXELS).open("r+b") as stream:
        stream.seek(-(42 * 40 * 40), 2)
        stream.write(bytes(np.full(42 * 40 * 40, 77, np.uint8)))
    assert set(load_all(folder, 40).reshape(-1)) == {77}
    assert set(load_all(folder, 40, cache_images=True).reshape(-1)) == {77}
    np.testing.assert_array_equal(load_all(folder, 32), expected[32])
    (folder / DESCRIPTION).unlink()
    np.testing.assert_array_equal(load_all(folder, 40), expected[40])


def load_all(folder: Path, size: int, cache_images: bool = False) -> np.ndarray:
    """Grey levels of the test images, in an order of its own, as the datamodule reads them."""
    data = ImageTextDataModule(
        str(folder), image_size=size, crop_size=16, num_workers=0, cache_images=cache_images
    )
    ids = sorted(PreparedSet(folder).table("images").query("use == 'test'")["dicom_id"], reverse=True)
    images = data._cached(ids)
    return np.stack([images[index] for index in range(len(ids))])


def test_the_datamodule_finds_the_right_rows(folder: Path) -> None:
    from_files = load_all(folder, 40)
    write_memory_map(folder)
    shutil.rmtree(folder / "images")
    np.testing.assert_array_equal(load_all(folder, 40), from_files)
    np.testing.assert_array_equal(load_all(folder, 40, cache_images=True), from_files)


def test_a_loader_process_is_sent_no_pixels(folder: Path) -> None:
    write_memory_map(folder)
    prepared = PreparedSet(folder)
    files = [prepared.image_file(path) for path in prepared.table("images")["path"]]
    images = Images(files, 40, False, open_memory_map(prepared), range(42))
    before = images[5].copy()
    sent = pickle.dumps(images)
    assert len(sent) < 42 * 40 * 40 / 4
    np.testing.assert_array_equal(pickle.loads(sent)[5], before)


def damage_fingerprint(folder: Path) -> None:
    info = json.loads((folder / "dataset.json").read_text())
    write_json({**info, "fingerprint": "g"}, folder / "dataset.json")


def damage_length(folder: Path) -> None:
    (folder / PIXELS).write_bytes((folder / PIXELS).read_bytes()[:-1])


def damage_shape(folder: Path) -> None:
    np.save(folder / PIXELS, np.zeros((42, 40, 41), np.uint8))


DAMAGE = {
    "of another set": (
        damage_fingerprint,
        "memory_map.json is of another set: fingerprint f, .*, expected fingerprint g, .*; delete",
    ),
    "too short": (damage_length, "memory_map.npy cannot be read .*--memory_map"),
    "another shape": (damage_shape, r"holds uint8 \(42, 40, 41\), expected uint8 \(42, 40, 40\)"),
    "missing": (lambda folder: (folder / PIXELS).unlink(), "memory_map.npy cannot be read .*No such file"),
    "no json": (lambda folder: (folder / DESCRIPTION).write_text("{"), "memory_map.json is not JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_map_that_does_not_belong_is_refused_and_made_again(folder: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    write_memory_map(folder)
    damage(folder)
    with pytest.raises(PreparedDataError, match=message):
        open_memory_map(PreparedSet(folder))
    assert write_memory_map(folder)
    np.testing.assert_array_equal(np.load(folder / PIXELS), pixels(folder))


def test_an_image_that_cannot_be_read_leaves_no_map(folder: Path) -> None:
    prepared = PreparedSet(folder)
    file = prepared.image_file(prepared.table("images")["path"].iloc[30])
    Image.new("L", (40, 39)).save(file)
    with pytest.raises(PreparedDataError, match=r"expected 40 x 40 pixels, found \(40, 39\)"):
        write_memory_map(folder)
    file.unlink()
    with pytest.raises(PreparedDataError, match="cannot be read"):
        write_memory_map(folder)
    assert not (folder / PIXELS).exists() and open_memory_map(PreparedSet(folder)) is None


def test_space_is_checked_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=42 * 40 * 40 - 1))
    with pytest.raises(ImageStageError, match="GB of memory map"):
        write_memory_map(folder)
    assert not list(folder.glob("*memory_map*"))


def test_a_map_that_is_written_again_needs_the_room_of_the_older_one_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_memory_map(folder)
    (folder / DESCRIPTION).unlink()
    monkeypatch.setattr(image_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert write_memory_map(folder)


def test_order_is_that_of_the_table_not_of_the_names(folder: Path) -> None:
    images = pd.read_parquet(folder / "images.parquet")
    images.iloc[::-1].reset_index(drop=True).to_parquet(folder / "images.parquet", index=False)
    write_memory_map(folder)
    np.testing.assert_array_equal(np.load(folder / PIXELS), pixels(folder))
