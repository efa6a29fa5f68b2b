"""Contrastive objectives: one loss, the class probabilities that debias it, and the weights of its negatives."""

from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
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
from medclip_dcl.objectives.individual_temperatures import IndividualTemperatures
from medclip_dcl.objectives.near_texts import NearTexts
from medclip_dcl.objectives.negative_weights import (
    HardNegatives,
    NegativeWeights,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    ReweightByTextSimilarity,
    TrueNegatives,
)
from medclip_dcl.objectives.sigmoid import SigmoidLoss, sigmoid_loss
from medclip_dcl.objectives.soft_targets import SoftTargets

__all__ = [
    "AnchorLoss",
    "Anchors",
    "ClassProbability",
    "ConstantClassProbability",
    "ContrastiveStatistics",
    "HardNegatives",
    "IndividualTemperatures",
    "KnownClassProbability",
    "LanguageModelClassProbability",
    "NearTexts",
    "NegativeWeights",
    "RemoveByLabel",
    "RemoveByTextSimilarity",
    "ResampleByTextSimilarity",
    "ReweightByTextSimilarity",
    "SigmoidLoss",
    "SoftTargets",
    "TrueNegatives",
    "contrastive_loss",
    "contrastive_statistics",
    "sigmoid_loss",
]
