"""Shared by the commands that run a language model over every sentence: options, names, finished batches."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int

from medclip_dcl.common.command_line import option
from medclip_dcl.common.files import replacing
from medclip_dcl.data.prepared import PreparedDataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEEP_EVERY = 20.0
"""Seconds between writes of finished batches: the most that a kill may cost."""

_FINGERPRINT_DIGITS = 8
_DECIDING = ("hidden_act", "layer_norm_eps", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of these commands."""

    data: Path = option("prepared data set", type=Path, metavar="SET")
    model: str = option("Hugging Face folder or repository id of the language model", metavar="FOLDER")
    device: str = option(
        "auto takes a GPU where there is one (auto)", "auto", choices=("auto", "cpu", "cuda")
    )


def result_file(folder: Path, model: str, network: PreTrainedModel, suffix: str) -> Path:
    """File of a model's results: its folder's or repository's name, a fingerprint of its weights, and a suffix."""
    from medclip_dcl.networks.bert_folder import weights_fingerprint

    # Also for "." or a closing slash.
    name = os.path.basename(os.path.abspath(os.path.expanduser(model)))
    return folder / f"{name}-{weights_fingerprint(network)[:_FINGERPRINT_DIGITS]}{suffix}.parquet"


def choose_device(device: str) -> str:
    """The device to use: "auto" is CUDA where this machine has it."""
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise PreparedDataError("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device


def settings_fingerprint(network: PreTrainedModel) -> str:
    """Fingerprint of the configuration that determines a BERT's values; dropout rates, names and the like do not."""
    settings = {name: getattr(network.config, name) for name in _DECIDING}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def has_results(file: Path, sentence_ids: Int[np.ndarray, " sentence"], meaning: tuple[str, str]) -> bool:
    """True if a Parquet file has results of these sentences' tokens; those of other texts are computed again.

    `meaning` is a name and its value in the file's metadata, or in the attributes that pandas keeps there.
    """
    if not file.is_file():
        return False
    try:
        table = pq.read_table(file, columns=["sentence_id"], partitioning=None)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        # The system's own errors have a number: the file may be whole.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        print(f"{file} is damaged ({error}): the sentences are computed again", file=sys.stderr)
        return False
    metadata = table.schema.metadata or {}
    name, value = meaning
    attributes = json.loads(metadata.get(b"PANDAS_ATTRS", b"{}"))
    found = metadata[name.encode()].decode() if name.encode() in metadata else attributes.get(name)
    if found is None:
        raise PreparedDataError(
            f"{file} was not written by this command; move it away, it would be overwritten"
        )
    if found == value and np.array_equal(table["sentence_id"].to_numpy(), sentence_ids):
        return True
    print(f"{file} is of other settings or sentences: the sentences are computed again", file=sys.stderr)
    return False


def require_writable(file: Path) -> None:
    """Check before the work that the file can be written at its end; make its folder."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreparedDataError(
            f"{file.parent} cannot be made ({error.strerror}); use a writable set"
        ) from error
    if not os.access(file.parent, os.W_OK):
        raise PreparedDataError(
            f"{file.parent} cannot be written by this user; use a writable copy of the set"
        )


class Parts:
    """Values of finished batches on disk, until all are there.

    Each file is written once, atomically, under a unique name: several processes and runs may add parts at once.

    Args:
        file: the final file of all values.
        meaning: identifies the values: equal for values that are equal up to rounding.
        batching: identifies the division into batches.
        places: batch number -> rows of its values among all values.
        keep_every: seconds between writes.
    """

    def __init__(
        self,
        file: Path,
        meaning: str,
        batching: str,
        places: Callable[[int], Int[np.ndarray, " row"]],
        keep_every: float = KEEP_EVERY,
    ) -> None:
        self.file, self.places, self.keep_every = file, places, keep_every
        self.prefix = f".{file.stem}-{meaning}-"
        self.folder = file.with_name(f"{self.prefix}{batching}.parts")
        self.finished: dict[int, np.ndarray] = {}
        self.kept_at = time.monotonic()

    def read_into(self, values: np.ndarray) -> set[int]:
        """Fill in the values of earlier runs and return the numbers of their batches."""
        done: set[int] = set()
        for file in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(file, allow_pickle=False) as part:
                    numbers, found = part["numbers"].tolist(), part["values"]
                values[np.concatenate([self.places(number) for number in numbers])] = found
            # Removed by another run that finished, or damaged on disk, where zipfile and numpy may raise anything.
            except Exception as error:
                print(f"{file.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            done.update(numbers)
        return done

    def add(self, number: int, values: np.ndarray) -> None:
        """Keep the values of a batch."""
        self.finished[number] = values
        if time.monotonic() - self.kept_at >= self.keep_every:
            self.write()

    def write(self) -> None:
        """Write the batches that are not on disk yet."""
        self.kept_at = time.monotonic()
        if self.finished:
            with replacing(self.folder / f"{uuid.uuid4().hex}.npz") as stream:
                np.savez(
                    stream, numbers=list(self.finished), values=np.concatenate(list(self.finished.values()))
                )
            self.finished = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Write the finished batches also when the block raises."""
        try:
            yield
        finally:
            self.write()

    def remove(self) -> None:
        """Remove the parts of this file, also those in other batches, and temporary files of killed runs."""
        for folder in self.folder.parent.glob(f"{glob.escape(self.prefix)}*.parts"):
            shutil.rmtree(folder, ignore_errors=True)
        for leftover in self.file.parent.glob(f".{glob.escape(self.file.name)}.*.tmp"):
            leftover.unlink(missing_ok=True)
