"""Log-likelihood of sentences under masked and causal language models, in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.scoring.plan import ScoringPlan as ScoringPlan
    from medclip_dcl.scoring.score import default_token_budget as default_token_budget
    from medclip_dcl.scoring.score import pseudo_log_likelihood as pseudo_log_likelihood
    from medclip_dcl.scoring.score import restored as restored
    from medclip_dcl.scoring.score import score_batches as score_batches
    from medclip_dcl.scoring.score import score_left as score_left
    from medclip_dcl.scoring.score import score_summary as score_summary
    from medclip_dcl.scoring.score import scoring_plan as scoring_plan

__all__, __getattr__, __dir__ = public(__name__, __file__)
