"""Labelled images of a prepared set: batches for a classifier, and the labels that it is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from jaxtyping import Float
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.distributed import rank_and_size
from medclip_dcl.common.errors import check_choice, check_range
from medclip_dcl.common.findings import require_labelled
from medclip_dcl.data.arrays import Arrays, Rows
from medclip_dcl.data.images import EvaluatedImages, ImageExamples, ImagesDataModule
from medclip_dcl.data.link import LabelledData, LabelledRequirements
from medclip_dcl.data.prepared import PreparedDataError
from medclip_dcl.data.samplers import EpochSampler, ShardSampler, as_it_is
from medclip_dcl.pictures.geometry import View

UNCERTAIN = -1.0
MEANINGS = {"ones": 1.0, "zeros": 0.0, "ignore": float("nan")}
"""Policy for uncertain and blank labels -> target value; NaN is left out of the loss."""


@dataclass(frozen=True)
class LabelPolicy:
    """What uncertain and blank labels of a labelled study count as in training."""

    uncertain: str
    blank: str

    def __post_init__(self) -> None:
        check_choice("data.uncertain", self.uncertain, MEANINGS)
        check_choice("data.blank", self.blank, ("zeros", "ignore"))

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """1, 0, or NaN for an entry that is left out, float32."""
        meant = np.where(labels == UNCERTAIN, MEANINGS[self.uncertain], labels)
        return np.where(np.isnan(labels), MEANINGS[self.blank], meant).astype(np.float32)

    def say_blanks(self, labels: np.ndarray) -> None:
        """Say how many of the training labels are negative because they are blank."""
        if (n_blank := int(np.isnan(labels).sum())) and self.blank == "zeros":
            rank_zero_info(
                f"data.blank zeros: {n_blank:,} of {labels.size:,} training labels are blank and count as negative "
                "(ignore leaves them out)"
            )

    def of_studies(self, labels: pd.DataFrame) -> pd.DataFrame:
        """Targets of the studies with a label, by study_id, from the table "labels"."""
        rows = labels.set_index("study_id").dropna(how="all")
        return pd.DataFrame(self.targets(rows.to_numpy()), rows.index, rows.columns)


@dataclass(frozen=True)
class LabelledImages(EvaluatedImages):
    """Tables of the evaluation of a classifier.

    Attributes:
        labels: dicom_id, finding, label: 1, 0, -1 (uncertain) or NaN (blank), as the labeller left them; a row for each
            image and each finding of the model that the set labels.
        view: what the model sees of each image.
    """

    labels: pd.DataFrame
    view: View = View()


class LabelledDataModule(ImagesDataModule[LabelledRequirements]):
    """Images with the labels of their studies, for training, validation, test and prediction.

    A batch is a dict: images, grey levels (image, 1, H, W), and image_scale (image, 3), their brightness, contrast and
    mean (`pictures.transforms.to_input`), or features (image, channel) where the model is a linear probe; labels
    (image, finding), 1, 0, or NaN for an entry that is left out; dicom_id. Test and prediction batches hold whole
    images only. The model names the findings: any that the set labels.

    A study in which all label columns are blank is not labelled: its images are used nowhere. Test images are those
    of the official test split (as for the zero-shot evaluation), validation images those of `validate` patients.

    Args:
        folder: the prepared data set.
        image_size: side in pixels to which the whole image is scaled; what evaluation and a linear probe see. null:
            512; on the command line the size at which the checkpoint, or what training starts from, was trained.
        crop_size: side of the random training crop, in pixels, at most image_size; null for the whole image, or, in
            fine-tuning by the command line with image_size null, for the crop of that training.
        batch_size: images per step, of all processes together; where the labelled training images are fewer, all of
            them.
        uncertain: what a label of -1 counts as in training: "ones", "zeros", or "ignore" (left out of the loss).
        blank: what no mention counts as in training: "zeros", as is common for MIMIC-CXR, or "ignore".
        label_fraction: share of the labelled training patients whose labels are used, in (0, 1]; at least one patient.
        label_seed: which patients these are. With the same seed the fewer are among the more.
        brightness: factor varies in 1 +- brightness.
        contrast: factor varies in 1 +- contrast.
        num_workers: loader processes; 0 loads in the training process.
        cache_images: True keeps all images at image_size in memory (bytes = images * image_size^2).
        predict_use: which images `predict` takes: "test", all that `test` evaluates; or train, validate, grounding.
        seed: of the order and the crops.
    """

    accepts = LabelledRequirements

    def __init__(
        self,
        folder: str,
        image_size: int | None = None,
        crop_size: int | None = None,
        batch_size: int = 64,
        uncertain: Literal["ones", "zeros", "ignore"] = "ignore",
        blank: Literal["zeros", "ignore"] = "zeros",
        label_fraction: float = 1.0,
        label_seed: int = 0,
        brightness: float = 0.2,
        contrast: float = 0.2,
        num_workers: int = 4,
        cache_images: bool = False,
        predict_use: Literal["train", "validate", "test", "grounding"] = "test",
        seed: int = 0,
    ) -> None:
        super().__init__(
            *(folder, image_size, crop_size, batch_size, brightness, contrast),
            *(num_workers, cache_images, predict_use, seed),
            usual_crop=lambda side: side,
        )
        check_range("data", "(0, 1]", label_fraction=label_fraction)
        self.policy = LabelPolicy(uncertain, blank)
        self.label_fraction, self.label_seed = label_fraction, label_seed
        self._train: Targets | None = None
        self._features: dict[str, Tensor] = {}
        self._kept: dict[str, Arrays] = {}
        self._said = set[str]()

    def provided(self) -> LabelledData:
        return LabelledData(self.image_settings(), self.positive_weight, partial(self.features, "train"))

    def load(self, stage: str) -> None:
        """Check the set against the requirements of the run."""
        self.of_machine(lambda: self.prepared.check("labels"))
        self._features = {}  # of another model, perhaps
        if stage != "fit":
            return
        self.of_machine(self._require_images_to_fit)
        self._kept, self._images = {}, {}
        require_labelled(self.requirements.findings, self.prepared.findings, "model.findings")
        if self.requirements.is_frozen:
            self._require_no_augmentation(
                "data: a linear probe (model.frozen: true, --config linear_probe) computes the features of whole "
                "images once"
            )
        self._train = self._training_targets()
        validate = self._targets("validate")
        if bool(validate.labels.isnan().all()):
            raise PreparedDataError(
                f"{self.folder}: none of the validate images has a label of {', '.join(self.requirements.findings)}"
            )
        self._batch_size = self._training_batch(len(self._train.dicom_ids))

    @property
    def train_patients(self) -> int | None:
        """Patients whose labels are used in training; None before they are drawn."""
        return None if self._train is None else len(np.unique(self._train.subject_ids))

    def positive_weight(self) -> Float[Tensor, " finding"]:
        """Negatives over positives of each finding among the training labels."""
        labels = self._targets("train").labels
        return (labels == 0).sum(0).float() / (labels == 1).sum(0)

    def features(self, use: str, count: int | None = None) -> Float[Tensor, "image channel"]:
        """The model's features of the whole images of "train" or "validate", kept, or of the first `count`."""
        if count is None and use in self._features:
            return self._features[use]
        dicom_ids = self._targets(use).dicom_ids[:count]
        computed = self.requirements.features_of(self._image_loader(dicom_ids))
        found = torch.stack([computed[dicom_id] for dicom_id in dicom_ids])
        if count is None:
            self._features[use] = found
        return found

    # Labels

    def _say_unlabelled(self, use: str, n_labelled: int, n_images: int) -> None:
        if n_labelled < n_images and use not in self._said:
            rank_zero_info(
                f"{n_images - n_labelled:,} of {n_images:,} {use} images are left out: all label columns of their "
                "studies are blank (write 0 where a finding is absent)"
            )
        self._said.add(use)

    def _labelled(self, images: pd.DataFrame) -> pd.DataFrame:
        """Images whose study has a label, with all label columns, by dicom_id."""
        labels = self.prepared.rows("labels")
        labels = labels[labels.drop(columns="study_id").notna().any(axis=1)]
        return images.merge(labels, on="study_id").sort_values("dicom_id").reset_index(drop=True)

    def _targets(self, use: str) -> Targets:
        """Targets of "train", the drawn patients' once these are drawn, or of "validate"."""
        if use == "train" and self._train is not None:
            return self._train
        if use not in self._kept:
            self._kept[use] = self.arrays({"of": "labelled images", "use": use}, lambda: self._arrays_of(use))
        kept = self._kept[use]
        targets = torch.from_numpy(self.policy.targets(self._codes(use)))
        return Targets(kept["dicom_id"], kept["path"], kept["subject_id"], targets)

    def _codes(self, use: str) -> Float[np.ndarray, "image finding"]:
        return np.stack(
            [self._kept[use][f"label/{finding}"] for finding in self.requirements.findings], axis=1
        )

    def _arrays_of(self, use: str) -> dict[str, Any]:
        """dicom_id, path, subject_id and each label of the labelled images of one use."""
        images = self._labelled(self.prepared.rows("images", use=[use]))
        findings = self.prepared.rows("labels").columns.drop("study_id")
        return {
            **{name: pa.array(images[name], pa.large_string()) for name in ("dicom_id", "path")},
            "subject_id": images["subject_id"].to_numpy(),
            **{f"label/{finding}": images[finding].to_numpy(np.float32) for finding in findings},
        }

    def _training_targets(self) -> Targets:
        self._train = None
        of_all = self._targets("train")
        drawn = draw_patients(of_all.subject_ids, self.label_fraction, self.label_seed)
        is_chosen = np.isin(of_all.subject_ids, drawn) & ~of_all.labels.isnan().all(1).numpy()
        chosen = of_all.rows(is_chosen)
        problems = [
            f"{finding} (no {kind} one)"
            for finding, column in zip(self.requirements.findings, chosen.labels.T, strict=True)
            for kind, value in (("positive", 1), ("negative", 0))
            if not (column == value).any()
        ]
        if problems:
            raise PreparedDataError(
                f"{self.folder}: the labels of {len(chosen.dicom_ids)} training images (data.label_fraction "
                f"{self.label_fraction}, label_seed {self.label_seed}) have none of one kind for "
                f"{', '.join(problems)}; raise label_fraction, choose another label_seed, leave the finding out of "
                "model.findings, or take blanks or uncertain labels for something (data.blank, data.uncertain)"
            )
        n_images = len(self.prepared.rows("images", ["dicom_id"], use=["train"]))
        self._say_unlabelled("training", len(of_all.dicom_ids), n_images)
        self.policy.say_blanks(self._codes("train")[is_chosen])
        return chosen

    def _training_batch(self, images: int) -> int:
        """data.batch_size, or all images where they are fewer, of all processes together."""
        processes = rank_and_size()[1]
        if images >= self.batch_size:
            return self.batch_size
        fewer = max(1, images // processes) * processes
        rank_zero_warn(
            f"data.batch_size {self.batch_size} is more than the {images} labelled training images: batches of {fewer}"
        )
        return fewer

    # Loaders

    def train_dataloader(self) -> DataLoader:
        assert self._train is not None
        sampler = EpochSampler(len(self._train.dicom_ids), self._batch_size, self.seed)
        dataset, options = self._examples("train", self._batch_size // sampler.num_replicas)
        return self.training_loader(dataset, sampler, drop_last=True, **options)

    def val_dataloader(self) -> DataLoader:
        dataset, options = self._examples("validate", self.batch_size)
        return DataLoader(dataset, sampler=ShardSampler(range(len(dataset))), **options)

    def _examples(self, use: str, batch_size: int) -> tuple[ImageExamples | FeatureExamples, dict[str, Any]]:
        targets = self._targets(use)
        if self.requirements.is_frozen:
            # In memory: no worker processes.
            options = {"batch_size": batch_size, "collate_fn": as_it_is}
            return FeatureExamples(self.features(use), targets), options
        if use not in self._images:
            self._images[use] = self._scaled(targets.paths)
        show = self.show(augmented=use == "train")
        examples = ImageExamples(self._images[use], targets.dicom_ids, show, targets.labels, self.seed)
        return examples, self._loader_options(batch_size, examples.collate)

    # Evaluation

    def evaluation(self, stage: str) -> LabelledImages:
        images = self.test_images if stage == "test" else self.prepared.rows("images", use=["validate"])
        labelled = self._labelled(images)
        self._say_unlabelled(stage, len(labelled), len(images))
        findings = [finding for finding in self.requirements.findings if finding in self.prepared.findings]
        if labelled.empty or not findings:
            there = f"; it labels {', '.join(self.prepared.findings)}" if self.prepared.findings else ""
            raise PreparedDataError(
                f"{self.folder} has no labelled {stage} images to evaluate a classifier of "
                f"{', '.join(self.requirements.findings)} on{there}"
            )
        long = labelled.melt("dicom_id", findings, var_name="finding", value_name="label")
        return LabelledImages(
            labelled[["dicom_id", "subject_id", "study_id", "height", "width"]], long, self.fitted_view
        )


@dataclass(frozen=True)
class Targets:
    """Images, patients (image,) and targets (image, finding): 1, 0, or NaN for an entry that is left out."""

    dicom_ids: Rows
    paths: Rows
    subject_ids: np.ndarray
    labels: Tensor

    def rows(self, chosen: np.ndarray) -> Targets:
        """The images at which (image,) is True."""
        if chosen.all():
            return self  # whose arrays the processes share
        dicom_ids, paths = (texts.take(np.flatnonzero(chosen)) for texts in (self.dicom_ids, self.paths))
        return Targets(dicom_ids, paths, self.subject_ids[chosen], self.labels[torch.from_numpy(chosen)])


@dataclass(eq=False)
class FeatureExamples(Dataset):
    """Labelled features in memory; serves whole batches, which are slices of one tensor."""

    features: Tensor
    targets: Targets

    def __len__(self) -> int:
        return len(self.features)

    def __getitems__(self, keys: Sequence[tuple[int, int] | int]) -> Mapping[str, Any]:
        indices = [key[1] if isinstance(key, tuple) else key for key in keys]
        return {
            "features": self.features[indices],
            "labels": self.targets.labels[indices],
            "dicom_id": [self.targets.dicom_ids[index] for index in indices],
        }


def draw_patients(subject_ids: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """A share of the patients, at least one; with the same seed a smaller share lies within a larger one."""
    patients = np.unique(subject_ids)
    order = np.random.default_rng(seed).permutation(patients)
    return np.sort(order[: max(1, round(fraction * len(patients)))])
