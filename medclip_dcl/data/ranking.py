"""A ranking of reports for each sentence, learned on the training reports by ``medclip-dcl rank``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

QUANTILES = 101
"""Stored quantiles of a sentence's scores: of 0, .01, ..., 1."""
REPORTS_FOLDER = "ranking_reports"


class Ranking(NamedTuple):
    """Vectors whose product is the score of a report for a sentence; keys ascend.

    Attributes:
        sentence_id: of each sentence of the set.
        sentences: vector of a sentence, (sentence, dim), and the quantiles of its scores over training reports,
            ascending, (sentence, 101), side by side; float16.
        study_id: of each report of train and validate.
        reports: their vectors, (report, dim), float16.
    """

    sentence_id: Int[np.ndarray, " sentence"]
    sentences: Float[np.ndarray, "sentence dim_and_quantiles"]
    study_id: Int[np.ndarray, " report"]
    reports: Float[np.ndarray, "report dim"]
