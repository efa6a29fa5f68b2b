"""The error bounds by quadrature and by hand; docs/theory.md has losses within them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

from tests.unimodal.bounds import dcl_error_bound, ssd_error_bound


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
