"""Facts about AUC and accuracy, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, roc_auc_score

from medclip_dcl.metrics import (
    BinaryAUC,
    ZeroShotMetrics,
    average_precision,
    binary_auc,
    finding_metrics,
    mean_over_findings,
    zero_shot_metrics,
)


def random_labels(n):
    labels = torch.randint(2, (n,))
    labels[:2] = torch.tensor([0, 1])
    return labels


@pytest.mark.parametrize("n", [2, 3, 17, 501])
@pytest.mark.parametrize("levels", [2, 5, None])
def test_auc_is_scikit_learns_with_ties_too(n, levels):
    labels = random_labels(n)
    scores = 30 * torch.randn(n) if levels is None else torch.randint(-levels, levels, (n,)).float()
    expected = roc_auc_score(labels.numpy(), scores.numpy())
    assert binary_auc(scores, labels).item() == pytest.approx(expected, abs=1e-6)
    assert binary_auc(scores, labels.bool()).item() == pytest.approx(expected, abs=1e-6)


def test_auc_tells_large_scores_apart():
    """A sigmoid in float32 would tie them all at 1."""
    assert binary_auc(torch.tensor([40.0, 60.0, 50.0]), torch.tensor([0, 1, 0])).item() == 1.0


def test_auc_of_a_constant_score_is_chance():
    assert binary_auc(torch.full((7,), 0.1), random_labels(7)).item() == 0.5


def test_zero_shot_metrics_are_those_of_the_score_difference():
    labels = random_labels(83)
    positive, negative = torch.randn(83) + 5, torch.randn(83) + 5
    found = zero_shot_metrics(positive, negative, labels)
    difference = (positive - negative).numpy()
    assert found.auc == pytest.approx(roc_auc_score(labels.numpy(), difference), abs=1e-6)
    assert found.acc == pytest.approx(accuracy_score(labels.numpy(), difference > 0))
    assert (found.positives, found.negatives) == (int(labels.sum()), int((1 - labels).sum()))


def test_tied_prompts_predict_absence():
    labels = torch.tensor([0, 0, 1])
    assert zero_shot_metrics(torch.ones(3), torch.ones(3), labels, min_cases=1).acc == pytest.approx(2 / 3)


@pytest.mark.parametrize(("positives", "negatives"), [(4, 50), (50, 4), (0, 0), (0, 9), (4, 4)])
def test_too_few_cases_give_no_number(positives, negatives):
    labels = torch.tensor([1] * positives + [0] * negatives, dtype=torch.int64)
    scores = torch.randn(len(labels))
    assert zero_shot_metrics(scores, -scores, labels) == ZeroShotMetrics(None, None, positives, negatives)


def test_average_is_over_the_findings_with_enough_cases():
    average = mean_over_findings(
        [
            ZeroShotMetrics(0.5, 0.75, 10, 20),
            ZeroShotMetrics(None, None, 1, 40),
            ZeroShotMetrics(1.0, 0.25, 5, 5),
        ]
    )
    assert average == ZeroShotMetrics(0.75, 0.5, 16, 65)


def test_average_of_nothing_is_no_number():
    assert mean_over_findings([ZeroShotMetrics(None, None, 1, 40)]) == ZeroShotMetrics(None, None, 1, 40)
    assert mean_over_findings([]) == ZeroShotMetrics(None, None, 0, 0)


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, torch.nan], [0, 1], "scores: 1 of 2 are NaN; an embedding is NaN"),
        ([0.1, 0.2, 0.3], [0, 1, -1], "labels must be 0 or 1: found [-1, 0, 1]; leave uncertain cases out"),
        ([0.1, 0.2], [1, 1], "binary_auc needs cases of both classes: found 2 positive and 0 negative"),
    ],
)
def test_bad_input_is_named(scores, labels, message):
    with pytest.raises(ValueError) as error:
        binary_auc(torch.tensor(scores), torch.tensor(labels))
    assert str(error.value) == message


def test_min_cases_below_one_is_refused():
    with pytest.raises(ValueError, match="min_cases must be at least 1: found 0"):
        zero_shot_metrics(torch.ones(2), torch.ones(2), torch.tensor([0, 1]), min_cases=0)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_metric_class_does_not_depend_on_the_batches():
    scores, labels = torch.randn(57), random_labels(57)
    metric = BinaryAUC()
    assert metric.compute().isnan()
    for part in torch.arange(57).split(8):
        metric.update(scores[part], labels[part])
    assert metric.compute().item() == pytest.approx(binary_auc(scores, labels).item(), abs=1e-6)
    few = BinaryAUC(min_cases=40)
    few.update(scores, labels)
    assert few.compute().isnan()


@pytest.mark.parametrize("n_cases", [2, 7, 60, 501])
@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_average_precision_is_scikit_learns_with_ties(n_cases, decimals):
    generator = np.random.default_rng(n_cases)
    labels = generator.random(n_cases) < 0.3
    labels[0] = True
    scores = np.round(generator.normal(size=n_cases) * 20 + labels, decimals)
    expected = average_precision_score(labels, scores)
    found = average_precision(torch.tensor(scores), torch.tensor(labels))
    assert found.item() == pytest.approx(expected, abs=1e-6)
    assert average_precision(torch.tensor(scores), torch.tensor(labels).long()).item() == found.item()


def test_average_precision_by_hand():
    # Above 3: one of one; above 1: two of four (two tied); the third positive is the last of five.
    scores = torch.tensor([3.0, 1.0, 1.0, 1.0, -2.0])
    labels = torch.tensor([1, 0, 1, 0, 1])
    assert average_precision(scores, labels).item() == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)
    with pytest.raises(ValueError, match="needs a positive case: found 3 negative ones"):
        average_precision(torch.zeros(3), torch.zeros(3, dtype=torch.int64))


def test_metrics_of_a_finding_by_its_logits():
    logits, labels = torch.tensor([2.0, -1.0, 0.0, 0.5, -3.0]), torch.tensor([1, 1, 1, 0, 0])
    found = finding_metrics(logits, labels, min_cases=2)
    assert found.auc == pytest.approx(4 / 6) and found.acc == pytest.approx(2 / 5)
    assert found.average_precision == pytest.approx(average_precision_score(labels, logits))
    assert finding_metrics(logits, labels, min_cases=3) == (None, None, None, 3, 2)
