"""What the model learned, in numbers: pure functions on tensors, and torchmetrics classes above them."""

from medclip_dcl.metrics.classification import (
    BinaryAUC,
    ZeroShotMetrics,
    binary_auc,
    mean_over_findings,
    zero_shot_metrics,
)
from medclip_dcl.metrics.grounding import (
    ContrastToNoiseRatio,
    MeanIoU,
    box_bounds,
    box_mask,
    contrast_to_noise_ratio,
    default_thresholds,
    mean_iou,
)
from medclip_dcl.metrics.retrieval import (
    RetrievalMetrics,
    retrieval_metrics,
    retrieval_ranks,
    summarise_ranks,
)

__all__ = [
    "BinaryAUC",
    "ContrastToNoiseRatio",
    "MeanIoU",
    "RetrievalMetrics",
    "ZeroShotMetrics",
    "binary_auc",
    "box_bounds",
    "box_mask",
    "contrast_to_noise_ratio",
    "default_thresholds",
    "mean_iou",
    "mean_over_findings",
    "retrieval_metrics",
    "retrieval_ranks",
    "summarise_ranks",
    "zero_shot_metrics",
]
