"""LightningDataModules, and the prepared sets that they read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medclip_dcl.data.image_only import ImageOnlyDataModule as ImageOnlyDataModule

__all__ = ["ImageOnlyDataModule"]


def __getattr__(name: str) -> Any:
    # `medclip_dcl.data.prepared` must not import Lightning.
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.image_only"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
