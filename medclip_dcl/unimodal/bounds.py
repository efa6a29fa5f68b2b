"""Bounds on the difference of the debiased loss from its asymptotic value: SSD, proposition 2.1, and DCL, theorem 3.

Both hold for gamma = 1, logits in [-1, 1], and are loose: SSD's needs thousands of negatives to say anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class ErrorBound(NamedTuple):
    """The terms of a bound on |L - Lbar|, in nats."""

    negatives: float
    """From finitely many negatives; falls with N^(-1/2)."""
    positives: float
    """From finitely many positives; falls with M^(-1/2)."""
    misspecification: float
    """From an eta that is not the class probability; stays."""

    @property
    def total(self) -> float:
        """The bound: the sum of its terms."""
        return self.negatives + self.positives + self.misspecification


def ssd_error_bound(
    rho: Float[Tensor, "anchor"],
    eta: float | Float[Tensor, ""] | Float[Tensor, "anchor"],
    *,
    n_negatives: int,
    n_positives: int,
    weights: Float[Tensor, "anchor"] | None = None,
) -> ErrorBound:
    """Bound on the error of the debiased loss with N negatives, M positives and an imperfect eta.

    Proposition 2.1 (Wang et al., MLHC 2023, eq. 9 and 10)::

        |L - Lbar| <= 3 e^2 sqrt(pi/2N) E[ 1/(1-rho) ]  +  3 e^2 sqrt(pi/2M) E[ rho/(1-rho) ]
                      +  3 e^2 E| 1/(1-eta) - 1/(1-rho) |

    where L is the expected loss (floor included) and Lbar has the true negatives' expectation in place of g. It holds
    for one x+ as in the paper and for :func:`contrastive_loss`, which averages over the M positives.

    Args:
        rho: true class probability rho(c_x) of each anchor, in [0, 1).
        eta: its estimate eta(x), in [0, 1): one number or one for each anchor.
        n_negatives: N.
        n_positives: M.
        weights: of the anchors in the expectations; default equal. With one anchor per class they are rho.

    Raises:
        ValueError: rho or eta outside [0, 1).

    Example:
        >>> rho = torch.tensor([0.5, 0.25, 0.25])
        >>> bound = ssd_error_bound(rho, rho, n_negatives=10**6, n_positives=10**4, weights=rho)
        >>> round(bound.total, 4), bound.misspecification
        (0.2315, 0.0)
    """
    rho, eta = _checked_probability(rho, "rho"), _checked_probability(eta, "eta")
    weights = torch.ones_like(rho) if weights is None else weights.detach().double().cpu()
    weights = weights / weights.sum()

    def expected(values: Tensor) -> float:
        return float(weights @ values)

    constant = 3 * math.e**2
    return ErrorBound(
        negatives=constant * math.sqrt(math.pi / (2 * n_negatives)) * expected(1 / (1 - rho)),
        positives=constant * math.sqrt(math.pi / (2 * n_positives)) * expected(rho / (1 - rho)),
        misspecification=constant * expected((1 / (1 - eta) - 1 / (1 - rho)).abs()),
    )


def dcl_error_bound(tau_plus: float, *, n_negatives: int, n_positives: int) -> ErrorBound:
    """Bound on the error of the debiased loss where all classes have the same, known probability.

    Theorem 3 (Chuang et al., NeurIPS 2020, eq. 9), for temperature 1::

        |L - Lbar| <= e^(3/2)/(1-tau+) sqrt(pi/2N)  +  e^(3/2) tau+/(1-tau+) sqrt(pi/2M)

    :func:`ssd_error_bound` at rho = eta = tau+ is 3 sqrt(e) = 4.9 times as large.

    Raises:
        ValueError: tau_plus outside [0, 1).
    """
    tau = float(_checked_probability(tau_plus, "tau_plus"))
    constant = math.exp(1.5) / (1 - tau)
    return ErrorBound(
        negatives=constant * math.sqrt(math.pi / (2 * n_negatives)),
        positives=constant * tau * math.sqrt(math.pi / (2 * n_positives)),
        misspecification=0.0,
    )


def _checked_probability(value: float | Tensor, name: str) -> Tensor:
    probability = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    if not ((probability >= 0) & (probability < 1)).all():
        raise ValueError(f"{name}: expected a number in [0, 1), found {probability.tolist()}")
    return probability
