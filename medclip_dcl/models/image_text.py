"""ImageTextModel: trains the image-text network with a debiased contrastive objective."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.compiler import set_stance

from medclip_dcl.common.distributed import global_mean
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.parts import build_part, part_config
from medclip_dcl.common.weight_files import read_model, with_adapters_merged
from medclip_dcl.data.link import ImageSettings, ImageTextData, ImageTextRequirements
from medclip_dcl.models.classifier import finding_losses
from medclip_dcl.models.gradient_cache import in_parts
from medclip_dcl.models.optimisation import Schedule, adamw_warmup_cosine, parameter_groups
from medclip_dcl.models.trained_model import Batch, ImageModel, part_of_model
from medclip_dcl.networks.adapters import LoRA, add_adapters, check_adaptable, has_adapters, merge_adapters
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import Similarity
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.objectives import AnchorLoss, ClassProbability, NearTexts, NegativeWeights
from medclip_dcl.objectives.in_batch import InBatchObjective

_OPTIONS = (
    *("masked_language_weight", "learning_rate", "weight_decay", "warmup_steps"),
    *("text_learning_rate", "beta2", "frozen", "schedule", "label_weight"),
)
"""Arguments that a checkpoint keeps beside the objective's."""
# Parts of the objective that may be null.
_OPTIONAL_PARTS: dict[str, Any] = {
    "negative_weights": NegativeWeights,
    "loss": AnchorLoss,
    "near_texts": NearTexts,
}


class ImageTextModel(ImageModel):
    """Text-to-image contrastive training: sentences are anchors, the images of all processes are candidates.

    Args:
        image_encoder: images to regions (SSD: ResNet-18); null for that which `init_from` describes.
        text_encoder: sentences to embeddings (SSD: CXR-BERT); null for that which `init_from` describes.
        similarity: logits; null for LSE+NL or, where `image_encoder` and `text_encoder` are null, that of `init_from`.
        class_probability: eta of each anchor; null for 0, which is InfoNCE.
        negative_weights: rule that removes, reweights or resamples negatives; null for none.
        learning_rate: of AdamW after the warm-up (SSD: 1e-5).
        weight_decay: on tensors of two dimensions and more, not on biases, norms and gamma (0.01: choice).
        warmup_steps: optimiser steps of linear warm-up (SSD: 2,000).
        schedule: after the warm-up; "cosine" decays the rate to 0 at the last step, "constant" keeps it, so that the
            weights at a step (`kept_steps`) are those of a training of that length.
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
        init_from: model to start from, of any objective, resolution and data: run folder, checkpoint, exported folder
            or Hugging Face repository; null for the weights that the encoders' own options say. The log lists what is
            not taken over. A run that continues from its own checkpoint does not need it any more.
        init_parts: of image_encoder, text_encoder and similarity, those that `init_from` gives; image_encoder.backbone
            and text_encoder.transformer are the encoders without their projections; null for all it has.
        loss: of each anchor; null for the debiased contrastive loss.
        correction_images: positives of the debiased loss's correction: "own", the anchor's image (SSD), so that eta
            weighs and stops an anchor without changing its direction; or images of other training studies, drawn with
            replacement as a function of (seed, epoch, index): with the sentence's "class", from the phantom's truth (an
            oracle), or with the same "sentence" in their report; crops of the own image where no other exists.
        correction_count: number of drawn images, M: a step encodes 1 + M times the images of a batch.
        label_weight: weight of the binary cross entropy of the label columns, which is added: each view's vector, its
            global one or the mean of its projected regions, gives the labels of its study by a linear layer, the label
            head. It learns the columns that have both values among the training studies.
        near_texts: counts images whose text is similar enough as of the sentence's own text, for `same_text`, which
            must then be "positive" or "ignore"; null for equal sentences alone.
        frozen: true: the encoders before their projections stay as they are, in evaluation mode (BatchNorm statistics,
            no dropout), and get no gradient; projections, similarity and what the objective learns are trained.
        compile: true: the steps of training run the encoders before their projections, and the head of the
            masked-language loss, by torch.compile, which the first steps wait for. Losses are equal up to
            rounding, in a run that is resumed too, but dropout draws other numbers. Evaluation is not compiled,
            checkpoints are the same.
        lora: trains adapters of this rank and alpha in both encoders, which stay as they are otherwise, with
            projections, similarity and what the objective learns; null for none. After training they are merged:
            `test`, `load` and `export` see an ordinary network.
    """

    network: ImageTextNetwork
    kind = ImageTextNetwork.kind
    tests_untrained = True
    parts = tuple(ImageTextNetwork.parts)

    def __init__(
        self,
        image_encoder: RegionEncoder | None = None,
        text_encoder: SentenceEncoder | None = None,
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
        loss: AnchorLoss | None = None,
        near_texts: NearTexts | None = None,
        frozen: bool = False,
        compile: bool = False,
        lora: LoRA | None = None,
        schedule: Schedule = "cosine",
        correction_images: Literal["own", "class", "sentence"] = "own",
        correction_count: int = 1,
        label_weight: float = 0.0,
    ) -> None:
        super().__init__()
        weights = {"masked_language_weight": masked_language_weight, "label_weight": label_weight}
        check_range("model", "(0, inf)", learning_rate=learning_rate, text_learning_rate=text_learning_rate)
        check_range("model", "[0, inf)", weight_decay=weight_decay, warmup_steps=warmup_steps, **weights)
        if frozen and (text_learning_rate is not None or masked_language_weight or compile):
            raise UserError(
                "model.frozen: expected text_learning_rate null, masked_language_weight 0 and compile false with it, "
                f"since it trains no encoder; found {text_learning_rate}, {masked_language_weight} and {compile}"
            )
        if lora is not None and (frozen or masked_language_weight or compile):
            raise UserError(
                "model.lora: expected frozen and compile false and masked_language_weight 0 with it, found "
                f"{frozen}, {compile} and {masked_language_weight}"
            )
        check_range("model", "[0, 1]", image_to_text=image_to_text)
        check_range("model", "[0, 1)", beta2=beta2)  # AdamW would say it after the run folder is made
        if image_encoder is None and text_encoder is None and similarity is None:
            similarity = part_of_model("similarity", Similarity, init_from)
        image_encoder = image_encoder or part_of_model("image_encoder", RegionEncoder, init_from)
        text_encoder = text_encoder or part_of_model("text_encoder", SentenceEncoder, init_from)
        for encoder in () if lora is None else (image_encoder, text_encoder):
            check_adaptable(encoder)
        self.network = ImageTextNetwork(image_encoder, text_encoder, similarity)
        self.objective = InBatchObjective(
            *(class_probability, negative_weights, image_to_text, same_text, loss, near_texts),
            *(correction_images, correction_count),
        )
        if masked_language_weight and not text_encoder.has_masked_language_head:
            raise UserError(
                "model: masked_language_weight needs a text encoder with a masked-language-modelling head, a BERT's; "
                "set model.init_args.text_encoder.init_args.masked_language_head: true"
            )
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.text_learning_rate, self.beta2 = text_learning_rate, beta2
        self.schedule: Schedule = schedule
        self.masked_language_weight, self.label_weight = masked_language_weight, label_weight
        self.frozen, self.is_compiled, self.lora = frozen, compile, lora
        for part in self.frozen_parts():
            part.requires_grad_(False).eval()
        head = getattr(text_encoder, "masked_language_head", None)
        if not masked_language_weight and head is not None:
            head.requires_grad_(False)  # processes would wait for its gradient
        # Fails now, not at the first checkpoint, for a rule that cannot describe itself.
        self._objective_config()
        if init_parts is not None and init_from is None:
            raise UserError("model: init_parts says what to take from init_from, which is null")
        self._encoded_by: Mapping[str, str] | None = None
        if init_from is not None:
            self.start_from(self.network, init_from, init_parts)

    @property
    def class_probability(self) -> ClassProbability:
        return self.objective.class_probability

    def requirements(self) -> ImageTextRequirements:
        encoder, is_masked = self.network.text_encoder, self.masked_language_weight > 0
        rule = self.objective.negative_weights
        return ImageTextRequirements(
            encoder.tokenize,
            self.objective.requires_of_sentences,
            self.objective.requires_of_images,
            self.objective.check,
            encoder.tokenizer.get_vocab() if is_masked else None,
            self.objective.check_sentences,
            self.frozen,
            encoder.tokenizer_identity(),
            encoder.are_truncated,
            None if rule is None else self._prepare,
            () if rule is None else rule.prepare_requires,
            self.objective.correction_images,
            self.objective.correction_count,
            self.label_weight > 0,
        )

    def _prepare(self, anchors: Tensor, fields: Mapping[str, Tensor]) -> None:
        assert self.objective.negative_weights is not None
        if line := self.objective.negative_weights.prepare(anchors, fields):
            rank_zero_info(line)

    def frozen_parts(self) -> list[nn.Module]:
        return self._encoders() if self.frozen else []

    def _encoders(self) -> list[nn.Module]:
        """The encoders before their projections."""
        return [self.network.image_encoder.trunk, self.network.text_encoder.transformer]

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.lora is not None and not has_adapters(self):
            for encoder in self._encoders():
                add_adapters(encoder, self.lora)
            trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
            total = sum(p.numel() for p in self.parameters())
            rank_zero_info(f"LoRA of rank {self.lora.rank}: {trained:,} of {total:,} parameters are trained")
        super().setup(stage)

    def _beside_the_loss(self) -> str:
        """Options of the objective that its file does not set, where they are not SSD's."""
        objective = self.objective
        found = {
            "same_text": objective.same_text.replace("negative", ""),
            "near_texts": objective.near_texts and type(objective.near_texts).__name__,
            "correction_images": objective.correction_images.replace("own", ""),
            **{"image_to_text": objective.image_to_text, "label_weight": self.label_weight},
            "masked_language_weight": self.masked_language_weight,
        }
        return ", ".join(f"{name} {value}" for name, value in found.items() if value)

    def use_data(self, data: ImageTextData, stage: str) -> None:
        self.use_images(data.images, stage)
        if data.label_findings:
            self.network.set_label_head(data.label_findings)
        if stage == "fit" and data.batch_size is not None:
            _require_two(data.batch_size)

    def use_images(self, images: ImageSettings, stage: str) -> None:
        """Take over the geometry of the images, whose sides must be multiples of the stride."""
        sides = {"image_size": images.image_size, "evaluation_crop": images.evaluation_size}
        stride = self.network.stride
        for name in (name for name, side in sides.items() if side % stride):
            raise UserError(
                f"data.{name} {sides[name]} must be a multiple of the image encoder's stride, {stride} pixels: regions "
                "at the border would reach beyond the image and heat maps would be shifted"
            )
        super().use_images(images, stage)
        self._encoded_by = images.encoded_by

    def on_train_start(self) -> None:
        if others := self._beside_the_loss():
            rank_zero_info(f"objective: besides its loss, eta and weights of negatives: {others}")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._check_weights()
        if self.is_compiled:
            set_stance("default")  # an earlier fit may have ended within its validation
            # In place keeps the names of the weights. `fullgraph`: an error beyond torch's limit of recompilations.
            image, *text = self._compiled_parts()
            image.compile(fullgraph=True)
            for part in text:
                part.compile(fullgraph=True, dynamic=True)  # batches of sentences have any size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_trained = self._trainer is not None and self._trainer.state.fn in ("fit", "validate")
        if not is_trained:  # else its data give the label head
            self.network.set_label_head(checkpoint.get("network", {}).get("label_head"))
        super().on_load_checkpoint(checkpoint)
        lora = checkpoint.get("lora")
        if lora is not None and not has_adapters(self):
            checkpoint["state_dict"] = with_adapters_merged(checkpoint["state_dict"], lora["alpha"])

    def on_fit_end(self) -> None:
        if self.lora is not None:
            for encoder in self._encoders():
                merge_adapters(encoder, self.lora)
        for part in self._compiled_parts() if self.is_compiled else []:
            part._compiled_call_impl = None  # what `compile` sets and nothing public takes back

    def _compiled_parts(self) -> list[nn.Module]:
        transformer = self.network.text_encoder.transformer
        text = list(transformer) if isinstance(transformer, nn.ModuleList) else [transformer]
        return [self.network.image_encoder.trunk, *text]

    def _check_weights(self) -> None:
        """Refuse features of other encoders, once for each `setup`, after a checkpoint is loaded."""
        expected, self._encoded_by = self._encoded_by, None
        if expected is None:
            return
        found = self.network.encoders_fingerprint()
        if others := [part for part, fingerprint in found.items() if expected[part] != fingerprint]:
            raise UserError(
                f"data.features are of another {' and '.join(others)} than this model's (its weights before the "
                "projection, tokenizer or pooling differ): start from the model that was encoded "
                "(model.init_args.init_from), encode this one (medclip-dcl encode), or set data.features: null"
            )

    on_test_start = on_predict_start = _check_weights

    def on_validation_start(self) -> None:
        self._check_weights()
        if self.is_compiled:
            set_stance("force_eager")

    def on_validation_end(self) -> None:
        if self.is_compiled:
            set_stance("default")

    def forward(
        self, images: Tensor, tokens: Tensor, lengths: Tensor, image_scale: Tensor | None = None
    ) -> Tensor:
        """Logits (sentence, image)."""
        return self.network(images, tokens, lengths, image_scale)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        batch = Batch(batch)
        if batch_index == 0:  # of a datamodule that is not linked
            _require_two(len(batch["study_id"]) * self.trainer.world_size)
        loss, _, metrics = self._losses(batch, step=self.global_step)
        metrics["gamma2"] = self.network.similarity.gamma2.detach()
        self.log_training(loss, len(batch["sentence_id"]), metrics)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Loss with the images of this batch and process as candidates, and the features for the callbacks."""
        batch = Batch(batch)
        loss, encoded, _ = self._losses(batch, across_processes=False)
        count = len(batch["sentence_id"])
        if len(batch["study_id"]) > 1:
            self.add_validation_loss(loss * count, count)
        else:
            warnings.warn(
                "validate/loss leaves out a block of one image, which has no negatives (the validate images left over "
                "by data.batch_size)",
                stacklevel=1,
            )
        return {"loss": loss, **_outputs(encoded, len(batch["dicom_id"])), "dicom_id": batch["dicom_id"]}

    def test_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        batch = Batch(batch)
        return {**_outputs(self._encoded(batch), len(batch["dicom_id"])), "dicom_id": batch["dicom_id"]}

    predict_step = test_step

    def _losses(
        self, batch: dict[str, Any], across_processes: bool = True, step: int = 0
    ) -> tuple[Tensor, Encoded, dict[str, Tensor]]:
        """Loss of this process's sentences, its images in the common space, and metrics of the sentences."""
        encoded, sentences = self._encoded(batch), self._sentences(batch)
        regions = self.network.regions(encoded.feature_map)
        loss, metrics = self.objective(
            *(self.network.similarity, regions, sentences, batch, across_processes, step),
            global_vector=encoded.global_vector,
        )
        if "masked_tokens" in batch:
            losses = self._masked_language_losses(batch)
            of_language = global_mean(losses) if across_processes else losses.mean()
            metrics["masked_language_loss"] = of_language.detach()
            loss = loss + self.masked_language_weight * of_language
        if self.label_weight:
            of_labels = self._label_loss(encoded, batch, across_processes)
            metrics["label_loss"] = of_labels.detach()
            loss = loss + self.label_weight * of_labels
        return loss, encoded, metrics

    def _label_loss(self, encoded: Encoded, batch: dict[str, Any], across_processes: bool) -> Tensor:
        """Mean over the labelled entries; images of the correction, behind the views, have no part in it."""
        labels = batch["labels"][batch["view_of"]]
        logits = self.network.label_logits(encoded)[: len(labels)]
        losses = finding_losses(logits, labels, labels.new_ones(labels.shape[1]))
        return global_mean(losses) if across_processes else losses.sum() / max(1, len(losses))

    def _encoded(self, batch: dict[str, Any]) -> Encoded:
        if "features" in batch:
            return self.network.project(batch["features"].to(self.network.mean))
        inputs = self.network.inputs_of(batch)
        at_once = batch.get("encode_at_once", len(inputs[0]))
        parts = list(zip(*(each.split(at_once) for each in inputs), strict=True))
        return in_parts(self.network.encode, parts, len(parts) == 1)

    def _sentences(self, batch: dict[str, Any]) -> Tensor:
        """Embeddings of the distinct sentences, or of their states; without `by_length` of all sentences."""
        if "states" in batch:
            return self.network.text_encoder.project(batch["states"].to(self.network.mean))
        tokens, lengths = batch["tokens"], batch["lengths"]
        pieces = batch.get("by_length", [(slice(None), tokens.shape[1])])
        parts = [(tokens[places, :longest], lengths[places]) for places, longest in pieces]
        return in_parts(self.network.encode_sentences, parts, "encode_at_once" not in batch)

    def _masked_language_losses(self, batch: dict[str, Any]) -> Tensor:
        tokens, lengths, labels = batch["masked_tokens"], batch["lengths"], batch["masked_labels"]
        parts = [
            (tokens[places, :longest], lengths[places], labels[places, :longest], masked)
            for places, longest, masked in batch["masked_by_length"]
        ]
        keeps_activations = "encode_at_once" not in batch
        return in_parts(self.network.text_encoder.masked_language_loss, parts, keeps_activations)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, and gamma pulled back to its cap before any callback averages or saves the weights."""
        super().optimizer_step(*args, **kwargs)
        self.network.similarity.clamp_gamma_()

    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches
        # Lists: the optimiser's state in a checkpoint goes by the order of parameters.
        transformer = list(self.network.text_encoder.transformer.parameters())
        own, rate = {id(p) for p in transformer}, self.text_learning_rate
        # An objective may learn, too: a class probability with parameters.
        every = [*self.network.parameters(), *self.objective.parameters()]
        # A run may go on with another number of processes: its optimiser keeps them.
        for parameter in self.unused:
            parameter.requires_grad_(True)
        groups = [
            *parameter_groups(transformer, self.weight_decay, rate, None if rate is None else "text"),
            *parameter_groups([p for p in every if id(p) not in own], self.weight_decay),
        ]
        for parameter in self.unused:
            parameter.requires_grad_(False)
        return adamw_warmup_cosine(
            groups, self.learning_rate, self.warmup_steps, total, self.beta2, self.schedule
        )

    def description(self) -> dict[str, Any]:
        lora = {} if self.lora is None else {"lora": asdict(self.lora)}
        return {**super().description(), "objective": self._objective_config(), **lora}

    def _objective_config(self) -> dict[str, Any]:
        parts = {name: getattr(self.objective, name) for name in _OPTIONAL_PARTS}
        return {
            "class_probability": part_config(self.class_probability),
            **{name: None if part is None else part_config(part) for name, part in parts.items()},
            "same_text": self.objective.same_text,
            "image_to_text": self.objective.image_to_text,
            "correction_images": self.objective.correction_images,
            "correction_count": self.objective.correction_count,
            **{name: getattr(self, name) for name in _OPTIONS},
        }

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, map_location: Any = "cpu") -> ImageTextModel:  # type: ignore[override]
        saved = read_model(checkpoint_path, map_location)
        checkpoint = saved.require_checkpoint()
        network = ImageTextNetwork.from_config(checkpoint["network"])
        objective = dict(checkpoint["objective"])
        class_probability = build_part(objective.pop("class_probability"), ClassProbability)
        parts: dict[str, Any] = {
            name: None if (config := objective.pop(name)) is None else build_part(config, base)
            for name, base in _OPTIONAL_PARTS.items()
        }
        model = cls(
            network.image_encoder,
            network.text_encoder,
            network.similarity,
            class_probability,
            **parts,
            **objective,
            lora=None if (lora := checkpoint.get("lora")) is None else LoRA(**lora),
        )
        model.restored(network, saved)
        return model


def _require_two(images: int) -> None:
    if images < 2:
        raise UserError(
            f"data.batch_size: expected at least 2 images of all processes in a batch, found {images}, which has no "
            "negatives; raise it"
        )


def _outputs(encoded: Encoded, count: int) -> dict[str, Tensor]:
    """Tensors of the first `count` images that evaluations measure, by name; images of the correction follow these."""
    return {name: value[:count].detach() for name, value in encoded._asdict().items() if value is not None}
