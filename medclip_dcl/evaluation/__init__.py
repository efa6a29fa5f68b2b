"""Evaluation callbacks and the results of a run on disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medclip_dcl.evaluation.base import EvaluationCallback as EvaluationCallback
    from medclip_dcl.evaluation.base import EvaluationResult as EvaluationResult
    from medclip_dcl.evaluation.classification import ZeroShotClassification as ZeroShotClassification
    from medclip_dcl.evaluation.embedding_map import EmbeddingMap as EmbeddingMap
    from medclip_dcl.evaluation.finding_classification import FindingClassification as FindingClassification
    from medclip_dcl.evaluation.grounding import Grounding as Grounding
    from medclip_dcl.evaluation.image_only import ImageOnlyEvaluation as ImageOnlyEvaluation
    from medclip_dcl.evaluation.results import ResultsWriter as ResultsWriter
    from medclip_dcl.evaluation.retrieval import Retrieval as Retrieval

_HOME = {
    "EmbeddingMap": "embedding_map",
    "EvaluationCallback": "base",
    "EvaluationResult": "base",
    "FindingClassification": "finding_classification",
    "Grounding": "grounding",
    "ImageOnlyEvaluation": "image_only",
    "Retrieval": "retrieval",
    "ResultsWriter": "results",
    "ZeroShotClassification": "classification",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    # `python -m medclip_dcl.report` must not import Lightning.
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
