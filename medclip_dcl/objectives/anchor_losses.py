"""Interface of losses other than the debiased contrastive one: anchors with their candidates in, a loss of each out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.objectives.class_probability import ClassProbability, ConstantClassProbability
from medclip_dcl.objectives.negative_weights import NegativeWeights


class Anchors(NamedTuple):
    """This process's anchors, the candidates of all processes, and everything that a loss may use of them."""

    logits: Float[Tensor, "anchor candidate"]
    """gamma^2 times similarity, at least in float32."""
    is_positive: Bool[Tensor, "anchor candidate"]
    is_negative: Bool[Tensor, "anchor candidate"]
    """A candidate may be neither positive nor negative."""
    weights: Float[Tensor, "anchor candidate"]
    """Of the negatives, at least 0; 0 elsewhere."""
    class_probability: float | Float[Tensor, "anchor"]
    """eta"""
    gamma2: Float[Tensor, ""]
    """The largest possible logit; -gamma2 is the least."""
    keys: Int[Tensor, "anchor"] | None
    """Identity of an anchor in all batches: sentence_id, or the row of a training image (None: the batch lacks it)."""
    is_of_sentences: bool
    """Sentences are the anchors and images the candidates; False: the other way round."""
    of_anchors: Mapping[str, Tensor]
    """(anchor, ...) the required fields: those of a sentence and of its own image, or those of an image."""
    of_candidates: Mapping[str, Tensor]
    """(candidate, ...) likewise."""


class AnchorLoss(nn.Module):
    """Base class: the loss of each anchor of a batch.

    A subclass implements `forward`. Its parameters are trained with the network. Under DistributedDataParallel each
    process has its own anchors; the objective averages the losses of all. Losses read no value of an accelerator on
    the host.

    Attributes:
        anchor_requires: names of the fields of sentences that it needs, as of a `ClassProbability`.
        candidate_requires: names of the fields of images that it needs, as of `NegativeWeights`.
        uses_class_probability: False refuses every class probability but a constant 0.
        uses_negative_weights: False refuses weights of negatives.
        uses_image_to_text: False refuses images as anchors.
        uses_gamma: False refuses a similarity that learns gamma^2.
    """

    anchor_requires: tuple[str, ...] = ()
    candidate_requires: tuple[str, ...] = ()
    uses_class_probability = True
    uses_negative_weights = True
    uses_image_to_text = True
    uses_gamma = True

    def config(self) -> dict[str, Any]:
        """Constructor arguments, for checkpoints."""
        raise NotImplementedError(f"{type(self).__name__} must define config(), its constructor arguments")

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        """Loss of each anchor."""
        raise NotImplementedError

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Statistics to log of sentences as anchors, scalars; called after `forward`, without gradient."""
        return {}

    def prepare(self, sentences: int, images: int) -> None:
        """Get ready for training, before a checkpoint is restored: keys of sentences and of images lie below these."""

    def check(self, fields: Mapping[str, Tensor]) -> None:
        """Check the required fields of the training images, (image, ...), before training."""

    def check_options(
        self,
        class_probability: ClassProbability,
        negative_weights: NegativeWeights | None,
        image_to_text: float,
    ) -> None:
        """Refuse options of the objective that this loss would ignore."""
        is_zero = isinstance(class_probability, ConstantClassProbability) and not class_probability.eta
        refused = {
            "class_probability: null": not (self.uses_class_probability or is_zero),
            "negative_weights: null": not (self.uses_negative_weights or negative_weights is None),
            "image_to_text: 0.0": not self.uses_image_to_text and image_to_text > 0,
        }
        for setting in (setting for setting, is_refused in refused.items() if is_refused):
            name = setting.partition(":")[0]
            raise UserError(
                f"model: {type(self).__name__} does not use {name}; set model.init_args.{setting}"
            )
