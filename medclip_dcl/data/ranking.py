"""A ranking of reports for each sentence, or a posterior, learned on the training reports by ``medclip-dcl rank``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

QUANTILES = 101
"""Stored quantiles of a sentence's scores: of 0, .01, ..., 1."""
PARTS = {"ranking": ("quantiles", QUANTILES, "float16"), "posterior": ("log_c", 1, "float32")}
"""By kind, which names the folder: the column beside a sentence's vector, its length, and the type of all numbers."""
NEVER_TRUE = 1_000.0
"""log c of a sentence whose posterior is 0 for all reports but its own."""


class Ranking(NamedTuple):
    """Vectors whose product is the score of a report for a sentence; keys ascend.

    Attributes:
        sentence_id: of each sentence of the set.
        sentences: vector of a sentence, (sentence, dim), and, side by side, of a ranking the quantiles of its scores
            over training reports, ascending, (sentence, 101), in float16; of a posterior, whose scores are logits,
            log c, (sentence, 1), in float32 (`medclip_dcl.objectives.PosteriorTargets`).
        study_id: of each report of train and validate.
        reports: their vectors, (report, dim), in the same type.
    """

    sentence_id: Int[np.ndarray, " sentence"]
    sentences: Float[np.ndarray, "sentence dim_and_part"]
    study_id: Int[np.ndarray, " report"]
    reports: Float[np.ndarray, "report dim"]
