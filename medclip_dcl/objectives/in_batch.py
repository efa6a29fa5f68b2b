"""The contrastive objective of a batch: sentences against the images of all processes, and images against sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding

from medclip_dcl.common.distributed import gather_with_grad, global_mean, local_offset
from medclip_dcl.common.errors import UserError, check_choice
from medclip_dcl.networks.similarity import Similarity
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.class_probability import ClassProbability, ConstantClassProbability
from medclip_dcl.objectives.contrastive import contrastive_loss, contrastive_statistics
from medclip_dcl.objectives.near_texts import NearTexts
from medclip_dcl.objectives.negative_weights import NegativeWeights

CorrectionImages = Literal["own", "class", "sentence"]
"""Positives of the correction: the anchor's image, or training images with its class, or with its sentence."""

SameText = Literal["negative", "positive", "ignore"]
"""Policies for a candidate that is known to fit: it shares the study or a sentence of the batch with the anchor."""

# Draws of images as anchors are not those of sentences: no batch has so many images.
_IMAGE_KEY = 2**31


class _Processes(NamedTuple):
    """Communication of a batch."""

    gather: Callable[[Tensor], Tensor]
    offset: Callable[[int, torch.device], int]
    """Index of the first own row."""
    mean: Callable[[Tensor], Tensor]


_ALL_PROCESSES = _Processes(gather_with_grad, local_offset, global_mean)
_THIS_PROCESS = _Processes(lambda rows: rows, lambda count, device: 0, torch.mean)


class _Batch(NamedTuple):
    """A batch with images numbered across processes; "own" rows are those of this process."""

    own_views: list[Tensor]
    """Regions (own_view, region, dim) and, where the encoder has them, global vectors (own_view, dim)."""
    sentences: Float[Tensor, "own_distinct dim"]
    row_of_sentence: Int[Tensor, "own_sentence"]
    """Row of `sentences` of each sentence."""
    views: list[Tensor]
    """Likewise of all views."""
    image_of_sentence: Int[Tensor, "own_sentence"]
    image_of_view: Int[Tensor, "view"]
    is_first_view: Bool[Tensor, "view"]
    study_of_image: Int[Tensor, "image"]
    sentence_id: Int[Tensor, "own_sentence"]
    of_images: Mapping[str, Tensor]
    """Candidates' fields, (image, ...)."""
    of_sentences: dict[str, Tensor]
    """Anchors' fields, (own_sentence, ...)."""
    numbers: Int[Tensor, "own_image"]
    """Numbers of the own images."""
    is_plain: bool
    """One view of each image: view n is image n."""

    def fields_of_images(self, numbers: Int[Tensor, "row"]) -> dict[str, Tensor]:
        return {name: field[numbers] for name, field in self.of_images.items()}


class _Direction(NamedTuple):
    """Anchors and candidates: sentences and all views, or images and all sentences."""

    logits: Float[Tensor, "anchor candidate"]
    is_of_sentences: bool
    image_of_anchor: Int[Tensor, "anchor"]
    image_of_candidate: Int[Tensor, "candidate"]
    of_anchors: Mapping[str, Tensor]
    """Fields of each anchor's image, and of the sentence itself."""
    of_candidates: Mapping[str, Tensor]
    class_probability: float | Float[Tensor, "anchor"]
    draws: Int[Tensor, "anchor 2"]
    """Keys of each anchor's random draws."""
    known: Bool[Tensor, "anchor candidate"] | None
    """Candidates that are known to fit; None where these are negatives."""
    may_be_negative: Bool[Tensor, "anchor candidate"] | None = None
    """None: every candidate."""
    positives: Int[Tensor, "anchor"] | None = None
    """Column of the positive where each anchor has one."""
    correction_logits: Float[Tensor, "anchor m"] | None = None
    """Of the correction's positives; None: of the positives."""


class InBatchObjective(nn.Module):
    """Loss of a batch in which each sentence's image is its positive; by default the debiased contrastive loss.

    Everything in SSD's table 1 is a choice of class probability and negative weights. A sentence's negatives are the
    images of all processes; under DistributedDataParallel gradients are those of one process with the whole batch.

    Args:
        class_probability: eta of each sentence; None for 0, which is InfoNCE.
        negative_weights: weight of each negative; None for 1.
        image_to_text: weight in [0, 1] of the loss with images as anchors and all sentences as candidates. An image's
            eta is the mean eta of its sentences, its negatives' weights are those of the pairs (choices, not from the
            paper, which has sentences as anchors alone).
        same_text: treatment of an image that is known to fit a sentence, because it is of the same study or has the
            same sentence in the batch: "negative" (the paper), "positive", or "ignore".
        loss: of each anchor; None for the debiased contrastive loss.
        near_texts: finds further images that are known to fit, by the similarity of texts; `same_text` must then be
            "positive" or "ignore".
        correction_images: positives v of the correction: "own", the anchor's image (the paper's M = 1); or, drawn by
            the datamodule from the training images of other studies, those with the sentence's "class" (from the
            phantom's truth: an oracle), or those whose report has the same "sentence". The batch then has
            `correction_count` further images of each of its images, and one sentence of each.
        correction_count: M, the number of drawn images.
    """

    def __init__(
        self,
        class_probability: ClassProbability | None = None,
        negative_weights: NegativeWeights | None = None,
        image_to_text: float = 0.0,
        same_text: SameText = "negative",
        loss: AnchorLoss | None = None,
        near_texts: NearTexts | None = None,
        correction_images: CorrectionImages = "own",
        correction_count: int = 1,
    ) -> None:
        super().__init__()
        check_choice("model.correction_images", correction_images, get_args(CorrectionImages))
        check_choice("model.same_text", same_text, get_args(SameText))
        if near_texts is not None and same_text == "negative":
            raise UserError(
                "model: near_texts finds images that fit, and same_text: negative makes negatives of them; set "
                "model.init_args.same_text: positive (or ignore)"
            )
        self.class_probability = class_probability or ConstantClassProbability(0.0)
        self.negative_weights = negative_weights
        self.image_to_text, self.same_text = image_to_text, same_text
        self.loss, self.near_texts = loss, near_texts
        self.correction_images, self.correction_count = correction_images, correction_count
        self._check_correction()
        if loss is not None:
            loss.check_options(self.class_probability, negative_weights, image_to_text)
        eta = self.class_probability
        is_zero = isinstance(eta, ConstantClassProbability) and not eta.eta
        if negative_weights is not None and not (negative_weights.uses_class_probability or is_zero):
            raise UserError(
                f"model.class_probability: expected null beside {type(negative_weights).__name__}, found "
                f"{type(eta).__name__}: false negatives would count twice; set model.init_args.class_probability: null"
            )
        if both := {*self.requires_of_sentences} & {*self.requires_of_images}:
            # An anchor's fields are those of its sentence and of its image by name.
            raise UserError(
                f"model: the objective asks for {both} of sentences and of images; rename one of them"
            )

    def _check_correction(self) -> None:
        """Refuse options with which drawn images would have no part in the loss, or no meaning."""
        if self.correction_count < 1 or (self.correction_images == "own" and self.correction_count > 1):
            raise UserError(
                "model.correction_count: expected at least 1, and 1 with correction_images: own, found "
                f"{self.correction_count}; set correction_images: class (or sentence)"
            )
        eta = self.class_probability
        for name, value, is_fitting in (
            ("image_to_text", "0.0", not self.image_to_text),
            ("same_text", "negative (or ignore)", self.same_text != "positive"),
            ("loss", "null", self.loss is None),
            ("class_probability", "not 0", not isinstance(eta, ConstantClassProbability) or eta.eta > 0),
        ):
            if self.correction_images != "own" and not is_fitting:
                raise UserError(
                    f"model.{name}: expected {value} with correction_images: {self.correction_images}, whose images "
                    f"are positives of the correction alone; set model.init_args.{name}, or correction_images: own"
                )

    @property
    def requires_of_sentences(self) -> tuple[str, ...]:
        """Names of the fields of sentences that the datamodule must serve."""
        of_pairs = [name for part in self._parts_of_pairs for name in part.anchor_requires]
        return tuple(dict.fromkeys((*self.class_probability.requires, *of_pairs)))

    @property
    def requires_of_images(self) -> tuple[str, ...]:
        """Names of the fields of images that the datamodule must serve."""
        return tuple(dict.fromkeys(name for part in self._parts_of_pairs for name in part.candidate_requires))

    @property
    def _parts_of_pairs(self) -> list[NegativeWeights | AnchorLoss | NearTexts]:
        """The parts that need fields of both sentences and images."""
        parts = (self.negative_weights, self.loss, self.near_texts)
        return [part for part in parts if part is not None]

    def check(self, of_images: Mapping[str, Tensor]) -> None:
        """Refuse fields of the training images, (image, ...), with which nothing would be trained."""
        for part in self._parts_of_pairs:
            part.check(of_images)

    def check_sentences(self, of_sentences: Mapping[str, Tensor]) -> None:
        """Refuse fields of the training reports' sentences, (sentence, ...), likewise."""
        if self.near_texts is not None:
            self.near_texts.check(of_sentences)
        if self.negative_weights is not None:
            self.negative_weights.check_sentences(of_sentences)

    def forward(
        self,
        similarity: Similarity,
        regions: Float[Tensor, "view region dim"],
        sentences: Float[Tensor, "distinct dim"],
        batch: Mapping[str, Any],
        across_processes: bool = True,
        step: int = 0,
        global_vector: Float[Tensor, "view dim"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss, and statistics to log: means over this process's sentences.

        Args:
            similarity: regions and sentences to logits.
            regions: of all views of this process's images.
            sentences: embeddings of the distinct sentences.
            batch: image_index (sentence,); row_of_sentence (sentence,), the row of `sentences` that each has, or none
                for one after the other; view_of (view,), which image each view is of: first views stand first;
                study_id (image,); sentence_id (sentence,); anchor and candidate, the required fields. With
                `correction_images` also has_others (image,), False where there is no other image and the own one is
                drawn; the drawn images follow the own ones in `regions` and `global_vector`: the first of each image,
                then the second.
            across_processes: False restricts the candidates to the images of this process.
            step: of training, for resampled weights.
            global_vector: of all views of this process's images, where the encoder has one.
        """
        processes = _ALL_PROCESSES if across_processes else _THIS_PROCESS
        # At least float32: half precision would round gathered gradients, weights and loss.
        with torch.autocast(device_type=regions.device.type, enabled=False):
            precise = torch.promote_types(regions.dtype, torch.float32)
            images = [x.to(precise) for x in (regions, global_vector) if x is not None]
            sentences, correction = sentences.to(precise), None
            if self.correction_images != "own":
                count = len(batch["study_id"])
                drawn, images = [x[count:] for x in images], [x[:count] for x in images]
                correction = self._correction_logits(similarity, drawn, sentences, batch)
            whole = _through_processes(images, sentences, batch, processes)
            eta = self.class_probability(
                **{name: whole.of_sentences[name] for name in self.class_probability.requires}
            )
            known = None if self.same_text == "negative" else self._known(whole, processes)
            regions, *vectors = whole.views
            logits = similarity(regions, whole.sentences, *vectors)[whole.row_of_sentence]
            of_sentences = self._from_sentences(logits, whole, eta, known, processes)
            of_sentences = of_sentences._replace(correction_logits=correction)
            loss, figures = self._loss_of(of_sentences, similarity.gamma2, processes, step)
            if self.image_to_text:
                of_images = self._from_images(logits, similarity, whole, eta, known, processes)
                other, _ = self._loss_of(of_images, similarity.gamma2, processes, step)
                loss = (1 - self.image_to_text) * loss + self.image_to_text * other
        figures["capped"] = torch.as_tensor(self.class_probability.share_capped)
        if correction is not None:
            figures["correction_own"] = 1 - batch["has_others"].float().mean()
        return loss, figures

    def _correction_logits(
        self, similarity: Similarity, drawn: Sequence[Tensor], sentences: Tensor, batch: Mapping[str, Any]
    ) -> Float[Tensor, "own_sentence m"]:
        """Logits of each sentence with the images that were drawn for its image."""
        of_each = [
            x.unflatten(0, (self.correction_count, -1)).transpose(0, 1)[batch["image_index"]] for x in drawn
        ]
        rows = batch.get("row_of_sentence", torch.arange(len(sentences), device=sentences.device))
        # Unlike indexing, an embedding's backward pass sums in a fixed order.
        return similarity.paired(of_each[0], embedding(rows, sentences), *of_each[1:])

    def _from_sentences(
        self, logits: Tensor, whole: _Batch, eta: float | Tensor, known: Tensor | None, processes: _Processes
    ) -> _Direction:
        """This process's sentences and the views of all processes' images."""
        may_be_negative = None
        if not whole.is_plain:
            # Further views of other images are not negatives: N is the same for any number of views (DCL, section 5.1,
            # fixes N and varies M). A further view may be another image of the study, which is not one either.
            study = whole.study_of_image[whole.image_of_sentence]
            is_same_study = study[:, None] == whole.study_of_image[whole.image_of_view]
            may_be_negative = whole.is_first_view & ~is_same_study
        if known is not None:
            first = processes.offset(len(whole.sentence_id), known.device)
            known = known[first : first + len(whole.sentence_id)][:, whole.image_of_view]
        return _Direction(
            logits,
            is_of_sentences=True,
            image_of_anchor=whole.image_of_sentence,
            image_of_candidate=whole.image_of_view,
            of_anchors=whole.fields_of_images(whole.image_of_sentence) | whole.of_sentences,
            of_candidates=whole.fields_of_images(whole.image_of_view),
            class_probability=eta,
            draws=torch.stack([whole.sentence_id, whole.image_of_sentence], dim=1),
            known=known,
            may_be_negative=may_be_negative,
            positives=whole.image_of_sentence if whole.is_plain else None,
        )

    def _from_images(
        self,
        logits: Tensor,
        similarity: Similarity,
        whole: _Batch,
        eta: float | Tensor,
        known: Tensor | None,
        processes: _Processes,
    ) -> _Direction:
        """First views of this process's images and the sentences of all processes."""
        count = len(whole.numbers)
        if whole.views[0] is whole.own_views[0]:
            logits = logits[:, :count].T
        else:
            rows = whole.row_of_sentence + processes.offset(len(whole.sentences), logits.device)
            regions, *vectors = (x[:count] for x in whole.own_views)
            all_logits = similarity(regions, processes.gather(whole.sentences), *vectors)
            logits = all_logits[processes.gather(rows)].T
        if logits.requires_grad:
            # In the layout of the logits: gamma^2's gradient is summed in one order, whatever the loss's operations.
            logits.register_hook(lambda gradient: gradient.T.contiguous().T)
        if isinstance(eta, Tensor):
            of_image = (whole.numbers[:, None] == whole.image_of_sentence).to(eta.dtype)
            eta = (of_image * eta).sum(1) / of_image.sum(1)
        of_all = {name: processes.gather(field) for name, field in whole.of_sentences.items()}
        image_of_all = processes.gather(whole.image_of_sentence)
        may_be_negative = None
        if not whole.is_plain:  # as for sentences
            study = whole.study_of_image
            may_be_negative = study[whole.numbers][:, None] != study[image_of_all]
        return _Direction(
            logits,
            is_of_sentences=False,
            image_of_anchor=whole.numbers,
            image_of_candidate=image_of_all,
            of_anchors=whole.fields_of_images(whole.numbers),
            of_candidates=whole.fields_of_images(image_of_all) | of_all,
            class_probability=eta,
            draws=torch.stack([whole.numbers, torch.full_like(whole.numbers, _IMAGE_KEY)], dim=1),
            known=None if known is None else known[:, whole.numbers].T,
            may_be_negative=may_be_negative,
        )

    def _loss_of(
        self, pairs: _Direction, gamma2: Tensor, processes: _Processes, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the anchors of all processes; figures of sentences as anchors."""
        is_positive = pairs.image_of_anchor[:, None] == pairs.image_of_candidate
        is_negative = ~is_positive
        if pairs.may_be_negative is not None:
            is_negative &= pairs.may_be_negative
        if pairs.known is not None:
            is_negative &= ~pairs.known
            if self.same_text == "positive":
                is_positive |= pairs.known
        weights = pair_weights = None
        if (rule := self.negative_weights) is not None:
            rule.step = step
            if pairs.is_of_sentences:
                pair_weights = weights = rule.pair_weights(
                    pairs.of_anchors, pairs.of_candidates, pairs.logits
                )
            else:
                weights = rule.pair_weights(pairs.of_candidates, pairs.of_anchors, pairs.logits.T).T
            weights = rule.finished(weights, is_negative, pairs.draws)
        elif pairs.may_be_negative is not None or self.same_text == "ignore":
            weights = is_negative.to(pairs.logits.dtype)
        if self.loss is not None:
            anchors = Anchors(
                pairs.logits,
                is_positive,
                is_negative,
                weights=is_negative.to(pairs.logits.dtype) if weights is None else weights,
                class_probability=pairs.class_probability,
                gamma2=gamma2,
                is_of_sentences=pairs.is_of_sentences,
                of_anchors=pairs.of_anchors,
                of_candidates=pairs.of_candidates,
            )
            mean = processes.mean(self.loss(anchors))
        else:
            has_one = pairs.positives is not None and self.same_text != "positive"
            arguments: dict[str, Any] = {
                "positives": pairs.positives if has_one else is_positive,
                "class_probability": pairs.class_probability,
                "floor": -gamma2,
                "weights": weights,
                "correction_logits": pairs.correction_logits,
            }
            mean = processes.mean(contrastive_loss(pairs.logits, reduction="none", **arguments))
        if not pairs.is_of_sentences:
            return mean, {}
        with torch.no_grad():
            weight = pairs.logits.new_ones(())
            if weights is not None:
                weight = weights.masked_fill(~is_negative, 0.0).sum() / is_negative.sum().clamp(min=1)
            figures = {"weight": weight}
            if rule is not None and pair_weights is not None:
                figures |= rule.figures(pair_weights, is_negative, pairs.of_anchors)
            if self.loss is None:
                statistics = contrastive_statistics(pairs.logits, **arguments)
                return mean, {**statistics._asdict(), **figures}
            eta = torch.as_tensor(pairs.class_probability, dtype=pairs.logits.dtype).mean()
            return mean, {"class_probability": eta, **figures, **self.loss.figures(anchors)}

    def _known(self, whole: _Batch, processes: _Processes) -> Bool[Tensor, "sentence image"]:
        """Images that the sentences of all processes are known to fit: of the own study, or with the same sentence."""
        image_of_all = processes.gather(whole.image_of_sentence)
        sentence_id = processes.gather(whole.sentence_id)
        numbers = torch.arange(len(whole.study_of_image), device=sentence_id.device)
        # Sentences with the same text of each image, counted: `unique` would read how many texts there are.
        is_same_text = (sentence_id[:, None] == sentence_id).float()
        says = is_same_text @ (image_of_all[:, None] == numbers).float() > 0
        known = says | (whole.study_of_image[image_of_all][:, None] == whole.study_of_image)
        if self.near_texts is not None:
            fields = {
                name: processes.gather(whole.of_sentences[name]) for name in self.near_texts.anchor_requires
            }
            known |= self.near_texts(image_of_all, len(whole.study_of_image), fields, whole.of_images)
        return known


def _through_processes(
    own_views: list[Tensor], sentences: Tensor, batch: Mapping[str, Any], processes: _Processes
) -> _Batch:
    """The batch with images numbered across processes and the fields of candidates gathered."""
    own_images, device = len(batch["study_id"]), sentences.device
    first_image = processes.offset(own_images, device)
    is_first_view = torch.arange(len(own_views[0]), device=device) < own_images
    views = processes.gather(torch.stack([batch["view_of"] + first_image, is_first_view.long()], dim=1))
    each = torch.arange(len(batch["sentence_id"]), device=device)
    return _Batch(
        own_views=own_views,
        sentences=sentences,
        row_of_sentence=batch.get("row_of_sentence", each),
        views=[processes.gather(x) for x in own_views],
        image_of_sentence=batch["image_index"] + first_image,
        image_of_view=views[:, 0],
        is_first_view=views[:, 1] == 1,
        study_of_image=processes.gather(batch["study_id"]),
        sentence_id=batch["sentence_id"],
        of_images={name: processes.gather(field) for name, field in batch["candidate"].items()},
        of_sentences=batch["anchor"],
        numbers=first_image + torch.arange(own_images, device=device),
        is_plain=len(own_views[0]) == own_images,
    )
