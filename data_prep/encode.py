"""Encode every image and sentence of a prepared set once, by the frozen encoders of an image-text model.

    python -m data_prep.encode --data SET --model SOURCE

SOURCE is a run folder, a checkpoint or an exported folder. The features go to ``SET/features/NAME/``: those of images
before the projection, in the view of evaluation, in float16; pooled sentence states in float32; and ``features.json``,
which identifies encoders, set and view. NAME is by default the model's name and a fingerprint of its encoders.

Training of projections and similarity alone then reads them in place of images and tokens (configs/heads.yaml). The
files grow row by row, on the disk alone; the same command continues after a kill, which costs at most 20 seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from jaxtyping import Float, Shaped

from data_prep.command import progress
from data_prep.scores import language_model
from data_prep.scores.language_model import KEEP_EVERY, choose_device, require_writable
from medclip_dcl.common.command_line import available_cores, option, parse_options, run_command, whole_number
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json
from medclip_dcl.common.journal import Journal
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.pictures.geometry import View

if TYPE_CHECKING:
    from medclip_dcl.networks.image_text import ImageTextNetwork

PROGRESS_FILE = ".progress.jsonl"

_NAME_DIGITS = 8
# Sentences that are sorted by length together, so that little is padded, and of these in a batch.
_SORTED, _SENTENCES = 1024, 64


@dataclass(frozen=True, kw_only=True)
class Settings(language_model.Settings):
    """Options of the command."""

    model: str = option(
        "image-text model: a run folder (its best checkpoint), a checkpoint, an exported folder",
        metavar="SOURCE",
    )
    name: str | None = option(
        "folder in SET/features (the model's name and a fingerprint)", None, metavar="NAME"
    )
    image_size: int | None = option(
        "side in pixels of the whole image, data.image_size of the training (that of the model)",
        None,
        type=whole_number(1),
        metavar="N",
    )
    evaluation_crop: int | None = option(
        "side in pixels of the middle square, data.evaluation_crop of the training (the whole image)",
        None,
        type=whole_number(1),
        metavar="N",
    )
    batch_size: int = option(
        "images in a batch, which bounds memory (64)", 64, type=whole_number(1), metavar="N"
    )
    workers: int | None = option(
        "processes that read images (with a GPU one a core, else none)",
        None,
        type=whole_number(1),
        metavar="N",
    )


def encode(settings: Settings) -> Path:
    """Write the features of one model unless they exist, and return their folder."""
    prepared = PreparedSet(settings.data)
    images, sentences = prepared.table("images"), prepared.table("sentences")
    if images.empty or sentences.empty:
        raise PreparedDataError(
            f"{prepared.folder} has {len(images)} images and {len(sentences)} sentences: both are needed"
        )
    device = choose_device(settings.device)
    # Heavy imports come after the cheap checks.
    from medclip_dcl.data.features import FOLDER, IMAGES_FILE, INFO_FILE, SENTENCES_FILE, FeaturesInfo
    from medclip_dcl.inference.model import load

    network = load(settings.model, device).network
    view = _view(settings, network)
    if prepared.fitting[0] != network.geometry:
        print(
            f"note: {prepared.folder} was prepared with --geometry {prepared.fitting[0]}, the model was trained on "
            f"images of geometry {network.geometry}",
            flush=True,
        )
    info = asdict(FeaturesInfo.of(network.encoders_fingerprint(), prepared, view))
    folder = prepared.folder / FOLDER / (settings.name or _name(settings.model, info["encoders"]))
    kept = Journal(folder / PROGRESS_FILE, info, f"choose another --name, or delete {folder}")
    if (folder / INFO_FILE).is_file():
        finished = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
        kept.require_same({"meaning": finished}, folder / INFO_FILE)
        print(f"{folder} holds the features of this model: nothing to do")
        return folder
    require_writable(folder / INFO_FILE)
    texts = sentences["text"].tolist()
    if cut := network.text_encoder.truncated_share(texts):
        print(f"note: {cut}", flush=True)
    states = RowFile(folder / SENTENCES_FILE, len(texts), kept)
    states.write(_states(network, texts[states.done :]), _SORTED, "sentences")
    files = [prepared.image_file(path) for path in images["path"]]
    features = RowFile(folder / IMAGES_FILE, len(files), kept)
    workers = (0 if device == "cpu" else available_cores()) if settings.workers is None else settings.workers
    found = _features(network, files[features.done :], view, settings.batch_size, workers)
    features.write(found, settings.batch_size, "images")
    write_json(info, folder / INFO_FILE)
    kept.remove()
    print(f"{folder}: {len(files):,} images, {len(texts):,} sentences", flush=True)
    print(f"to train on them: --data.init_args.features {folder.name} with configs/heads.yaml")
    return folder


class RowFile:
    """A .npy file of so many rows that is written in order, and continued where the journal says.

    Attributes:
        done: rows that are there.
    """

    def __init__(self, file: Path, count: int, kept: Journal, keep_every: float = KEEP_EVERY) -> None:
        self.file, self.count, self.kept, self.keep_every = file, count, kept, keep_every
        entries = [entry for entry in kept.entries if entry["file"] == file.name]
        self.done = entries[-1]["rows"] if entries and file.is_file() else 0

    def write(self, parts: Iterator[Shaped[np.ndarray, "row ..."]], rows_of_part: int, what: str) -> None:
        """Write the rows that are missing, of which each part but the last holds so many."""
        if self.done:
            print(f"continuing: {self.done:,} of {self.count:,} {what} were done before", flush=True)
        n_parts = -(-(self.count - self.done) // rows_of_part)
        self.file.touch()
        # Not truncated, and written where it was: two processes of the same command write the same.
        with self.file.open("r+b") as stream:
            kept_at, is_begun = time.monotonic(), False
            try:
                for part in progress(parts, n_parts, f"encoding {what}", "batches"):
                    self._require_finite(part, what)
                    if not is_begun:
                        self._begin(stream, part)
                        is_begun = True
                    stream.write(np.ascontiguousarray(part).data)
                    self.done += len(part)
                    if time.monotonic() - kept_at >= self.keep_every:
                        self._keep(stream)
                        kept_at = time.monotonic()
            finally:
                self._keep(stream)

    def _begin(self, stream: BinaryIO, part: Shaped[np.ndarray, "row ..."]) -> None:
        """Write the header and go to the first row that is missing."""
        header = {"descr": part.dtype.str, "fortran_order": False, "shape": (self.count, *part.shape[1:])}
        np.lib.format.write_array_header_1_0(stream, header)
        of_row = part.nbytes // len(part)
        stream.seek(stream.tell() + self.done * of_row)
        # What the file has beyond the rows that are done is written over.
        beyond = self.file.stat().st_size - stream.tell()
        if self.done and beyond < 0:
            raise PreparedDataError(
                f"{self.file} lacks some of its {self.done:,} finished rows; delete its folder and encode anew"
            )
        needed, free = (self.count - self.done) * of_row, shutil.disk_usage(self.file.parent).free
        if needed > free + max(beyond, 0):
            raise PreparedDataError(
                f"{self.file.parent}: the features of {self.count:,} {self.file.stem} need {needed / 1e9:.1f} GB more, "
                f"and {free / 1e9:.1f} GB are free; make space, or encode a copy of the set elsewhere"
            )

    def _keep(self, stream: BinaryIO) -> None:
        stream.flush()
        os.fsync(stream.fileno())
        self.kept.add([{"file": self.file.name, "rows": self.done}])

    def _require_finite(self, part: Shaped[np.ndarray, "row ..."], what: str) -> None:
        is_finite = np.isfinite(part.reshape(len(part), -1)).all(axis=1)
        if not is_finite.all():
            raise PreparedDataError(
                f"row {self.done + int(np.argmin(is_finite))} of the table {what}: its features are not finite in "
                f"{part.dtype}; the model's weights hold NaN, or have diverged"
            )


def _features(
    network: ImageTextNetwork, files: list[Path], view: View, batch_size: int, workers: int
) -> Iterator[Float[np.ndarray, "image channel region_row region_column"]]:
    """Input of the projection for each image, in batches."""
    import torch
    from torch.utils.data import DataLoader

    from medclip_dcl.data.images import ImageExamples, Images

    examples = ImageExamples(Images(files, view.size, False), [file.stem for file in files], view.seen)
    loader = DataLoader(examples, batch_size, num_workers=workers, collate_fn=examples.collate)
    for batch in loader:
        # Not around the yield: the caller's code must not run in inference mode.
        with torch.inference_mode():
            found = network.image_features(batch["images"].to(network.mean.device)).half().cpu().numpy()
        yield found


def _states(network: ImageTextNetwork, texts: list[str]) -> Iterator[Float[np.ndarray, "sentence hidden"]]:
    """Pooled states of each text, so many sorted by length at a time."""
    import torch

    from medclip_dcl.networks.image_text import pad_tokens

    for start in range(0, len(texts), _SORTED):
        ids = network.text_encoder.tokenize(texts[start : start + _SORTED])
        order = np.argsort([len(row) for row in ids], kind="stable")
        parts = []
        with torch.inference_mode():
            for places in np.split(order, range(_SENTENCES, len(order), _SENTENCES)):
                tokens, lengths = (
                    x.to(network.mean.device) for x in pad_tokens([ids[place] for place in places])
                )
                parts.append(network.text_encoder.states(tokens, lengths).float().cpu().numpy())
        yield np.concatenate(parts)[np.argsort(order)]


def _view(settings: Settings, network: ImageTextNetwork) -> View:
    """The view of evaluation in a training with these options."""
    size = settings.image_size or network.image_size
    seen = settings.evaluation_crop or size
    if seen > size or seen % network.stride:
        raise UserError(
            f"evaluation sees {seen} pixels of {size}: it must be at most the whole image, and a multiple of the image "
            f"encoder's stride, {network.stride} (--image_size, --evaluation_crop)"
        )
    return View(seen, size)


def _name(model: str, encoders: dict[str, str]) -> str:
    """Name of a run, an exported folder or a file, and a fingerprint of the encoders."""
    path = Path(os.path.abspath(os.path.expanduser(model)))
    stem = path.stem if path.suffix else path.name
    if path.parent.name == "checkpoints":
        stem = f"{path.parent.parent.name}-{stem}"
    digest = hashlib.sha256(json.dumps(encoders, sort_keys=True).encode()).hexdigest()
    return f"{stem}-{digest[:_NAME_DIGITS]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    encode(parse_options(Settings, "data_prep.encode", __doc__, arguments, has_own_classes=True))


if __name__ == "__main__":
    run_command(main)
