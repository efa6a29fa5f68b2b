"""Contrastive objectives: one loss, and the class probabilities that debias it."""

from medclip_dcl.objectives.class_probability import (
    ClassProbability,
    ConstantClassProbability,
    KnownClassProbability,
    LanguageModelClassProbability,
)
from medclip_dcl.objectives.contrastive import (
    ContrastiveStatistics,
    contrastive_loss,
    contrastive_statistics,
)

__all__ = [
    "ClassProbability",
    "ConstantClassProbability",
    "ContrastiveStatistics",
    "KnownClassProbability",
    "LanguageModelClassProbability",
    "contrastive_loss",
    "contrastive_statistics",
]
