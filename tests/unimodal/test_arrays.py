"""Readers of small labelled images: each layout gives the same arrays; files that are not of it are named."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR100

from medclip_dcl.common.errors import UserError
from medclip_dcl.unimodal.arrays import CIFAR10, ImageArrays, read_images

TRAIN, TEST = 3, 4
"""Images of a batch file."""


def pixels(count: int, seed: int) -> np.ndarray:
    """Images (image, 3, 32, 32)."""
    return np.random.default_rng(seed).integers(256, size=(count, 3, 32, 32), dtype=np.uint8)


def labels_of(count: int, first: int) -> np.ndarray:
    """Every class is among those of all training files."""
    return np.arange(3 * first, 3 * first + count) * 7 % 10


def png(image: np.ndarray) -> bytes:
    """A file of an image (3, row, column)."""
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


BATCHES = {
    **{f"data_batch_{n}": (pixels(TRAIN, n), labels_of(TRAIN, n)) for n in range(1, 6)},
    "test_batch": (pixels(TEST, 6), labels_of(TEST, 6)),
}


def python_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 2 pickled it, whose strings are byte strings; as the official files are."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01J"
        + struct.pack("<i", len(images))
        + b"M\x00\x0c\x86cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<i", images.size) + images.tobytes() + b"tb"
    )
    values = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    name = text(b"batch_label") + text(b"training batch 1 of 5")
    return b"\x80\x02}(" + name + text(b"data") + array + text(b"labels") + values + b"u."


def write_batches(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in BATCHES.items():
        (folder / name).write_bytes(python_batch(*batch))
    return folder


def write_parquet(folder: Path, column: str = "img") -> Path:
    """Parquet files with PNG images, those for training in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train-00000-of-00002": [1, 2], "train-00001-of-00002": [3, 4, 5], "test-00000-of-00001": [6]}
    batches = list(BATCHES.values())
    for name, numbers in parts.items():
        images, labels = (np.concatenate(x) for x in zip(*(batches[n - 1] for n in numbers), strict=True))
        files = [{"bytes": png(x), "path": None} for x in images]
        pd.DataFrame({column: files, "label": labels}).to_parquet(folder / f"{name}.parquet")
    return folder


def write_stl10(folder: Path, unlabelled: int = 5) -> tuple[Path, dict[str, np.ndarray]]:
    """The binary files, which hold each channel of an image column by column."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    images = {
        use: generator.integers(256, size=(count, 3, 96, 96), dtype=np.uint8)
        for use, count in (("train", 20), ("test", 12), ("unlabeled", unlabelled))
        if count
    }
    for use, arrays in images.items():
        with (folder / f"{use}_X.bin").open("wb") as stream:
            for image in arrays:
                for channel in image:
                    for column in range(96):
                        stream.write(channel[:, column].tobytes())
        if use != "unlabeled":
            (folder / f"{use}_y.bin").write_bytes(bytes(i % 10 + 1 for i in range(len(arrays))))
    names = "airplane bird car cat deer dog horse monkey ship truck"
    (folder / "class_names.txt").write_text(names.replace(" ", "\n") + "\n")
    return folder, images


def assert_are_the_batches(found: ImageArrays) -> None:
    train = [BATCHES[f"data_batch_{n}"] for n in range(1, 6)]
    assert np.array_equal(found.train.numpy(), np.concatenate([images for images, _ in train]))
    assert np.array_equal(found.train_labels.numpy(), np.concatenate([labels for _, labels in train]))
    assert np.array_equal(found.test.numpy(), BATCHES["test_batch"][0])
    assert np.array_equal(found.test_labels.numpy(), BATCHES["test_batch"][1])
    assert found.classes == CIFAR10 and found.selected == ("dog", "frog", "horse", "ship", "truck")


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(
    ("layout", "usual"),
    [
        ("python", "cifar-10-batches-py"),
        ("parquet", "plain_text"),
    ],
)
def test_every_layout_of_cifar10_gives_the_same_arrays(layout, usual, is_inside, tmp_path):
    folder = tmp_path / usual if is_inside else tmp_path
    write_parquet(folder, "img" if is_inside else "image") if layout == "parquet" else write_batches(folder)
    assert_are_the_batches(read_images("cifar10", str(tmp_path)))


@pytest.fixture(scope="session")
def real_cifar10(real_data) -> Path:
    if not (real_data / "cifar10").is_dir():
        pytest.skip(f"no {real_data / 'cifar10'}")
    return real_data / "cifar10"


@pytest.mark.slow
def test_the_real_cifar10(real_cifar10):
    found = read_images("cifar10", str(real_cifar10))
    assert found.train.shape == (50_000, 3, 32, 32) and len(found.test) == 10_000
    assert found.train_labels.bincount().tolist() == [5_000] * 10
    assert found.test_labels.bincount().tolist() == [1_000] * 10
    assert found.test_labels[:5].tolist() == [3, 8, 8, 0, 6]  # cat, ship, ship, airplane, frog
    # Frog, truck, truck, deer, automobile.
    assert found.train_labels[:5].tolist() == [6, 9, 9, 4, 1]
    means = (found.train.float().mean((0, 2, 3)) / 255).tolist()
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-4)


def test_stl10_is_read_column_by_column(tmp_path):
    folder, images = write_stl10(tmp_path / "stl10_binary")
    found = read_images("stl10", str(tmp_path))
    assert np.array_equal(found.train.numpy(), np.concatenate([images["train"], images["unlabeled"]]))
    assert np.array_equal(found.test.numpy(), images["test"])
    assert found.train_labels.tolist() == [*range(10), *range(10)] + [-1] * 5
    assert found.test_labels.tolist() == [*range(10), 0, 1]
    assert found.classes[0] == "airplane" and found.selected == ("dog", "horse", "monkey", "ship", "truck")
    (folder / "unlabeled_X.bin").unlink()
    labelled = read_images("stl10", str(folder))
    assert np.array_equal(labelled.train.numpy(), images["train"])
    assert labelled.train_labels.tolist() == [*range(10), *range(10)]


def write_class_folders(folder: Path, height: int = 20, width: int = 32) -> Path:
    """Two classes, of 24 images for training and 6 for the test, of random pixels of one hue for each image."""
    generator = np.random.default_rng(3)
    for use, count in (("train", 12), ("val", 3)):
        for name in ("fox", "owl"):
            (folder / use / name).mkdir(parents=True)
            for number in range(count):
                grey, hue = generator.integers(256, size=(height, width, 1)), generator.random(3)
                image = Image.fromarray((grey * hue).astype(np.uint8))
                image.save(folder / use / name / f"{number:02}.png")
    return folder


def test_class_folders_are_central_squares(tmp_path):
    folder = write_class_folders(tmp_path)
    found = read_images("class_folders", str(folder), 20)
    assert found.classes == ("fox", "owl") and found.selected == ("owl",)
    assert (
        found.train_labels.tolist() == [0] * 12 + [1] * 12 and found.test_labels.tolist() == [0] * 3 + [1] * 3
    )
    for images, row, name in ((found.train, 14, "train/owl/02.png"), (found.test, 0, "val/fox/00.png")):
        with Image.open(folder / name) as image:
            assert np.array_equal(images[row].numpy(), np.asarray(image)[:, 6:26].transpose(2, 0, 1))
    small = read_images("class_folders", str(folder), 5)
    assert small.train.shape == (24, 3, 5, 5)
    means = [x.float().mean((1, 2, 3)) for x in (small.train, found.train)]
    torch.testing.assert_close(*means, rtol=0, atol=1)
    grey = Image.new("L", (7, 9), 77)
    grey.save(folder / "val" / "fox" / "zz.jpg")
    assert (read_images("class_folders", str(folder), 4).test[3] == 77).all(), (
        "grey files have three channels"
    )


def test_class_folders_of_other_classes_are_refused(tmp_path):
    folder = write_class_folders(tmp_path)
    (folder / "val" / "owl").rename(folder / "val" / "wolf")
    with pytest.raises(UserError, match=r"same classes in train and val of .*, found owl, wolf in one"):
        read_images("class_folders", str(folder), 8)
    (folder / "val" / "wolf").rename(folder / "val" / "owl")
    (folder / "train" / "fox" / "03.png").write_bytes(b"?")
    with pytest.raises(UserError, match=r"fox/03.png: expected an image file, found UnidentifiedImageError"):
        read_images("class_folders", str(folder), 8)
    with pytest.raises(UserError, match=r"data.image_size: expected the side .* found null"):
        read_images("class_folders", str(folder))


def test_digits_are_split_by_class():
    found = read_images("digits", None)
    bunch = load_digits()
    assert (len(found.train), len(found.test)) == (1198, 599)
    assert found.train.shape[1:] == (1, 8, 8) and found.train.max() == 255
    for label in range(10):
        count = int((bunch.target == label).sum())
        assert int((found.test_labels == label).sum()) == round(count / 3)
        assert int((found.train_labels == label).sum()) == count - round(count / 3)
    both = torch.cat([found.train, found.test]).flatten(1).tolist()
    originals = np.round(bunch.data * 255 / 16).astype(int).tolist()
    assert sorted(both) == sorted(originals), "every image is in one part"
    # Each image keeps its label.
    label_of = {tuple(row): label for row, label in zip(originals, bunch.target.tolist(), strict=True)}
    assert [label_of[tuple(row)] for row in both] == [
        *found.train_labels.tolist(),
        *found.test_labels.tolist(),
    ]


def test_the_fingerprint_is_of_every_value():
    found = read_images("digits", None)
    before = found.fingerprint()
    assert read_images("digits", None).fingerprint() == before
    for name in ("train", "train_labels", "test", "test_labels"):
        changed = read_images("digits", None)
        getattr(changed, name)[7] += 1
        assert changed.fingerprint() != before, name


def test_cifar100_is_read_by_torchvision_after_its_checksums(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    parts = {"train": (pixels(7, 1), [3, 99, 0, 1, 2, 50, 3]), "test": (pixels(5, 2), [0, 1, 99, 3, 2])}
    contents = {
        name: {"data": images.reshape(len(images), -1), "fine_labels": labels}
        for name, (images, labels) in parts.items()
    }
    contents["meta"] = {"fine_label_names": [f"class {number}" for number in range(100)]}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="data.files: expected the unpacked folder cifar-100-python in"):
        read_images("cifar100", str(tmp_path))
    digests = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in contents}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", digests["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", digests["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": digests["meta"]})
    found = read_images("cifar100", str(tmp_path))
    assert np.array_equal(found.train, parts["train"][0]) and np.array_equal(found.test, parts["test"][0])
    assert found.train_labels.tolist() == parts["train"][1] and found.test_labels.tolist() == parts["test"][1]
    assert len(found.classes) == 100 and found.selected == found.classes[50:]


class Attack:
    """A pickle that runs a program when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_a_batch_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_batches(tmp_path)
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": Attack(), "labels": [1]}))
    with pytest.raises(UserError, match=r"data_batch_3: expected a Python batch .* names posix.mkdir"):
        read_images("cifar10", str(folder))
    assert not Path("attacked").exists()


def damage(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


GOOD = BATCHES["data_batch_2"]


@pytest.mark.parametrize(
    ("layout", "name", "content", "words"),
    [
        ("python", "data_batch_4", None, ["No such file", "data_batch_4"]),
        ("python", "data_batch_2", python_batch(*GOOD)[:5000], ["data_batch_2", "truncated"]),
        ("python", "data_batch_2", pickle.dumps({"data": 3}), ["data_batch_2", "labels"]),
        ("python", "data_batch_2", python_batch(GOOD[0][:, :, :31], GOOD[1]), ["data_batch_2", "buffer size"]),
        ("python", "data_batch_2", python_batch(GOOD[0], np.array([0, 10, 3])), ["0 to 9", "10"]),
        ("parquet", "test-00000-of-00001.parquet", None, ["test-*.parquet", "FileNotFoundError"]),
        ("parquet", "train-00001-of-00002.parquet", b"PAR1", ["train-00001", "expected the columns img"]),
        ("stl10", "test_X.bin", bytes(27_647), ["test_X.bin", "27,647 bytes", "27,648"]),
        ("stl10", "train_y.bin", bytes([1, 2]), ["train_y.bin", "each of the 20 images", "found 2"]),
        ("stl10", "train_y.bin", bytes(range(20)), ["train_y.bin", "1 to 10", "19"]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_in_one_line(layout, name, content, words, tmp_path):
    if layout == "stl10":
        write_stl10(tmp_path)
    elif layout == "parquet":
        write_parquet(tmp_path)
    else:
        write_batches(tmp_path)
    damage(tmp_path / name, content)
    with pytest.raises(UserError) as error:
        read_images("stl10" if layout == "stl10" else "cifar10", str(tmp_path))
    assert all(part in str(error.value) for part in words), error.value
    assert "\n" not in str(error.value)


BLACK = png(np.zeros((3, 32, 32), np.uint8))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"img": [{"bytes": png(np.zeros((3, 1, 1), np.uint8))}], "label": [1]}, ["32 x 32", "(1, 1)"]),
        ({"img": [{"bytes": BLACK}, {"bytes": b"?"}], "label": [1, 2]}, ["PNG or JPEG", "cannot identify"]),
        ({"img": [{"bytes": BLACK}], "fine_label": [1]}, ["columns img (or image)", "KeyError('label')"]),
        ({"img": [{"bytes": BLACK}], "label": [10]}, ["labels from 0 to 9", "10"]),
        ({"img": [], "label": []}, ["train-0.parquet"]),
    ],
)  # fmt: skip
def test_parquet_files_of_another_content_are_named(columns, words, tmp_path):
    for use in ("train", "test"):
        pd.DataFrame(columns).to_parquet(tmp_path / f"{use}-0.parquet")
    with pytest.raises(UserError) as error:
        read_images("cifar10", str(tmp_path))
    assert all(part in str(error.value) for part in ["train-0.parquet", *words]), error.value
    assert "\n" not in str(error.value)
