"""Contrastive objectives: one loss, the class probabilities that debias it, and the weights of its negatives."""

from medclip_dcl.common.public_names import public
from medclip_dcl.objectives.anchor_losses import AnchorLoss as AnchorLoss
from medclip_dcl.objectives.anchor_losses import Anchors as Anchors
from medclip_dcl.objectives.class_probability import ClassProbability as ClassProbability
from medclip_dcl.objectives.class_probability import ConstantClassProbability as ConstantClassProbability
from medclip_dcl.objectives.class_probability import KnownClassProbability as KnownClassProbability
from medclip_dcl.objectives.class_probability import (
    LanguageModelClassProbability as LanguageModelClassProbability,
)
from medclip_dcl.objectives.contrastive import ContrastiveStatistics as ContrastiveStatistics
from medclip_dcl.objectives.contrastive import contrastive_loss as contrastive_loss
from medclip_dcl.objectives.contrastive import contrastive_statistics as contrastive_statistics
from medclip_dcl.objectives.controls import DecoupledLoss as DecoupledLoss
from medclip_dcl.objectives.controls import StoppedInfoNCE as StoppedInfoNCE
from medclip_dcl.objectives.controls import WeightedInfoNCE as WeightedInfoNCE
from medclip_dcl.objectives.near_texts import NearTexts as NearTexts
from medclip_dcl.objectives.negations import Negations as Negations
from medclip_dcl.objectives.negative_weights import HardNegatives as HardNegatives
from medclip_dcl.objectives.negative_weights import NegativeWeights as NegativeWeights
from medclip_dcl.objectives.negative_weights import RankedByText as RankedByText
from medclip_dcl.objectives.negative_weights import RemoveByLabel as RemoveByLabel
from medclip_dcl.objectives.negative_weights import RemoveByTextSimilarity as RemoveByTextSimilarity
from medclip_dcl.objectives.negative_weights import ResampleByTextSimilarity as ResampleByTextSimilarity
from medclip_dcl.objectives.negative_weights import ReweightByTextSimilarity as ReweightByTextSimilarity
from medclip_dcl.objectives.negative_weights import TrueNegatives as TrueNegatives
from medclip_dcl.objectives.posterior_targets import PosteriorTargets as PosteriorTargets
from medclip_dcl.objectives.sigmoid import SigmoidLoss as SigmoidLoss
from medclip_dcl.objectives.sigmoid import sigmoid_loss as sigmoid_loss
from medclip_dcl.objectives.soft_targets import SoftTargets as SoftTargets

__all__, __getattr__, __dir__ = public(__name__, __file__)
