"""Positives and negatives of each anchor among the candidates of a batch: views, studies, equal sentences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

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
