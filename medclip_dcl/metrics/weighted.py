"""Numbers of weighted rows, in each draw: mean, median, AUC, average precision, precision at k. Without torch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Shaped

Weights = Float[np.ndarray, "draw row"]
Scores = Float[np.ndarray, "row"]
Positive = Bool[np.ndarray, "row"]
Draws = Float[np.ndarray, "draw"]


def weighted_mean(values: Shaped[np.ndarray, "row"], weights: Weights) -> Draws:
    """Mean of the finite values; NaN for a draw without any."""
    is_finite = np.isfinite(values)
    if not is_finite.all():
        values, weights = values[is_finite], weights.compress(is_finite, axis=1)
    # Sums of counts are exact in any order; of other values a product would change the last digit.
    total = weights @ values.astype("float64") if values.dtype == bool else (weights * values).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / weights.sum(axis=1)


def weighted_auc(scores: Scores, positive: Positive, weights: Weights) -> Draws:
    """Area under the ROC curve: the chance that a positive case scores above a negative one; a tie counts half.

    A draw that lacks a class gives NaN.
    """
    order = np.argsort(scores, kind="stable")
    of_class = [order[positive[order] == is_positive] for is_positive in (False, True)]
    negative, own = scores[of_class[0]], weights.take(of_class[1], axis=1)
    below = np.zeros((len(weights), len(negative) + 1))
    weights.take(of_class[0], axis=1).cumsum(axis=1, out=below[:, 1:])
    ends = [np.searchsorted(negative, scores[of_class[1]], side) for side in ("left", "right")]
    wins = sum(np.einsum("dr,dr->d", own, below.take(end, axis=1)) for end in ends) / 2
    with np.errstate(invalid="ignore"):
        return wins / (own.sum(axis=1) * below[:, -1])


def weighted_average_precision(scores: Scores, positive: Positive, weights: Weights) -> Draws:
    """Sum over thresholds of (recall - recall before) * precision; tied cases are one threshold.

    Without skill it is the share of positive cases. A draw without a positive case gives NaN.
    """
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(-scores[order], prepend=-np.inf) > 0)
    cases = weights.take(order, axis=1).cumsum(axis=1)
    places = np.flatnonzero(positive[order])
    # Recall grows at thresholds with a positive case alone.
    grows, first = np.unique(np.searchsorted(starts, places, "right") - 1, return_index=True)
    positives = np.add.reduceat(weights.take(order[places], axis=1), first, axis=1)
    last = np.append(starts[1:], len(order))[grows] - 1
    gains = np.zeros((len(weights), len(starts)))
    # Thresholds above the first case that was drawn have neither recall nor precision.
    gains[:, grows] = positives * (positives.cumsum(axis=1) / np.maximum(cases.take(last, axis=1), 1))
    with np.errstate(invalid="ignore"):
        return gains.sum(axis=1) / positives.sum(axis=1)


def weighted_precision(scores: Scores, positive: Positive, weights: Weights, k: int) -> Draws:
    """Share of positive cases among the k with the highest scores; its expectation where cases tie at the end."""
    order = np.argsort(-scores, kind="stable")
    for last in (10 * k, len(order)):  # few draws need more than the first
        top = order[scores[order] >= scores[order[:last][-1]]]
        of_top = weights.take(top, axis=1)
        if of_top.sum(axis=1).min() >= k:
            break
    starts = np.flatnonzero(np.diff(-scores[top], prepend=-np.inf) > 0)
    cases = np.add.reduceat(of_top, starts, axis=1)
    positives = np.add.reduceat(of_top * positive[top], starts, axis=1)
    until = cases.cumsum(axis=1).clip(max=k)
    taken = np.diff(until, axis=1, prepend=0)
    with np.errstate(invalid="ignore"):
        return (taken * positives / np.maximum(cases, 1)).sum(axis=1) / until[:, -1]


def weighted_median(values: Scores, weights: Weights) -> Draws:
    """Median; of an even number of rows the mean of the middle two. NaN for a draw without any."""
    if not len(values):
        return np.full(len(weights), np.nan)
    order = np.argsort(values, kind="stable")
    ordered, below = values[order], weights.take(order, axis=1).cumsum(axis=1)
    total = below[:, -1]
    middle = np.stack([(total - 1) // 2, total // 2], axis=1)
    places = [np.searchsorted(*one, side="right") for one in zip(below, middle, strict=True)]
    lower, upper = ordered[np.array(places).clip(max=len(ordered) - 1)].T
    return np.where(total > 0, (lower + upper) / 2, np.nan)


def mean_of(numbers: list[Draws], otherwise: Draws) -> Draws:
    """Mean of numbers in each draw; `otherwise` if there are none."""
    return sum(numbers[1:], numbers[0]) / len(numbers) if numbers else otherwise
