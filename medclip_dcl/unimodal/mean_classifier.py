"""The mean classifier, whose weights are the class means, its average over tasks, and the spread of classes (CURL).

Its scores are inner products, not distances: a class mean of a larger norm attracts more.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.unimodal.curl import margin_loss

Embeddings = Float[Tensor, "case dim"]
Labels = Int[Tensor, "case"]
Means = Float[Tensor, "class dim"]

_MAX_TASKS = 1000
"""Of a class; the margins of all tasks are in memory at once. Of ten classes there are at most 126 with one of them."""


class MeanClassifierMetrics(NamedTuple):
    """Metrics of one task, or their average over tasks."""

    loss: float
    accuracy: float


def class_means(embeddings: Embeddings, labels: Labels, n_classes: int | None = None) -> Means:
    """Rows W of the mean classifier: the mean embedding of each class (Saunshi et al., ICML 2019, definition 2.1).

    NaN for a class without a case; without `n_classes` there are as many as the largest label plus one.
    """
    counts = torch.bincount(labels, minlength=n_classes or 0)
    sums = embeddings.new_zeros((len(counts), embeddings.shape[1]), dtype=torch.float64)
    sums.index_add_(0, labels, embeddings.double())
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    return (sums / counts[:, None]).to(dtype)


def average_k_metrics(
    embeddings: Embeddings, labels: Labels, means: Means, k: int, *, loss: str = "logistic"
) -> MeanClassifierMetrics:
    """Loss and accuracy of the mean classifier, averaged over tasks of k + 1 distinct classes.

    The average supervised loss (Saunshi et al., ICML 2019, definition 2.2) of equally likely classes: the mean within a
    class first, then over classes. CURL's tables call it avg-(k + 1); with k rivals of k + 1 classes it is the task of
    all classes. A case whose class ties with t others for the highest score counts 1/(1 + t) as correct. Of more than
    1,000 tasks of a class as many are drawn, always the same.

    Args:
        embeddings: f(x) of the labelled cases.
        labels: class of each case, from 0.
        means: of :func:`class_means`, from these cases or from others.
        k: rivals of the right class, at least 1; k is also the number of negatives in CURL's unsupervised loss.
        loss: "hinge" or "logistic".

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> average_k_metrics(points, torch.tensor([0, 1]), points, 1, loss="hinge")
        MeanClassifierMetrics(loss=0.0, accuracy=1.0)
    """
    if not (embeddings.isfinite().all() and means.isfinite().all()):
        raise ValueError("embeddings and means: expected finite numbers, found NaN or infinity")
    return average_k_of_scores(embeddings.double() @ means.double().T, labels, k, loss=loss)


def average_k_of_scores(
    scores: Float[Tensor, "case class"], labels: Labels, k: int, *, loss: str = "logistic"
) -> MeanClassifierMetrics:
    """:func:`average_k_metrics` of any classifier's scores, of which a task compares those of its classes."""
    n_classes = scores.shape[1]
    check_number_of_tasks(n_classes, k)
    losses, accuracies = [], []
    for c in range(n_classes):
        others = torch.tensor([other for other in range(n_classes) if other != c])
        if math.comb(len(others), k) <= _MAX_TASKS:
            rivals = torch.tensor([*combinations(others.tolist(), k)])  # torch's would make all n^k tuples
        else:
            generator = torch.Generator().manual_seed(c)
            rivals = others[torch.rand(_MAX_TASKS, len(others), generator=generator).argsort(1)[:, :k]]
        of_class = scores[labels == c].double()
        leads = (of_class[:, c, None] - of_class)[:, rivals.to(scores.device)]
        losses.append(margin_loss(leads, loss).mean())
        accuracies.append(((leads >= 0).all(2) / (1 + (leads == 0).sum(2)).double()).mean())
    return MeanClassifierMetrics(torch.stack(losses).mean().item(), torch.stack(accuracies).mean().item())


def intraclass_deviation(
    embeddings: Embeddings, labels: Labels, class_probability: Float[Tensor, "class"] | None = None
) -> float:
    """CURL's s(f): the classes' standard deviation in their widest direction, times the norm of their embeddings.

    Saunshi et al., ICML 2019, eq. 9 (reconstructed: the text at hand has lost the formula; docs/theory.md)::

        s(f) = E_{c ~ nu} [ sqrt( ||Sigma(f, c)||_2 ) E_{x ~ c} ||f(x)|| ],   nu(c) proportional to rho(c)^2

    It bounds what class collisions add to the contrastive loss, and grows with the square of the norm: compare encoders
    on embeddings of one length. A class of one case adds 0; NaN if a class has none.

    Args:
        embeddings: f(x) of the labelled cases.
        labels: class of each case, from 0.
        class_probability: rho; None: the classes' shares of the cases.

    Example:
        >>> intraclass_deviation(torch.tensor([[3.0, 4.0], [3.0, -4.0]]), torch.tensor([0, 0]))
        20.0
    """
    rho = torch.bincount(labels) if class_probability is None else class_probability
    deviations = []
    for c in range(len(rho)):
        of_class = embeddings[labels == c].double()
        widest = torch.linalg.matrix_norm(of_class - of_class.mean(0), ord=2) / math.sqrt(len(of_class))
        deviations.append(widest * of_class.norm(dim=1).mean())
    nu = rho.double() ** 2
    return (torch.stack(deviations) @ (nu / nu.sum())).item()


def check_number_of_tasks(n_classes: int, k: int) -> None:
    """Refuse a k of which there is no task of k + 1 classes."""
    if not 1 <= k < n_classes:
        raise UserError(f"average_k: expected 1 to {n_classes - 1} rivals for {n_classes} classes, found {k}")
