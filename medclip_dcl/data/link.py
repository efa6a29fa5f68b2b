"""The link between a model and its datamodule: each gets the values that it needs of the other, once, before training.

Lightning sets up the datamodule first: its `setup` takes the model's requirements by `connect_model`. Then the model's
`setup` takes its values by `shown_images`, `training_labels` or `tokenized_sentences`. No other module of `data` or
`models` looks for its counterpart in the Trainer. Without a Trainer, call `datamodule.connect(requirements)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from pytorch_lightning import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertTokenizer

from medclip_dcl.errors import UserError

# From the model to the data


@dataclass(frozen=True)
class ImageTextRequirements:
    """Requirements of an image-text model.

    Attributes:
        tokenize: token ids of each text, [CLS] and [SEP] included.
        sentence_fields: names of the fields of anchors that the objective takes.
        image_fields: names of the fields of candidates.
        check_image_fields: refuses the training images' fields before training.
        masked_vocabulary: token -> id, to mask sentences for masked language modelling; None for no masked sentences.
    """

    tokenize: Callable[[Sequence[str]], list[list[int]]]
    sentence_fields: tuple[str, ...] = ()
    image_fields: tuple[str, ...] = ()
    check_image_fields: Callable[[Mapping[str, Tensor]], None] | None = None
    masked_vocabulary: Mapping[str, int] | None = None


@dataclass(frozen=True)
class LabelledRequirements:
    """Requirements of a classifier.

    Attributes:
        findings: one for each column of the labels.
        features_of: features of a loader's images by dicom_id.
        is_frozen: True for a linear probe, whose batches are features instead of images.
    """

    findings: tuple[str, ...]
    features_of: Callable[[DataLoader], Mapping[str, Tensor]]
    is_frozen: bool = False


@dataclass(frozen=True)
class ReportsRequirements:
    """Requirements of a language model: the folder or repository of its tokenizer, None to train a tokenizer."""

    pretrained: str | None = None


Requirements = TypeVar("Requirements")


@runtime_checkable
class RequiringModel(Protocol):
    """A model that states its requirements of the data."""

    def requirements(self) -> object:
        """One of the dataclasses above."""
        ...


class ConnectedDataModule(LightningDataModule, Generic[Requirements]):
    """A datamodule that serves what its model requires; `accepts` is the type of the requirements."""

    accepts: type[Requirements]
    _requirements: Requirements | None = None

    def connect(self, requirements: Requirements) -> None:
        """Take the requirements of the model to serve."""
        self._requirements = requirements

    def connect_model(self) -> None:
        """Take the requirements of the Trainer's model, if there is one that states them; call it in `setup`."""
        model = None if self.trainer is None else self.trainer.lightning_module
        if isinstance(model, RequiringModel):
            requirements = model.requirements()
            if isinstance(requirements, self.accepts):
                self.connect(requirements)

    @property
    def requirements(self) -> Requirements:
        """Requirements of the connected model.

        Raises:
            UserError: no model is connected, or one for other data.
        """
        if self._requirements is None:
            model = None if self.trainer is None else type(self.trainer.lightning_module).__name__
            raise UserError(
                f"{type(self).__name__} needs {self.accepts.__name__} of its model, found the model {model}; fit a "
                "model with a method `requirements` that returns them, or call connect(...) before setup()"
            )
        return self._requirements


# From the data to the model


@dataclass(frozen=True)
class ImageSettings:
    """Size and geometry of the images that a datamodule serves.

    Attributes:
        image_size: side in pixels to which the whole image is scaled.
        evaluation_size: side of the part that evaluation sees.
        crop_size: side of the training crops; None where it is not known.
        geometry: see `medclip_dcl.pictures.geometry`.
        prepared_size: of the prepared images, if known.
    """

    image_size: int
    evaluation_size: int
    crop_size: int | None = None
    geometry: str = "stretch"
    prepared_size: int | None = None


@runtime_checkable
class ImageData(Protocol):
    """Data that describe their images."""

    def image_settings(self) -> ImageSettings:
        """Size and geometry."""
        ...


@runtime_checkable
class SizedData(Protocol):
    """A datamodule of the user's with images of one size."""

    image_size: int


@runtime_checkable
class TrainingLabels(Protocol):
    """Data from which a classifier starts: class weights and the features of the training images."""

    def positive_weight(self) -> Tensor:
        """Negatives over positives of each finding."""
        ...

    def features(self, use: str, most: int | None = None) -> Tensor:
        """Features of the first `most` images of a use."""
        ...


@runtime_checkable
class TokenizedSentences(Protocol):
    """Data that bring the tokenizer."""

    tokenizer: BertTokenizer
    max_tokens: int


def image_settings(data: object) -> ImageSettings | None:
    """Size and geometry of the images of a datamodule; None for one that does not say."""
    if isinstance(data, ImageData):
        return data.image_settings()
    return ImageSettings(data.image_size, data.image_size) if isinstance(data, SizedData) else None


def shown_images(trainer: Trainer) -> ImageSettings | None:
    """`image_settings` of the Trainer's datamodule; None without one."""
    return image_settings(_data_of(trainer))


def training_labels(trainer: Trainer) -> TrainingLabels:
    """The Trainer's datamodule, for a classifier.

    Raises:
        UserError: it has none, or one without labels.
    """
    data = _data_of(trainer)
    if not isinstance(data, TrainingLabels):
        raise UserError(
            f"a classifier needs a datamodule such as LabelledDataModule, found {type(data).__name__}"
        )
    return data


def tokenized_sentences(trainer: Trainer) -> TokenizedSentences:
    """The Trainer's datamodule, for a language model.

    Raises:
        UserError: it has none, or one without a tokenizer.
    """
    data = _data_of(trainer)
    if not isinstance(data, TokenizedSentences):
        raise UserError(
            f"a language model needs a datamodule such as ReportsDataModule, found {type(data).__name__}"
        )
    return data


def _data_of(trainer: Trainer) -> object:
    return getattr(trainer, "datamodule", None)
