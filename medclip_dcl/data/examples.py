"""Examples of the image-text datamodule: images with sentences of their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medclip_dcl.data.by_length import pieces_by_length, rows_of
from medclip_dcl.data.features import Features
from medclip_dcl.data.fields import FieldRows
from medclip_dcl.data.images import Crop, Images
from medclip_dcl.data.masking import Masking
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.masked_language import IGNORED, masked_places
from medclip_dcl.pictures.transforms import GreyCrop, batch_of, centre_crop

# Last number of the masking generator's seed, so that masking changes neither crops nor sentence choice.
_MASKING_STREAM = 1


@dataclass(frozen=True)
class Reported:
    """Images (rows of images.parquet) and, in the same order, the sentences of their reports."""

    images: pd.DataFrame
    sentence_ids: list[list[int]]


@dataclass(eq=False)
class ReportedExamples(Dataset):
    """Images with sentences of their reports; what is random in an example is a function of (seed, epoch, index).

    Attributes:
        reported: the images and their sentences.
        images: their grey levels; or features of images and sentences, in place of both.
        tokens: of every sentence that is not given by features.
        views: of each image in training: the image itself, then other images of its study, then itself again.
        crop: augmentation; None shows each image once, the middle part of `seen` pixels.
        draws_one: True draws one sentence of the report, False takes all.
        anchor: fields of sentences, by name and sentence_id.
        candidate: fields of images, by name; (image, ...).
        masking: masks tokens; None for no masked sentences.
        extra: entries of every batch.
    """

    reported: Reported
    images: Images | Features
    tokens: Mapping[int, list[int]]
    views: int
    crop: Crop | None
    seen: int
    draws_one: bool
    seed: int
    anchor: Mapping[str, FieldRows]
    candidate: Mapping[str, Tensor]
    masking: Masking | None
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.dicom_ids = self.reported.images["dicom_id"].tolist()
        self.study_ids = self.reported.images["study_id"].tolist()
        self.sentence_ids = self.reported.sentence_ids
        self.of_study: dict[int, list[int]] = {}
        for index, study in enumerate(self.study_ids):
            self.of_study.setdefault(study, []).append(index)

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitem__(self, key: tuple[int, int] | int) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        generator = np.random.default_rng([self.seed, epoch, index])
        sentences = self.sentence_ids[index]
        if self.draws_one:
            sentences = [sentences[int(generator.integers(len(sentences)))]]
        example = {"views": self._shown(index, generator), "sentence_ids": sentences, "index": index}
        if self.masking is not None:
            masks = np.random.default_rng([self.seed, epoch, index, _MASKING_STREAM])
            example["masked"] = [
                self.masking(np.array(self.tokens[sentence]), masks) for sentence in sentences
            ]
        return example

    def _shown(self, index: int, generator: np.random.Generator) -> list[GreyCrop]:
        if isinstance(self.images, Features):
            return []
        if self.crop is None:
            return [GreyCrop(centre_crop(self.images[index], self.seen))]
        shown = [self.crop(self.images[index], generator)]
        others = [other for other in self.of_study[self.study_ids[index]] if other != index]
        if self.views > 1:
            sources = [*generator.permutation(others).astype(int).tolist(), index]
            for view in range(self.views - 1):
                shown.append(self.crop(self.images[sources[view % len(sources)]], generator))
        return shown

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch; first views of all images stand before second views of all."""
        sentence_ids = [sentence for example in examples for sentence in example["sentence_ids"]]
        positions = [i for i, example in enumerate(examples) for _ in example["sentence_ids"]]
        indices = [example["index"] for example in examples]
        dicom_ids = [self.dicom_ids[index] for index in indices]
        batch = {
            **self._inputs(examples, dicom_ids, sentence_ids),
            "image_index": torch.tensor(positions),
            "dicom_id": dicom_ids,
            "study_id": torch.tensor([self.study_ids[index] for index in indices]),
            "sentence_id": torch.tensor(sentence_ids),
            "image_key": torch.tensor(indices),
            "anchor": {name: rows[sentence_ids] for name, rows in self.anchor.items()},
            "candidate": {name: values[indices] for name, values in self.candidate.items()},
            **self.extra,
        }
        if self.masking is not None:
            masked = [pair for example in examples for pair in example["masked"]]
            batch["masked_tokens"], _ = pad_tokens([tokens.tolist() for tokens, _ in masked])
            batch["masked_labels"] = torch.full_like(batch["masked_tokens"], IGNORED)
            for row, (_, labels) in enumerate(masked):
                batch["masked_labels"][row, : len(labels)] = torch.from_numpy(labels)
            # As a sentence is hidden in other places each time, each is encoded.
            pieces = pieces_by_length(batch["lengths"].tolist(), self._most(examples, sentence_ids))
            batch["masked_by_length"] = [
                (places, longest, masked_places(batch["masked_labels"][places, :longest]))
                for places, longest in pieces
            ]
        return batch

    def _inputs(
        self, examples: list[dict[str, Any]], dicom_ids: list[str], sentence_ids: list[int]
    ) -> dict[str, Any]:
        first = {sentence: place for place, sentence in reversed(list(enumerate(sentence_ids)))}
        if isinstance(self.images, Features):
            row = {sentence: row for row, sentence in enumerate(first)}
            return {
                "features": self.images.of_images(dicom_ids),
                "view_of": torch.arange(len(examples)),
                "states": self.images.of_sentences(list(first)),
                "row_of_sentence": torch.tensor([row[sentence] for sentence in sentence_ids]),
            }
        by_view = list(zip(*(example["views"] for example in examples), strict=True))
        tokens, lengths = pad_tokens([self.tokens[sentence] for sentence in sentence_ids])
        places = torch.tensor(sorted(first.values()))
        most = self._most(examples, sentence_ids)
        pieces = [
            (places[some], longest) for some, longest in pieces_by_length(lengths[places].tolist(), most)
        ]
        row_of = rows_of(pieces)
        return {
            **batch_of([crop for view in by_view for crop in view]),
            "view_of": torch.arange(len(examples)).repeat(len(by_view)),
            "tokens": tokens,
            "lengths": lengths,
            "by_length": pieces,
            "row_of_sentence": torch.tensor([row_of[first[sentence]] for sentence in sentence_ids]),
        }

    def _most(self, examples: list[dict[str, Any]], sentence_ids: list[int]) -> int:
        """Sentences to encode at once, where images are encoded in parts."""
        parts = -(-len(examples) // self.extra.get("encode_at_once", len(examples)))
        return -(-len(sentence_ids) // parts)
