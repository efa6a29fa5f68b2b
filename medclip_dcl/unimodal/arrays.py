"""Labelled images in memory: scikit-learn's digits, CIFAR-10, STL10 and folders of classes."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64, UInt8
from PIL import Image, ImageOps
from torch import Tensor

from medclip_dcl.common.errors import MissingFileError, UserError

UNLABELLED = -1
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SSD = ("dog", "frog", "horse", "ship", "truck")
_CIFAR10_FOLDERS = ("cifar-10-batches-py", "plain_text")
_CIFAR10_SHAPE, _STL10_SHAPE = (3, 32, 32), (3, 96, 96)
_ARRAY_PARTS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
"""Globals that an unpickled array of numbers may name."""


@dataclass(frozen=True)
class ImageArrays:
    """Training images, of which the unlabelled ones are the last, and test images with positions in `classes`."""

    classes: tuple[str, ...]
    train: UInt8[Tensor, "train_image channel side side"]
    train_labels: Int64[Tensor, " train_image"]
    test: UInt8[Tensor, "test_image channel side side"]
    test_labels: Int64[Tensor, " test_image"]
    selected: tuple[str, ...]
    """Classes of which a fraction is kept where nothing else is chosen."""

    def fingerprint(self) -> str:
        """SHA-256 of the class names, images and labels."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for array in (self.train, self.train_labels, self.test, self.test_labels):
            digest.update(repr(tuple(array.shape)).encode())
            digest.update(array.contiguous().numpy().data)
        return digest.hexdigest()


def read_digits() -> ImageArrays:
    """The 1,797 digits of 8 x 8 pixels that come with scikit-learn, in 256 grey levels.

    They have no official split: a third of each class is for the test, drawn once and for all (choice). The writers
    are not known, so that both parts have digits of the same hands.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    grey = torch.from_numpy(np.round(images * (255 / 16)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        of_class = np.random.default_rng([0, label]).permutation(np.flatnonzero(labels == label))
        is_test[of_class[: round(len(of_class) / 3)]] = True
    train, test = torch.from_numpy(~is_test), torch.from_numpy(is_test)
    label_of = torch.from_numpy(labels.astype(np.int64))
    classes = tuple(str(label) for label in range(10))
    return ImageArrays(
        classes, grey[train], label_of[train], grey[test], label_of[test], selected=classes[5:]
    )


def read_cifar10(folder: Path) -> ImageArrays:
    """CIFAR-10 from its official Python batches, or the Parquet files of the Hugging Face data set."""
    for place in (folder, *(folder / name for name in _CIFAR10_FOLDERS)):
        if (place / "data_batch_1").is_file():
            files = [place / f"data_batch_{number}" for number in range(1, 6)]
            return _cifar10(files, [place / "test_batch"], _read_python_batch)
        if train := sorted(place.glob("train-*.parquet")):
            test = sorted(place.glob("test-*.parquet")) or [place / "test-*.parquet"]
            return _cifar10(train, test, _read_parquet)
    raise MissingFileError(
        f"data.files: found no CIFAR-10 in {folder}; expected the files data_batch_1 (Python batches) or "
        "train-*.parquet (Hugging Face), unpacked"
    )


def _cifar10(
    train: Sequence[Path], test: Sequence[Path], read: Callable[[Path], tuple[np.ndarray, np.ndarray]]
) -> ImageArrays:
    def joined(files: Sequence[Path]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*(read(file) for file in files), strict=True)
        for file, found in zip(files, labels, strict=True):
            _check_labels(file, found, 0, len(CIFAR10) - 1)
        numbers = np.concatenate(labels).astype(np.int64)
        return torch.from_numpy(np.concatenate(images)), torch.from_numpy(numbers)

    return ImageArrays(CIFAR10, *joined(train), *joined(test), _SSD)


class _ArraysUnpickler(pickle.Unpickler):
    """Reads plain values and arrays; a pickle that names anything else, which could run code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAY_PARTS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a batch of images does not need")
        return super().find_class(module, name)


def _read_python_batch(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a pickled batch."""
    try:
        with file.open("rb") as stream:
            # Written by Python 2, whose strings are bytes.
            batch = _ArraysUnpickler(stream, encoding="latin1").load()
        labels = np.array(batch["labels"])
        return batch["data"].reshape(len(labels), *_CIFAR10_SHAPE), labels
    except Exception as error:  # which ones damaged bytes raise is not limited
        raise UserError(f"{file}: expected a Python batch of CIFAR-10, found {error!r}") from error


def _read_parquet(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a Parquet file: columns img (or image) with bytes of a PNG or JPEG file, and label."""
    try:
        table = pd.read_parquet(file)
        images = np.empty((len(table), *_CIFAR10_SHAPE), dtype=np.uint8)
        for row, encoded in enumerate(table["img" if "img" in table else "image"]):
            with Image.open(io.BytesIO(encoded["bytes"]), formats=("PNG", "JPEG")) as image:
                if image.size != _CIFAR10_SHAPE[1:]:  # one pixel would be copied to all places
                    raise ValueError(f"an image of {image.size}")
                images[row] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        return images, table["label"].to_numpy()
    except Exception as error:  # those of damaged bytes, other columns and other images
        raise UserError(
            f"{file}: expected the columns img (or image), with the bytes of PNG or JPEG images of 32 x 32, and label; "
            f"found {error!r}"
        ) from error


def read_stl10(folder: Path) -> ImageArrays:
    """STL10 from its official binary files; unlabeled_X.bin, which has no labels, may be missing."""
    place = folder / "stl10_binary" if (folder / "stl10_binary").is_dir() else folder
    classes = tuple((place / "class_names.txt").read_text(encoding="utf-8").split())
    images, labels = {}, {}
    for use in ("train", "test"):
        images[use] = _stl10_images(place / f"{use}_X.bin")
        file = place / f"{use}_y.bin"
        labels[use] = np.fromfile(file, dtype=np.uint8).astype(np.int64) - 1
        if len(labels[use]) != len(images[use]):
            raise UserError(
                f"{file}: expected a label for each of the {len(images[use])} images, found {len(labels[use])}"
            )
        _check_labels(file, labels[use] + 1, 1, len(classes))
    unlabelled = images["train"][:0]
    if (place / "unlabeled_X.bin").is_file():
        unlabelled = _stl10_images(place / "unlabeled_X.bin")
        labels["train"] = np.append(labels["train"], np.full(len(unlabelled), UNLABELLED))
    # Row by row, copied once: the unlabelled images take 3 GB.
    train = np.empty((len(labels["train"]), *_STL10_SHAPE), dtype=np.uint8)
    np.concatenate([images["train"], unlabelled], out=train)
    return ImageArrays(
        classes,
        torch.from_numpy(train),
        torch.from_numpy(labels["train"]),
        torch.from_numpy(np.ascontiguousarray(images["test"])),
        torch.from_numpy(labels["test"]),
        selected=classes[len(classes) // 2 :],
    )


def _stl10_images(file: Path) -> np.ndarray:
    """Images of a file, which holds them column by column; read from the disk when they are used."""
    return _rows(file, 3 * 96 * 96).reshape(-1, *_STL10_SHAPE).swapaxes(2, 3)


def _rows(file: Path, length: int) -> np.ndarray:
    """Bytes of a file in rows."""
    size = file.stat().st_size
    if not size or size % length:
        raise UserError(
            f"{file}: expected images of {length:,} bytes each, found {size:,} bytes; fetch it again"
        )
    return np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, length)


def _check_labels(file: Path, labels: np.ndarray, least: int, greatest: int) -> None:
    found = np.unique(labels).tolist()
    if not found or not set(found) <= {*range(least, greatest + 1)}:
        raise UserError(f"{file}: expected labels from {least} to {greatest}, found {found}")


def read_cifar100(folder: Path) -> ImageArrays:
    """CIFAR-100 from its official Python batches (cifar-100-python), whose checksums torchvision verifies."""
    from torchvision.datasets import CIFAR100

    try:
        train, test = (CIFAR100(folder, train=use) for use in (True, False))
    except RuntimeError as error:
        raise MissingFileError(
            f"data.files: expected the unpacked folder cifar-100-python in {folder}; {error}"
        ) from error
    return ImageArrays(
        tuple(train.classes),
        torch.from_numpy(train.data.transpose(0, 3, 1, 2).copy()),
        torch.tensor(train.targets),
        torch.from_numpy(test.data.transpose(0, 3, 1, 2).copy()),
        torch.tensor(test.targets),
        selected=tuple(train.classes[50:]),
    )


def read_class_folders(folder: Path, side: int) -> ImageArrays:
    """Image files in train/CLASS and val/CLASS, as ImageNet's are kept; each is the central square at `side` pixels."""
    from torchvision.datasets import ImageFolder

    try:
        train, test = (ImageFolder(folder / use) for use in ("train", "val"))
    except FileNotFoundError as error:
        raise MissingFileError(
            f"data.files: expected train and val in {folder}, each with a folder of images for each class; {error}"
        ) from error
    if (classes := train.classes) != test.classes:
        differing = ", ".join(sorted({*classes} ^ {*test.classes}))
        raise UserError(
            f"data.files: expected the same classes in train and val of {folder}, found {differing} in one"
        )
    selected = tuple(classes[len(classes) // 2 :])
    return ImageArrays(tuple(classes), *_squares(train, side), *_squares(test, side), selected)


def _squares(folder: Any, side: int) -> tuple[Tensor, Tensor]:
    """Central squares of the images of an ImageFolder, and their labels."""
    images = np.empty((len(folder), 3, side, side), dtype=np.uint8)

    def read(row: int) -> None:
        file, _ = folder.samples[row]
        try:
            with Image.open(file) as image:
                square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
        except OSError as error:
            raise UserError(f"{file}: expected an image file, found {error!r}") from error
        images[row] = np.asarray(square).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(images))))  # raises the error of a file
    return torch.from_numpy(images), torch.tensor(folder.targets)


def read_images(source: str, folder: str | None, side: int | None = None) -> ImageArrays:
    """Images of "digits", or of another source from its folder; those of "class_folders" at `side` pixels."""
    if folder is None:
        return read_digits()
    if not Path(folder).is_dir():
        raise MissingFileError(f"data.files: no folder {folder} (looked at {Path(folder).absolute()})")
    if source == "class_folders":
        if side is None:
            raise UserError("data.image_size: expected the side in pixels for class_folders, found null")
        return read_class_folders(Path(folder), side)
    readers = {"cifar10": read_cifar10, "cifar100": read_cifar100, "stl10": read_stl10}
    return readers[source](Path(folder))
