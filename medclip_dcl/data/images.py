"""Images of a prepared set, and the base class of the datamodules that serve them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.link import ImageSettings, PreparedDataModule, Requirements
from medclip_dcl.data.prepared import PreparedDataError
from medclip_dcl.data.samplers import EpochDataModule, ShardSampler, worker_options
from medclip_dcl.data.shards import StoredImages
from medclip_dcl.pictures.geometry import View
from medclip_dcl.pictures.transforms import GreyCrop, augment, batch_of, centre_crop, load_grey

Grey: TypeAlias = UInt8[np.ndarray, "height width"]

USUAL_SIZE = 512
"""Default side of the whole image in pixels (SSD, section 3.2)."""


def usual_crop(image_size: int) -> int:
    """Default side of the training crop, in pixels: SSD's 480 of 512."""
    return max(1, image_size * 15 // 16)


class Images:
    """Grey images by position, scaled so that the shorter side has `size` pixels; read when needed, or at once."""

    def __init__(self, stored: StoredImages, size: int, in_memory: bool) -> None:
        self.stored, self.size = stored, size
        self.cache: list[np.ndarray] = []
        if in_memory:
            self.cache = [self[index] for index in range(len(stored))]

    def __getitem__(self, index: int) -> Grey:
        if self.cache:
            return self.cache[index]
        try:
            return load_grey(self.stored[index], self.size)
        except OSError as error:
            raise PreparedDataError(self.stored.problem(index, error)) from error


def middle(grey: Grey, size: int, generator: np.random.Generator | None = None) -> GreyCrop:
    """The middle square of an image, as evaluation shows it; draws nothing."""
    return GreyCrop(centre_crop(grey, size))


@dataclass(eq=False)
class ImageExamples(Dataset):
    """Images as `show` shows them, drawing by (seed, epoch, index), with labels (image, finding) for a classifier."""

    images: Images
    dicom_ids: Sequence[str]
    show: Callable[..., GreyCrop]
    labels: Tensor | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dicom_ids)

    def __getitem__(self, key: tuple[int, int] | int) -> tuple[int, GreyCrop]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        generator = np.random.default_rng([self.seed, epoch, index])
        return index, self.show(self.images[index], generator=generator)

    def collate(self, examples: list[tuple[int, GreyCrop]]) -> dict[str, Any]:
        indices = [index for index, _ in examples]
        return {
            **batch_of([crop for _, crop in examples]),
            "dicom_id": [self.dicom_ids[index] for index in indices],
            **({} if self.labels is None else {"labels": self.labels[indices]}),
        }


@dataclass(frozen=True)
class EvaluatedImages:
    """Tables of every evaluation; images: dicom_id, subject_id, study_id, height, width (original), each image once."""

    images: pd.DataFrame


class ImagesDataModule(PreparedDataModule[Requirements], EpochDataModule, Generic[Requirements]):
    """Base class of datamodules that serve images of a prepared set.

    `usual_crop` is the crop_size for an image_size where it is null; `view` the part of an image that evaluation sees.
    """

    def __init__(
        self,
        folder: str,
        image_size: int | None,
        crop_size: int | None,
        batch_size: int,
        brightness: float,
        contrast: float,
        num_workers: int,
        cache_images: bool,
        predict_use: str,
        seed: int,
        usual_crop: Callable[[int], int],
    ) -> None:
        super().__init__()
        image_size = USUAL_SIZE if image_size is None else image_size
        check_range("data", "[1, inf)", image_size=image_size, batch_size=batch_size)
        check_range("data", "[0, inf)", num_workers=num_workers, seed=seed)
        self.folder, self.batch_size = folder, batch_size
        crop_size = usual_crop(image_size) if crop_size is None else crop_size
        check_range("data", f"[1, {image_size}]", crop_size=crop_size)
        check_range("data", "[0, 1)", brightness=brightness, contrast=contrast)
        self.image_size, self.crop_size = image_size, crop_size
        self.varies = bool(crop_size < image_size or brightness or contrast)
        self._augment = partial(augment, crop_size=crop_size, brightness=brightness, contrast=contrast)
        self.num_workers, self.cache_images = num_workers, cache_images
        self.predict_use, self.seed = predict_use, seed
        self.view = View(self.image_size, self.image_size)
        self._images: dict[str, Images] = {}

    def show(self, augmented: bool) -> Callable[..., GreyCrop]:
        """Function of an image and a `generator`: its augmented crop, or the part that evaluation sees."""
        return self._augment if augmented else partial(middle, size=self.view.seen)

    def image_settings(self) -> ImageSettings:
        return ImageSettings(self.image_size, self.view.seen, self.crop_size, *self.prepared.fitting)

    @property
    def fitted_view(self) -> View:
        """`view` in the geometry of the prepared set."""
        geometry, prepared = self.prepared.fitting
        return (
            self.view if geometry == "stretch" else replace(self.view, geometry=geometry, prepared=prepared)
        )

    @property
    def test_images(self) -> pd.DataFrame:
        """Images of the official test split, which grounding may have too."""
        return self.prepared.rows("images", official_split=["test"], use=["test", "grounding"])

    def evaluation(self, stage: str) -> EvaluatedImages:
        """Tables of the evaluations on "validate" or "test"."""
        raise NotImplementedError

    def load_image(self, dicom_id: str) -> Grey:
        """Grey levels of a prepared image at image_size, without padding."""
        images = self.prepared.table("images")
        image = images[images["dicom_id"] == dicom_id].iloc[0]
        grey = Images(self.prepared.stored_images([image["path"]]), self.image_size, False)[0]
        return grey[self.fitted_view.shown(int(image["height"]), int(image["width"])).slices]

    def test_dataloader(self) -> DataLoader:
        return self._image_loader(self.evaluation("test").images["dicom_id"].tolist())

    def predict_dataloader(self) -> DataLoader:
        if self.predict_use == "test":
            return self.test_dataloader()
        images = self.prepared.rows("images", ["dicom_id"], use=[self.predict_use])
        if images.empty:
            raise PreparedDataError(
                f"{self.folder} has no images of use {self.predict_use!r} (data.predict_use)"
            )
        return self._image_loader(sorted(images["dicom_id"]))

    def _require_images_to_fit(self) -> None:
        """Refuse a set with a damaged table, without training or validate images, or with patients in both."""
        self.prepared.require_separate_patients()
        uses = set(self.prepared.rows("images", ["use"])["use"])
        for use in ("train", "validate"):
            if use not in uses:
                raise PreparedDataError(
                    f"{self.folder} has no {use} images; fit needs train and validate (a set of reports alone serves "
                    "language models, scores and embeddings of sentences)"
                )
        for name in ("reports", "labels", "cases"):  # before the first epoch, not at its validation
            if self.prepared.has(name):
                self.prepared.check(name)

    def _require_no_augmentation(self, reason: str) -> None:
        if self.varies:
            raise UserError(
                f"{reason}, so nothing can vary them; set data.crop_size: null, data.brightness: 0 and "
                "data.contrast: 0"
            )

    def _image_loader(self, dicom_ids: Sequence[str]) -> DataLoader:
        key = "\n".join(dicom_ids)
        if key not in self._images:
            paths = self.prepared.rows("images", ["dicom_id", "path"]).set_index("dicom_id")["path"]
            self._images[key] = self._scaled(paths.loc[list(dicom_ids)].tolist())
        examples = ImageExamples(self._images[key], dicom_ids, self.show(augmented=False))
        return self._loader(examples, ShardSampler(range(len(examples))), self.batch_size, examples.collate)

    def _scaled(self, paths: Sequence[str]) -> Images:
        return Images(self.prepared.stored_images(paths), self.image_size, self.cache_images)

    def _loader(self, dataset: Dataset, sampler: Any, batch_size: int | None, collate: Any) -> DataLoader:
        return DataLoader(dataset, sampler=sampler, **self._loader_options(batch_size, collate))

    def _loader_options(self, batch_size: int | None, collate: Any) -> dict[str, Any]:
        return {"batch_size": batch_size, "collate_fn": collate, **worker_options(self.num_workers)}


def image_settings(data: object) -> ImageSettings | None:
    """Geometry of the images of any datamodule, of a user's own by its `image_size`; None without images."""
    if isinstance(data, ImagesDataModule):
        return data.image_settings()
    size = getattr(data, "image_size", None)
    return None if size is None else ImageSettings(size, size)


def shown_images(data: object) -> dict[str, Any]:
    """The size and geometry at which a datamodule shows images; empty for one without images."""
    shown = image_settings(data)
    return (
        {}
        if shown is None
        else {name: getattr(shown, name) for name in ("image_size", "geometry", "prepared_size")}
    )
