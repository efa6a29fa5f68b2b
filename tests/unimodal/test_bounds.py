"""The error bounds by quadrature and by hand; docs/theory.md has losses within them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

from medclip_dcl.unimodal.mean_classifier import average_k_metrics, class_means
from tests.unimodal.bounds import dcl_error_bound, ssd_error_bound
from tests.unimodal.synthetic_classes import SyntheticClasses


@pytest.mark.parametrize("n, m", [(1, 1), (7, 3), (10_000, 100)])
def test_proposition_2_1_integrates_its_tail_bounds(n, m):
    # The last lines of the proof: Hoeffding's tails and an indicator, integrated over epsilon by quadrature.
    rho, eta, weights = [0.3, 0.05, 0.6], [0.2, 0.05, 0.7], [1.0, 3.0, 2.0]

    def expected(function):
        return sum(w * function(r, h) for r, h, w in zip(rho, eta, weights, strict=True)) / sum(weights)

    def tail_integral(size, factor):
        scale = 3 * math.e**2 / math.sqrt(size) / factor
        tail = quad(lambda t: 2 * math.exp(-2 * size * (t * scale * factor) ** 2 / 9 / math.e**4), 0, 9)
        return scale * tail[0]

    found = ssd_error_bound(
        torch.tensor(rho), torch.tensor(eta), n_negatives=n, n_positives=m, weights=torch.tensor(weights)
    )
    assert found.negatives == pytest.approx(expected(lambda r, h: tail_integral(n, 1 - r)), rel=1e-6)
    assert found.positives == pytest.approx(expected(lambda r, h: tail_integral(m, (1 - r) / r)), rel=1e-6)
    gap = expected(lambda r, h: 3 * math.e**2 * abs(1 / (1 - h) - 1 / (1 - r)))
    assert found.misspecification == pytest.approx(gap, rel=1e-6)
    assert found.total == pytest.approx(found.negatives + found.positives + gap, rel=1e-6)


def test_theorem_3_by_hand():
    found = dcl_error_bound(0.1, n_negatives=200, n_positives=50)
    assert found.negatives == pytest.approx(math.e**1.5 / 0.9 * 0.08862269)  # sqrt(pi / 400)
    assert found.positives == pytest.approx(math.e**1.5 / 9 * 0.17724539)  # sqrt(pi / 100)
    assert found.misspecification == 0


@pytest.mark.parametrize("spread", [0.1, 0.4, 2.0])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_unbiased_loss_bounds_the_classifiers_cross_entropy(spread, k):
    # DCL, lemma 4: equal classes, N >= K - 1. Cross entropy is the logistic loss in nats.
    classes = SyntheticClasses.on_sphere([0.25] * 4, spread)
    means = class_means(classes.cases, classes.labels)
    bits = average_k_metrics(classes.cases, classes.labels, means, k).loss
    assert bits * math.log(2) <= classes.unbiased_loss(k)
