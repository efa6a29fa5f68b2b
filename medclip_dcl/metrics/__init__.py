"""Metrics of grounding, retrieval and calibration, and means by rows: pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medclip_dcl.common.public_names import public

if TYPE_CHECKING:
    from medclip_dcl.metrics.grounding import Agreement as Agreement
    from medclip_dcl.metrics.grounding import BoxedHeatMap as BoxedHeatMap
    from medclip_dcl.metrics.grounding import Rectangle as Rectangle
    from medclip_dcl.metrics.grounding import box_bounds as box_bounds
    from medclip_dcl.metrics.grounding import contrast_to_noise_ratio as contrast_to_noise_ratio
    from medclip_dcl.metrics.grounding import default_thresholds as default_thresholds
    from medclip_dcl.metrics.grounding import mean_iou as mean_iou
    from medclip_dcl.metrics.retrieval import cosine_retrieval_ranks as cosine_retrieval_ranks
    from medclip_dcl.metrics.retrieval import retrieval_metrics as retrieval_metrics
    from medclip_dcl.metrics.retrieval import retrieval_ranks as retrieval_ranks

__all__, __getattr__, __dir__ = public(__name__, __file__)
