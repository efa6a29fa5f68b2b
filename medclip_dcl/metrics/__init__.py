"""Metrics of grounding, retrieval and the mean classifier: pure functions on tensors."""

from medclip_dcl.metrics.grounding import (
    Agreement,
    BoxedHeatMap,
    Rectangle,
    box_bounds,
    box_mask,
    contrast_to_noise_ratio,
    default_thresholds,
    mean_iou,
)
from medclip_dcl.metrics.mean_classifier import (
    MeanClassifierMetrics,
    average_k_metrics,
    class_means,
    mean_classifier_metrics,
    mean_classifier_predictions,
    mean_classifier_scores,
)
from medclip_dcl.metrics.retrieval import cosine_retrieval_ranks, retrieval_metrics, retrieval_ranks

__all__ = [
    "Agreement",
    "BoxedHeatMap",
    "MeanClassifierMetrics",
    "Rectangle",
    "average_k_metrics",
    "box_bounds",
    "box_mask",
    "class_means",
    "contrast_to_noise_ratio",
    "cosine_retrieval_ranks",
    "default_thresholds",
    "mean_classifier_metrics",
    "mean_classifier_predictions",
    "mean_classifier_scores",
    "mean_iou",
    "retrieval_metrics",
    "retrieval_ranks",
]
