"""LightningDataModules, and the prepared sets that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.lazy import lazy

if TYPE_CHECKING:
    from medclip_dcl.data.image_text import ImageTextDataModule as ImageTextDataModule
    from medclip_dcl.data.labelled import LabelledDataModule as LabelledDataModule
    from medclip_dcl.data.prepared import PreparedSet as PreparedSet
    from medclip_dcl.data.reports import ReportsDataModule as ReportsDataModule

_MODULES = {
    "ImageTextDataModule": "image_text",
    "LabelledDataModule": "labelled",
    "PreparedSet": "prepared",
    "ReportsDataModule": "reports",
}

__all__ = [*_MODULES]
__getattr__ = lazy(__name__, _MODULES)
