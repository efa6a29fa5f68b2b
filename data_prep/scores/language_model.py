"""What commands share that put every sentence of a set through a language model: names, device, finished work."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from medclip_dcl.data.prepared import PreparedDataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINGERPRINT_DIGITS = 8
"""Of the weights' fingerprint, in the name of a result."""

_DECIDING = ("hidden_act", "layer_norm_eps", "num_attention_heads")
# Seconds after which a file that was being written has nobody any more who writes it.
_ABANDONED = 3600.0


def last_component(model: str) -> str:
    """Name of a folder (also of ``.`` or with a closing slash) or of a repository."""
    return os.path.basename(os.path.abspath(os.path.expanduser(model)))


def choose_device(device: str) -> str:
    """The device that "auto" means here, or the one that was asked for.

    Raises:
        PreparedDataError: "cuda" without a usable GPU.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise PreparedDataError("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device


def settings_fingerprint(network: PreTrainedModel) -> str:
    """Of what decides a BERT's values beside its weights; dropout rates, names and the like do not."""
    settings = {name: getattr(network.config, name) for name in _DECIDING}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def require_writable(file: Path) -> None:
    """Check, before hours of work, that the file can be written at their end; makes its folder.

    Raises:
        PreparedDataError: it cannot.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreparedDataError(
            f"{file.parent} cannot be made a folder ({error.strerror}); move what is there away, or use a set that "
            "can be written"
        ) from error
    if file.is_dir():
        raise PreparedDataError(f"{file} is a folder, expected a file or nothing; move it away")
    if not os.access(file.parent, os.W_OK):
        raise PreparedDataError(
            f"{file.parent} cannot be written by this user; use a set that can be, as a copy"
        )


class Parts:
    """Values of finished batches on disk, until all are there.

    Every file is written once, under a name of its own, by rename: processes and runs that work on the same values at
    the same time do not disturb each other.

    Args:
        file: where all values will be.
        meaning: of the values: equal for values that are equal up to rounding.
        batching: what the numbers of batches belong to.
        places: batch number -> rows of its values among all values.
        keep_every: seconds between writes.
    """

    def __init__(
        self,
        file: Path,
        meaning: str,
        batching: str,
        places: Callable[[int], Int[np.ndarray, " row"]],
        keep_every: float,
    ) -> None:
        self.file, self.places, self.keep_every = file, places, keep_every
        self.prefix = f".{file.stem}-{meaning}-"
        self.folder = file.with_name(f"{self.prefix}{batching}.parts")
        self.numbers: list[int] = []
        self.values: list[np.ndarray] = []
        self.kept_at = time.monotonic()

    def read_into(self, values: np.ndarray) -> set[int]:
        """Fill in what earlier runs finished; the numbers of those batches."""
        done: set[int] = set()
        for file in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(file, allow_pickle=False) as part:
                    numbers, found = part["numbers"].tolist(), part["values"]
                places = [self.places(number) for number in numbers]
                values[np.concatenate(places)] = found
            # Removed by another run that finished, or damaged on the disk, of which zipfile and numpy may say anything:
            # computed again.
            except Exception as error:
                print(f"{file.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            done.update(numbers)
        return done

    def add(self, number: int, values: np.ndarray) -> None:
        """Keep a batch."""
        self.numbers.append(number)
        self.values.append(values)
        if time.monotonic() - self.kept_at >= self.keep_every:
            self.write()

    def write(self) -> None:
        """Put on disk what is not yet there."""
        self.kept_at = time.monotonic()
        if not self.numbers:
            return
        name = uuid.uuid4().hex
        for _ in range(10):
            # Another run that has just finished may remove the folder at any moment.
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary = self.folder / f"{name}.tmp"
                with temporary.open("wb") as handle:
                    np.savez(handle, numbers=np.array(self.numbers), values=np.concatenate(self.values))
                    handle.flush()
                    os.fsync(handle.fileno())
                temporary.replace(self.folder / f"{name}.npz")
                break
            except FileNotFoundError:
                continue
        self.numbers, self.values = [], []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Whatever ends the work, what is done is on disk."""
        try:
            yield
        finally:
            self.write()

    def remove(self) -> None:
        """The final file is there: parts of it are not needed, those in other batches included.

        Neither is what a run was writing of it when it was killed, unless another may be writing it just now.
        """
        if not self.folder.parent.is_dir():
            return
        for path in list(self.folder.parent.iterdir()):
            if path.name.startswith(self.prefix) and path.suffix == ".parts":
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{self.file.name}.") and path.suffix == ".tmp":
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED:
                        path.unlink()
