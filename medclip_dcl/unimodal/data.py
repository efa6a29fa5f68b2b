"""Views of small labelled images in memory, of which some classes may be rarer than others (CIFAR10-r)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.link import LinkedDataModule
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

_AUGMENTATION = Augmentation()


@dataclass(frozen=True)
class ViewsRequirements:
    """Augmented views of each training image, and the fields of an image that the objective needs."""

    n_views: int
    fields: tuple[str, ...] = ()
    n_members: int = 0
    """Of the views, the last ones, that are of other training images of the class."""


@dataclass(frozen=True)
class ViewsProvided:
    """Images provided to a unimodal model: channels, and images in a batch."""

    channels: int
    batch_size: int


class UnimodalDataModule(LinkedDataModule[ViewsRequirements], EpochDataModule):
    """Views of small labelled images for contrastive learning without text, and the images as they are to evaluate it.

    A training batch is a dict: images (view, image, channel, side, side) in [0, 1]; index (image,), the position among
    the training images; class_id (image,); rho (image,), the share of the image's class among the training images;
    lowest_rho and highest_rho (image,), the least and the greatest share of any class. The model requires the number
    of views, and how many of the last ones are of other images of the class (`class_members`). They depend on (seed,
    epoch, index) alone, and the first ones not on the number.

    Batches of validation and test hold images as they are: images (image, channel, side, side), index, class_id,
    is_test. The test serves all labelled training images, then all test images, and index counts through both; the
    validation serves some of these training images, for a nearest-neighbour monitor.

    STL10's unlabelled images are trained on, unless `classes` is given; with them there are no shares of classes, and
    objectives that require these are refused.

    Args:
        source: "digits", 1,797 images of 8 x 8 pixels that come with scikit-learn; "cifar10"; "cifar100"; "stl10"; or
            "class_folders", image files such as ImageNet's.
        files: folder of CIFAR-10 (the official Python batches, or the Parquet files of the Hugging Face data set),
            CIFAR-100 (it holds cifar-100-python), STL10 (the official binary files), or train/CLASS and val/CLASS with
            image files. null for digits.
        fraction: share r of the training images of each selected class that is kept, in (0, 1]. Other classes and the
            test images stay whole (SSD describes 6,000 images of a class, training and test together: choice).
        selected: the classes of which the fraction is kept. null: SSD's dog, frog, horse, ship and truck of CIFAR-10;
            the last half of the classes of the others (choice).
        classes: use these classes alone, in training and test. null for all. Names of digits are quoted: "0" to "9".
        subset_seed: which images the fraction keeps. With the same seed the fewer are among the more.
        batch_size: images per step, of all processes together.
        image_size: side in pixels of the views. null: the images' own. Images of class_folders, which need one, are
            central squares of this side in memory (choice), read anew by each command.
        evaluation_size: side in pixels of evaluated images. null: that of the views (DCL's public code for STL10: crops
            of 32 in training, whole images of 96 in evaluation).
        augmentation: of the views.
        monitor_images: number of training images of the validation, drawn by `seed`.
        seed: of the order and the views.
    """

    accepts = ViewsRequirements

    def __init__(
        self,
        source: Literal["digits", "cifar10", "cifar100", "stl10", "class_folders"] = "digits",
        files: str | None = None,
        fraction: float = 1.0,
        selected: list[str] | None = None,
        classes: list[str] | None = None,
        subset_seed: int = 0,
        batch_size: int = 128,
        image_size: int | None = None,
        evaluation_size: int | None = None,
        augmentation: Augmentation = _AUGMENTATION,
        monitor_images: int = 5000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if (source == "digits") != (files is None):
            raise UserError(
                "data.files: expected null for digits, which come with scikit-learn, and the folder of the files for "
                f"other sources, found {files} for {source}"
            )
        check_range("data", "(0, 1]", fraction=fraction)
        check_range("data", "[1, inf)", batch_size=batch_size, monitor_images=monitor_images)
        check_range("data", "[3, inf)", image_size=image_size, evaluation_size=evaluation_size)
        check_range("data", "[0, inf)", subset_seed=subset_seed, seed=seed)
        self.source, self.files = source, files
        self.fraction, self.selected, self.classes = fraction, selected, classes
        self.subset_seed, self.batch_size, self.seed = subset_seed, batch_size, seed
        self.monitor_images = monitor_images
        self.image_size, self.evaluation_size, self.augmentation = image_size, evaluation_size, augmentation
        self._fingerprint = ""
        self._chosen: ImageArrays | None = None

    def load(self, stage: str) -> None:
        """Read the images, choose classes and subset, and check them against the requirements of the run."""
        if self._chosen is None:
            images = read_images(self.source, self.files, self.image_size)
            self._fingerprint, self._chosen = images.fingerprint(), self._subset(images)
            self.made_of = {"data.files": self._fingerprint}
        if stage == "fit":
            is_labelled = bool((self.chosen.train_labels != UNLABELLED).all())
            there = [*_fields(self.chosen)] if is_labelled else []
            if missing := [name for name in self.requirements.fields if name not in there]:
                raise UserError(
                    f"the objective requires {', '.join(missing)} of an image, {self.source} has "
                    f"{', '.join(there) or 'unlabelled images; name the classes to use in data.classes'}"
                )
            if self.requirements.n_members and int(self.chosen.train_labels.bincount().min()) < 2:
                raise UserError(
                    "data.fraction: expected two training images of every class, since the objective draws others of "
                    f"the class, found one of some at {self.fraction}; raise data.init_args.fraction"
                )
            require_whole_batches(len(self.chosen.train), self.batch_size, rank_and_size()[1], "images")

    @property
    def chosen(self) -> ImageArrays:
        """Images of the chosen classes, with the fraction of the selected ones; there after `setup`."""
        assert self._chosen is not None, "call setup() first"
        return self._chosen

    @property
    def side(self) -> int:
        """Side of the views, in pixels."""
        return self.chosen.train.shape[-1] if self.image_size is None else self.image_size

    @property
    def evaluated_side(self) -> int:
        """Side of evaluated images, in pixels."""
        return self.side if self.evaluation_size is None else self.evaluation_size

    def provided(self) -> ViewsProvided:
        return ViewsProvided(self.chosen.train.shape[1], self.batch_size)

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
            "image_size": self.evaluated_side,
            "view_size": self.side,
            "train_images": _by_class(chosen.train_labels, chosen.classes),
            "test_images": _by_class(chosen.test_labels, chosen.classes),
        }

    # Choice of images

    def _subset(self, images: ImageArrays) -> ImageArrays:
        names = tuple(name for name in images.classes if self.classes is None or name in self.classes)
        for setting, given, there in (
            ("classes", self.classes, images.classes),
            ("selected", self.selected, names),
        ):
            if unknown := [name for name in given or () if name not in there]:
                raise UserError(
                    f"data.{setting}: expected some of {', '.join(there)}, found {', '.join(unknown)}"
                )
        if len(names) < 2:
            raise UserError(f"data.classes: expected at least two classes, found {self.classes}")
        usual = [name for name in images.selected if name in names]
        selected = usual if self.selected is None else self.selected
        if self.fraction < 1 and not selected:
            raise UserError(
                f"data.selected: expected some of {', '.join(names)} for data.fraction {self.fraction}, found none"
            )
        is_kept = torch.from_numpy(self._kept(images, names, selected))
        # The last entry is that of the label -1.
        numbers = [names.index(name) if name in names else UNLABELLED for name in images.classes]
        number = torch.tensor([*numbers, UNLABELLED])
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
        is_kept = (labels == UNLABELLED) & (self.classes is None)
        for label, name in enumerate(images.classes):
            of_class = np.flatnonzero(labels == label) if name in names else np.empty(0, dtype=int)
            count = round(self.fraction * len(of_class)) if name in selected else len(of_class)
            if name in names and not count:
                raise UserError(
                    f"data.fraction: expected to keep images of every class, {self.fraction} keeps none of the "
                    f"{len(of_class)} training images of class {name}"
                )
            # A stream of its own: not that of any training order or view.
            generator = np.random.default_rng([self.subset_seed, label, 0, 1])
            is_kept[generator.permutation(of_class)[:count]] = True
        return is_kept

    # Loaders

    def train_dataloader(self) -> DataLoader:
        sampler = EpochSampler(len(self.chosen.train), self.batch_size, self.seed)
        views = _Views(self.chosen.train, _fields(self.chosen), self.requirements, self.seed)
        return self.training_loader(
            views,
            sampler,
            batch_size=self.batch_size // sampler.num_replicas,
            drop_last=True,
            collate_fn=as_it_is,
            **worker_options(0),
        )

    def val_dataloader(self) -> DataLoader:
        generator = np.random.default_rng([self.seed, 0, 0, 2])
        drawn = generator.permutation(self._labelled)[: self.monitor_images]
        return self._evaluation_loader(np.sort(drawn).tolist())

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader(range(self._labelled + len(self.chosen.test)))

    @property
    def _labelled(self) -> int:
        """Number of labelled training images, which come before the others."""
        return int((self.chosen.train_labels != UNLABELLED).sum())

    def _evaluation_loader(self, keys: Sequence[int]) -> DataLoader:
        """Some of the labelled training images and, after them, the test images."""
        count = self._labelled
        labels = torch.cat([self.chosen.train_labels[:count], self.chosen.test_labels])
        # Rows and not one array: both may take half of the memory.
        images = [*self.chosen.train[:count], *self.chosen.test]
        is_test = torch.arange(len(labels)) >= count
        return DataLoader(
            _Images(images, {"class_id": labels, "is_test": is_test}),
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
            members = [one.float() / 255 for one in batch.pop("members").unbind(1)]
            seen = [images] * (len(numbers) - len(members)) + members
            batch["images"] = torch.stack(
                [
                    self.augmentation(one, of_view, self.side)
                    for one, of_view in zip(seen, numbers, strict=True)
                ]
            )
        elif images.shape[-1] != self.evaluated_side:
            whole = torch.tensor([[0, 0, *images.shape[-2:]]], device=images.device).expand(len(images), -1)
            batch["images"] = resized_crops(images, whole, self.evaluated_side)
        else:
            batch["images"] = images
        return batch


class _Images(Dataset):
    """Images with their fields; serves whole batches."""

    def __init__(self, images: Tensor | list[Tensor], fields: Mapping[str, Tensor]) -> None:
        self.images, self.fields = images, fields

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        index = torch.tensor(keys)
        fields = {name: values[index] for name, values in self.fields.items()}
        return {"images": torch.stack([self.images[key] for key in keys]), "index": index, **fields}


class _Views(_Images):
    """Training images by (epoch, index), with other images of their class and the uniform numbers of the views."""

    def __init__(
        self, images: Tensor, fields: Mapping[str, Tensor], requirements: ViewsRequirements, seed: int
    ) -> None:
        super().__init__(images, fields)
        self.requirements, self.seed = requirements, seed
        self._epoch, self._numbers, self._members = -1, torch.empty(0), torch.empty(0)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        epoch = keys[0][0]
        if epoch != self._epoch:
            self._epoch = epoch
            views, members = self.requirements.n_views, self.requirements.n_members
            self._numbers = uniform_numbers(len(self.images), views, self.seed, epoch)
            self._members = class_members(self.fields["class_id"], members, self.seed, epoch)
        batch = super().__getitems__([index for _, index in keys])
        index = batch["index"]
        return {**batch, "members": self.images[self._members[index]], "numbers": self._numbers[index]}


def class_members(
    class_id: Int64[Tensor, " image"], count: int, seed: int, epoch: int
) -> Int64[Tensor, "image {count}"]:
    """Rows of `count` other images of each image's class, drawn with replacement.

    A function of (seed, epoch, member, image): more members leave the first ones as they are. A class of one image
    has no other.
    """
    labels = class_id.numpy()
    rows = labels.argsort(kind="stable")
    first, others = np.searchsorted(labels[rows], labels), np.bincount(labels + 1)[labels + 1] - 1
    place = rows.argsort() - first  # among the images of the class
    drawn = np.empty((len(labels), count), dtype=np.int64)
    for member in range(count):
        # A stream of its own: not that of any order, view or subset.
        number = np.random.default_rng([seed, epoch, member, 3]).integers(others)
        drawn[:, member] = rows[first + number + (number >= place)]
    return torch.from_numpy(drawn)


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
