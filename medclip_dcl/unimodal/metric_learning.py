"""Losses of metric learning, of which contrastive learning comes: pairs, triplets, soft nearest neighbours.

All are of Euclidean distances, and computed at least in float32.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from medclip_dcl.objectives.contrastive import at_least_float32, reduce_losses


def contrastive_pair_loss(
    first: Float[Tensor, "pair dim"],
    second: Float[Tensor, "pair dim"],
    is_same: Bool[Tensor, "pair"],
    *,
    margin: float = 1.0,
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "pair"]:
    """Contrastive loss of labelled pairs (Chopra et al., CVPR 2005, in the form of Hadsell et al., CVPR 2006, eq. 4).

    With D the distance of the two embeddings::

        1/2 D^2                     of one class
        1/2 max{ 0, margin - D }^2  of two classes

    (Chopra et al. have an exponential in place of the hinge.) A pair of two classes in one place has no gradient.

    Args:
        first: embeddings, of any norm.
        second: of the pairs' other points.
        is_same: True for two points of one class.
        margin: distance from which on points of two classes cost nothing; above 0.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: margin out of range, no pair, an unknown reduction.

    Example:
        >>> x, y = torch.tensor([[0.0], [0.0]]), torch.tensor([[0.4], [0.4]])
        >>> contrastive_pair_loss(x, y, torch.tensor([True, False]), reduction="none")
        tensor([0.0800, 0.1800])
    """
    _check(first, "pair", margin=margin)
    distance = torch.linalg.vector_norm(at_least_float32(first) - at_least_float32(second), dim=1)
    losses = distance.where(is_same, (margin - distance).clamp(min=0)).square() / 2
    return reduce_losses(losses, reduction)


def triplet_loss(
    anchors: Float[Tensor, "anchor dim"],
    positives: Float[Tensor, "anchor dim"],
    negatives: Float[Tensor, "anchor dim"],
    *,
    margin: float = 0.2,
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "anchor"]:
    """Triplet loss (Schroff et al., CVPR 2015, eq. 2)::

        max{ 0, |f(x) - f(x+)|^2 - |f(x) - f(x-)|^2 + margin }

    Distances are squared, as in the paper, whose embeddings have norm 1; here they are taken as they are.

    Args:
        anchors: f(x).
        positives: f(x+), of the anchor's class.
        negatives: f(x-), of another class.
        margin: by which a negative must be farther than a positive; above 0 (0.2: the paper).
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: margin out of range, no anchor, an unknown reduction.

    Example:
        >>> x, near, far = torch.tensor([[0.0]]), torch.tensor([[0.5]]), torch.tensor([[0.6]])
        >>> round(triplet_loss(x, near, far).item(), 4)
        0.09
    """
    _check(anchors, "anchor", margin=margin)
    anchors = at_least_float32(anchors)
    to_positive, to_negative = (
        (anchors - at_least_float32(others)).square().sum(1) for others in (positives, negatives)
    )
    return reduce_losses((to_positive - to_negative + margin).clamp(min=0), reduction)


def soft_nearest_neighbour_loss(
    embeddings: Float[Tensor, "point dim"],
    class_id: Int[Tensor, "point"],
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "point"]:
    """Soft nearest neighbour loss of a labelled batch (Frosst et al., ICML 2019, eq. 1)::

        -log  sum_{j != i, same class} exp(-|x_i - x_j|^2 / T)  /  sum_{j != i} exp(-|x_i - x_j|^2 / T)

    It is InfoNCE with all points of the class as positives in the numerator's sum, and squared distances for
    similarities. In log space; the paper's code adds a small number to both sums instead.

    Args:
        embeddings: of any norm.
        class_id: equal for points of one class.
        temperature: T, above 0: how far a neighbour may be.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (point,) with reduction "none". A point without another one of its class costs 0 and counts in
        the mean (choice: the paper leaves it undefined).

    Raises:
        ValueError: temperature out of range, no point, an unknown reduction.

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [1.0]])
        >>> soft_nearest_neighbour_loss(points, torch.tensor([0, 0, 1]), reduction="none")
        tensor([0.6931, 1.3133, 0.0000])
    """
    _check(embeddings, "point", temperature=temperature)
    points = at_least_float32(embeddings)
    # Differences and not products: |x|^2 + |y|^2 - 2 xy cancels for neighbours.
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    logits = -distance.square() / temperature
    is_other = ~torch.eye(len(points), dtype=torch.bool, device=points.device)
    is_same = (class_id[:, None] == class_id) & is_other
    has_neighbour = is_same.any(1)
    # Points without a neighbour take part with a row of zeros: the gradient of logsumexp is NaN in a row of -inf.
    numerator, denominator = (
        logits.masked_fill(~mask, -math.inf).masked_fill(~has_neighbour[:, None], 0).logsumexp(1)
        for mask in (is_same, is_other)
    )
    return reduce_losses((denominator - numerator).where(has_neighbour, 0), reduction)


def _check(embeddings: Tensor, rows: str, **positive: float) -> None:
    if not len(embeddings):
        raise ValueError(f"there must be at least one {rows}, got shape {tuple(embeddings.shape)}")
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be finite and above 0, got {value}")
