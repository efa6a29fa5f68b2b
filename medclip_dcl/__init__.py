"""Image-text models for chest radiographs, trained with sample-specific debiased contrastive learning."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError(
        "medclip_dcl runs on Linux and macOS (it locks files by fcntl); on Windows install it in WSL2"
    )

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.objectives.contrastive import contrastive_loss as contrastive_loss
    from medclip_dcl.studies.evaluate_model import evaluate as evaluate
    from medclip_dcl.use.model import load as load

try:
    __version__ = version("medclip_dcl")
except PackageNotFoundError:
    __version__ = "0 (not installed)"

__all__, __getattr__, __dir__ = public(__name__, __file__)
