"""LightningModules: thin, around the networks and the objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.models.classifier import Classifier as Classifier
    from medclip_dcl.models.image_text import ImageTextModel as ImageTextModel
    from medclip_dcl.models.masked_language import MaskedLanguageModel as MaskedLanguageModel

__all__, __getattr__, __dir__ = public(__name__, __file__)
