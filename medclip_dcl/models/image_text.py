"""ImageTextModel: trains the image-text network with a debiased contrastive objective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from medclip_dcl.distributed import gather_with_grad, global_mean, local_offset
from medclip_dcl.encoders.image import RegionEncoder
from medclip_dcl.encoders.text import SentenceEncoder
from medclip_dcl.models.optimisation import adamw_warmup_cosine, parameter_groups
from medclip_dcl.network import ImageTextNetwork, build_part, load_exactly, part_config, read_checkpoint
from medclip_dcl.objectives import (
    ClassProbability,
    ConstantClassProbability,
    contrastive_loss,
    contrastive_statistics,
)
from medclip_dcl.similarity import Similarity


class _Processes(NamedTuple):
    """Over which processes a batch reaches: how rows are gathered, where they start, how losses are averaged."""

    gather: Callable[[Tensor], Tensor]
    offset: Callable[[int, torch.device], int]
    mean: Callable[[Tensor], Tensor]


_ALL_PROCESSES = _Processes(gather_with_grad, local_offset, global_mean)
_THIS_PROCESS = _Processes(lambda rows: rows, lambda count, device: 0, torch.mean)


class ImageTextModel(LightningModule):
    """Text-to-image contrastive training: sentences are anchors, the images of all processes are candidates.

    Args:
        image_encoder: images to regions (SSD: ResNet-18).
        text_encoder: sentences to embeddings (SSD: CXR-BERT).
        similarity: logits; null for LSE+NL.
        class_probability: eta of each anchor; null for 0, which is InfoNCE.
        learning_rate: of AdamW after the warm-up (SSD: 1e-5).
        weight_decay: on weight matrices only, not on biases, norms and gamma (0.01: choice, not from the paper).
        warmup_steps: optimiser steps of linear warm-up; cosine decay to 0 follows (SSD: 2,000).
        text_learning_rate: of the text encoder's transformer; null for `learning_rate`, as in SSD. At the high rates
            that small networks from scratch need, it collapses (all sentences alike): give it a lower one.
        beta2: of AdamW, in [0, 1) (0.999: AdamW's own).
        image_to_text: weight in [0, 1] of the loss that has images as anchors, all sentences as candidates and the
            image's own as positives; the loss of sentences has the rest. 0 is SSD, 0.5 the symmetric loss of BioViL.
            At 0 nothing compares two sentences for one image: the level of each sentence's logits is free, so that
            AUC may be high where ACC is the majority's. An image's eta is the mean eta of its sentences (choice,
            not from the paper).

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        image_encoder: RegionEncoder,
        text_encoder: SentenceEncoder,
        similarity: Similarity | None = None,
        class_probability: ClassProbability | None = None,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 2000,
        text_learning_rate: float | None = None,
        beta2: float = 0.999,
        image_to_text: float = 0.0,
    ) -> None:
        super().__init__()
        rates = [learning_rate] if text_learning_rate is None else [learning_rate, text_learning_rate]
        if min(rates) <= 0 or weight_decay < 0 or warmup_steps < 0:
            raise ValueError(
                "model: learning_rate and text_learning_rate must be above 0, weight_decay and warmup_steps at least "
                f"0; got {learning_rate}, {text_learning_rate}, {weight_decay}, {warmup_steps}"
            )
        self.network = ImageTextNetwork(image_encoder, text_encoder, similarity)
        self.class_probability = class_probability or ConstantClassProbability(0.0)
        if not 0 <= beta2 < 1:
            raise ValueError(f"model: beta2 must lie in [0, 1), got {beta2}")
        if not 0 <= image_to_text <= 1:
            raise ValueError(f"model: image_to_text must lie in [0, 1], got {image_to_text}")
        # A rule that cannot describe itself should not fail at the first checkpoint, hours later.
        part_config(self.class_probability)
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.text_learning_rate, self.beta2 = text_learning_rate, beta2
        self.image_to_text = image_to_text

    @property
    def anchor_fields(self) -> tuple[str, ...]:
        """Fields of sentences that the objective asks the datamodule for."""
        return self.class_probability.requires

    def setup(self, stage: str) -> None:
        """The network takes over the size at which the datamodule shows whole images."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            return
        size, stride = datamodule.image_size, self.network.stride
        if size % stride:
            raise ValueError(
                f"data.image_size {size} must be a multiple of the image encoder's stride, {stride} pixels: regions "
                "at the border would reach beyond the image and heat maps would be shifted"
            )
        self.network.image_size = size

    def forward(self, images: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits (sentence, image)."""
        return self.network(images, tokens, lengths)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        loss, _, statistics = self._losses(batch)
        values = {f"train/{name}": value for name, value in statistics.items()}
        values["train/gamma2"] = self.network.similarity.gamma2.detach()
        values["train/learning_rate"] = torch.tensor(self.trainer.optimizers[0].param_groups[-1]["lr"])
        self.log_dict(values, batch_size=len(batch["lengths"]))
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch["lengths"]))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Loss with the images of this batch and process as candidates, and the features for the callbacks."""
        loss, feature_map, _ = self._losses(batch, across_processes=False)
        self.log(
            "validate/loss",
            loss,
            on_epoch=True,
            prog_bar=True,
            sync_dist=True,
            batch_size=len(batch["lengths"]),
        )
        return {"loss": loss, "feature_map": feature_map.detach(), "dicom_id": batch["dicom_id"]}

    def test_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Features for the evaluation callbacks."""
        return {"feature_map": self.network.feature_map(batch["images"]), "dicom_id": batch["dicom_id"]}

    def predict_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Features for whatever writes predictions."""
        return self.test_step(batch, batch_index)

    def _losses(
        self, batch: dict[str, Any], across_processes: bool = True
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of this process's sentences, the feature map of its images, and figures to watch (of the sentences)."""
        feature_map = self.network.feature_map(batch["images"])
        regions = self.network.regions(feature_map)
        sentences = self.network.encode_sentences(batch["tokens"], batch["lengths"])
        processes = _ALL_PROCESSES if across_processes else _THIS_PROCESS
        candidates = processes.gather(regions)
        logits = self.network.similarity(candidates, sentences)
        positives = batch["image_index"] + processes.offset(len(regions), regions.device)
        eta = self.class_probability(**batch["anchor"])
        arguments = {"class_probability": eta, "floor": -self.network.similarity.gamma2}
        loss = processes.mean(contrastive_loss(logits, positives, reduction="none", **arguments))
        if self.image_to_text:
            by_image = logits.T
            if candidates is not regions:
                by_image = self.network.similarity(regions, processes.gather(sentences)).T
            first = processes.offset(len(sentences), regions.device)
            of_images = self._losses_of_images(by_image, batch["image_index"], eta, first)
            loss = (1 - self.image_to_text) * loss + self.image_to_text * processes.mean(of_images)
        statistics = contrastive_statistics(logits, positives, **arguments)
        return (
            loss,
            feature_map,
            {
                "at_floor": statistics.at_floor,
                "class_probability": statistics.class_probability,
                "false_negative_mass": statistics.false_negative_mass,
                "capped": torch.tensor(float(self.class_probability.share_capped)),
            },
        )

    def _losses_of_images(
        self, logits: Tensor, image_index: Tensor, eta: float | Tensor, first_sentence: int
    ) -> Tensor:
        """Loss of each image of this process as an anchor, (image,).

        Args:
            logits: (image, sentence), of this process's images with all candidate sentences.
            image_index: (local sentence,), the image of each of this process's sentences.
            eta: of each of this process's sentences, or of all.
            first_sentence: where this process's sentences start among the candidates.
        """
        is_own = image_index == torch.arange(len(logits), device=logits.device)[:, None]
        positives = torch.zeros_like(logits, dtype=torch.bool)
        positives[:, first_sentence : first_sentence + len(image_index)] = is_own
        if isinstance(eta, Tensor):
            eta = (is_own * eta).sum(1) / is_own.sum(1)
        floor = -self.network.similarity.gamma2
        return contrastive_loss(logits, positives, class_probability=eta, floor=floor, reduction="none")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.network.similarity.clamp_gamma_()

    def configure_optimizers(self) -> Any:
        """AdamW; linear warm-up, then cosine decay to 0, by optimiser step."""
        total = int(self.trainer.estimated_stepping_batches)
        # Lists: the optimiser's state in a checkpoint goes by the order of parameters.
        transformer = list(self.network.text_encoder.transformer.parameters())
        own = {id(p) for p in transformer}
        others = [p for p in self.network.parameters() if id(p) not in own]
        groups = [
            *parameter_groups(transformer, self.weight_decay, self.text_learning_rate),
            *parameter_groups(others, self.weight_decay),
        ]
        return adamw_warmup_cosine(groups, self.learning_rate, self.warmup_steps, total, self.beta2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The checkpoint describes its network (tokenizer included) and objective in plain values."""
        checkpoint["network"] = self.network.config()
        checkpoint["objective"] = {
            "class_probability": part_config(self.class_probability),
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "warmup_steps": self.warmup_steps,
            "text_learning_rate": self.text_learning_rate,
            "beta2": self.beta2,
            "image_to_text": self.image_to_text,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Weights go only into the network that they were trained in.

        Raises:
            ValueError: another encoder, tokenizer or similarity; names which.
        """
        there, here = checkpoint.get("network"), self.network.config()
        if there is None:
            raise ValueError(
                "the checkpoint is not of an image-text model: it has no description of its network"
            )
        parts = ("image_encoder", "text_encoder", "similarity", "mean", "std")
        if others := [part for part in parts if there[part] != here[part]]:
            raise ValueError(
                f"the checkpoint was trained with another {' and '.join(others)} (settings or tokenizer differ); "
                "restore what it was trained with, or choose another --run_folder to train anew"
            )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu"
    ) -> ImageTextModel:
        """The model of a checkpoint, wherever its encoders first came from, in evaluation mode.

        Raises:
            ValueError: not a checkpoint of an image-text model, or weights that do not fit.
        """
        checkpoint = read_checkpoint(Path(checkpoint_path), map_location)
        network = ImageTextNetwork.from_config(checkpoint["network"])
        objective = dict(checkpoint["objective"])
        class_probability = build_part(objective.pop("class_probability"), ClassProbability)
        model = cls(
            network.image_encoder,
            network.text_encoder,
            network.similarity,
            class_probability,
            **objective,
        )
        model.network = network
        load_exactly(model, checkpoint["state_dict"], str(checkpoint_path))
        return model.eval()
