"""Batches of radiographs and report sentences from a prepared data set, and the tables of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.data.samplers import EpochDataModule, EpochSampler, FixedBatches, ShardSampler
from medclip_dcl.data.transforms import augment, load_grey, to_input
from medclip_dcl.network import pad_tokens
from medclip_dcl.prepared import PreparedDataError, PreparedSet

SENTENCE_FIELDS = {"log_p": "log_p", "rho": "classes", "sentence_share": "classes", "class_id": "classes"}
"""Fields of anchors (sentences) by name -> the table that they stand in."""


@dataclass(frozen=True)
class EvaluationTables:
    """What the evaluations of one stage need to know besides the images.

    Attributes:
        images: dicom_id, subject_id, study_id, height, width (original pixels): each evaluated image once.
        chex5: dicom_id, finding, label (1 / 0).
        boxes: dicom_id, category, phrase, x, y, w, h in original pixels; empty on validate.
        sentences: dicom_id, sentence_id, text: the sentences of each image's report, each once.
        phantom: True if the images are no patients.
    """

    images: pd.DataFrame
    chex5: pd.DataFrame
    boxes: pd.DataFrame
    sentences: pd.DataFrame
    phantom: bool


class ImageTextDataModule(EpochDataModule):
    """Images with sentences of their reports, for training, validation, test and prediction.

    A batch is a dict: images (image, 3, H, W) in [0, 1]; tokens (sentence, token), lengths (sentence,);
    image_index (sentence,): which image of the batch is the sentence's positive; dicom_id, study_id, sentence_id;
    anchor: the sentence fields that the objective asked for. Test and prediction batches hold images only.

    Args:
        folder: the prepared data set.
        image_size: side in pixels to which the whole image is scaled; what evaluation sees.
        crop_size: side of the random training crop, in pixels; at most image_size.
        batch_size: images per batch, of all processes together.
        sentences: "one" draws one sentence per image and step (choice, not from the paper), "all" takes every
            sentence of the report as an anchor.
        brightness: factor varies in 1 +- brightness (choice: 0.2).
        contrast: factor varies in 1 +- contrast (choice: 0.2).
        log_p: which sentence scores, the stem of a file in log_p/; null for the only one there.
        num_workers: loader processes; 0 loads in the training process.
        cache_images: True keeps all images at image_size in memory (bytes = images * image_size^2).
        predict_use: which images `predict` takes: "test", all that `test` evaluates; or train, validate, grounding.
        seed: of the order, the crops and the sentence choice.

    Raises:
        ValueError: an option out of its range.
        PreparedDataError: when it is set up: a set that is missing, or lacks what the run needs.
    """

    def __init__(
        self,
        folder: str,
        image_size: int = 512,
        crop_size: int = 480,
        batch_size: int = 64,
        sentences: str = "one",
        brightness: float = 0.2,
        contrast: float = 0.2,
        log_p: str | None = None,
        num_workers: int = 4,
        cache_images: bool = False,
        predict_use: str = "test",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= crop_size <= image_size:
            raise ValueError(f"crop_size {crop_size} must lie in [1, image_size = {image_size}]")
        if sentences not in ("one", "all"):
            raise ValueError(f'data.sentences must be "one" or "all", got {sentences!r}')
        for name, value in (("brightness", brightness), ("contrast", contrast)):
            if not 0 <= value < 1:
                raise ValueError(f"data.{name} must lie in [0, 1), got {value}")
        self.folder = folder
        self.image_size, self.crop_size, self.batch_size = image_size, crop_size, batch_size
        self.sentences, self.brightness, self.contrast = sentences, brightness, contrast
        self.log_p_name, self.num_workers, self.cache_images = log_p, num_workers, cache_images
        self.predict_use, self.seed = predict_use, seed
        self._prepared: PreparedSet | None = None
        self._train: _TrainingExamples | None = None
        self._tokens: dict[int, list[int]] | None = None
        self._images: dict[str, _Images] = {}
        self._evaluation: dict[str, EvaluationTables] = {}

    @property
    def prepared(self) -> PreparedSet:
        """The prepared data set, opened at first use."""
        if self._prepared is None:
            self._prepared = PreparedSet(self.folder)
        return self._prepared

    def setup(self, stage: str) -> None:
        """Check the set against what the run needs; nothing is found out in the middle of an epoch."""
        images = self.prepared.table("images")
        if stage != "fit":
            return
        both = self.prepared.patients_in_training_and_evaluation
        if both:
            raise PreparedDataError(
                f"{self.folder}: {len(both)} patients stand both in training and in evaluation (first: {both[0]}); "
                "prepare the set again with data_prep.mimic_cxr"
            )
        for use in ("train", "validate"):
            if not (images["use"] == use).any():
                raise PreparedDataError(f"{self.folder} has no {use} images; fit needs train and validate")
        self._token_table()
        self._train = _TrainingExamples(self, self._reported("train"))
        # The sampler's error (a batch larger than the set) belongs here, not into the first epoch.
        EpochSampler(len(self._train), self.batch_size, self.seed)

    def _model(self) -> Any:
        """The model that is trained: it has the tokenizer and knows which fields the objective needs."""
        if self.trainer is None:
            raise RuntimeError("ImageTextDataModule needs a Trainer: its model has the tokenizer")
        return self.trainer.lightning_module

    def _reported(self, use: str) -> _Reported:
        """Images of one use with the distinct sentences of their reports; images without any are left out."""
        images = self.prepared.table("images").query("use == @use")
        reports = self.prepared.table("reports")
        reports = reports[reports["study_id"].isin(images["study_id"])]
        by_study = {
            int(str(study)): list(dict.fromkeys(ids))
            for study, ids in reports.groupby("study_id")["sentence_id"].apply(list).items()
        }
        images = (
            images[images["study_id"].isin(list(by_study))].sort_values("dicom_id").reset_index(drop=True)
        )
        return _Reported(images, [by_study[study] for study in images["study_id"]])

    def _token_table(self) -> dict[int, list[int]]:
        """Word pieces of every sentence of the set."""
        if self._tokens is None:
            sentences = self.prepared.table("sentences")
            ids = self._model().network.text_encoder.tokenize(sentences["text"].tolist())
            self._tokens = dict(zip(sentences["sentence_id"].tolist(), ids, strict=True))
        return self._tokens

    def anchor_fields(self, names: Sequence[str]) -> dict[str, pd.Series]:
        """Columns of the sentence tables, indexed by sentence_id.

        Raises:
            ValueError: a name that no table has.
            PreparedDataError: the table is not there; names the command that makes it.
        """
        fields = {}
        for name in names:
            if name not in SENTENCE_FIELDS:
                raise ValueError(f"no sentence field named {name!r}; there are {sorted(SENTENCE_FIELDS)}")
            frame = (
                self.prepared.log_p(self.log_p_name)
                if name == "log_p"
                else self.prepared.table(SENTENCE_FIELDS[name])
            )
            fields[name] = frame.set_index("sentence_id")[name]
        return fields

    def load_image(self, dicom_id: str) -> UInt8[np.ndarray, "height width"]:
        """The prepared image, grey levels at image_size."""
        images = self.prepared.table("images")
        path = images.loc[images["dicom_id"] == dicom_id, "path"].item()
        return load_grey(self.prepared.image_file(path), self.image_size)

    # Loaders

    def train_dataloader(self) -> DataLoader:
        if self._train is None:
            raise RuntimeError("call setup('fit') first")
        sampler = EpochSampler(len(self._train), self.batch_size, self.seed)
        sampler.set_epoch(self.first_epoch)
        return self._loader(
            self._train, sampler, self.batch_size // sampler.num_replicas, self._train.collate, drop_last=True
        )

    def val_dataloader(self) -> DataLoader:
        # Whole blocks of images, so that the loss has the same candidates on any number of processes.
        examples = _TrainingExamples(self, self._reported("validate"), augmented=False)
        blocks = FixedBatches(examples, self.batch_size, examples.collate)
        return self._loader(blocks, ShardSampler(len(blocks)), None, None)

    def test_dataloader(self) -> DataLoader:
        return self._image_loader(self.evaluation("test").images["dicom_id"].tolist())

    def predict_dataloader(self) -> DataLoader:
        if self.predict_use == "test":
            return self.test_dataloader()
        images = self.prepared.table("images").query("use == @self.predict_use")
        if images.empty:
            raise PreparedDataError(
                f"{self.folder} has no images of use {self.predict_use!r} (data.predict_use)"
            )
        return self._image_loader(sorted(images["dicom_id"]))

    def _image_loader(self, dicom_ids: list[str]) -> DataLoader:
        examples = _WholeImages(self._cached(dicom_ids), dicom_ids)
        return self._loader(examples, ShardSampler(len(examples)), self.batch_size, examples.collate)

    def _cached(self, dicom_ids: list[str]) -> _Images:
        key = "\n".join(dicom_ids)
        if key not in self._images:
            paths = self.prepared.table("images").set_index("dicom_id")["path"].reindex(dicom_ids)
            files = [self.prepared.image_file(path) for path in paths]
            self._images[key] = _Images(files, self.image_size, self.cache_images)
        return self._images[key]

    def _loader(
        self, dataset: Dataset, sampler: Any, batch_size: int | None, collate: Any, drop_last: bool = False
    ) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            drop_last=drop_last,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    # Evaluation

    def evaluation(self, stage: str) -> EvaluationTables:
        """Tables of the evaluations on "validate" or "test".

        Test: the images of chex5 (official test split) and every image with a box. Validate: the images of
        validate patients whose report has a sentence.
        """
        if stage not in ("validate", "test"):
            raise ValueError(f'stage must be "validate" or "test", got {stage!r}')
        if stage not in self._evaluation:
            self._evaluation[stage] = self._evaluation_tables(stage)
        return self._evaluation[stage]

    def _evaluation_tables(self, stage: str) -> EvaluationTables:
        chex5 = self.prepared.table("chex5").query("use == @stage")
        images = self.prepared.table("images")
        if stage == "validate":
            boxes = pd.DataFrame(columns=["dicom_id", "category", "phrase", "x", "y", "w", "h"])
            evaluated = set(self._reported("validate").images["dicom_id"])
        else:
            boxes = self.prepared.table("boxes") if self.prepared.has("boxes") else self._no_boxes()
            evaluated = set(chex5["dicom_id"]) | set(boxes["dicom_id"])
            if not evaluated:
                raise PreparedDataError(
                    f"{self.folder} has nothing to test on: no CheX5 label and no box; prepare it with --ms_cxr FILE"
                )
        images = images[images["dicom_id"].isin(evaluated)].sort_values("dicom_id").reset_index(drop=True)
        reports = self.prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
        sentences = (
            images[["dicom_id", "study_id"]]
            .merge(reports, on="study_id")
            .merge(self.prepared.table("sentences")[["sentence_id", "text"]], on="sentence_id")
        )
        return EvaluationTables(
            images=images[["dicom_id", "subject_id", "study_id", "height", "width"]],
            chex5=chex5.loc[chex5["dicom_id"].isin(evaluated), ["dicom_id", "finding", "label"]].reset_index(
                drop=True
            ),
            boxes=boxes.reset_index(drop=True),
            sentences=sentences[["dicom_id", "sentence_id", "text"]],
            phantom=self.prepared.is_phantom,
        )

    @staticmethod
    def _no_boxes() -> pd.DataFrame:
        return pd.DataFrame(columns=["dicom_id", "category", "phrase", "x", "y", "w", "h"])


@dataclass(frozen=True)
class _Reported:
    """Images and, in the same order, the sentences of their reports."""

    images: pd.DataFrame
    sentence_ids: list[list[int]]


class _Images:
    """Grey images by position, read when needed or held in memory."""

    def __init__(self, files: list[Path], size: int, in_memory: bool) -> None:
        self.files, self.size = files, size
        self.cache: np.ndarray | None = None
        if in_memory:
            self.cache = np.empty((len(files), size, size), dtype=np.uint8)
            for index, file in enumerate(files):
                self.cache[index] = self._read(file)

    def _read(self, file: Path) -> UInt8[np.ndarray, "size size"]:
        try:
            return load_grey(file, self.size)
        except OSError as error:
            raise PreparedDataError(
                f"prepared image {file} cannot be read ({error}); delete it and run data_prep.mimic_cxr again"
            ) from error

    def __getitem__(self, index: int) -> UInt8[np.ndarray, "size size"]:
        return self._read(self.files[index]) if self.cache is None else self.cache[index]


class _TrainingExamples(Dataset):
    """Image-report pairs; what is random in a pair is a function of (seed, epoch, index)."""

    def __init__(self, data: ImageTextDataModule, reported: _Reported, augmented: bool = True) -> None:
        # Plain values, not the datamodule: loader processes need no trainer and no model.
        self.seed, self.sentences, self.augmented = data.seed, data.sentences, augmented
        self.crop_size, self.brightness, self.contrast = data.crop_size, data.brightness, data.contrast
        self.dicom_ids = reported.images["dicom_id"].tolist()
        self.study_ids = reported.images["study_id"].tolist()
        self.sentence_ids = reported.sentence_ids
        self.images = data._cached(self.dicom_ids)
        self.tokens = data._token_table()
        # Plain dicts: workers and collation look single sentences up.
        names = data._model().anchor_fields
        self.fields: dict[str, dict[Any, Any]] = {
            name: column.to_dict() for name, column in data.anchor_fields(names).items()
        }

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitem__(self, key: tuple[int, int] | int) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        generator = np.random.default_rng([self.seed, epoch, index])
        sentences = self.sentence_ids[index]
        if self.sentences == "one":
            sentences = [sentences[int(generator.integers(len(sentences)))]]
        grey = self.images[index]
        if self.augmented:
            image = augment(grey, self.crop_size, self.brightness, self.contrast, generator)
        else:
            image = to_input(grey)
        return {"image": image, "sentence_ids": sentences, "index": index}

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        sentence_ids = [sentence for example in examples for sentence in example["sentence_ids"]]
        positions = [i for i, example in enumerate(examples) for _ in example["sentence_ids"]]
        tokens, lengths = pad_tokens([self.tokens[sentence] for sentence in sentence_ids])
        return {
            "images": torch.stack([example["image"] for example in examples]),
            "tokens": tokens,
            "lengths": lengths,
            "image_index": torch.tensor(positions),
            "dicom_id": [self.dicom_ids[example["index"]] for example in examples],
            "study_id": torch.tensor([self.study_ids[example["index"]] for example in examples]),
            "sentence_id": torch.tensor(sentence_ids),
            "anchor": {name: _column(values, sentence_ids) for name, values in self.fields.items()},
        }


class _WholeImages(Dataset):
    """Images alone, whole."""

    def __init__(self, images: _Images, dicom_ids: list[str]) -> None:
        self.images, self.dicom_ids = images, dicom_ids

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": to_input(self.images[index]), "dicom_id": self.dicom_ids[index]}

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "images": torch.stack([example["image"] for example in examples]),
            "dicom_id": [example["dicom_id"] for example in examples],
        }


def _column(values: Mapping[Any, Any], sentence_ids: Sequence[int]) -> Tensor:
    column = torch.tensor([values[sentence] for sentence in sentence_ids])
    return column.float() if column.is_floating_point() else column
