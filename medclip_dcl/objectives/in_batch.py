"""The contrastive objective of a batch: sentences against the images of all processes, and images against sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from medclip_dcl.common.distributed import gather_with_grad, global_mean, local_offset
from medclip_dcl.common.errors import UserError, check_choice
from medclip_dcl.networks.similarity import Similarity
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.class_probability import ClassProbability, ConstantClassProbability
from medclip_dcl.objectives.contrastive import contrastive_loss, contrastive_statistics
from medclip_dcl.objectives.near_texts import NearTexts
from medclip_dcl.objectives.negative_weights import NegativeWeights

SAME_TEXT = ("negative", "positive", "ignore")
"""Policies for a candidate that is known to fit: it shares the study or a sentence of the batch with the anchor."""


class Pairing(NamedTuple):
    """Positives and negatives of each anchor among the candidates; a candidate may be neither."""

    is_positive: Bool[Tensor, "anchor candidate"]
    is_negative: Bool[Tensor, "anchor candidate"]


def known_to_fit(
    image_of_sentence: Int[Tensor, "sentence"],
    sentence_id: Int[Tensor, "sentence"],
    study_of_image: Int[Tensor, "image"],
) -> Bool[Tensor, "sentence image"]:
    """Images that a sentence of the batch is known to fit: of its own study, or with the same sentence in the batch.

    Args:
        image_of_sentence: number of each sentence's image.
        sentence_id: equal for equal texts.
        study_of_image: study of each image, by its number.
    """
    numbers = torch.arange(len(study_of_image), device=sentence_id.device)
    # Sentences with the same text of each image, counted: `unique` would read how many texts there are.
    is_same_text = (sentence_id[:, None] == sentence_id).float()
    says = is_same_text @ (image_of_sentence[:, None] == numbers).float() > 0
    return says | (study_of_image[image_of_sentence][:, None] == study_of_image)


def with_known(pairing: Pairing, is_known: Bool[Tensor, "anchor candidate"], same_text: str) -> Pairing:
    """Treat known fits as further positives (same_text "positive") or as neither ("ignore")."""
    is_positive = pairing.is_positive | is_known if same_text == "positive" else pairing.is_positive
    return Pairing(is_positive, pairing.is_negative & ~is_known)


# Draws of images as anchors are not those of sentences: no batch has so many images.
_IMAGE_KEY = 2**31


class _Processes(NamedTuple):
    """Communication of a batch: gathering of rows, index of the first own row, mean of losses."""

    gather: Callable[[Tensor], Tensor]
    offset: Callable[[int, torch.device], int]
    mean: Callable[[Tensor], Tensor]


_ALL_PROCESSES = _Processes(gather_with_grad, local_offset, global_mean)
_THIS_PROCESS = _Processes(lambda rows: rows, lambda count, device: 0, torch.mean)


class _Batch(NamedTuple):
    """A batch with images numbered across processes; candidates are their views."""

    regions: Tensor
    """(view, region, dim) of this process."""
    sentences: Tensor
    """(distinct, dim) of this process."""
    row_of_sentence: Tensor
    """(sentence,): the row of `sentences` of each sentence of this process."""
    candidates: Tensor
    """(candidate, region, dim) of all processes."""
    image_of_sentence: Tensor
    image_of_candidate: Tensor
    is_first_view: Tensor
    """(candidate,)"""
    study_of_image: Tensor
    """(image,) of all processes."""
    sentence_id: Tensor
    """(sentence,) of this process."""
    image_key: Tensor | None
    """(image,) of this process, or None."""
    of_images: dict[str, Tensor]
    """Candidates' fields, (image, ...) of all processes."""
    of_sentences: dict[str, Tensor]
    """Anchors' fields, (sentence, ...) of this process."""
    first_image: int
    """Number of this process's first image."""
    own_images: int
    """Number of images of this process."""
    is_plain: bool
    """One view of each image: candidate n is image n."""


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

    Raises:
        ValueError: an unknown `same_text`, or one that ignores `near_texts`; an option that `loss` does not use.
    """

    def __init__(
        self,
        class_probability: ClassProbability | None = None,
        negative_weights: NegativeWeights | None = None,
        image_to_text: float = 0.0,
        same_text: Literal["negative", "positive", "ignore"] = "negative",
        loss: AnchorLoss | None = None,
        near_texts: NearTexts | None = None,
    ) -> None:
        super().__init__()
        check_choice("model.same_text", same_text, SAME_TEXT)
        if near_texts is not None and same_text == "negative":
            raise UserError(
                "model: near_texts finds images that fit, and same_text: negative makes negatives of them; set "
                "model.init_args.same_text: positive (or ignore)"
            )
        self.class_probability = class_probability or ConstantClassProbability(0.0)
        self.negative_weights = negative_weights
        self.image_to_text, self.same_text = image_to_text, same_text
        self.loss, self.near_texts = loss, near_texts
        if loss is not None:
            loss.check_options(self.class_probability, negative_weights, image_to_text)

    @property
    def requires_of_sentences(self) -> tuple[str, ...]:
        """Names of the sentences' fields that the datamodule must serve."""
        of_pairs = [name for part in self._parts_of_pairs for name in part.anchor_requires]
        return tuple(dict.fromkeys((*self.class_probability.requires, *of_pairs)))

    @property
    def requires_of_images(self) -> tuple[str, ...]:
        """Names of the images' fields that the datamodule must serve."""
        return tuple(dict.fromkeys(name for part in self._parts_of_pairs for name in part.candidate_requires))

    @property
    def _parts_of_pairs(self) -> list[NegativeWeights | AnchorLoss | NearTexts]:
        """The parts that need fields of both sentences and images."""
        parts = (self.negative_weights, self.loss, self.near_texts)
        return [part for part in parts if part is not None]

    def check(self, of_images: Mapping[str, Tensor]) -> None:
        """Check the training images' fields, (image, ...), before training.

        Raises:
            ValueError: with them nothing would be trained.
        """
        for part in self._parts_of_pairs:
            if not isinstance(part, NearTexts) or part.candidate_requires:
                part.check(of_images)

    def check_sentences(self, of_sentences: Mapping[str, Tensor]) -> None:
        """Check fields of the training reports' sentences, (sentence, ...), before training.

        Raises:
            ValueError: with them nothing would be trained.
        """
        if self.near_texts is not None and self.near_texts.anchor_requires:
            self.near_texts.check(of_sentences)

    def check_similarity(self, similarity: Similarity) -> None:
        """Check that the loss uses what the similarity learns.

        Raises:
            UserError: it does not.
        """
        if self.loss is not None and not self.loss.uses_gamma and similarity.log_gamma2.requires_grad:
            raise UserError(
                f"model.loss: {type(self.loss).__name__} has temperatures of its own, gamma^2 has no gradient; set "
                "model.init_args.similarity.init_args.learn_gamma: false"
            )

    def forward(
        self,
        similarity: Similarity,
        regions: Float[Tensor, "view region dim"],
        sentences: Float[Tensor, "distinct dim"],
        batch: Mapping[str, Any],
        across_processes: bool = True,
        step: int = 0,
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss, and statistics to log: means over this process's sentences.

        Args:
            similarity: regions and sentences to logits.
            regions: of all views of this process's images.
            sentences: embeddings of the distinct sentences.
            batch: image_index (sentence,); row_of_sentence (sentence,), the row of `sentences` that each has, or none
                for one after the other; view_of (view,), which image each view is of: first views stand first;
                study_id (image,); sentence_id (sentence,); anchor and candidate, the required fields; image_key
                (image,), which a `loss` may need: the row of each training image.
            across_processes: False restricts the candidates to the images of this process.
            step: of training, for resampled weights.
        """
        processes = _ALL_PROCESSES if across_processes else _THIS_PROCESS
        # At least float32: half precision would round gathered gradients, weights and loss.
        with torch.autocast(device_type=regions.device.type, enabled=False):
            precise = torch.promote_types(regions.dtype, torch.float32)
            whole = _through_processes(regions.to(precise), sentences.to(precise), batch, processes)
            eta = self.class_probability(
                **{name: whole.of_sentences[name] for name in self.class_probability.requires}
            )
            logits = similarity(whole.candidates, whole.sentences)[whole.row_of_sentence]
            loss, figures = self._of_sentences(logits, similarity, whole, eta, processes, step)
            if self.image_to_text:
                of_images = self._of_images(logits, similarity, whole, eta, processes, step)
                loss = (1 - self.image_to_text) * loss + self.image_to_text * of_images
        figures["capped"] = torch.as_tensor(self.class_probability.share_capped)
        return loss, figures

    def _of_sentences(
        self,
        logits: Tensor,
        similarity: Similarity,
        whole: _Batch,
        eta: float | Tensor,
        processes: _Processes,
        step: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        is_own = whole.image_of_sentence[:, None] == whole.image_of_candidate
        # Further views of other images are not negatives: N is the same for any number of views (DCL, section 5.1,
        # fixes N and varies M).
        pairing = Pairing(is_own, ~is_own & whole.is_first_view)
        if not whole.is_plain:
            # A further view may be another image of the study: as a candidate of its own it is not a negative.
            study = whole.study_of_image[whole.image_of_sentence]
            is_same_study = study[:, None] == whole.study_of_image[whole.image_of_candidate]
            pairing = Pairing(pairing.is_positive, pairing.is_negative & ~is_same_study)
        if self.same_text != "negative":
            known = self._known(whole, processes)[0][:, whole.image_of_candidate]
            pairing = with_known(pairing, known, self.same_text)
        weights = None
        if self.negative_weights is not None:
            weights = self._pair_weights(
                whole, whole.image_of_sentence, whole.of_sentences, whole.image_of_candidate, logits
            )
            keys = torch.stack([whole.sentence_id, whole.image_of_sentence], dim=1)
            weights = self.negative_weights.finished(weights, pairing.is_negative, keys, step)
        elif not whole.is_plain or self.same_text == "ignore":
            weights = pairing.is_negative.to(logits.dtype)
        if self.loss is not None:
            anchors = Anchors(
                logits,
                *pairing,
                weights=pairing.is_negative.to(logits.dtype) if weights is None else weights,
                class_probability=eta,
                gamma2=similarity.gamma2,
                keys=whole.sentence_id,
                is_of_sentences=True,
                of_anchors=_fields_of_sentences(
                    self.loss, whole, whole.image_of_sentence, whole.of_sentences
                ),
                of_candidates=_fields_of_images(self.loss, whole, whole.image_of_candidate),
            )
            losses = self.loss(anchors)
            return processes.mean(losses), _figures_of_loss(self.loss, anchors)
        is_one_positive = whole.is_plain and self.same_text != "positive"
        arguments: dict[str, Any] = {
            "positives": whole.image_of_sentence if is_one_positive else pairing.is_positive,
            "class_probability": eta,
            "floor": -similarity.gamma2,
            "weights": weights,
        }
        losses = contrastive_loss(logits, reduction="none", **arguments)
        return processes.mean(losses), _figures(logits, pairing, arguments)

    def _of_images(
        self,
        logits: Tensor,
        similarity: Similarity,
        whole: _Batch,
        eta: float | Tensor,
        processes: _Processes,
        step: int,
    ) -> Tensor:
        """Loss with this process's images (their first views) as anchors and all sentences as candidates."""
        if whole.candidates is whole.regions:
            logits = logits[:, : whole.own_images].T
        else:
            rows = whole.row_of_sentence + processes.offset(len(whole.sentences), logits.device)
            all_logits = similarity(whole.regions[: whole.own_images], processes.gather(whole.sentences))
            logits = all_logits[processes.gather(rows)].T
        if logits.requires_grad:
            # In the layout of the logits: gamma^2's gradient is summed in one order, whatever the loss's operations.
            logits.register_hook(lambda gradient: gradient.T.contiguous().T)
        numbers = whole.first_image + torch.arange(whole.own_images, device=logits.device)
        image_of_all = processes.gather(whole.image_of_sentence)
        is_own = numbers[:, None] == image_of_all
        pairing = Pairing(is_own, ~is_own)
        if self.same_text != "negative":
            pairing = with_known(pairing, self._known(whole, processes)[1][:, numbers].T, self.same_text)
        weights = None
        names = dict.fromkeys(name for part in self._parts_of_pairs for name in part.anchor_requires)
        of_all = {name: processes.gather(whole.of_sentences[name]) for name in names}
        if self.negative_weights is not None:
            # The weight of a pair is the same in both directions.
            weights = self._pair_weights(whole, image_of_all, of_all, numbers, logits.T).T
            keys = torch.stack([numbers, torch.full_like(numbers, _IMAGE_KEY)], dim=1)
            weights = self.negative_weights.finished(weights, pairing.is_negative, keys, step)
        elif self.same_text == "ignore":
            weights = pairing.is_negative.to(logits.dtype)
        if isinstance(eta, Tensor):
            of_image = (numbers[:, None] == whole.image_of_sentence).to(eta.dtype)
            eta = (of_image * eta).sum(1) / of_image.sum(1)
        if self.loss is not None:
            anchors = Anchors(
                logits,
                *pairing,
                weights=pairing.is_negative.to(logits.dtype) if weights is None else weights,
                class_probability=eta,
                gamma2=similarity.gamma2,
                keys=whole.image_key,
                is_of_sentences=False,
                of_anchors=_fields_of_images(self.loss, whole, numbers),
                of_candidates=_fields_of_sentences(self.loss, whole, image_of_all, of_all),
            )
            return processes.mean(self.loss(anchors))
        losses = contrastive_loss(
            logits,
            pairing.is_positive,
            class_probability=eta,
            floor=-similarity.gamma2,
            weights=weights,
            reduction="none",
        )
        return processes.mean(losses)

    def _pair_weights(
        self,
        whole: _Batch,
        image_of_sentence: Tensor,
        of_sentences: Mapping[str, Tensor],
        image_of_candidate: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Weights (sentence, candidate) of pairs of sentences and images, given by the images' numbers."""
        rule = self.negative_weights
        assert rule is not None
        anchor = _fields_of_sentences(rule, whole, image_of_sentence, of_sentences)
        return rule.pair_weights(anchor, _fields_of_images(rule, whole, image_of_candidate), logits)

    def _known(self, whole: _Batch, processes: _Processes) -> tuple[Tensor, Tensor]:
        """Images that this process's sentences are known to fit, and the same for the sentences of all processes."""
        image_of_all = processes.gather(whole.image_of_sentence)
        known = known_to_fit(image_of_all, processes.gather(whole.sentence_id), whole.study_of_image)
        if self.near_texts is not None:
            fields = {
                name: processes.gather(whole.of_sentences[name]) for name in self.near_texts.anchor_requires
            }
            known |= self.near_texts(image_of_all, len(whole.study_of_image), fields, whole.of_images)
        first = processes.offset(len(whole.sentence_id), known.device)
        return known[first : first + len(whole.sentence_id)], known


def _through_processes(
    regions: Tensor, sentences: Tensor, batch: Mapping[str, Any], processes: _Processes
) -> _Batch:
    """The batch with images numbered across processes and the fields of candidates gathered."""
    own_images = len(batch["study_id"])
    first_image = processes.offset(own_images, regions.device)
    is_first_view = torch.arange(len(regions), device=regions.device) < own_images
    views = processes.gather(torch.stack([batch["view_of"] + first_image, is_first_view.long()], dim=1))
    return _Batch(
        regions=regions,
        sentences=sentences,
        row_of_sentence=batch.get(
            "row_of_sentence", torch.arange(len(batch["sentence_id"]), device=sentences.device)
        ),
        candidates=processes.gather(regions),
        image_of_sentence=batch["image_index"] + first_image,
        image_of_candidate=views[:, 0],
        is_first_view=views[:, 1] == 1,
        study_of_image=processes.gather(batch["study_id"]),
        sentence_id=batch["sentence_id"],
        image_key=batch.get("image_key"),
        of_images={name: processes.gather(field) for name, field in batch["candidate"].items()},
        of_sentences=dict(batch["anchor"]),
        first_image=first_image,
        own_images=own_images,
        is_plain=len(regions) == own_images,
    )


def _fields_of_images(part: NegativeWeights | AnchorLoss, whole: _Batch, images: Tensor) -> dict[str, Tensor]:
    """Fields of images, given by their numbers, that a part of the objective requires."""
    return {name: whole.of_images[name][images] for name in part.candidate_requires}


def _fields_of_sentences(
    part: NegativeWeights | AnchorLoss,
    whole: _Batch,
    image_of_sentence: Tensor,
    of_sentences: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Fields that a part of the objective requires of sentences and, under the images' names, of their own images."""
    own = {name: of_sentences[name] for name in part.anchor_requires}
    return {**_fields_of_images(part, whole, image_of_sentence), **own}


@torch.no_grad()
def _figures(logits: Tensor, pairing: Pairing, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Share of anchors at the floor, mean eta, mean false-negative mass and mean weight of a negative."""
    statistics = contrastive_statistics(logits, **arguments)
    figures = {
        "at_floor": statistics.at_floor,
        "class_probability": statistics.class_probability,
        "false_negative_mass": statistics.false_negative_mass,
        "weight": logits.new_ones(()),
    }
    if arguments["weights"] is not None:
        count = pairing.is_negative.sum().clamp(min=1)
        figures["weight"] = arguments["weights"].masked_fill(~pairing.is_negative, 0.0).sum() / count
    return figures


@torch.no_grad()
def _figures_of_loss(loss: AnchorLoss, anchors: Anchors) -> dict[str, Tensor]:
    """Mean eta, mean weight of a negative, and what the loss itself has to log."""
    return {
        "class_probability": torch.as_tensor(anchors.class_probability, dtype=anchors.logits.dtype).mean(),
        "weight": anchors.weights.sum() / anchors.is_negative.sum().clamp(min=1),
        **loss.figures(anchors),
    }
