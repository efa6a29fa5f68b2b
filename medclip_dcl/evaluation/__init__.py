"""Evaluation callbacks and the results of a run on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.evaluation.callback import EvaluationCallback as EvaluationCallback
    from medclip_dcl.evaluation.callback import EvaluationResult as EvaluationResult
    from medclip_dcl.evaluation.classification import ZeroShotClassification as ZeroShotClassification
    from medclip_dcl.evaluation.embedding_map import EmbeddingMap as EmbeddingMap
    from medclip_dcl.evaluation.finding_classification import FindingClassification as FindingClassification
    from medclip_dcl.evaluation.grounding import Grounding as Grounding
    from medclip_dcl.evaluation.localisation import Localisation as Localisation
    from medclip_dcl.evaluation.results import ResultsWriter as ResultsWriter
    from medclip_dcl.evaluation.retrieval import Retrieval as Retrieval
    from medclip_dcl.evaluation.sentences import SentenceClassification as SentenceClassification

__all__, __getattr__, __dir__ = public(__name__, __file__)
