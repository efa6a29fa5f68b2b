"""Examples of the image-text datamodule: images with sentences of their reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from medclip_dcl.data.arrays import Arrays, as_lists
from medclip_dcl.data.by_length import pieces_by_length, rows_of
from medclip_dcl.data.correction import CorrectionImages
from medclip_dcl.data.features import Features
from medclip_dcl.data.fields import FieldRows
from medclip_dcl.data.images import Images
from medclip_dcl.data.link import ImageTextRequirements
from medclip_dcl.data.masking import Masking
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.masked_language import IGNORED, masked_places
from medclip_dcl.pictures.transforms import GreyCrop, batch_of

# Last number of the masking generator's seed, so that masking changes neither crops nor sentence choice.
_MASKING_STREAM = 1
_CORRECTION_STREAM = 2
_TOKENISED_AT_ONCE = 65_536


def reported_arrays(prepared: PreparedSet, use: str) -> dict[str, Any]:
    """Images of one use, by dicom_id, with the distinct sentences of their reports; those without any are left out.

    dicom_id, path: texts; place: the row in images.parquet; study_id; sentences: lists of sentence_ids in the order of
    the report; images: lists of the rows here of the images of the study.
    """
    images = prepared.rows("images", ["dicom_id", "path", "study_id"], use=[use])
    images.index = np.flatnonzero(prepared.rows("images", ["use"])["use"] == use)
    said = prepared.rows("reports", ["study_id", "sentence_id"])
    said = said[said["study_id"].isin(images["study_id"])].drop_duplicates()
    studies, of_study = np.unique(said["study_id"].to_numpy(), return_inverse=True)
    images = images[images["study_id"].isin(studies)].sort_values("dicom_id")
    study = np.searchsorted(studies, images["study_id"].to_numpy())
    sentences = said["sentence_id"].to_numpy()[np.argsort(of_study, kind="stable")]
    return {
        **{name: pa.array(images[name], pa.large_string()) for name in ("dicom_id", "path")},
        "place": images.index.to_numpy(np.int32),
        "study_id": images["study_id"].to_numpy(),
        "sentences": as_lists(sentences, np.bincount(of_study)).take(study),
        "images": as_lists(np.argsort(study, kind="stable"), np.bincount(study)).take(study),
    }


def expected_anchors(reported: Arrays, draws_one: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Sentences, and the expected number of anchors of an epoch that each is; float64.

    An image has one sentence of its report, drawn, or all of them. `reported` are the arrays of `reported_arrays`.
    """
    _, first, images = np.unique(reported["study_id"], return_index=True, return_counts=True)
    of_studies = reported["sentences"].take(first)
    sentences, row = np.unique(of_studies.flat, return_inverse=True)
    counts = np.repeat(images / of_studies.lengths if draws_one else images, of_studies.lengths)
    return sentences, torch.from_numpy(np.bincount(row, counts))


def token_arrays(prepared: PreparedSet, requirements: ImageTextRequirements) -> dict[str, Any]:
    """Arrays of `FieldRows`: the tokens of sentences; truncated: number of sentences that were cut."""
    sentences = prepared.table("sentences").sort_values("sentence_id")
    lengths, tokens, truncated = [np.zeros(0, int)], [np.zeros(0, int)], 0
    for start in range(0, len(sentences), _TOKENISED_AT_ONCE):
        texts = sentences["text"].iloc[start : start + _TOKENISED_AT_ONCE].tolist()
        ids = requirements.tokenize(texts)
        lengths.append(np.array([len(row) for row in ids]))
        tokens.append(np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(lengths[-1].sum())))
        if requirements.are_truncated is not None:
            # A cut sentence is as long as any may be.
            longest = np.flatnonzero(lengths[-1] == lengths[-1].max())
            truncated += sum(requirements.are_truncated([texts[place] for place in longest]))
    return {
        "key": sentences["sentence_id"].to_numpy(),
        "value": as_lists(np.concatenate(tokens), np.concatenate(lengths)),
        "truncated": np.array([truncated]),
    }


@dataclass(eq=False)
class ReportedExamples(Dataset):
    """Images with sentences of their reports; what is random in an example is a function of (seed, epoch, index).

    Attributes:
        reported: the images and their sentences (`reported_arrays`).
        images: their grey levels; or features of images and sentences, in place of both.
        tokens: of every sentence; None where features stand in their place.
        views: of each image: the image itself, then other images of its study, then itself again.
        show: of an image and a `generator`.
        draws_one: True draws one sentence of the report, False takes all.
        anchor: fields of sentences, by name.
        candidate: fields of images, by name.
        masking: masks tokens; None for no masked sentences.
        extra: entries of every batch.
        correction: draws training images for each anchor, which follow the views; None for none.
        labels: targets of the images' labels, (image, finding); None for none.
    """

    reported: Arrays
    images: Images | Features
    tokens: FieldRows | None
    views: int
    show: Callable[..., GreyCrop]
    draws_one: bool
    seed: int
    anchor: Mapping[str, FieldRows]
    candidate: Mapping[str, FieldRows]
    masking: Masking | None
    extra: Mapping[str, Any]
    correction: CorrectionImages | None = None
    labels: FieldRows | None = None

    def __len__(self) -> int:
        return len(self.reported["place"])

    def __getitem__(self, key: tuple[int, int] | int) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        generator = np.random.default_rng([self.seed, epoch, index])
        sentences = self.reported["sentences"][index].tolist()
        if self.draws_one:
            sentences = [sentences[int(generator.integers(len(sentences)))]]
        shown = self._shown(index, generator)
        example = {"views": shown, "sentence_ids": sentences, "index": index}
        if self.correction is not None:
            draws = np.random.default_rng([self.seed, epoch, index, _CORRECTION_STREAM])
            study = int(self.reported["study_id"][index])
            rows = self.correction.draw(sentences[0], study, draws).tolist()
            source: CorrectionImages | ReportedExamples = self.correction if rows else self
            example["has_others"], rows = bool(rows), rows or [index] * self.correction.count
            example["drawn"] = source.reported["place"][rows].tolist()
            if not isinstance(images := source.images, Features):
                example["views"] = [*shown, *(self.show(images[row], generator=draws) for row in rows)]
        if self.masking is not None:
            masks = np.random.default_rng([self.seed, epoch, index, _MASKING_STREAM])
            assert self.tokens is not None
            example["masked"] = [self.masking(tokens, masks) for tokens in self.tokens.exact(sentences)]
        return example

    def _shown(self, index: int, generator: np.random.Generator) -> list[GreyCrop]:
        if isinstance(self.images, Features):
            return []
        shown = [self.show(self.images[index], generator=generator)]
        if self.views > 1:
            others = [other for other in self.reported["images"][index].tolist() if other != index]
            sources = [*generator.permutation(others).astype(int).tolist(), index]
            for view in range(self.views - 1):
                image = self.images[sources[view % len(sources)]]
                shown.append(self.show(image, generator=generator))
        return shown

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch; first views of all images stand before second views, or first drawn images, of all."""
        sentence_ids = [sentence for example in examples for sentence in example["sentence_ids"]]
        positions = [i for i, example in enumerate(examples) for _ in example["sentence_ids"]]
        indices = [example["index"] for example in examples]
        batch = {
            **self._inputs(examples, indices, sentence_ids),
            "image_index": torch.tensor(positions),
            "dicom_id": self.reported["dicom_id"][indices],
            "study_id": torch.from_numpy(self.reported["study_id"][indices]),
            "sentence_id": torch.tensor(sentence_ids),
            "image_key": torch.tensor(indices),
            "anchor": {name: rows[sentence_ids] for name, rows in self.anchor.items()},
            "candidate": {name: rows[indices] for name, rows in self.candidate.items()},
            **self.extra,
        }
        if self.labels is not None:
            batch["labels"] = self.labels[indices]
        if self.correction is not None:
            batch["has_others"] = torch.tensor([example["has_others"] for example in examples])
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
        self, examples: list[dict[str, Any]], indices: list[int], sentence_ids: list[int]
    ) -> dict[str, Any]:
        first = {sentence: place for place, sentence in reversed(list(enumerate(sentence_ids)))}
        if isinstance(self.images, Features):
            row = {sentence: row for row, sentence in enumerate(first)}
            drawn = zip(*(example.get("drawn", ()) for example in examples), strict=True)
            of_images = [*self.reported["place"][indices], *itertools.chain(*drawn)]
            return {
                "features": self.images.of_images(np.array(of_images)),
                "view_of": torch.arange(len(examples)),
                "states": self.images.of_sentences(list(first)),
                "row_of_sentence": torch.tensor([row[sentence] for sentence in sentence_ids]),
            }
        assert self.tokens is not None
        by_view = list(zip(*(example["views"] for example in examples), strict=True))
        tokens, lengths = pad_tokens([row.tolist() for row in self.tokens.exact(sentence_ids)])
        places = torch.tensor(sorted(first.values()))
        most = self._most(examples, sentence_ids)
        pieces = [
            (places[some], longest) for some, longest in pieces_by_length(lengths[places].tolist(), most)
        ]
        row_of = rows_of(pieces)
        return {
            **batch_of([crop for view in by_view for crop in view]),
            "view_of": torch.arange(len(examples)).repeat(1 if self.correction else len(by_view)),
            "tokens": tokens,
            "lengths": lengths,
            "by_length": pieces,
            "row_of_sentence": torch.tensor([row_of[first[sentence]] for sentence in sentence_ids]),
        }

    def _most(self, examples: list[dict[str, Any]], sentence_ids: list[int]) -> int:
        """Sentences to encode at once, where images are encoded in parts."""
        parts = -(-len(examples) // self.extra.get("encode_at_once", len(examples)))
        return -(-len(sentence_ids) // parts)
