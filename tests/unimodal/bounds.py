"""Bounds on the difference of the debiased loss from its asymptotic value: SSD, proposition 2.1, and DCL, theorem 3.

Both hold for gamma = 1, logits in [-1, 1], and are loose: SSD's needs thousands of negatives to say anything.
docs/theory.md and the tests compare losses with them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ErrorBound(NamedTuple):
    """The terms of a bound on |L - Lbar|, in nats: from finitely many samples, and from an eta that is not rho."""

    negatives: float
    positives: float
    misspecification: float

    @property
    def total(self) -> float:
        return self.negatives + self.positives + self.misspecification


def ssd_error_bound(
    rho: Tensor, eta: float | Tensor, *, n_negatives: int, n_positives: int, weights: Tensor
) -> ErrorBound:
    """Proposition 2.1 (Wang et al., MLHC 2023, eq. 9 and 10).

    |L - Lbar| <= 3 e^2 sqrt(pi/2N) E[ 1/(1-rho) ]  +  3 e^2 sqrt(pi/2M) E[ rho/(1-rho) ]
                  +  3 e^2 E| 1/(1-eta) - 1/(1-rho) |

    L is the expected loss (floor included); Lbar has the true negatives' expectation in place of g. `weights` are those
    of the anchors in the expectations.
    """
    rho, eta = rho.double(), torch.as_tensor(eta, dtype=torch.float64)
    weights = weights.double() / weights.double().sum()
    constant = 3 * math.e**2
    return ErrorBound(
        negatives=constant * math.sqrt(math.pi / (2 * n_negatives)) * float(weights @ (1 / (1 - rho))),
        positives=constant * math.sqrt(math.pi / (2 * n_positives)) * float(weights @ (rho / (1 - rho))),
        misspecification=constant * float(weights @ (1 / (1 - eta) - 1 / (1 - rho)).abs()),
    )


def dcl_error_bound(tau_plus: float, *, n_negatives: int, n_positives: int) -> ErrorBound:
    """Theorem 3 (Chuang et al., NeurIPS 2020, eq. 9), for temperature 1 and classes of one known probability.

    |L - Lbar| <= e^(3/2)/(1-tau+) sqrt(pi/2N)  +  e^(3/2) tau+/(1-tau+) sqrt(pi/2M)
    """
    constant = math.exp(1.5) / (1 - tau_plus)
    return ErrorBound(
        negatives=constant * math.sqrt(math.pi / (2 * n_negatives)),
        positives=constant * tau_plus * math.sqrt(math.pi / (2 * n_positives)),
        misspecification=0.0,
    )
