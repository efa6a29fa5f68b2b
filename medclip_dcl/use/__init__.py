"""A trained model in the hand: `load()`, the verbs `ask` and `page`. No module here imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.use.model import LoadedModel as LoadedModel
    from medclip_dcl.use.model import load as load

__all__, __getattr__, __dir__ = public(__name__, __file__)
