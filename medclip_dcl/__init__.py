"""Image-text models for chest radiographs, trained with sample-specific debiased contrastive learning."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medclip_dcl.inference.model import load as load

try:
    __version__ = version("medclip_dcl")
except PackageNotFoundError:
    __version__ = "0 (not installed)"

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    # `from medclip_dcl import load` must not make every import of the package pay for torch.
    if name == "load":
        from medclip_dcl.inference.model import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
