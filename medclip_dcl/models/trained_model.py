"""Base classes of the models: what they log, when they are seeded, and checkpoints that describe themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import torch
from pytorch_lightning import Callback, LightningModule, callbacks
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from medclip_dcl.common.devices import widest_float
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.formats import CHECKPOINT, VERSION_KEY
from medclip_dcl.common.parts import Part, build_part, differing_arguments
from medclip_dcl.common.weight_files import CLASSIFIER, IMAGE_TEXT, SavedModel, load_exactly, read_model
from medclip_dcl.data.images import ImagesDataModule, image_settings
from medclip_dcl.data.link import ImageSettings, trainer_data
from medclip_dcl.models.optimisation import learning_rates
from medclip_dcl.models.seeded_batches import seeded_batches
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.described import DescribedNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.initial_weights import TakenOver, take_over
from medclip_dcl.networks.text_encoder import TransformersSentences

_OWNERS: dict[type[Callback], str] = {
    callbacks.StochasticWeightAveraging: "set ema_decay instead",
    callbacks.WeightAveraging: "set ema_decay instead",
    callbacks.BatchSizeFinder: "set data.init_args.batch_size",
    callbacks.LearningRateFinder: "set model.init_args.learning_rate",
    callbacks.BaseFinetuning: "set the model's frozen, frozen_steps or lora",
    callbacks.ModelPruning: "remove it",
}
"""Callbacks of which checkpoints hold other weights than the trained ones, or config.yaml other batches and rates."""


def refuse_owners(given: Iterable[Callback]) -> None:
    """Refuse callbacks of training whose weights, loaders or rates are not those that are saved."""
    for one in given:
        for kind, advice in _OWNERS.items():
            if isinstance(one, kind) and not getattr(one, "is_saved", False):
                raise UserError(
                    "trainer.callbacks: expected none with weights, batches or rates of its own, which are not saved, "
                    f"found {type(one).__name__}; {advice}"
                )


class Batch(dict[str, Any]):
    """A batch of any datamodule, which names the entry that it lacks; so do the groups of fields in it."""

    def __init__(self, batch: Any) -> None:
        if not isinstance(batch, Mapping):
            raise UserError(f"data: expected batches as dictionaries, found {type(batch).__name__}")
        super().__init__({name: Batch(x) if isinstance(x, dict) else x for name, x in batch.items()})

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(
            f"data: expected batches with an entry {name!r}, found {', '.join(map(str, self))}; let the datamodule "
            "give it"
        )


def _with_strides(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    """A gradient with its weight's strides, which DDP expects, where they differ in dimensions of size 1 alone."""
    each = zip(gradient.shape, gradient.stride(), strides, strict=True)
    is_same_layout = all(size == 1 or a == b for size, a, b in each)
    return gradient.as_strided(gradient.shape, strides) if is_same_layout else gradient


class TrainedModel(LightningModule):
    """A model whose training resumes exactly and whose checkpoints describe it in plain values."""

    tests_untrained = False
    """True: `fit` keeps the untrained weights, and `test` evaluates them beside the trained ones."""
    unused: Iterable[Tensor] = ()
    """Parameters of the text encoder without gradient, which are frozen where several processes train."""

    def configure_callbacks(self) -> list[Callback]:
        """Dropout is a function of (seed, epoch, batch, process)."""
        return seeded_batches(self)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            refuse_owners(self.trainer.callbacks)  # type: ignore[attr-defined]
            for encoder in self.modules() if self.trainer.world_size > 1 else ():
                if isinstance(encoder, TransformersSentences) and (unused := encoder.freeze_unused()):
                    self.unused = unused.values()
                    count, name = len(unused), next(iter(unused))
                    rank_zero_info(f"text encoder: {count} tensors without gradient are frozen: {name} ...")
            for parameter in self.parameters() if self.trainer.world_size > 1 else ():
                if parameter.requires_grad:
                    parameter.register_hook(partial(_with_strides, parameter.stride()))

    def description(self) -> dict[str, Any]:
        """Entries of a checkpoint from which `load_from_checkpoint` builds the model."""
        raise NotImplementedError

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[VERSION_KEY] = CHECKPOINT.version
        # Lightning's copies of constructor arguments may be Python objects, which cannot be loaded safely.
        for key in ("hyper_parameters", "hparams_name", "hparams_type"):
            checkpoint.pop(key, None)
            checkpoint.pop(f"datamodule_{key}", None)
        checkpoint.update(self.description())

    def log_training(self, loss: Tensor, count: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Log a batch's metrics, learning rates and loss, of which each process has its share of the sum."""
        metrics = {**(metrics or {}), **learning_rates(self.trainer.optimizers[0])}
        self.log_dict({f"train/{name}": value for name, value in metrics.items()}, batch_size=count)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=count)

    def on_validation_epoch_start(self) -> None:
        # Lightning's own mean rounds the number of examples when it reduces over processes.
        self._validation = torch.zeros(2, dtype=widest_float(self.device), device=self.device)

    def add_validation_loss(self, total: Tensor, count: int) -> None:
        self._validation += torch.stack(
            [total.to(self._validation.dtype), self._validation.new_tensor(count)]
        )

    def on_validation_epoch_end(self) -> None:
        total, count = self.trainer.strategy.reduce(self._validation, reduce_op="sum")
        self.log_validation_loss(total / count)

    def log_validation_loss(self, mean: Tensor) -> None:
        self.log("validate/loss", mean.float(), prog_bar=True)


class NetworkModel(TrainedModel):
    """A model around a network that describes itself."""

    network: DescribedNetwork
    kind: str
    """That of its network."""
    parts: tuple[str, ...]
    """Entries of the network's description that a checkpoint must share, by the names of the model's arguments."""
    instead_of_other_kinds = ""
    """Advice for a checkpoint of another kind of model."""

    def description(self) -> dict[str, Any]:
        return {"network": self.network.config()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load weights only into the network that they were trained in."""
        there, here = checkpoint.get("network", {}), self.network.config()
        if (found := there.get("kind", "none")) != self.kind:
            raise UserError(
                f"the checkpoint: expected kind {self.kind}, found {found}{self.instead_of_other_kinds}"
            )
        CHECKPOINT.check(checkpoint, "the checkpoint")
        parts = (*self.parts, "label_head")  # which a part of the models have
        if others := [part for part in parts if _is_other(there.get(part), here.get(part))]:
            raise UserError(
                f"the checkpoint was trained with another {' and '.join(others)} (settings, tokenizer or findings "
                "differ); restore what it was trained with, or choose another --run_folder to train anew"
            )


class ImageModel(NetworkModel):
    """A model of radiographs, whose network knows the geometry of the images that it was trained with."""

    network: ImageTextNetwork | FindingNetwork
    instead_of_other_kinds = "; to start from its weights, give it as model.init_args.init_from"

    def __init__(self) -> None:
        super().__init__()
        self.initial_weights: TakenOver | None = None

    def frozen_parts(self) -> list[nn.Module]:
        """Parts that stay as they are at this step of the training."""
        return []

    def train(self, mode: bool = True) -> ImageModel:
        """As of any module; frozen parts stay in evaluation mode: BatchNorm uses and keeps its statistics."""
        super().train(mode)
        for part in self.frozen_parts():
            part.eval()
        return self

    def on_fit_start(self) -> None:
        if problem := self.network.unit_problem(self.network.image_config()):
            raise UserError(f"image_encoder.{problem}")
        if self.frozen_parts():
            # Evaluation mode is meant.
            warnings.filterwarnings(
                "ignore", message="Found .* module.* in eval mode at the start of training"
            )

    def setup(self, stage: str) -> None:
        """Take the geometry of the images of a datamodule that gives the model nothing itself."""
        super().setup(stage)
        data = trainer_data(self.trainer)
        is_linked = isinstance(data, ImagesDataModule) and data.is_linked
        if not is_linked and (images := image_settings(data)):
            self.use_images(images, stage)

    def use_images(self, images: ImageSettings, stage: str) -> None:
        seen = "image_size" if images.evaluation_size == images.image_size else "evaluation_crop"
        sides = {f"data.{seen}": images.evaluation_size}
        if stage == "fit" and images.crop_size is not None:
            sides["data.crop_size"] = images.crop_size
        self.network.image_encoder.check_sides(sides)
        self.network.image_size, self.network.geometry = images.image_size, images.geometry
        self.network.prepared_size = images.prepared_size
        if stage == "fit":
            self.network.crop_size = images.crop_size

    def start_from(self, network: Any, source: str, parts: list[str] | None) -> None:
        self.initial_weights = take_over(network, source, parts)
        rank_zero_info(str(self.initial_weights))

    def description(self) -> dict[str, Any]:
        start = self.initial_weights
        taken_over = {} if start is None else {"initial_weights": asdict(start)}
        return {**super().description(), **taken_over}

    def restored(self, network: ImageTextNetwork | FindingNetwork, saved: SavedModel) -> None:
        self.network = network
        self.initial_weights = TakenOver.of_checkpoint(saved.checkpoint)
        load_exactly(self, saved.state, saved.path)
        self.eval()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # No options: they came with the weights that the training had started from.
        described = checkpoint["network"]
        self.network.set_normalisation(described["mean"], described["std"])
        self.initial_weights = TakenOver.of_checkpoint(checkpoint)


def _is_other(there: Any, here: Any) -> bool:
    """True if two entries of descriptions differ: parts, or names of findings."""
    return bool(differing_arguments(there, here)) if isinstance(there, dict) else there != here


def part_of_model(name: str, base: type[Part], init_from: str | None) -> Part:
    """A part of a network as `init_from` describes it, with weights of its own."""
    described, source = None, ""
    if init_from is not None:
        network = read_model(find_model(init_from).path).require_network(IMAGE_TEXT, CLASSIFIER)
        described, source = network.get(name), f" ({init_from} does not)"
    if described is None:
        raise UserError(
            f"model.{name}: give class_path and init_args, or init_from with a model that describes its own{source}"
        )
    return build_part(described, base)
