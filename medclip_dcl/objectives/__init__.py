"""Contrastive objectives: one loss, the class probabilities that debias it, and the weights of its negatives."""

from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.bounds import ErrorBound, dcl_error_bound, ssd_error_bound
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
from medclip_dcl.objectives.curl import Blocks, KNegatives, block_loss, k_negative_loss, margin_loss
from medclip_dcl.objectives.individual_temperatures import IndividualTemperatures
from medclip_dcl.objectives.metric_learning import (
    contrastive_pair_loss,
    soft_nearest_neighbour_loss,
    triplet_loss,
)
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
from medclip_dcl.objectives.simclr import SimCLR, simclr_loss
from medclip_dcl.objectives.soft_targets import SoftTargets
from medclip_dcl.objectives.views import ViewsObjective

__all__ = [
    "AnchorLoss",
    "Anchors",
    "Blocks",
    "ClassProbability",
    "ConstantClassProbability",
    "ContrastiveStatistics",
    "ErrorBound",
    "HardNegatives",
    "IndividualTemperatures",
    "KNegatives",
    "KnownClassProbability",
    "LanguageModelClassProbability",
    "NearTexts",
    "NegativeWeights",
    "RemoveByLabel",
    "RemoveByTextSimilarity",
    "ResampleByTextSimilarity",
    "ReweightByTextSimilarity",
    "SigmoidLoss",
    "SimCLR",
    "SoftTargets",
    "TrueNegatives",
    "ViewsObjective",
    "block_loss",
    "contrastive_loss",
    "contrastive_pair_loss",
    "contrastive_statistics",
    "dcl_error_bound",
    "k_negative_loss",
    "margin_loss",
    "sigmoid_loss",
    "simclr_loss",
    "soft_nearest_neighbour_loss",
    "ssd_error_bound",
    "triplet_loss",
]
