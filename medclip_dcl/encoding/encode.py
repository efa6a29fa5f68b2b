"""Encode every image and sentence of a prepared set once, by the frozen encoders of an image-text model."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from medclip_dcl.common.command_line import available_cores
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import require_writable, write_json
from medclip_dcl.common.journal import Journal
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.shards import StoredImages
from medclip_dcl.encoding.model_results import RowFile
from medclip_dcl.encoding.options import Encode
from medclip_dcl.pictures.geometry import View
from medclip_dcl.runs.saved import read_json

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from medclip_dcl.networks.image_text import ImageTextNetwork

PROGRESS_FILE = ".progress.jsonl"

_NAME_DIGITS = 8
# Sentences that are sorted by length together, so that little is padded, and of these in a batch.
_SORTED, _SENTENCES = 1024, 64


def encode(settings: Encode) -> Path:
    """Write the features of one model unless they exist, and return their folder."""
    prepared = PreparedSet(settings.data)
    images, sentences = prepared.table("images"), prepared.table("sentences")
    if images.empty or sentences.empty:
        raise PreparedDataError(
            f"{prepared.folder} has {len(images)} images and {len(sentences)} sentences: both are needed"
        )
    # Heavy imports come after the cheap checks.
    from medclip_dcl.common.devices import usable_device, without_tf32
    from medclip_dcl.data.features import FOLDER, IMAGES_FILE, INFO_FILE, SENTENCES_FILE, FeaturesInfo
    from medclip_dcl.use.model import load

    without_tf32()
    network = load(settings.model, device := usable_device(settings.device)).image_text
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
        finished = read_json(folder / INFO_FILE, f"delete {folder}")
        kept.require_same({"meaning": finished}, folder / INFO_FILE)
        print(f"{folder} holds the features of this model: nothing to do")
        return folder
    require_writable(folder)
    texts = sentences["text"].tolist()
    if cut := network.text_encoder.truncated_share(texts):
        print(f"note: {cut}", flush=True)
    states = RowFile(folder / SENTENCES_FILE, len(texts), kept)
    left = texts[states.done :]
    states.write(_states(network, left), math.ceil(len(left) / _SORTED), "sentences")
    features = RowFile(folder / IMAGES_FILE, len(images), kept)
    left_images = prepared.stored_images(images["path"].tolist()).part(features.done)
    usual_workers = 0 if device.type == "cpu" else available_cores()
    workers = usual_workers if settings.workers is None else settings.workers
    batches = batches_of(left_images, view, settings.batch_size, workers)
    features.write(_features(network, batches), len(batches), "images")
    write_json(info, folder / INFO_FILE)
    kept.remove()
    print(f"{folder}: {len(images):,} images, {len(texts):,} sentences", flush=True)
    print(f"to train on them: --data.init_args.features {folder.name} --config heads")
    return folder


def batches_of(stored: StoredImages, view: View, batch_size: int, workers: int) -> DataLoader:
    """Loader of whole images in the view of evaluation."""
    from torch.utils.data import DataLoader

    from medclip_dcl.data.images import ImageExamples, Images, middle

    names = [str(place) for place in range(len(stored))]
    examples = ImageExamples(Images(stored, view.size, False), names, partial(middle, size=view.seen))
    return DataLoader(examples, batch_size, num_workers=workers, collate_fn=examples.collate)


def _features(
    network: ImageTextNetwork, batches: DataLoader
) -> Iterator[Float[np.ndarray, "image channel region_row region_column"]]:
    import torch

    for batch in batches:
        # Not around the yield: the caller's code must not run in inference mode.
        with torch.inference_mode():
            found = network.image_features(*network.inputs_of(batch)).half().cpu().numpy()
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


def _view(settings: Encode, network: ImageTextNetwork) -> View:
    """The view of evaluation in a training with these options."""
    size = settings.image_size or network.image_size
    seen = settings.evaluation_crop or size
    if seen > size or seen % network.stride:
        raise UserError(
            f"--evaluation_crop: expected at most {size} pixels (--image_size), and a multiple of the image encoder's "
            f"stride, {network.stride}; found {seen}"
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
