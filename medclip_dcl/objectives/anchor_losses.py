"""Interface of losses other than the debiased contrastive one: anchors with their candidates in, a loss of each out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.objectives.class_probability import ClassProbability, ConstantClassProbability
from medclip_dcl.objectives.negative_weights import NegativeWeights
from medclip_dcl.objectives.part import ObjectivePart


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
    is_of_sentences: bool
    """Sentences are the anchors and images the candidates; False: the other way round."""
    of_anchors: Mapping[str, Tensor]
    """(anchor, ...) the required fields: those of a sentence and of its own image, or those of an image."""
    of_candidates: Mapping[str, Tensor]
    """(candidate, ...) likewise."""


class AnchorLoss(ObjectivePart):
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
    """

    anchor_requires: tuple[str, ...] = ()
    candidate_requires: tuple[str, ...] = ()
    uses_class_probability = True
    uses_negative_weights = True
    uses_image_to_text = True

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        """Loss of each anchor."""
        raise NotImplementedError

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Statistics to log of sentences as anchors, scalars; called after `forward`, without gradient."""
        return {}

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
        for name, value, is_used in (
            ("class_probability", "null", self.uses_class_probability or is_zero),
            ("negative_weights", "null", self.uses_negative_weights or negative_weights is None),
            ("image_to_text", "0.0", self.uses_image_to_text or not image_to_text),
        ):
            if not is_used:
                raise UserError(
                    f"model.{name}: expected {value}, since {type(self).__name__} does not use it; set "
                    f"model.init_args.{name}: {value}"
                )
