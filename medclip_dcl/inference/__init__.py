"""A trained model in the hand: `load()` and its heat maps. No module here imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.lazy import lazy

if TYPE_CHECKING:
    from medclip_dcl.inference.model import LoadedModel as LoadedModel
    from medclip_dcl.inference.model import load as load

_MODULES = {
    "LoadedModel": "model",
    "load": "model",
}

__all__ = [*_MODULES]
__getattr__ = lazy(__name__, _MODULES)
