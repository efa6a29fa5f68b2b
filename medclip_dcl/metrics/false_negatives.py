"""Detection of false negatives by a score, where the truth is known."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata


def auc_within_anchors(
    scores: Float[np.ndarray, "sentence report"],
    fits: Bool[np.ndarray, "sentence report"],
    says: Bool[np.ndarray, "sentence report"],
) -> float:
    """Mean over anchors of the AUC with which a score tells the other reports that fit from those that do not.

    An anchor is a sentence of a report. Its own report is left out; an anchor without another report that fits, or
    without one that does not, has no AUC and is left out, too.

    Args:
        scores: of each report for each sentence; greater for reports that fit.
        fits: True if the sentence is true of the report's image.
        says: True if the report has the sentence.

    Returns:
        NaN if no anchor has an AUC.
    """
    total, count = 0.0, 0
    for score, is_fitting, is_anchor in zip(scores, fits, says, strict=True):
        positives, negatives = int(is_fitting.sum()), int((~is_fitting).sum())
        # The number of unfitting reports below each one, ties by half.
        below = rankdata(score)
        below[is_fitting] -= rankdata(score[is_fitting])
        wins = below[is_fitting].sum()
        for own in np.flatnonzero(is_anchor):
            if is_fitting[own] and positives > 1 and negatives:
                total += (wins - below[own]) / ((positives - 1) * negatives)
                count += 1
            elif not is_fitting[own] and positives and negatives > 1:
                lost = (score[is_fitting] > score[own]).sum() + (score[is_fitting] == score[own]).sum() / 2
                total += (wins - lost) / (positives * (negatives - 1))
                count += 1
    return total / count if count else float("nan")
