"""ImageTextModel: trains the image-text network with a debiased contrastive objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from medclip_dcl.data.link import ImageTextRequirements, shown_images
from medclip_dcl.distributed import global_mean
from medclip_dcl.encoders.image import RegionEncoder
from medclip_dcl.encoders.text import SentenceEncoder
from medclip_dcl.errors import MissingFileError, UserError
from medclip_dcl.formats import CHECKPOINT, drop_hyper_parameters
from medclip_dcl.models.gradient_cache import in_chunks
from medclip_dcl.models.optimisation import adamw_warmup_cosine, learning_rates, parameter_groups
from medclip_dcl.models.seeded_batches import seeded_batches
from medclip_dcl.models.validation_loss import ValidationLoss
from medclip_dcl.networks.image_text import ImageTextNetwork, build_part, part_config
from medclip_dcl.networks.initial_weights import PARTS, TakenOver, take_over
from medclip_dcl.objectives import ClassProbability, NegativeWeights
from medclip_dcl.objectives.in_batch import InBatchObjective
from medclip_dcl.similarity import Similarity
from medclip_dcl.weight_files import load_exactly, read_model


class ImageTextModel(LightningModule):
    """Text-to-image contrastive training: sentences are anchors, the images of all processes are candidates.

    Args:
        image_encoder: images to regions (SSD: ResNet-18).
        text_encoder: sentences to embeddings (SSD: CXR-BERT).
        similarity: logits; null for LSE+NL.
        class_probability: eta of each anchor; null for 0, which is InfoNCE.
        negative_weights: rule that removes, reweights or resamples negatives; null for none.
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
        same_text: what another image of the batch counts as that is of the sentence's study, or has the same sentence
            in the batch: "negative" (SSD), "positive", or "ignore" (neither).
        masked_language_weight: weight of the masked-language-modelling loss of the batch's sentences, which is added
            (BioViL); above 0 the text encoder needs `masked_language_head: true`.
        init_from: weights to start from: a checkpoint of this program, a folder of `save_pretrained`, or a state dict
            of torchvision's ResNet, whichever objective, resolution and data they were trained with; null for what
            the encoders' own options say. What is not taken over is listed (see `initial_weights.take_over`). A run
            that continues from its own checkpoint does not need it any more.
        init_parts: of image_encoder, text_encoder and similarity, those that `init_from` gives; null for all it has.

    Raises:
        ValueError: an option out of its range, or weights that do not fit.
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
        negative_weights: NegativeWeights | None = None,
        same_text: Literal["negative", "positive", "ignore"] = "negative",
        masked_language_weight: float = 0.0,
        init_from: str | None = None,
        init_parts: list[str] | None = None,
    ) -> None:
        super().__init__()
        rates = [learning_rate] if text_learning_rate is None else [learning_rate, text_learning_rate]
        if min(rates) <= 0 or weight_decay < 0 or warmup_steps < 0:
            raise UserError(
                "model: learning_rate and text_learning_rate must be above 0, weight_decay and warmup_steps at least "
                f"0; got {learning_rate}, {text_learning_rate}, {weight_decay}, {warmup_steps}"
            )
        self.network = ImageTextNetwork(image_encoder, text_encoder, similarity)
        self.objective = InBatchObjective(class_probability, negative_weights, image_to_text, same_text)
        if not 0 <= beta2 < 1:
            raise UserError(f"model: beta2 must lie in [0, 1), got {beta2}")
        if masked_language_weight < 0:
            raise UserError(f"model: masked_language_weight must be at least 0, got {masked_language_weight}")
        if masked_language_weight and not text_encoder.has_masked_language_head:
            raise UserError(
                "model: masked_language_weight needs a text encoder with a masked-language-modelling head; set "
                "model.init_args.text_encoder.init_args.masked_language_head: true"
            )
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.text_learning_rate, self.beta2 = text_learning_rate, beta2
        self.masked_language_weight = masked_language_weight
        if not masked_language_weight and text_encoder.has_masked_language_head:
            # Without its loss the head has no gradient, for which processes would wait.
            text_encoder.freeze_masked_language_head()
        # Fails now, not at the first checkpoint, for a rule that cannot describe itself.
        self._objective_config()
        if init_parts is not None and init_from is None:
            raise UserError("model: init_parts says what to take from init_from, which is null")
        self.initial_weights: TakenOver | None = None
        self._missing_source: str | None = None
        if init_from is not None and Path(init_from).expanduser().exists():
            self.initial_weights = take_over(self.network, init_from, init_parts)
            rank_zero_info(str(self.initial_weights))
        elif init_from is not None:
            # An error only if no checkpoint is loaded, which is known when a Trainer starts.
            self._missing_source = init_from

    @property
    def class_probability(self) -> ClassProbability:
        """The rule that gives each sentence its eta."""
        return self.objective.class_probability

    def requirements(self) -> ImageTextRequirements:
        """Requirements of the datamodule: the tokenizer and the fields of the objective."""
        encoder, is_masked = self.network.text_encoder, self.masked_language_weight > 0
        return ImageTextRequirements(
            encoder.tokenize,
            self.objective.requires_of_sentences,
            self.objective.requires_of_images,
            self.objective.check,
            encoder.tokenizer.get_vocab() if is_masked else None,
        )

    def configure_callbacks(self) -> list[Callback]:
        """Dropout is a function of (seed, epoch, batch, process)."""
        return seeded_batches(self)

    def setup(self, stage: str) -> None:
        """Take over image size, training crop and geometry from the datamodule."""
        shown, stride = shown_images(self.trainer), self.network.stride
        if shown is None:
            return
        sides = {"image_size": shown.image_size, "evaluation_crop": shown.evaluation_size}
        for name in (name for name, side in sides.items() if side % stride):
            raise UserError(
                f"data.{name} {sides[name]} must be a multiple of the image encoder's stride, {stride} pixels: regions "
                "at the border would reach beyond the image and heat maps would be shifted"
            )
        self.network.image_size = shown.image_size
        if stage == "fit":
            self.network.crop_size = shown.crop_size
        self.network.geometry, self.network.prepared_size = shown.geometry, shown.prepared_size

    def on_fit_start(self) -> None:
        self._check_initial_weights()

    def on_validation_start(self) -> None:
        self._check_initial_weights()

    def on_test_start(self) -> None:
        self._check_initial_weights()

    def on_predict_start(self) -> None:
        self._check_initial_weights()

    def _check_initial_weights(self) -> None:
        if self._missing_source is not None:
            raise MissingFileError(f"model.init_args.init_from: no file and no folder {self._missing_source}")

    def forward(self, images: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits (sentence, image)."""
        return self.network(images, tokens, lengths)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        loss, _, figures = self._losses(batch, step=self.global_step)
        values = {f"train/{name}": value for name, value in figures.items()}
        values["train/gamma2"] = self.network.similarity.gamma2.detach()
        for name, rate in learning_rates(self.trainer.optimizers[0]).items():
            values[f"train/{name}"] = torch.tensor(rate)
        self.log_dict(values, batch_size=len(batch["lengths"]))
        # Each process has its share of the sum: their mean is the batch's loss.
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(batch["lengths"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self._validation = ValidationLoss(self)

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Loss with the images of this batch and process as candidates, and the features for the callbacks."""
        loss, feature_map, _ = self._losses(batch, across_processes=False)
        self._validation.add(loss * len(batch["lengths"]), len(batch["lengths"]))
        return {"loss": loss, "feature_map": feature_map.detach(), "dicom_id": batch["dicom_id"]}

    def on_validation_epoch_end(self) -> None:
        """Log the mean over all sentences."""
        self.log("validate/loss", self._validation.mean().float(), prog_bar=True)

    def test_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Features for the callbacks."""
        return {"feature_map": self.network.feature_map(batch["images"]), "dicom_id": batch["dicom_id"]}

    predict_step = test_step

    def _losses(
        self, batch: dict[str, Any], across_processes: bool = True, step: int = 0
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of this process's sentences, the feature map of its images, and figures to watch (of the sentences)."""
        parts = -(-len(batch["images"]) // batch["encode_at_once"]) if "encode_at_once" in batch else 1
        feature_map = in_chunks(self.network.feature_map, parts, batch["images"])
        sentences = in_chunks(self.network.encode_sentences, parts, batch["tokens"], batch["lengths"])
        regions = self.network.regions(feature_map)
        loss, figures = self.objective(
            self.network.similarity, regions, sentences, batch, across_processes, step
        )
        if "masked_tokens" in batch:
            masked = (batch["masked_tokens"], batch["lengths"], batch["masked_labels"])
            losses = in_chunks(self.network.text_encoder.masked_language_loss, parts, *masked)
            of_language = global_mean(losses) if across_processes else losses.mean()
            figures["masked_language_loss"] = of_language.detach()
            loss = loss + self.masked_language_weight * of_language
        return loss, feature_map, figures

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, and gamma pulled back to its cap before any callback averages or saves the weights."""
        super().optimizer_step(*args, **kwargs)
        self.network.similarity.clamp_gamma_()

    def configure_optimizers(self) -> Any:
        """AdamW; linear warm-up, then cosine decay to 0, by optimiser step."""
        total = int(self.trainer.estimated_stepping_batches)
        # Lists: the optimiser's state in a checkpoint goes by the order of parameters.
        transformer = list(self.network.text_encoder.transformer.parameters())
        own = {id(p) for p in transformer}
        # An objective may learn, too: a class probability with parameters.
        every = [*self.network.parameters(), *self.objective.parameters()]
        others = [p for p in every if id(p) not in own]
        groups = [
            *parameter_groups(
                transformer,
                self.weight_decay,
                self.text_learning_rate,
                name=None if self.text_learning_rate is None else "text",
            ),
            *parameter_groups(others, self.weight_decay),
        ]
        return adamw_warmup_cosine(groups, self.learning_rate, self.warmup_steps, total, self.beta2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The checkpoint describes its network (tokenizer included) and objective in plain values."""
        CHECKPOINT.stamp(checkpoint)
        drop_hyper_parameters(checkpoint)
        checkpoint["network"] = self.network.config()
        checkpoint["objective"] = self._objective_config()
        if self.initial_weights is not None:
            checkpoint["initial_weights"] = self.initial_weights.record()

    def _objective_config(self) -> dict[str, Any]:
        """Arguments of the model besides the network's parts, in plain values."""
        weights = self.objective.negative_weights
        return {
            "class_probability": part_config(self.class_probability),
            "negative_weights": None if weights is None else part_config(weights),
            "same_text": self.objective.same_text,
            "image_to_text": self.objective.image_to_text,
            "masked_language_weight": self.masked_language_weight,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "warmup_steps": self.warmup_steps,
            "text_learning_rate": self.text_learning_rate,
            "beta2": self.beta2,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Weights go only into the network that they were trained in.

        Raises:
            ValueError: another encoder, tokenizer or similarity; names which. Or a format of a newer program.
        """
        if "network" not in checkpoint:
            raise UserError(
                "the checkpoint is not of an image-text model: it has no description of its network"
            )
        CHECKPOINT.upgrade(checkpoint, "the checkpoint")
        there, here = checkpoint["network"], self.network.config()
        if others := [part for part in PARTS if not _is_same(there[part], here[part])]:
            raise UserError(
                f"the checkpoint was trained with another {' and '.join(others)} (settings or tokenizer differ); "
                "restore what it was trained with, or choose another --run_folder to train anew"
            )
        # No options: they came with the weights that the training had started from.
        for name in ("mean", "std"):
            getattr(self.network, name).copy_(torch.tensor(there[name]).view(3, 1, 1))
        self.initial_weights, self._missing_source = TakenOver.of_checkpoint(checkpoint), None

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu"
    ) -> ImageTextModel:
        """The model of a checkpoint, wherever its encoders first came from, in evaluation mode.

        Raises:
            ValueError: not a checkpoint of an image-text model, or weights that do not fit.
        """
        checkpoint = read_model(checkpoint_path, map_location).require_checkpoint()
        network = ImageTextNetwork.from_config(checkpoint["network"])
        objective = dict(checkpoint["objective"])
        class_probability = build_part(objective.pop("class_probability"), ClassProbability)
        rule = objective.pop("negative_weights")
        model = cls(
            network.image_encoder,
            network.text_encoder,
            network.similarity,
            class_probability,
            negative_weights=None if rule is None else build_part(rule, NegativeWeights),
            **objective,
        )
        model.network = network
        model.initial_weights = TakenOver.of_checkpoint(checkpoint)
        load_exactly(model, checkpoint["state_dict"], str(checkpoint_path))
        return model.eval()


def _is_same(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """True if both describe the same part; other versions of libraries may say more or fewer of the defaults."""
    if there == here:
        return True
    if there["class_path"] != here["class_path"]:
        return False
    with torch.device("meta"):
        built: Any = build_part(there, torch.nn.Module)
    return part_config(built) == here
