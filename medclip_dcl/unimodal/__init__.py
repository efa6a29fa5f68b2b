"""The papers' unimodal experiments: data, networks, objectives, evaluation."""

from medclip_dcl.common.public_names import public
from medclip_dcl.unimodal.cross_view import CrossView as CrossView
from medclip_dcl.unimodal.curl import Blocks as Blocks
from medclip_dcl.unimodal.curl import Supervised as Supervised
from medclip_dcl.unimodal.curl import k_negative_loss as k_negative_loss
from medclip_dcl.unimodal.curl import margin_loss as margin_loss
from medclip_dcl.unimodal.data import UnimodalDataModule as UnimodalDataModule
from medclip_dcl.unimodal.encoders import SmallConvNet as SmallConvNet
from medclip_dcl.unimodal.encoders import SmallImageEncoder as SmallImageEncoder
from medclip_dcl.unimodal.encoders import SmallImageResNet as SmallImageResNet
from medclip_dcl.unimodal.evaluation import UnimodalEvaluation as UnimodalEvaluation
from medclip_dcl.unimodal.gru import GruSentences as GruSentences
from medclip_dcl.unimodal.lightness_colour import LightnessColourResNets as LightnessColourResNets
from medclip_dcl.unimodal.mean_classifier import average_k_metrics as average_k_metrics
from medclip_dcl.unimodal.mean_classifier import class_means as class_means
from medclip_dcl.unimodal.mean_classifier import intraclass_deviation as intraclass_deviation
from medclip_dcl.unimodal.model import UnimodalModel as UnimodalModel
from medclip_dcl.unimodal.network import UnimodalNetwork as UnimodalNetwork
from medclip_dcl.unimodal.quick_thought import QuickThought as QuickThought
from medclip_dcl.unimodal.quick_thought import quick_thought_loss as quick_thought_loss
from medclip_dcl.unimodal.sentence_evaluation import SentenceEvaluation as SentenceEvaluation
from medclip_dcl.unimodal.sentences import SentencesDataModule as SentencesDataModule
from medclip_dcl.unimodal.simclr import SimCLR as SimCLR
from medclip_dcl.unimodal.simclr import simclr_loss as simclr_loss
from medclip_dcl.unimodal.views import ViewsObjective as ViewsObjective

__all__, __getattr__, __dir__ = public(__name__, __file__)
