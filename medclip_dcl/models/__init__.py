"""LightningModules: thin, around the networks and the objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.lazy import lazy

if TYPE_CHECKING:
    from medclip_dcl.models.classifier import Classifier as Classifier
    from medclip_dcl.models.image_text import ImageTextModel as ImageTextModel
    from medclip_dcl.models.masked_language import MaskedLanguageModel as MaskedLanguageModel

_MODULES = {
    "Classifier": "classifier",
    "ImageTextModel": "image_text",
    "MaskedLanguageModel": "masked_language",
}

__all__ = [*_MODULES]
__getattr__ = lazy(__name__, _MODULES)
