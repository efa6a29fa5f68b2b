"""Metrics of grounding, retrieval and calibration, and means by rows: pure functions."""

from medclip_dcl.metrics.grounding import (
    Agreement,
    BoxedHeatMap,
    Rectangle,
    box_bounds,
    contrast_to_noise_ratio,
    default_thresholds,
    mean_iou,
)
from medclip_dcl.metrics.retrieval import cosine_retrieval_ranks, retrieval_metrics, retrieval_ranks

__all__ = [
    "Agreement",
    "BoxedHeatMap",
    "Rectangle",
    "box_bounds",
    "contrast_to_noise_ratio",
    "cosine_retrieval_ranks",
    "default_thresholds",
    "mean_iou",
    "retrieval_metrics",
    "retrieval_ranks",
]
