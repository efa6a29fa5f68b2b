"""The link of datamodule and model: the datamodule's `setup` takes the model's requirements and gives its own side.

Lightning sets up the datamodule before the model, and before it restores a checkpoint, in every command.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pytorch_lightning import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from medclip_dcl.common.distributed import gather_objects, is_distributed, rank_and_size
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.arrays import Arrays, kept_arrays
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

Requirements = TypeVar("Requirements")
T = TypeVar("T")


@runtime_checkable
class LinkedModel(Protocol):
    """A model for a `LinkedDataModule`: it returns its requirements and takes what the datamodule provides."""

    def requirements(self) -> object: ...
    def use_data(self, data: Any, stage: str) -> None: ...


class LinkedDataModule(LightningDataModule, Generic[Requirements]):
    """Base class of datamodules that serve models with requirements of the type `accepts`.

    A subclass implements `load(stage)` instead of `setup`, and `provided`, the argument of the model's `use_data`.
    """

    accepts: type[Requirements]
    _requirements: Requirements | None = None

    def __init__(self) -> None:
        super().__init__()
        self.made_of: dict[str, str] = {}
        """Digest of each file that training has read, beside a prepared set's tables, by what it was read for."""

    def setup(self, stage: str) -> None:
        """Take the model's requirements, load the data, and give the model what they provide."""
        model = None if self.trainer is None else self.trainer.lightning_module
        required = model.requirements() if isinstance(model, LinkedModel) else None
        if not isinstance(model, LinkedModel) or not isinstance(required, self.accepts):
            return self.load(stage)
        self.connect(required)
        self.load(stage)
        model.use_data(self.provided(), stage)

    def connect(self, requirements: Requirements) -> None:
        """Serve these requirements; call it where there is no Trainer."""
        self._requirements = requirements

    def load(self, stage: str) -> None:
        raise NotImplementedError

    def provided(self) -> object:
        raise NotImplementedError

    @property
    def is_linked(self) -> bool:
        return self._requirements is not None

    @property
    def requirements(self) -> Requirements:
        if self._requirements is None:
            model = None if self.trainer is None else type(self.trainer.lightning_module).__name__
            raise UserError(
                f"{type(self).__name__} needs {self.accepts.__name__} of its model, found the model {model}; fit one "
                "with the methods `requirements` and `use_data`, or call connect(...) before setup()"
            )
        return self._requirements


class PreparedDataModule(LinkedDataModule[Requirements], Generic[Requirements]):
    """Base class of datamodules of a prepared set, whose first process on each machine computes for all of it."""

    folder: str

    @cached_property
    def prepared(self) -> PreparedSet:
        return PreparedSet(self.folder)

    def setup(self, stage: str) -> None:
        """As `LinkedDataModule.setup`, once all machines are found to have the same content of the set."""
        if is_distributed():
            self.prepared.take_content(self.of_machine(lambda: self.prepared.content))
            self._require_same("fingerprint", self.prepared.fingerprint)
        super().setup(stage)

    def _require_same(self, name: str, value: str) -> None:
        """Refuse a machine on which the set, or a file beside it, has another value than on the first."""
        here = (socket.gethostname(), str(Path(self.folder).absolute()), value)
        (first, _, expected), *others = gather_objects(here)
        for host, folder, found in others:
            if found != expected:
                raise PreparedDataError(
                    f"{folder} on {host}: expected the set of {first}, of {name} {expected}, found {found}; one of "
                    "them is a stale or changed copy: copy the set anew"
                )

    def of_machine(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process of this machine; an error there is raised in all processes.

        Where a process group stands, all processes call it.
        """
        if not is_distributed():
            return make()
        rank = rank_and_size()[0]
        own = os.environ.get("LOCAL_RANK", "0") if self.trainer is None else self.trainer.local_rank
        made: Any = None
        error: Exception | None = None
        if is_first := int(own) == 0:
            try:
                made = make()
            except Exception as raised:
                error = raised
        every = gather_objects((is_first, made, error))
        for _, _, error in every:
            if error is not None:
                raise error
        return next(made for is_first, made, _ in reversed(every[: rank + 1]) if is_first)

    def arrays(self, what: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> Arrays:
        """Arrays of the set for all processes of a machine; see `kept_arrays`."""
        run = [] if self.trainer is None else [Path(self.trainer.default_root_dir)]
        folders, fingerprint = [self.prepared.folder, *run], self.prepared.fingerprint
        return self.of_machine(partial(kept_arrays, folders, fingerprint, what, make))


@dataclass(frozen=True)
class ImageTextRequirements:
    """Tokenizer, fields, vocabulary for masked sentences, if any, and checks of the fields of training.

    All training images are checked, and a sample of the sentences of their reports.
    A frozen model takes features of its encoders in place of images and tokens.
    `tokenizer` identifies all that `tokenize` depends on, so that its tokens are kept with the set; "" keeps none.
    `prepare` takes the expected number of anchors of an epoch of each sentence in training, and its `prepared_fields`.
    `are_truncated` is True for each sentence of which `tokenize` drops the end.
    `correction_images` and `correction_count` are those of `InBatchObjective`.
    `labels`: the images' labels are asked for, too.
    """

    tokenize: Callable[[Sequence[str]], list[list[int]]]
    sentence_fields: tuple[str, ...] = ()
    image_fields: tuple[str, ...] = ()
    check_image_fields: Callable[[Mapping[str, Tensor]], None] | None = None
    masked_vocabulary: Mapping[str, int] | None = None
    check_sentence_fields: Callable[[Mapping[str, Tensor]], None] | None = None
    is_frozen: bool = False
    tokenizer: str = ""
    are_truncated: Callable[[Sequence[str]], list[bool]] | None = None
    prepare: Callable[[Tensor, Mapping[str, Tensor]], None] | None = None
    prepared_fields: tuple[str, ...] = ()
    correction_images: str = "own"
    correction_count: int = 1
    labels: bool = False


@dataclass(frozen=True)
class LabelledRequirements:
    """Findings of a classifier, and its features of a loader's images by dicom_id; a linear probe is frozen."""

    findings: tuple[str, ...]
    features_of: Callable[[DataLoader], Mapping[str, Tensor]]
    is_frozen: bool = False


@dataclass(frozen=True)
class ReportsRequirements:
    """Folder or repository of a language model's tokenizer; None to train a tokenizer."""

    pretrained: str | None = None


@dataclass(frozen=True)
class ImageSettings:
    """Radiographs provided to a model: sides in pixels of the whole image, in evaluation and of the crops.

    `encoded_by` identifies the encoders whose features stand in place of images and tokens; None for none.
    """

    image_size: int
    evaluation_size: int
    crop_size: int | None = None
    geometry: str = "stretch"
    prepared_size: int | None = None
    encoded_by: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ImageTextData:
    """Images provided to an image-text model, and the images of all processes in a batch of training.

    `batch_size`: None where nothing is trained, or it is not known.
    `label_findings`: columns of the batches' labels; empty without labels.
    """

    images: ImageSettings
    batch_size: int | None = None
    label_findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelledData:
    """Images provided to a classifier, class weights, and features of the first n (None: all) training images."""

    images: ImageSettings
    positive_weight: Callable[[], Tensor]
    features: Callable[[int | None], Tensor]

    def __deepcopy__(self, memo: object) -> LabelledData:
        return self  # a copy of the model, as weight averaging makes, must not copy the datamodule


@dataclass(frozen=True)
class TokenizedSentences:
    """Tokenizer provided to a language model, and the tokens of the longest sentence."""

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int


def trainer_data(trainer: Trainer) -> object:
    """The Trainer's datamodule, an attribute that Lightning does not declare; None where loaders were given."""
    return getattr(trainer, "datamodule", None)
