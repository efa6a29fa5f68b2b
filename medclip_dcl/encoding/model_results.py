"""Shared by the commands that run a model over every row of a set: names, finished rows."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, Shaped

from medclip_dcl.common.find_model import LANGUAGE_MODEL
from medclip_dcl.common.journal import Journal, work_through
from medclip_dcl.data.prepared import PreparedDataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEEP_EVERY = 20.0
"""Seconds between notes of the rows that a `RowFile` has: the most that a kill may cost."""

_FINGERPRINT_DIGITS = 8
_REMEDY = "give the options of before, or remove it"
# Settings of a BERT, and of the others.
_DECIDING = ("hidden_act", "layer_norm_eps", "num_attention_heads")
_NOT_DECIDING = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache")


def stems_of_model(stems: Sequence[str], model: str) -> list[str]:
    """Stems of the files of `ModelResults` of a model, found by its name alone: of any weights and suffix."""
    return [stem for stem in stems if re.fullmatch(rf"{re.escape(_name(model))}-[0-9a-f]{{8}}(-\w+)?", stem)]


def _name(model: str) -> str:
    # Also of "." and with a closing slash; of a run its folder that `resolve_folder` reads.
    folder = Path(os.path.abspath(os.path.expanduser(model)))
    return LANGUAGE_MODEL if (folder / LANGUAGE_MODEL).is_dir() else folder.name


def scoring_fingerprint(network: PreTrainedModel) -> str:
    """Fingerprint of the configuration that determines a model's values; dropout rates, names and the like do not."""
    if network.config.model_type == "bert":
        settings = {name: getattr(network.config, name) for name in _DECIDING}
    else:
        settings = {
            name: value
            for name, value in network.config.to_diff_dict().items()
            if name not in _NOT_DECIDING and "drop" not in name
        }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


class ModelResults:
    """What a model gives for the sentences of a set: a Parquet file, and the journals of unfinished work beside it.

    Attributes:
        file: the model's folder or repository, a fingerprint of its weights, and a suffix.
    """

    def __init__(self, folder: Path, model: str, network: PreTrainedModel, suffix: str) -> None:
        from medclip_dcl.networks.bert_folder import weights_fingerprint

        digest = weights_fingerprint(network)[:_FINGERPRINT_DIGITS]
        self.file = folder / f"{_name(model)}-{digest}{suffix}.parquet"

    def exist_for(self, sentence_ids: Int[np.ndarray, " sentence"], name: str, meaning: str) -> bool:
        """True if the file has results of these sentences' tokens; those of other texts are computed again.

        Args:
            sentence_ids: of all sentences, ascending.
            name: of the entry of the file's metadata (or the attributes that pandas keeps there) with `meaning`.
            meaning: fingerprint of the tokens and the model's settings.
        """
        file = self.file
        if not file.is_file():
            return False
        try:
            table = pq.read_table(file, columns=["sentence_id"], partitioning=None)
        except (pa.ArrowInvalid, OSError) as error:
            # The system's own errors have a number: the file may be whole.
            if getattr(error, "errno", None) is not None:
                raise
            print(f"{file} is damaged ({error}): the sentences are computed again")
            return False
        metadata = str(table.schema.metadata)
        if name not in metadata:
            raise PreparedDataError(
                f"{file} was not written by this command; move it away, it would be overwritten"
            )
        if meaning in metadata and np.array_equal(table["sentence_id"].to_numpy(), sentence_ids):
            return True
        print(f"{file} is of other settings or sentences: the sentences are computed again")
        return False

    def journal(self, work: Mapping[str, Any], process: int | str = 0) -> Journal:
        """Journal of the process of this number or name."""
        return Journal(self.file.with_name(f".{self.file.stem}.{process}.progress.jsonl"), work, _REMEDY)

    def earlier_entries(self, work: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Entries in the journals of all processes."""
        for place in self._progress_files(".jsonl"):
            with contextlib.suppress(FileNotFoundError):  # the last of several tasks removes them
                yield from Journal(place, work, _REMEDY, is_own=False).entries

    def remove_progress(self) -> None:
        """Remove what only unfinished results need."""
        for place in self._progress_files(".*"):
            place.unlink(missing_ok=True)

    def _progress_files(self, suffix: str) -> list[Path]:
        return sorted(self.file.parent.glob(f".{glob.escape(self.file.stem)}.*.progress{suffix}"))


class RowFile:
    """A .npy file of `count` rows that is written in order, and continued where the journal says.

    Attributes:
        done: rows that exist.
    """

    def __init__(self, file: Path, count: int, kept: Journal) -> None:
        self.file, self.count, self.kept = file, count, kept
        entries = [entry for entry in kept.entries if entry["file"] == file.name]
        self.done = entries[-1]["rows"] if entries and file.is_file() else 0

    def write(self, parts: Iterator[Shaped[np.ndarray, "row ..."]], n_parts: int, what: str) -> None:
        """Write the rows that are missing, in so many parts."""
        if self.done:
            print(f"continuing: {self.done:,} of {self.count:,} {what} were done before", flush=True)
        self.file.touch()
        # Not truncated, and written where it was: two processes of the same command write the same.
        with self.file.open("r+b") as stream:

            def save() -> None:
                stream.flush()
                os.fsync(stream.fileno())

            written = self._written(stream, parts, what)
            shown: dict[str, Any] = {"desc": f"encoding {what}", "total": n_parts, "unit": " batches"}
            work_through(written, self.kept, KEEP_EVERY, save, **shown)

    def _written(
        self, stream: BinaryIO, parts: Iterator[Shaped[np.ndarray, "row ..."]], what: str
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, part in enumerate(parts):
            is_finite = np.isfinite(part.reshape(len(part), -1)).all(axis=1)
            if not is_finite.all():
                raise PreparedDataError(
                    f"{what}: expected finite features, found others in row {self.done + int(np.argmin(is_finite))} "
                    f"({part.dtype}); the model's weights hold NaN, or have diverged"
                )
            if number == 0:
                self._begin(stream, part)
            stream.write(np.ascontiguousarray(part).data)
            self.done += len(part)
            yield 1, {"file": self.file.name, "rows": self.done}

    def _begin(self, stream: BinaryIO, part: Shaped[np.ndarray, "row ..."]) -> None:
        """Write the header and go to the first row that is missing; what the file has beyond is written over."""
        header = {"descr": part.dtype.str, "fortran_order": False, "shape": (self.count, *part.shape[1:])}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.seek(self.done * (part.nbytes // len(part)), os.SEEK_CUR)
        if self.done and stream.tell() > self.file.stat().st_size:
            raise PreparedDataError(
                f"{self.file}: expected {self.done:,} finished rows, found fewer; remove it and start again"
            )
