"""Positives and negatives of each anchor among the candidates of a batch: views, studies, equal sentences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from medclip_dcl.errors import UserError

SAME_TEXT = ("negative", "positive", "ignore")
"""Policies for a candidate that is known to fit: it shares the study or a sentence of the batch with the anchor."""


class Pairing(NamedTuple):
    """Positives and negatives of each anchor among the candidates; a candidate may be neither."""

    is_positive: Bool[Tensor, "anchor candidate"]
    is_negative: Bool[Tensor, "anchor candidate"]


def pair_views(
    image_of_anchor: Int[Tensor, "anchor"],
    image_of_candidate: Int[Tensor, "candidate"],
    is_first_view: Bool[Tensor, "candidate"],
) -> Pairing:
    """All views of an anchor's image are its positives, the first views of all other images its negatives.

    Further views of other images are neither: N is the same for any number of views (DCL, section 5.1, fixes N and
    varies M).

    Args:
        image_of_anchor: number of each anchor's image.
        image_of_candidate: number of the image that each candidate is a view of.
        is_first_view: one True for each image.
    """
    is_own = image_of_anchor[:, None] == image_of_candidate
    return Pairing(is_own, ~is_own & is_first_view)


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
    """Treat known fits as further positives ("positive"), as neither ("ignore"), or as before ("negative", as in SSD).

    Raises:
        ValueError: another policy.
    """
    if same_text not in SAME_TEXT:
        raise UserError(f"same_text must be one of {SAME_TEXT}, got {same_text!r}")
    if same_text == "negative":
        return pairing
    is_positive = pairing.is_positive | is_known if same_text == "positive" else pairing.is_positive
    return Pairing(is_positive, pairing.is_negative & ~is_known)
