"""Encoders, similarities, and networks that describe and rebuild themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.networks.classifier import FindingNetwork as FindingNetwork
    from medclip_dcl.networks.image_encoder import RegionEncoder as RegionEncoder
    from medclip_dcl.networks.image_encoder import ResNetRegions as ResNetRegions
    from medclip_dcl.networks.image_text import ImageTextNetwork as ImageTextNetwork
    from medclip_dcl.networks.pretrained_regions import TransformersRegions as TransformersRegions
    from medclip_dcl.networks.similarity import LSE as LSE
    from medclip_dcl.networks.similarity import GlobalCosine as GlobalCosine
    from medclip_dcl.networks.similarity import LSENonLocal as LSENonLocal
    from medclip_dcl.networks.similarity import NonLocal as NonLocal
    from medclip_dcl.networks.similarity import Similarity as Similarity
    from medclip_dcl.networks.text_encoder import BertSentences as BertSentences
    from medclip_dcl.networks.text_encoder import SentenceEncoder as SentenceEncoder
    from medclip_dcl.networks.text_encoder import TransformersSentences as TransformersSentences
    from medclip_dcl.networks.timm_regions import TimmRegions as TimmRegions

__all__, __getattr__, __dir__ = public(__name__, __file__)
