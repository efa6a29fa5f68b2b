"""What the model learned, in numbers: pure functions on tensors, and torchmetrics classes above them."""

from medclip_dcl.metrics.classification import (
    BinaryAUC,
    ZeroShotMetrics,
    binary_auc,
    mean_over_findings,
    zero_shot_metrics,
)
from medclip_dcl.metrics.grounding import (
    Agreement,
    BoxedHeatMap,
    ContrastToNoiseRatio,
    MeanIoU,
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
    sample_tasks,
)
from medclip_dcl.metrics.retrieval import (
    RetrievalMetrics,
    cosine_retrieval_ranks,
    retrieval_metrics,
    retrieval_ranks,
    summarise_ranks,
)

__all__ = [
    "Agreement",
    "BinaryAUC",
    "BoxedHeatMap",
    "ContrastToNoiseRatio",
    "MeanClassifierMetrics",
    "MeanIoU",
    "Rectangle",
    "RetrievalMetrics",
    "ZeroShotMetrics",
    "average_k_metrics",
    "binary_auc",
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
    "mean_over_findings",
    "retrieval_metrics",
    "retrieval_ranks",
    "sample_tasks",
    "summarise_ranks",
    "zero_shot_metrics",
]
