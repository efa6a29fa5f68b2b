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
    k: int,
    temperature: float,
) -> Int[Tensor, "query"]:
    """Class of each query by its k nearest neighbours in cosine, each with the weight exp(cosine / temperature).

    The weighted vote of Wu et al. (CVPR 2018, section 3.4); the first of the classes that tie.

    Args:
        queries: features to classify; None for those of the labelled images, each without itself (leave one out).
        features: of the labelled images, of any norm.
        labels: class of each, from 0.
        k: neighbours; where there are fewer, all of them.
        temperature: above 0.
    """
    bank = normalize(features.float(), dim=1)
    asked = bank if queries is None else normalize(queries.float(), dim=1)
    n_classes = int(labels.max()) + 1
    rows = max(1, _ELEMENTS_PER_CHUNK // len(bank))
    found = []
    for start in range(0, len(asked), rows):
        cosines = asked[start : start + rows] @ bank.T
        if queries is None:
            cosines[:, start : start + rows].fill_diagonal_(-math.inf)
        nearest = cosines.topk(min(k, len(bank) - (queries is None)), dim=1)
        votes = cosines.new_zeros(len(cosines), n_classes)
        votes.scatter_add_(1, labels[nearest.indices], (nearest.values / temperature).exp())
        found.append(votes.argmax(1))
    return torch.cat(found) if found else labels.new_zeros(0)
