"""Views of small labelled images in memory, of which some classes may be rarer than others (CIFAR10-r)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import UserError, check_least
from medclip_dcl.data.link import LinkedDataModule, ViewsProvided, ViewsRequirements
from medclip_dcl.data.samplers import (
    EpochDataModule,
    EpochSampler,
    ShardSampler,
    as_it_is,
    require_whole_batches,
    worker_options,
)
from medclip_dcl.unimodal.arrays import UNLABELLED, ImageArrays, read_images
from medclip_dcl.unimodal.augmentation import Augmentation, resized_crops, uniform_numbers


@dataclass(frozen=True)
class _Usual:
    """Settings of a source where nothing else is given: augmentation, and side of the views (None: the images')."""

    augmentation: Augmentation
    image_size: int | None = None


_USUAL = {
    # A digit flipped, or without most of its strokes, is not that digit.
    "digits": _Usual(Augmentation(crop_scale=0.4, flip=0.0, jitter=(0.0, 0.0, 0.0, 0.0), grey=0.0)),
    "cifar10": _Usual(Augmentation()),
    "stl10": _Usual(Augmentation(blur=0.5), image_size=32),
}


class ImageOnlyDataModule(LinkedDataModule[ViewsRequirements], EpochDataModule):
    """Views of small labelled images for contrastive learning without text, and the images as they are to evaluate it.

    A training batch is a dict: images (view, image, channel, side, side) in [0, 1]; index (image,), the position among
    the training images; class_id (image,); rho (image,), the share of the image's class among the training images;
    lowest_rho and highest_rho (image,), the least and the greatest share of any class. The model requires the number
    of views. They depend on (seed, epoch, index) alone, and the first ones not on the number.

    Batches of validation and test hold images as they are: images (image, channel, side, side), index, class_id,
    is_test. The test serves all labelled training images, then all test images, and index counts through both; the
    validation serves some of these training images, for a nearest-neighbour monitor.

    STL10's unlabelled images are trained on, unless `classes` is given; with them there are no shares of classes, and
    objectives that require these are refused.

    Args:
        source: "digits", 1,797 images of 8 x 8 pixels that come with scikit-learn; "cifar10"; or "stl10".
        folder: of the files of CIFAR-10 (the official Python or binary batches, or the Parquet files of the Hugging
            Face data set) or STL10 (the official binary files). null for digits.
        fraction: share r of the training images of each selected class that is kept, in (0, 1]. Other classes and the
            test images stay whole. SSD describes 6,000 images of a class, which is training and test together: thinning
            the training images alone is our choice.
        selected: the classes of which the fraction is kept. null: SSD's dog, frog, horse, ship and truck of CIFAR-10;
            the last five classes of the others (choice).
        classes: use these classes alone, in training and test. null for all. Names of digits are quoted: "0" to "9".
        subset_seed: which images the fraction keeps. With the same seed the fewer are among the more.
        batch_size: images per step, of all processes together.
        image_size: side in pixels of views and evaluated images. null: the images' own; 32 for STL10, as DCL's code.
        crop_scale: least share of the image's area that a view shows, in (0, 1]. null: .08, as torchvision; .4 for
            digits.
        flip: probability of a horizontal flip. null: .5; 0 for digits.
        jitter: strengths of brightness, contrast, saturation and hue. null: [.4, .4, .4, .1]; zeros for digits.
        jitter_probability: probability that a view has the jitter.
        grey: probability that a view loses its colours. null: .2; 0 for digits.
        blur: probability of a Gaussian blur of 3 x 3 pixels. null: 0, as SSD names none; .5 for STL10, as DCL's code.
        monitor_images: number of training images of the validation, drawn by `seed`.
        seed: of the order and the views.
    """

    accepts = ViewsRequirements

    has_prepared_set = False

    def __init__(
        self,
        source: Literal["digits", "cifar10", "stl10"] = "digits",
        folder: str | None = None,
        fraction: float = 1.0,
        selected: list[str] | None = None,
        classes: list[str] | None = None,
        subset_seed: int = 0,
        batch_size: int = 128,
        image_size: int | None = None,
        crop_scale: float | None = None,
        flip: float | None = None,
        jitter: list[float] | None = None,
        jitter_probability: float = 0.8,
        grey: float | None = None,
        blur: float | None = None,
        monitor_images: int = 5000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if source == "digits" and folder is not None:
            raise UserError(f"data.folder: the digits come with scikit-learn, set it to null, got {folder}")
        if source != "digits" and folder is None:
            raise UserError(f"data.folder must name the folder of the files of {source}, got null")
        if classes is not None and len(set(classes)) < 2:
            raise UserError(f"data.classes must name at least two classes, which differ, got {classes}")
        if classes is not None and not set(selected or ()) <= set(classes):
            raise UserError(f"data.selected must be among data.classes {classes}, got {selected}")
        for name, share in (("fraction", fraction), ("crop_scale", crop_scale)):
            if share is not None and not 0 < share <= 1:
                raise UserError(f"data.{name} must lie in (0, 1], got {share}")
        probabilities = {"flip": flip, "jitter_probability": jitter_probability, "grey": grey, "blur": blur}
        for name, probability in probabilities.items():
            if probability is not None and not 0 <= probability <= 1:
                raise UserError(f"data.{name} must lie in [0, 1], got {probability}")
        if jitter is not None and not (len(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5):
            raise UserError(
                "data.jitter must be four strengths of at least 0, of brightness, contrast, saturation and hue (at "
                f"most 0.5), got {jitter}"
            )
        check_least(
            "data",
            {
                "batch_size": (batch_size, 1),
                "image_size": (image_size, 3),
                "subset_seed": (subset_seed, 0),
                "monitor_images": (monitor_images, 1),
                "seed": (seed, 0),
            },
        )
        self.source, self.folder = source, folder
        self.fraction, self.selected, self.classes = fraction, selected, classes
        self.subset_seed, self.batch_size, self.seed = subset_seed, batch_size, seed
        self.monitor_images = monitor_images
        usual = _USUAL[source]
        self.image_size = usual.image_size if image_size is None else image_size
        given = {
            **probabilities,
            "crop_scale": crop_scale,
            "jitter": None if jitter is None else tuple(jitter),
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.augmentation = replace(usual.augmentation, **changes)
        self._fingerprint = ""
        self._chosen: ImageArrays | None = None

    def load(self, stage: str) -> None:
        """Read the images, choose classes and subset, and check them against the requirements of the run."""
        if self._chosen is None:
            images = read_images(self.source, self.folder)
            self._fingerprint, self._chosen = images.fingerprint(), self._subset(images)
        if stage == "fit":
            is_labelled = bool((self.chosen.train_labels != UNLABELLED).all())
            there = [*_fields(self.chosen)] if is_labelled else []
            if missing := [name for name in self.requirements.fields if name not in there]:
                raise UserError(
                    f"the objective requires {', '.join(missing)} of an image, {self.source} has "
                    f"{', '.join(there) or 'unlabelled images; name the classes to use in data.classes'}"
                )
            require_whole_batches(len(self.chosen.train), self.batch_size, rank_and_size()[1], "images")

    @property
    def chosen(self) -> ImageArrays:
        """Images of the chosen classes, with the fraction of the selected ones; there after `setup`."""
        assert self._chosen is not None, "call setup() first"
        return self._chosen

    @property
    def side(self) -> int:
        """Side of the views and of evaluated images, in pixels."""
        return self.chosen.train.shape[-1] if self.image_size is None else self.image_size

    def provided(self) -> ViewsProvided:
        return ViewsProvided(self.chosen.train.shape[1], self.side, self.chosen.classes, self.batch_size)

    def dataset(self) -> dict[str, Any]:
        """Description of the data for results.json."""
        chosen = self.chosen
        return {
            "source": self.source,
            "fingerprint": self._fingerprint,
            "fraction": self.fraction,
            "selected": list(chosen.selected),
            "classes": list(chosen.classes),
            "subset_seed": self.subset_seed,
            "image_size": self.side,
            "train_images": _by_class(chosen.train_labels, chosen.classes),
            "test_images": _by_class(chosen.test_labels, chosen.classes),
        }

    # Choice of images

    def _subset(self, images: ImageArrays) -> ImageArrays:
        for name, given in (("classes", self.classes), ("selected", self.selected)):
            if unknown := [one for one in given or () if one not in images.classes]:
                raise UserError(
                    f"data.{name}: {self.source} has no class {', '.join(unknown)}; it has {', '.join(images.classes)}"
                )
        names = tuple(name for name in images.classes if self.classes is None or name in self.classes)
        usual = [name for name in images.selected if name in names]
        selected = usual if self.selected is None else self.selected
        if self.fraction < 1 and not selected:
            raise UserError(
                f"data.fraction {self.fraction} thins the selected classes, but there is none: name some of "
                f"{', '.join(names)} in data.selected"
            )
        is_kept = torch.from_numpy(self._kept(images, names, selected))
        number = torch.tensor([names.index(name) if name in names else UNLABELLED for name in images.classes])
        # The last entry is that of the label -1.
        number = torch.cat([number, torch.tensor([UNLABELLED])])
        is_tested = number[images.test_labels] != UNLABELLED
        return replace(
            images,
            classes=names,
            # Without a copy where nothing is left out: STL10 takes 3 GB.
            train=images.train if bool(is_kept.all()) else images.train[is_kept],
            train_labels=number[images.train_labels[is_kept]],
            test=images.test[is_tested],
            test_labels=number[images.test_labels[is_tested]],
            selected=tuple(name for name in names if name in selected),
        )

    def _kept(self, images: ImageArrays, names: Sequence[str], selected: Sequence[str]) -> np.ndarray:
        """True for the training images that are used."""
        labels = images.train_labels.numpy()
        is_kept = np.full(len(labels), self.classes is None)
        for label, name in enumerate(images.classes):
            of_class = np.flatnonzero(labels == label)
            count = len(of_class)
            if name in selected:
                count = round(self.fraction * count)
                # A stream of its own: not that of any training order or view.
                generator = np.random.default_rng([self.subset_seed, label, 0, 1])
                of_class = generator.permutation(of_class)
            is_kept[of_class] = False
            if name not in names:
                continue
            if not count:
                raise UserError(
                    f"data.fraction {self.fraction} keeps none of the {len(of_class)} training images of class {name}"
                )
            is_kept[of_class[:count]] = True
        return is_kept

    # Loaders

    def train_dataloader(self) -> DataLoader:
        sampler = EpochSampler(len(self.chosen.train), self.batch_size, self.seed)
        views = _Views(self.chosen.train, _fields(self.chosen), self.requirements.n_views, self.seed)
        return self.training_loader(
            views,
            sampler,
            batch_size=self.batch_size // sampler.num_replicas,
            drop_last=True,
            collate_fn=as_it_is,
            **worker_options(0),
        )

    def val_dataloader(self) -> DataLoader:
        evaluated = self._evaluated()
        labelled = len(evaluated) - len(self.chosen.test)
        drawn = np.random.default_rng([self.seed, 0, 0, 2]).permutation(labelled)[: self.monitor_images]
        return self._evaluation_loader(evaluated, np.sort(drawn).tolist())

    def test_dataloader(self) -> DataLoader:
        evaluated = self._evaluated()
        return self._evaluation_loader(evaluated, range(len(evaluated)))

    def _evaluated(self) -> _Evaluated:
        labelled = int((self.chosen.train_labels != UNLABELLED).sum())
        return _Evaluated(
            (self.chosen.train[:labelled], self.chosen.test),
            (self.chosen.train_labels[:labelled], self.chosen.test_labels),
        )

    def _evaluation_loader(self, evaluated: _Evaluated, keys: Sequence[int]) -> DataLoader:
        return DataLoader(
            evaluated,
            batch_size=self.batch_size,
            sampler=ShardSampler(keys),
            collate_fn=as_it_is,
            **worker_options(0),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Views of training images, evaluated images as numbers in [0, 1]: computed on the device."""
        batch = dict(batch)
        images = batch["images"].float() / 255
        if "numbers" in batch:
            numbers = batch.pop("numbers").unbind(1)
            batch["images"] = torch.stack(
                [self.augmentation(images, of_view, self.side) for of_view in numbers]
            )
        elif images.shape[-1] != self.side:
            whole = torch.tensor([[0, 0, *images.shape[-2:]]], device=images.device).expand(len(images), -1)
            batch["images"] = resized_crops(images, whole, self.side)
        else:
            batch["images"] = images
        return batch


class _Views(Dataset):
    """Training images with their fields, and the uniform numbers of their views; serves whole batches."""

    def __init__(
        self, images: UInt8[Tensor, "image ..."], fields: Mapping[str, Tensor], n_views: int, seed: int
    ) -> None:
        self.images, self.fields, self.n_views, self.seed = images, fields, n_views, seed
        self._epoch, self._numbers = -1, torch.empty(0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        epoch = keys[0][0]
        if epoch != self._epoch:
            self._epoch = epoch
            self._numbers = uniform_numbers(len(self.images), self.n_views, self.seed, epoch)
        index = torch.tensor([position for _, position in keys])
        return {
            "images": self.images[index],
            "numbers": self._numbers[index],
            "index": index,
            **{name: values[index] for name, values in self.fields.items()},
        }


class _Evaluated(Dataset):
    """Labelled training images, then test images; serves whole batches."""

    def __init__(self, images: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> None:
        self.images, self.labels = images, torch.cat(labels)
        self.first_test = len(images[0])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[int]) -> dict[str, Tensor]:
        index = torch.tensor(keys)
        is_test = index >= self.first_test
        train, test = self.images
        images = train.new_empty((len(index), *train.shape[1:]))
        images[~is_test] = train[index[~is_test]]
        images[is_test] = test[index[is_test] - self.first_test]
        return {"images": images, "index": index, "class_id": self.labels[index], "is_test": is_test}


def _fields(images: ImageArrays) -> dict[str, Tensor]:
    """Fields of the training images; without shares of classes where some images have no label."""
    labels = images.train_labels
    if bool((labels == UNLABELLED).any()):
        return {"class_id": labels}
    shares = torch.bincount(labels, minlength=len(images.classes)) / len(labels)
    return {
        "class_id": labels,
        "rho": shares[labels],
        "lowest_rho": shares.min().expand(len(labels)),
        "highest_rho": shares.max().expand(len(labels)),
    }


def _by_class(labels: Int64[Tensor, " image"], classes: Sequence[str]) -> dict[str, int]:
    """Number of images of each class, and of those without a label where there are some."""
    counts = {name: int((labels == label).sum()) for label, name in enumerate(classes)}
    unlabelled = int((labels == UNLABELLED).sum())
    return {**counts, **({"unlabelled": unlabelled} if unlabelled else {})}
