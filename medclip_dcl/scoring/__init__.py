"""Log-likelihood of sentences under masked and causal language models, in bulk."""

from medclip_dcl.scoring.plan import ScoringPlan
from medclip_dcl.scoring.score import (
    default_token_budget,
    pseudo_log_likelihood,
    restored,
    score_batches,
    score_left,
    score_summary,
    scoring_plan,
)

__all__ = [
    "ScoringPlan",
    "default_token_budget",
    "pseudo_log_likelihood",
    "restored",
    "score_batches",
    "score_left",
    "score_summary",
    "scoring_plan",
]
