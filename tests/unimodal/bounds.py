"""Bounds of the papers: on the debiased loss (SSD, proposition 2.1; DCL, theorem 3), and terms of bounds that use it.

All hold for gamma = 1, logits in [-1, 1], and are loose: SSD's needs thousands of negatives to say anything.
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


class GeneralisationTerms(NamedTuple):
    """N, M and tau+ in DCL's theorem 5: two terms, and the factors of two that fall with the training points."""

    negatives: float
    positives: float
    complexity: float
    """lambda, times R_S(F) / T."""
    range: float
    """B, times sqrt(log(1/delta) / T)."""


def dcl_generalisation_terms(tau_plus: float, *, n_negatives: int, n_positives: int) -> GeneralisationTerms:
    """Theorem 5 (Chuang et al., NeurIPS 2020, eq. 13), as printed; constants are not given there."""
    inverse, ratio = 1 / (1 - tau_plus), n_negatives / n_positives
    return GeneralisationTerms(
        negatives=inverse / math.sqrt(n_negatives),
        positives=tau_plus * inverse / math.sqrt(n_positives),
        complexity=math.sqrt(inverse**2 * (1 / ratio + 1) + tau_plus**2 * (ratio + 1)),
        range=math.log(n_negatives) * (inverse + tau_plus),
    )


class LipschitzBounds(NamedTuple):
    """Bounds in SSD's lemma A.4 on derivatives of omega(z) = log(1 + Nz) and psi, the estimate relative to e^s+."""

    omega: float
    """Eq. 43."""
    b: float
    """Second term of eq. 48: the norm of the derivatives in b_m."""
    d: float
    """In eta; eq. 46, labelled as the derivative in c."""
    loss: float
    """omega times psi, eq. 48: of the loss in all its arguments."""


def ssd_lipschitz_bounds(max_eta: float, *, n: int, m: int, as_printed: bool) -> LipschitzBounds:
    """Lemma A.4 (Wang et al., MLHC 2023), as printed or as its own steps give it."""
    odds, e = 1 / (1 - max_eta), math.e
    omega = e**-2 if as_printed else e**2
    b = max_eta * odds / math.sqrt(m) * (1 if as_printed else e**2)
    d = odds**2 * (e if as_printed else e**2 - e**-2)
    psi = math.sqrt((e**2 * odds) ** 2 / n + b**2 + d**2 + 1)
    return LipschitzBounds(omega, b, d, omega * psi)
