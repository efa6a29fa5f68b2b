"""Base class of the evaluation callbacks: measure each image, gather the values of all processes, summarise once.

Values are kept by dicom_id, so that an image that a padded loader served twice counts once.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from lightning_fabric.utilities.data import sized_len
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from medclip_dcl.common.distributed import gather_objects
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.images import EvaluatedImages
from medclip_dcl.data.link import trainer_data
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork

FeatureMaps: TypeAlias = Float[Tensor, "image dim region_row region_column"]
Values: TypeAlias = Mapping[str, Any]
"""Measured values of each image, by dicom_id."""

_embedded: WeakKeyDictionary[ImageTextNetwork, dict[str, Tensor]] = WeakKeyDictionary()


@dataclass
class EvaluationResult:
    """Result of one evaluation: a section of results.json.

    Attributes:
        metrics: for results.json; None where a number cannot be given.
        scalars: name -> value for the logger, without the stage.
        protocol: options on which the metrics depend.
        counts: number of cases, images and patients behind the metrics.
        notes: warnings for the reader, such as too few cases.
        predictions: a row for each case, from which `medclip_dcl.metrics.summaries` computes the metrics.
    """

    metrics: dict[str, Any]
    scalars: dict[str, float] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    predictions: pd.DataFrame = field(default_factory=pd.DataFrame)


Results: TypeAlias = dict[str, EvaluationResult]
"""Result of each section of results.json."""


class Evaluation(Callback):
    """Base class of everything whose results `ResultsWriter` writes.

    Attributes:
        section: name of the evaluation in results.json and of its file in predictions/; default: the class's name.
        results: section of results.json -> result of the last test; empty before it.
    """

    results: Mapping[str, EvaluationResult] = MappingProxyType({})

    @property
    def section(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, Evaluation) and other is not self and other.section == self.section:
                raise UserError(
                    f"trainer.callbacks: {type(self).__name__} and {type(other).__name__} both write section"
                    f" {self.section!r} of results.json; remove one, or give a subclass a `section` of its own"
                )

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """Names and figures of the last test; ``load_image(dicom_id)`` gives a prepared image, None without any."""
        yield from ()

    def log_results(
        self, pl_module: LightningModule, stage: str, results: Mapping[str, EvaluationResult]
    ) -> None:
        """Show the notes of the results and log their scalars, which every process has alike."""
        for result in results.values():
            for note in result.notes:
                rank_zero_warn(f"{stage}: {note}", category=UserWarning)
            for name, value in result.scalars.items():
                if stage == "test" and math.isnan(value):
                    continue
                # Every process has all values and computes the same; averaging them changes nothing.
                is_shown = name == "auc" and math.isfinite(value)
                pl_module.log(f"{stage}/{name}", value, batch_size=1, sync_dist=True, prog_bar=is_shown)


class EvaluationCallback(Evaluation, ABC):
    """Base class of the evaluations: a subclass measures images and summarises the values of all of them.

    Attributes:
        stages: "validate", "test", or both, the default.
        network_class: class of the network that it evaluates.
        measured: name of the model's output that it measures.
        measures_images: True if it compares whole images, and so gets `Encoded`.
        options: its arguments on which the results depend; results.json records them as `protocol`.
    """

    stages: ClassVar[tuple[str, ...]] = ("validate", "test")
    network_class: ClassVar[type[nn.Module]] = ImageTextNetwork
    measured: ClassVar[str] = "feature_map"
    measures_images: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()

    _tables: Any = None
    _expected: set[str]
    _values: dict[str, Any]

    @abstractmethod
    def prepare(self, tables: Any, stage: str) -> set[str]:
        """Check the cases before the first image; return the dicom_ids of the images that are needed.

        Args:
            tables: of the datamodule's `evaluation(stage)`.
            stage: "validate" or "test".
        """

    @abstractmethod
    def measure(self, network: Any, output: Any, dicom_ids: Sequence[str]) -> Values:
        """Values of each image that this evaluation needs, by dicom_id, on the CPU; output is in float32."""

    @abstractmethod
    def summarise(self, network: Any, values: Values, tables: Any) -> Results:
        """Result of each section of results.json, from the values of all images."""

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tables = None
        stage = _stage(trainer)
        if trainer.sanity_checking or stage not in self.stages:
            return
        network = self._network(pl_module)
        if isinstance(network, ImageTextNetwork):
            forget_texts(network)
        self._values = {}
        tables = evaluation_data(trainer).evaluation(stage)
        self._expected = self.prepare(tables, stage)
        self._tables = tables

    def _collect(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._tables is None:
            return
        dicom_ids, output = outputs["dicom_id"], outputs[self.measured].float()
        _require_numbers(output, dicom_ids)
        if self.measures_images:
            output = Encoded(output, outputs.get("global_vector")).each(Tensor.float)
        self._values.update(self.measure(self._network(pl_module), output, dicom_ids))

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._tables is None:
            return
        tables, self._tables = self._tables, None
        values = {key: value for part in gather_objects(self._values) for key, value in part.items()}
        self._values = {}
        network = self._network(pl_module)
        results = self.summarise(network, dict(sorted(values.items())), tables)
        protocol = {"view": str(tables.view), **{name: getattr(self, name) for name in self.options}}
        if isinstance(network, ImageTextNetwork):
            protocol["final_period"] = getattr(network.text_encoder, "final_period", False)
        n_missing = len(self._expected - values.keys())
        for section, result in results.items():
            result.protocol = {**protocol, **result.protocol}
            if n_missing:
                result.notes.append(
                    f"{section}: {n_missing} of {len(self._expected)} images were not evaluated: the run was limited"
                    " to some batches"
                )
        self.log_results(pl_module, _stage(trainer), results)
        if trainer.testing:
            self.results = results

    on_validation_epoch_start = on_test_epoch_start = _begin
    on_validation_batch_end = on_test_batch_end = _collect
    on_validation_epoch_end = on_test_epoch_end = _finish

    def _network(self, pl_module: LightningModule) -> nn.Module:
        network = getattr(pl_module, "network", None)
        if not isinstance(network, self.network_class):
            raise UserError(
                f"{type(self).__name__}: expected a model with an {self.network_class.__name__} as `network`,"
                f" found {type(pl_module).__name__} with {type(network).__name__}"
            )
        return network


def is_part(trainer: Trainer) -> bool:
    """True for a `test` or `predict` that leaves out batches."""
    loaders, counts = trainer.predict_dataloaders, trainer.num_predict_batches
    if trainer.testing:
        loaders, counts = trainer.test_dataloaders, trainer.num_test_batches
    each = CombinedLoader(loaders, "sequential").flattened
    return any(n < (sized_len(one) or math.inf) for n, one in zip(counts, each, strict=True))


def _stage(trainer: Trainer) -> str:
    return "test" if trainer.testing else "validate"


def forget_texts(network: ImageTextNetwork) -> None:
    """Empty the cache of `embed_texts`, for a network that may have been trained since."""
    _embedded.pop(network, None)


def embed_texts(network: ImageTextNetwork, texts: Sequence[str]) -> Float[Tensor, "sentence dim"]:
    """Sentence embeddings in float32; within one evaluation each distinct text is encoded once for all callbacks."""
    known = _embedded.setdefault(network, {})
    new = [text for text in dict.fromkeys(texts) if text not in known]
    if new:
        known.update(zip(new, embed_anew(network, new), strict=True))
    if not texts:
        return network.embed_texts([]).float()
    return torch.stack([known[text] for text in texts])


def embed_anew(
    network: ImageTextNetwork, texts: Sequence[str], states: Float[Tensor, "sentence hidden"] | None = None
) -> Float[Tensor, "sentence dim"]:
    """Sentence embeddings in float32, not from the cache; warns of texts that are cut, without quoting a patient's.

    `states` of the texts, of a frozen encoder, need the projection alone.
    """
    if states is not None:
        embeddings = network.text_encoder.project(states.to(network.mean)).float()
    else:
        if cut := network.text_encoder.truncated_share(texts):
            rank_zero_warn(f"evaluation: {cut}")
        embeddings = network.embed_texts(texts).float()
    n_nan = int(embeddings.isnan().any(dim=1).sum())
    if n_nan:
        raise UserError(f"{n_nan} of {len(texts)} sentence embeddings hold NaN: training has diverged")
    return embeddings


def subject_ids(tables: EvaluatedImages, dicom_ids: pd.Series) -> pd.Series:
    """The patient of each image."""
    return dicom_ids.map(tables.images.set_index("dicom_id")["subject_id"]).astype(np.int64)


@runtime_checkable
class EvaluationData(Protocol):
    """A datamodule for the evaluation callbacks, such as ImageTextDataModule."""

    prepared: PreparedSet

    def evaluation(self, stage: str) -> Any: ...
    def load_image(self, dicom_id: str) -> UInt8[np.ndarray, "height width"]: ...


@runtime_checkable
class OwnData(Protocol):
    """A datamodule without a prepared set, which describes its data for results.json."""

    def dataset(self) -> dict[str, Any]: ...


def evaluation_data(trainer: Trainer) -> EvaluationData:
    """The Trainer's datamodule, which must serve evaluations."""
    data = trainer_data(trainer)
    if not isinstance(data, EvaluationData):
        raise UserError(
            "evaluation: expected a datamodule with `evaluation`, `load_image` and `prepared`, such as "
            f"ImageTextDataModule, found {type(data).__name__}"
        )
    return data


def _require_numbers(output: Tensor, dicom_ids: Sequence[str]) -> None:
    is_nan = output.flatten(1).isnan().any(dim=1)
    if bool(is_nan.any()):
        first = dicom_ids[int(is_nan.nonzero()[0])]
        raise UserError(
            f"the features of {int(is_nan.sum())} of {len(dicom_ids)} images of a batch hold NaN (first: image"
            f" {first}): training has diverged, or the image is broken"
        )
