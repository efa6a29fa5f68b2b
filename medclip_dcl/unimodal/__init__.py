"""The papers' experiments with images alone: data, networks, objectives, evaluation, theory."""

from medclip_dcl.unimodal.bounds import ErrorBound, dcl_error_bound, ssd_error_bound
from medclip_dcl.unimodal.curl import Blocks, KNegatives, block_loss, k_negative_loss, margin_loss
from medclip_dcl.unimodal.data import ImageOnlyDataModule
from medclip_dcl.unimodal.encoders import SmallConvNet, SmallImageEncoder, SmallImageResNet
from medclip_dcl.unimodal.evaluation import ImageOnlyEvaluation
from medclip_dcl.unimodal.mean_classifier import average_k_metrics, class_means
from medclip_dcl.unimodal.model import ImageOnlyModel
from medclip_dcl.unimodal.network import ImageOnlyNetwork
from medclip_dcl.unimodal.simclr import SimCLR, simclr_loss
from medclip_dcl.unimodal.synthetic_classes import SyntheticClasses
from medclip_dcl.unimodal.views import ViewsObjective

__all__ = [
    "Blocks",
    "ErrorBound",
    "ImageOnlyDataModule",
    "ImageOnlyEvaluation",
    "ImageOnlyModel",
    "ImageOnlyNetwork",
    "KNegatives",
    "SimCLR",
    "SmallConvNet",
    "SmallImageEncoder",
    "SmallImageResNet",
    "SyntheticClasses",
    "ViewsObjective",
    "average_k_metrics",
    "block_loss",
    "class_means",
    "dcl_error_bound",
    "k_negative_loss",
    "margin_loss",
    "simclr_loss",
    "ssd_error_bound",
]
