"""Classifier: findings from images, by a linear probe of a frozen encoder or by fine-tuning all of it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from medclip_dcl.common.distributed import gather_objects, gather_with_grad, global_mean, is_distributed
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.link import LabelledData, LabelledRequirements
from medclip_dcl.models.optimisation import adamw_warmup_cosine, parameter_groups
from medclip_dcl.models.trained_model import Batch, ImageModel, part_of_model
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_encoder import RegionEncoder

_OPTIONS = (
    *("frozen", "learning_rate", "encoder_learning_rate", "layer_decay"),
    *("frozen_steps", "warmup_steps", "weight_decay", "balanced"),
)
"""Arguments that a checkpoint keeps."""
_SCALED_BY = 1000
"""Training images by which fine-tuning scales the features at its start."""


class Classifier(ImageModel):
    """Multi-label classification of findings on an image encoder.

    Two kinds of training. Linear probe (`frozen: true`): the encoder stays as it is, in evaluation mode; its features
    are computed once, of whole images, and the linear layer is trained upon them from memory. Fine-tuning (`frozen:
    false`): the encoder is trained as well, at a rate of its own. In both, the linear layer sees features standardised
    by their mean and deviation among training images before the first step (in fine-tuning, among 1,000 of them): a
    contrastive objective leaves their scale free.

    The loss is the binary cross entropy, averaged over all labelled (image, finding) entries of the batch and of all
    processes; entries that the data leaves out (see `LabelledDataModule`) count for nothing.

    Args:
        findings: any that the data set labels; null for CheX5's five.
        image_encoder: images to regions; null to build the one that `init_from` describes.
        init_from: image-text model or classifier whose encoder to start from: run folder, checkpoint, exported folder
            or Hugging Face repository. Null for the weights that `image_encoder` has by itself.
        frozen: true for a linear probe.
        learning_rate: of the linear layer, with AdamW, after the warm-up.
        encoder_learning_rate: of the encoder's last stage; null for `learning_rate`. Null in a linear probe.
        layer_decay: each stage below learns at this factor times the rate of the one above it, in (0, 1]; 1: all alike.
        frozen_steps: optimiser steps at the beginning in which the linear layer is trained alone. The encoder then
            starts with a linear warm-up of its own. Its BatchNorm uses and keeps its statistics as long.
        warmup_steps: optimiser steps of linear warm-up; cosine decay to 0 follows.
        weight_decay: on weight matrices and kernels only.
        balanced: true weighs a finding's positive cases by negatives / positives among the training labels, so that
            both classes have the same weight in the loss; probabilities are then too high for rare findings.
    """

    network: FindingNetwork
    kind = FindingNetwork.kind
    parts = ("image_encoder", "findings")
    positive_weight: Tensor
    _data: LabelledData | None = None

    def __init__(
        self,
        findings: list[str] | None = None,
        image_encoder: RegionEncoder | None = None,
        init_from: str | None = None,
        frozen: bool = False,
        learning_rate: float = 1e-3,
        encoder_learning_rate: float | None = None,
        layer_decay: float = 1.0,
        frozen_steps: int = 0,
        warmup_steps: int = 0,
        weight_decay: float = 0.01,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        rates = {"learning_rate": learning_rate, "encoder_learning_rate": encoder_learning_rate}
        steps = {"warmup_steps": warmup_steps, "frozen_steps": frozen_steps}
        check_range("model", "(0, inf)", **rates)
        check_range("model", "[0, inf)", weight_decay=weight_decay, **steps)
        check_range("model", "(0, 1]", layer_decay=layer_decay)
        if frozen and (encoder_learning_rate is not None or layer_decay != 1 or frozen_steps):
            raise UserError(
                "model.frozen: expected encoder_learning_rate null, layer_decay 1.0 and frozen_steps 0 with it, since "
                f"it trains no encoder; found {encoder_learning_rate}, {layer_decay} and {frozen_steps}"
            )
        image_encoder = image_encoder or part_of_model("image_encoder", RegionEncoder, init_from)
        self.network = FindingNetwork(image_encoder, list(CHEX5) if findings is None else findings)
        if init_from is not None:
            self.start_from(self.network, init_from, ["image_encoder"])
        self.frozen, self.frozen_steps = frozen, frozen_steps
        self.learning_rate, self.encoder_learning_rate = learning_rate, encoder_learning_rate
        self.layer_decay, self.warmup_steps, self.weight_decay = layer_decay, warmup_steps, weight_decay
        self.balanced = balanced
        # What has no part in the logits, or is frozen, gets no gradient.
        image_encoder.requires_grad_(False)
        for parameter in [] if frozen else [p for layer in image_encoder.feature_layers() for p in layer]:
            parameter.requires_grad_(True)
        self.train()
        self.register_buffer("positive_weight", torch.ones(len(self.findings)))

    @property
    def findings(self) -> tuple[str, ...]:
        return self.network.findings

    @property
    def encoder_is_frozen(self) -> bool:
        """At this step of the training."""
        return self.frozen or self.global_step < self.frozen_steps

    def frozen_parts(self) -> list[nn.Module]:
        return [self.network.image_encoder] if self.encoder_is_frozen else []

    def use_data(self, data: LabelledData, stage: str) -> None:
        self._data = data
        self.use_images(data.images, stage)

    def requirements(self) -> LabelledRequirements:
        return LabelledRequirements(self.findings, self.features_of, self.frozen)

    def on_fit_start(self) -> None:
        """Take class weights and the scale of the features from the training images."""
        super().on_fit_start()
        if self._data is None:
            raise UserError("a classifier learns from a datamodule with labels, such as LabelledDataModule")
        if self.balanced:
            self.positive_weight.copy_(self._data.positive_weight())
        # A resumed run keeps its scale: its encoder has changed since the start.
        if not self.network.is_standardised:
            features = self._data.features(None if self.frozen else _SCALED_BY)
            self.network.standardise(features.to(self.device))

    @torch.no_grad()
    def features_of(self, images: DataLoader) -> dict[str, Tensor]:
        """Features of a loader's images by dicom_id, on the CPU: of all processes, each of which does a share."""
        parts, dicom_ids = [], []
        was_training = self.network.image_encoder.training
        self.network.image_encoder.eval()
        with self.trainer.precision_plugin.forward_context():
            for batch in images:
                parts.append(self.network.features(*self.network.inputs_of(batch)).float())
                dicom_ids += batch["dicom_id"]
        self.network.image_encoder.train(was_training)
        of_all = gather_with_grad(torch.cat(parts)).cpu()
        return dict(zip([x for ids in gather_objects(dicom_ids) for x in ids], of_all, strict=True))

    def forward(self, images: Tensor, image_scale: Tensor | None = None) -> Tensor:
        """Logits (image, finding)."""
        return self.network(images, image_scale)

    def on_train_batch_start(self, batch: dict[str, Any], batch_index: int) -> None:
        if self.network.image_encoder.training == self.encoder_is_frozen:
            self.network.image_encoder.train(not self.encoder_is_frozen)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        batch = Batch(batch)
        loss = self._loss(batch)
        self.log_training(loss, len(batch["labels"]))
        return loss

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        """Mean over the labelled entries of all processes, as averaging gradients over them needs it."""
        loss = global_mean(finding_losses(self._logits(batch), batch["labels"], self.positive_weight))
        if is_distributed() and self.encoder_is_frozen:
            # Processes wait for the gradient of every parameter that may ever have one.
            trained = (p for p in self.network.image_encoder.parameters() if p.requires_grad)
            loss = loss + 0 * sum(p.sum() for p in trained)
        return loss

    def _logits(self, batch: dict[str, Any]) -> Tensor:
        if "features" in batch:
            return self.network.classify(batch["features"])
        with torch.no_grad() if self.encoder_is_frozen else nullcontext():
            features = self.network.features(*self.network.inputs_of(batch))
        return self.network.classify(features)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.encoder_is_frozen:  # AdamW would answer gradients of zero with weight decay
            self.network.image_encoder.zero_grad(set_to_none=True)

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        batch = Batch(batch)
        logits = self._logits(batch)
        losses = finding_losses(logits, batch["labels"], self.positive_weight)
        self.add_validation_loss(losses.sum(), len(losses))
        return {"logits": logits, "dicom_id": batch["dicom_id"]}

    def test_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        batch = Batch(batch)
        return {"logits": self(*self.network.inputs_of(batch)), "dicom_id": batch["dicom_id"]}

    predict_step = test_step

    def configure_optimizers(self) -> Any:
        """AdamW; linear warm-up, then cosine decay to 0, by optimiser step; the encoder's from `frozen_steps` on."""
        total = self.trainer.estimated_stepping_batches
        layers = [] if self.frozen else self.network.image_encoder.feature_layers()
        rate = self.learning_rate if self.encoder_learning_rate is None else self.encoder_learning_rate
        groups: list[dict[str, Any]] = []
        for below_the_last, layer in enumerate(reversed(layers)):
            name = None if below_the_last else "image_encoder"
            of_layer = parameter_groups(
                layer, self.weight_decay, rate * self.layer_decay**below_the_last, name
            )
            groups += [{**group, "first_step": self.frozen_steps} for group in of_layer]
        # Last, as the rate that is logged without a name.
        groups += parameter_groups(self.network.head.parameters(), self.weight_decay)
        return adamw_warmup_cosine(groups, self.learning_rate, self.warmup_steps, total)

    def description(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().description(), "classifier": options}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, map_location: Any = "cpu") -> Classifier:  # type: ignore[override]
        saved = read_model(checkpoint_path, map_location)
        checkpoint = saved.require_checkpoint()
        network = FindingNetwork.from_config(checkpoint["network"])
        model = cls(list(network.findings), network.image_encoder, **checkpoint["classifier"])
        model.restored(network, saved)
        return model


def finding_losses(
    logits: Float[Tensor, "image finding"],
    labels: Float[Tensor, "image finding"],
    positive_weight: Float[Tensor, " finding"],
) -> Float[Tensor, " labelled"]:
    """Binary cross entropy of each labelled entry, row by row; NaN labels are left out."""
    is_labelled = ~labels.isnan()
    return binary_cross_entropy_with_logits(
        logits.to(labels.dtype)[is_labelled],
        labels[is_labelled],
        pos_weight=positive_weight.to(labels.dtype).expand_as(labels)[is_labelled],
        reduction="none",
    )
