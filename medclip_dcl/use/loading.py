"""Read many image files as a network's input, in loader processes; a file that cannot be used is a reason."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import files_below
from medclip_dcl.common.processes import begin_worker
from medclip_dcl.pictures.dicom import HEAD, is_dicom
from medclip_dcl.pictures.geometry import View
from medclip_dcl.pictures.image_file import ENDINGS, FORMATS
from medclip_dcl.pictures.inputs import ImageWarning, as_grey, doubts, network_input
from medclip_dcl.use.score_table import FileState


class ReadFile(NamedTuple):
    """An image file as a network's input (`square`), or why it cannot be used (`error`)."""

    name: str
    square: UInt8[np.ndarray, "side side"] | None
    error: str = ""
    warning: str = ""
    state: FileState = FileState()


def read_image(name: str) -> Image.Image | str:
    """The image in a file, or the reason why it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImageWarning)
            return as_grey(name)
    except UserError as error:
        return " ".join(str(error).split()).removeprefix(f"{name}: ")
    except OSError as error:
        return error.strerror or str(error)


class ImageFiles(Dataset[ReadFile]):
    """Image files, read when they are asked for."""

    def __init__(self, names: Sequence[str], view: View) -> None:
        self.names = list(names)
        self.view = view

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> ReadFile:
        name = self.names[place]
        state, grey = FileState.read(name), read_image(name)
        if isinstance(grey, str):
            return ReadFile(name, None, error=grey, state=state)
        return ReadFile(name, network_input(grey, self.view), warning=doubts(grey), state=state)


def read_in_batches(
    names: Sequence[str], view: View, batch_size: int, workers: int
) -> Iterator[list[ReadFile]]:
    """Read files in their order, `batch_size` at a time, in loader processes ahead; without workers in this one."""
    n_batches = -(-len(names) // batch_size)
    # Arrays, not tensors: they come through a pipe, so that a small /dev/shm is enough.
    loader = DataLoader(
        ImageFiles(names, view),
        batch_size,
        num_workers=max(0, min(workers, n_batches - 1)),
        collate_fn=list,
        worker_init_fn=begin_worker,
    )
    yield from loader


def image_files_in(folder: Path) -> list[Path]:
    """Image files in a folder and its subfolders, sorted: by suffix, and DICOM by content; hidden ones are left out.

    Linked folders are searched, too, and each folder once. Unreadable folders are among the files: `as_grey` says why.
    """
    content = files_below(folder)
    found = [file for file in content.files if ENDINGS.search(file.name) or _may_be_dicom(file)]
    found += [Path(error.filename) for error in content.closed]
    if not found:
        raise UserError(f"{folder} holds no image file ({', '.join(FORMATS)} or DICOM)")
    return sorted(found)


def _may_be_dicom(file: Path) -> bool:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return False
        with file.open("rb") as stream:
            return is_dicom(stream.read(HEAD))
    except OSError:
        return True  # its row has the reason
