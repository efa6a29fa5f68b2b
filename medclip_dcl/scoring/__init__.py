"""Pseudo-log-likelihood of sentences under a masked language model, in bulk."""

from medclip_dcl.scoring.plan import ScoringPlan
from medclip_dcl.scoring.score import (
    default_token_budget,
    pseudo_log_likelihood,
    score_batches,
    scoring_progress,
)

__all__ = [
    "ScoringPlan",
    "default_token_budget",
    "pseudo_log_likelihood",
    "score_batches",
    "scoring_progress",
]
