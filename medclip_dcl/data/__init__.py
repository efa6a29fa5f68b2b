"""LightningDataModules, and the prepared sets that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.data.image_text import ImageTextDataModule as ImageTextDataModule
    from medclip_dcl.data.labelled import LabelledDataModule as LabelledDataModule
    from medclip_dcl.data.prepared import PreparedSet as PreparedSet
    from medclip_dcl.data.reports import ReportsDataModule as ReportsDataModule

__all__, __getattr__, __dir__ = public(__name__, __file__)
