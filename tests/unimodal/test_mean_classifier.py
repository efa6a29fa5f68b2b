"""The mean classifier against scikit-learn and loops, and its average over tasks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestCentroid

from medclip_dcl.unimodal.mean_classifier import (
    average_k_metrics,
    average_k_of_scores,
    class_means,
    intraclass_deviation,
)

LOSSES = ["hinge", "logistic"]


def labelled(counts, dim, spread=1.0):
    """Gaussian clusters with `counts` cases, in random order."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels))]
    centres = torch.randn(len(counts), dim, dtype=torch.float64)
    return centres[labels] + spread * torch.randn(len(labels), dim, dtype=torch.float64), labels


def loop_average(embeddings, labels, means, k, loss):
    """Definition 2.2 with equally likely classes, task by task and case by case."""
    scores = (embeddings @ means.T).tolist()
    tasks = list(itertools.combinations(range(len(means)), k + 1))
    total_loss = total_accuracy = 0.0
    for task in tasks:
        for c in task:
            cases = [row for row, label in zip(scores, labels.tolist(), strict=True) if label == c]
            for row in cases:
                margins = [row[c] - row[other] for other in task if other != c]
                if loss == "hinge":
                    value = max(0.0, 1 + max(-v for v in margins))
                else:
                    value = math.log2(1 + sum(math.exp(-v) for v in margins))
                weight = 1 / len(tasks) / len(task) / len(cases)
                total_loss += weight * value
                total_accuracy += weight * (min(margins) > 0)
    return total_loss, total_accuracy


def test_class_means_are_scikit_learns_centroids():
    embeddings, labels = labelled([3, 1, 7, 5], 6)
    expected = NearestCentroid().fit(embeddings.numpy(), labels.numpy()).centroids_
    torch.testing.assert_close(class_means(embeddings, labels), torch.from_numpy(expected))
    assert class_means(embeddings.half(), labels).dtype == torch.float32


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_average_over_all_tasks_equals_the_loop(loss, k):
    embeddings, labels = labelled([4, 3, 6, 2, 1, 5], 3)
    means = class_means(embeddings, labels)
    found = average_k_metrics(embeddings, labels, means, k, loss=loss)
    assert found == pytest.approx(loop_average(embeddings, labels, means, k, loss), rel=1e-6)


def test_a_tie_counts_half():
    found = average_k_metrics(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]), torch.ones(2, 3), 1, loss="hinge")
    assert found == (1.0, 0.5)


def test_average_over_drawn_tasks_is_near_all_of_them():
    """Of 3,876 tasks of a class 1,000 are drawn: the chance that the rivals of a task are among the worse classes."""
    scores, labels = torch.randn(200, 20), torch.arange(200) % 20
    worse = (scores < scores.gather(1, labels[:, None])).sum(1).tolist()
    expected = np.mean([math.comb(count, 4) / math.comb(19, 4) for count in worse])
    found = average_k_of_scores(scores, labels, 4)
    assert found.accuracy == pytest.approx(expected, abs=0.01)
    assert found == average_k_of_scores(scores, labels, 4)
    # Three classes are worse than each: four distinct rivals never are.
    scores = torch.ones(20, 20) - torch.eye(20)
    for c in range(20):
        scores[c, [(c + step) % 20 for step in (1, 2, 3)]] = -1
    assert average_k_of_scores(scores, torch.arange(20), 4).accuracy == 0
    assert average_k_of_scores(scores, torch.arange(20), 3).accuracy == pytest.approx(1 / math.comb(19, 3))


@pytest.mark.parametrize("rho", [None, torch.tensor([0.2, 0.5, 0.1, 0.2])])
def test_intraclass_deviation_equals_numpys_covariances(rho):
    embeddings, labels = labelled([5, 1, 9, 3], 3)
    nu = np.array([5, 1, 9, 3]) ** 2.0 if rho is None else rho.double().numpy() ** 2
    expected = 0.0
    for c in range(4):
        of_class = embeddings[labels == c].numpy()
        variance = np.linalg.eigvalsh(np.cov(of_class.T, bias=True))[-1] if len(of_class) > 1 else 0.0
        expected += nu[c] / nu.sum() * np.sqrt(variance) * np.linalg.norm(of_class, axis=1).mean()
    assert intraclass_deviation(embeddings, labels, rho) == pytest.approx(expected, rel=1e-6)
    assert intraclass_deviation(2 * embeddings, labels, rho) == pytest.approx(4 * expected, rel=1e-6)
