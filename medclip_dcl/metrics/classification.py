"""Classification: AUC, average precision and accuracy, with a named policy for findings that have too few cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


class ZeroShotMetrics(NamedTuple):
    """One finding, or the average over findings. None: too few cases to say."""

    auc: float | None
    acc: float | None
    positives: int
    negatives: int


def binary_auc(
    scores: Float[Tensor, "case"], labels: Bool[Tensor, "case"] | Int[Tensor, "case"]
) -> Float[Tensor, ""]:
    """Area under the ROC curve: the chance that a positive case scores above a negative one; a tie counts half.

    Computed from mean ranks (Mann-Whitney U), exact for scores of any range: torchmetrics' ``binary_auroc`` passes
    scores outside [0, 1] through a float32 sigmoid, which ties the large ones.

    Args:
        scores: higher means more likely positive.
        labels: 1 or True for a positive case, 0 or False for a negative one.

    Raises:
        ValueError: a NaN score, a label that is neither 0 nor 1, a class without any case.
    """
    _check_cases(scores, labels)
    positive = labels.bool()
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if n_positive == 0 or n_negative == 0:
        raise ValueError(
            f"binary_auc needs cases of both classes: found {n_positive} positive and {n_negative} negative"
        )
    _, group, group_size = scores.unique(return_inverse=True, return_counts=True)
    mean_rank = group_size.cumsum(0) - (group_size - 1).double() / 2
    rank_sum = mean_rank[group][positive].sum()
    u = rank_sum - n_positive * (n_positive + 1) / 2
    return (u / (n_positive * n_negative)).float()


def zero_shot_metrics(
    score_positive: Float[Tensor, "case"],
    score_negative: Float[Tensor, "case"],
    labels: Bool[Tensor, "case"] | Int[Tensor, "case"],
    min_cases: int = 5,
) -> ZeroShotMetrics:
    """AUC and accuracy of one finding from the scores of its two prompts (SSD, section 3.2).

    The predicted label is that of the prompt with the higher score (negative where they tie); the AUC is that of
    ``score_positive - score_negative`` (choice, not from the paper).

    Args:
        score_positive: image-sentence score of the positive prompt.
        score_negative: of the negative prompt.
        labels: 1 where the finding is present, 0 where it is absent.
        min_cases: positive cases and negative cases that a number needs (choice, not from the paper); with fewer of
            either, AUC and accuracy are None, since they would say more about the few cases than about the model.

    Raises:
        ValueError: a NaN score, a label that is neither 0 nor 1, ``min_cases`` below 1.
    """
    if min_cases < 1:
        raise ValueError(
            f"min_cases must be at least 1: found {min_cases}; an AUC needs a case of each class"
        )
    difference = score_positive.double() - score_negative.double()
    _check_cases(difference, labels)
    positive = labels.bool()
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if min(n_positive, n_negative) < min_cases:
        return ZeroShotMetrics(None, None, n_positive, n_negative)
    acc = float(((difference > 0) == positive).double().mean())
    return ZeroShotMetrics(float(binary_auc(difference, labels)), acc, n_positive, n_negative)


class FindingMetrics(NamedTuple):
    """One finding by its logits. None: too few cases to say."""

    auc: float | None
    average_precision: float | None
    acc: float | None
    positives: int
    negatives: int


def average_precision(
    scores: Float[Tensor, "case"], labels: Bool[Tensor, "case"] | Int[Tensor, "case"]
) -> Float[Tensor, ""]:
    """Mean precision at the scores of the positive cases: sum of (recall - recall before) * precision.

    Over all thresholds, without interpolation; tied cases are one threshold. Without skill it is the share of positive
    cases, so that it says nothing beside an AUC of other cases.

    Args:
        scores: higher means more likely positive.
        labels: 1 or True for a positive case, 0 or False for a negative one.

    Raises:
        ValueError: a NaN score, a label that is neither 0 nor 1, no positive case.
    """
    _check_cases(scores, labels)
    n_positive = int(labels.bool().sum())
    if n_positive == 0:
        raise ValueError(f"average_precision needs a positive case: found {len(labels)} negative ones")
    thresholds, group = scores.unique(return_inverse=True)
    positives, cases = (torch.zeros(2, len(thresholds), dtype=torch.float64, device=scores.device)).unbind()
    positives.index_add_(0, group, labels.double())
    cases.index_add_(0, group, torch.ones_like(labels, dtype=torch.float64))
    precision = positives.flip(0).cumsum(0) / cases.flip(0).cumsum(0)
    return ((positives.flip(0) * precision).sum() / n_positive).float()


def finding_metrics(
    logits: Float[Tensor, "case"],
    labels: Bool[Tensor, "case"] | Int[Tensor, "case"],
    min_cases: int = 5,
) -> FindingMetrics:
    """AUC, average precision and accuracy of one finding by its logits.

    Args:
        logits: above 0 where the finding is more likely than not; that is the predicted label.
        labels: 1 where the finding is present, 0 where it is absent.
        min_cases: as in :func:`zero_shot_metrics`.

    Raises:
        ValueError: as there.
    """
    found = zero_shot_metrics(logits, torch.zeros_like(logits), labels, min_cases)
    precision = None if found.auc is None else float(average_precision(logits, labels))
    return FindingMetrics(found.auc, precision, found.acc, found.positives, found.negatives)


def mean_over_findings(metrics: Iterable[ZeroShotMetrics]) -> ZeroShotMetrics:
    """Average AUC and accuracy over the findings that have enough cases, None where none has; cases are summed."""
    metrics = list(metrics)
    evaluable = [(m.auc, m.acc) for m in metrics if m.auc is not None and m.acc is not None]
    auc = sum(auc for auc, _ in evaluable) / len(evaluable) if evaluable else None
    acc = sum(acc for _, acc in evaluable) / len(evaluable) if evaluable else None
    return ZeroShotMetrics(auc, acc, sum(m.positives for m in metrics), sum(m.negatives for m in metrics))


class BinaryAUC(Metric):
    """AUC over cases that arrive in batches, of all processes; NaN where a class has fewer than ``min_cases`` cases."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self, min_cases: int = 5) -> None:
        super().__init__()
        self.min_cases = min_cases
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(
        self, scores: Float[Tensor, "case"], labels: Bool[Tensor, "case"] | Int[Tensor, "case"]
    ) -> None:
        """Add cases; ``labels`` as in :func:`binary_auc`."""
        _check_cases(scores, labels)
        self.scores.append(scores)
        self.labels.append(labels.long())

    def compute(self) -> Float[Tensor, ""]:
        """The AUC of all cases so far."""
        if isinstance(self.scores, list) and not self.scores:
            return torch.tensor(torch.nan)
        scores, labels = dim_zero_cat(self.scores), dim_zero_cat(self.labels)
        auc = zero_shot_metrics(scores, torch.zeros_like(scores), labels, self.min_cases).auc
        return torch.tensor(torch.nan if auc is None else auc, device=scores.device)


def _check_cases(scores: Tensor, labels: Tensor) -> None:
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"scores and labels must be (case,): found {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    n_nan = int(scores.isnan().sum())
    if n_nan:
        raise ValueError(f"scores: {n_nan} of {len(scores)} are NaN; an embedding is NaN")
    if labels.dtype != torch.bool and not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"labels must be 0 or 1: found {sorted(set(labels.tolist()))}; leave uncertain cases out"
        )
