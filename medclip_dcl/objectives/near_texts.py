"""Near-duplicate texts: images that are known to fit a sentence because a text of theirs is similar enough."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.objectives.negative_weights import cosines, share_above
from medclip_dcl.objectives.part import ObjectivePart

# Shares of the pairs of texts above which a threshold is refused, and warned of: an image has several sentences, and is
# near if one of them is.
_MAX, _MANY = 0.9, 0.1


class NearTexts(ObjectivePart):
    """Counts an image as known to fit a sentence if their texts' cosine exceeds a threshold.

    FaNe (Zhang et al., AAAI 2026) takes two reports with such a similarity for positives of each other; see
    docs/near_texts.md for what differs. `same_text` of the objective says what becomes of the images found.

    Args:
        threshold: least cosine of frozen text embeddings, exclusive, in [-1, 1]. FaNe's published code has 0.95 after
            a normalisation; `medclip-dcl similar` prints what a threshold finds in a data set (0.95: choice).
        compare: "sentences": the sentence with each sentence of the other image that is in the batch, as `same_text`
            does for equal ones (choice). "reports": the sentence's own report with that of the other image (FaNe).
    """

    def __init__(
        self, threshold: float = 0.95, compare: Literal["sentences", "reports"] = "sentences"
    ) -> None:
        super().__init__()
        check_range("near_texts", "[-1, 1]", threshold=threshold)
        check_choice("near_texts.compare", compare, ("sentences", "reports"))
        self.threshold, self.compare = threshold, compare
        is_of_sentences = compare == "sentences"
        self.anchor_requires = ("sentence_embedding",) if is_of_sentences else ()
        self.candidate_requires = () if is_of_sentences else ("text_embedding",)

    def check(self, fields: Mapping[str, Tensor]) -> None:
        """Refuse a threshold that takes nearly all pairs of texts for near, and warn of one that takes many."""
        name = (*self.anchor_requires, *self.candidate_requires)[0]
        if name not in fields:  # those of images for sentences, or the other way round
            return
        share = share_above(self.threshold, fields[name])
        message = (
            f"near_texts.threshold: {self.threshold} takes {share:.0%} of the pairs of {self.compare} for near; choose "
            "a higher one by: medclip-dcl similar SET"
        )
        if share > _MAX:
            raise UserError(message)
        if share > _MANY:
            warnings.warn(message, stacklevel=2)

    def forward(
        self,
        image_of_sentence: Int[Tensor, "sentence"],
        images: int,
        of_sentences: Mapping[str, Tensor],
        of_images: Mapping[str, Tensor],
    ) -> Bool[Tensor, "sentence image"]:
        """Images whose text is near to a sentence's, its own among them; `images` is their number."""
        if self.compare == "reports":
            reports = of_images["text_embedding"]
            return (cosines(reports, reports) > self.threshold)[image_of_sentence]
        sentences = of_sentences["sentence_embedding"]
        is_near = (cosines(sentences, sentences) > self.threshold).float()
        numbers = torch.arange(images, device=image_of_sentence.device)
        # Near sentences of each image, counted.
        return is_near @ (image_of_sentence[:, None] == numbers).float() > 0
