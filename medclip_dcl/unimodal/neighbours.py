"""Weighted nearest neighbours: a classifier of features that needs no training."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

_ELEMENTS_PER_CHUNK = 2**24
"""Cosines computed at a time; bounds the memory whatever the number of images."""


def neighbour_predictions(
    queries: Float[Tensor, "query dim"] | None,
    features: Float[Tensor, "image dim"],
    labels: Int[Tensor, " image"],
    *,
    k: int = 200,
    temperature: float = 0.5,
) -> Int[Tensor, "query"]:
    """Class of each query by its k nearest neighbours in cosine, each with the weight exp(cosine / temperature).

    The weighted vote of Wu et al. (CVPR 2018, section 3.4).

    Args:
        queries: features to classify; None for those of the labelled images, each without itself (leave one out).
        features: of the labelled images, of any norm.
        labels: class of each, from 0.
        k: neighbours; where there are fewer, all of them.
        temperature: above 0.

    Returns:
        The class with the largest vote; the first of those that tie.

    Raises:
        ValueError: k below 1, a temperature that is not above 0, a label below 0, shapes that do not fit, or no
            neighbour.
    """
    n_neighbours = len(features) - (queries is None)
    if k < 1 or not temperature > 0 or n_neighbours < 1 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"k must be at least 1, temperature above 0, with at least one neighbour and a label for each: found {k}, "
            f"{temperature}, {n_neighbours} neighbours and {len(labels)} labels"
        )
    if int(labels.min()) < 0:
        raise ValueError(f"labels must be at least 0: found {int(labels.min())}")
    bank = normalize(features.float(), dim=1)
    asked = bank if queries is None else normalize(queries.float(), dim=1)
    n_classes = int(labels.max()) + 1
    rows = max(1, _ELEMENTS_PER_CHUNK // len(bank))
    found = []
    for start in range(0, len(asked), rows):
        cosines = asked[start : start + rows] @ bank.T
        if queries is None:
            cosines[:, start : start + rows].fill_diagonal_(-math.inf)
        nearest = cosines.topk(min(k, n_neighbours), dim=1)
        votes = cosines.new_zeros(len(cosines), n_classes)
        votes.scatter_add_(1, labels[nearest.indices], (nearest.values / temperature).exp())
        found.append(votes.argmax(1))
    return torch.cat(found) if found else labels.new_zeros(0)
