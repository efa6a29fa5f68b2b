"""Images of a prepared set, and the base class of the datamodules that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pandas as pd
import torch
from jaxtyping import UInt8
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.data.link import ImageSettings, Requirements
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.samplers import EpochDataModule, ShardSampler, require_whole_batches, worker_options
from medclip_dcl.distributed import rank_and_size
from medclip_dcl.errors import UserError
from medclip_dcl.pictures.geometry import View
from medclip_dcl.pictures.transforms import centre_crop, load_grey, to_input

USUAL_SIZE = 512
"""Side of the whole image in pixels, where nothing says another (SSD, section 3.2)."""


def usual_crop(image_size: int) -> int:
    """Side of the training crop, in pixels, where nothing says another: SSD's 480 of 512."""
    return max(1, image_size * 15 // 16)


class Images:
    """Grey images by position, read when needed or held in memory.

    Args:
        files: the prepared JPEG files.
        size: of the shorter side, in pixels, to which they are scaled.
        in_memory: True reads all of them at once.
    """

    def __init__(self, files: list[Path], size: int, in_memory: bool) -> None:
        self.files, self.size = files, size
        self.cache: list[np.ndarray] | None = None
        if in_memory:
            self.cache = [self._read(index) for index in range(len(files))]

    def _read(self, index: int) -> UInt8[np.ndarray, "height width"]:
        file = self.files[index]
        try:
            return load_grey(file, self.size)
        except OSError as error:
            raise PreparedDataError(
                f"prepared image {file} cannot be read ({error}); delete it and run data_prep.mimic_cxr again"
            ) from error

    def __getitem__(self, index: int) -> UInt8[np.ndarray, "height width"]:
        return self._read(index) if self.cache is None else self.cache[index]


class ImagesAlone(Dataset):
    """Images without text or labels, cropped to their middle `seen` x `seen` pixels."""

    def __init__(self, images: Images, dicom_ids: list[str], seen: int) -> None:
        self.images, self.dicom_ids, self.seen = images, dicom_ids, seen

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": to_input(centre_crop(self.images[index], self.seen)),
            "dicom_id": self.dicom_ids[index],
        }

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "images": torch.stack([example["image"] for example in examples]),
            "dicom_id": [example["dicom_id"] for example in examples],
        }


@dataclass(frozen=True)
class EvaluatedImages:
    """Tables that every evaluation of a stage needs.

    Attributes:
        images: dicom_id, subject_id, study_id, height, width (original pixels): each evaluated image once.
    """

    images: pd.DataFrame


class ImagesDataModule(EpochDataModule[Requirements], Generic[Requirements]):
    """Base class of datamodules that serve images of a prepared set.

    Args:
        folder: the prepared data set.
        image_size: side in pixels to which the whole image is scaled (the shorter side for geometry shortest); None
            for SSD's 512.
        batch_size: images per batch, of all processes together.
        num_workers: loader processes; 0 loads in the training process.
        cache_images: True keeps all images at image_size in memory (bytes = images * image_size^2).
        predict_use: images of `predict`: "test", all that `test` evaluates; or train, validate, grounding.
        seed: of everything random.

    Attributes:
        view: the part of an image that evaluation sees; by default all of it.
        crop_size: side of the training crop, in pixels.
    """

    crop_size: int

    def __init__(
        self,
        folder: str,
        image_size: int | None,
        batch_size: int,
        num_workers: int,
        cache_images: bool,
        predict_use: str,
        seed: int,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size
        self.image_size = USUAL_SIZE if image_size is None else image_size
        self.num_workers, self.cache_images = num_workers, cache_images
        self.predict_use, self.seed = predict_use, seed
        self.view = View(self.image_size, self.image_size)
        self._prepared: PreparedSet | None = None
        self._images: dict[str, Images] = {}

    @property
    def prepared(self) -> PreparedSet:
        """The prepared data set, opened at first use."""
        if self._prepared is None:
            self._prepared = PreparedSet(self.folder)
        return self._prepared

    def image_settings(self) -> ImageSettings:
        """Size and geometry at which images are served."""
        return ImageSettings(self.image_size, self.view.seen, self.crop_size, *self.prepared.fitting)

    @property
    def fitted_view(self) -> View:
        """`view` in the geometry of the prepared set."""
        geometry, prepared = self.prepared.fitting
        return (
            self.view if geometry == "stretch" else replace(self.view, geometry=geometry, prepared=prepared)
        )

    def evaluation(self, stage: str) -> EvaluatedImages:
        """Tables of the evaluations on "validate" or "test"."""
        raise NotImplementedError

    def load_image(self, dicom_id: str) -> UInt8[np.ndarray, "height width"]:
        """Grey levels of a prepared image at image_size, without padding."""
        images = self.prepared.table("images")
        image = images[images["dicom_id"] == dicom_id].iloc[0]
        grey = load_grey(self.prepared.image_file(image["path"]), self.image_size)
        return grey[self.fitted_view.shown(int(image["height"]), int(image["width"])).slices]

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

    def _require_images_to_fit(self) -> None:
        """Refuse a set without training or validate images, or with a patient in training and in evaluation."""
        images = self.prepared.table("images")
        if images.empty:
            raise PreparedDataError(
                f"{self.folder} has no images: it holds reports alone, which serve language models, scores and "
                "embeddings of sentences, but no model of images"
            )
        self.prepared.require_separate_patients()
        for use in ("train", "validate"):
            if not (images["use"] == use).any():
                raise PreparedDataError(f"{self.folder} has no {use} images; fit needs train and validate")

    def _require_batches(self, train: int, validate: int) -> None:
        """Validate batch sizes at setup."""
        processes = rank_and_size()[1]
        require_whole_batches(train, self.batch_size, processes, "images")
        if -(-validate // self.batch_size) < processes:
            raise UserError(
                f"{validate} validate images are {-(-validate // self.batch_size)} batches of {self.batch_size}, fewer "
                f"than the {processes} processes; lower data.batch_size or use fewer processes"
            )

    def _image_loader(self, dicom_ids: list[str]) -> DataLoader:
        examples = ImagesAlone(self._cached(dicom_ids), dicom_ids, self.view.seen)
        return self._loader(examples, ShardSampler(len(examples)), self.batch_size, examples.collate)

    def _cached(self, dicom_ids: Sequence[str]) -> Images:
        key = "\n".join(dicom_ids)
        if key not in self._images:
            paths = self.prepared.table("images").set_index("dicom_id")["path"].loc[list(dicom_ids)]
            files = [self.prepared.image_file(path) for path in paths]
            self._images[key] = Images(files, self.image_size, self.cache_images)
        return self._images[key]

    def _loader(self, dataset: Dataset, sampler: Any, batch_size: int | None, collate: Any) -> DataLoader:
        return DataLoader(dataset, sampler=sampler, **self._loader_options(batch_size, collate))

    def _loader_options(self, batch_size: int | None, collate: Any) -> dict[str, Any]:
        return {"batch_size": batch_size, "collate_fn": collate, **worker_options(self.num_workers)}


def check_augmentation(brightness: float, contrast: float) -> None:
    """Refuse factors that could make an image black.

    Raises:
        ValueError: names the option.
    """
    for name, value in (("brightness", brightness), ("contrast", contrast)):
        if not 0 <= value < 1:
            raise UserError(f"data.{name} must lie in [0, 1), got {value}")
