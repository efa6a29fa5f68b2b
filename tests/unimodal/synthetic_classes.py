"""Synthetic classes of finitely many points, on which docs/theory.md computes the papers' theorems.

Every expectation over the points is a sum. Samples are counts of points, the `weights` of `contrastive_loss`: a million
negatives cost no more than ten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from medclip_dcl.objectives.contrastive import contrastive_loss
from medclip_dcl.unimodal.curl import block_loss, k_negative_loss
from medclip_dcl.unimodal.mean_classifier import average_k_metrics
from tests.unimodal.bounds import ErrorBound, ssd_error_bound


@dataclass(frozen=True)
class SyntheticClasses:
    """Classes of a few equally likely points each; logits are inner products, and gamma is 1.

    `points` (class, point, dim) are embeddings f(x), `class_probability` (class,) is rho(c), both float64.
    """

    points: Tensor
    class_probability: Tensor

    @classmethod
    def on_sphere(cls, rho: Sequence[float], spread: float = 0.25) -> SyntheticClasses:
        """At most 4 classes of 3 points around the corners of a tetrahedron, on the unit sphere.

        `spread` is the standard deviation of the points around a corner, before they are normalised.
        """
        generator = torch.Generator().manual_seed(0)
        corners = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
        noise = torch.randn(len(rho), 3, 3, dtype=torch.float64, generator=generator)
        points = normalize(normalize(corners[: len(rho), None], dim=-1) + spread * noise, dim=-1)
        return cls(points, torch.tensor(rho, dtype=torch.float64))

    @property
    def n_points(self) -> int:
        return self.points.shape[1]

    @cached_property
    def cases(self) -> Tensor:
        """All points (case, dim), class by class."""
        return self.points.flatten(0, 1)

    @cached_property
    def labels(self) -> Tensor:
        """Class of each point."""
        return torch.arange(len(self.points)).repeat_interleave(self.n_points)

    @cached_property
    def rho(self) -> Tensor:
        """Probability of each point's class, the true eta."""
        return self.class_probability[self.labels]

    @cached_property
    def chance(self) -> Tensor:
        """Probability of each point."""
        return self.rho / self.n_points

    @cached_property
    def logits(self) -> Tensor:
        return self.cases @ self.cases.T

    @cached_property
    def is_same_class(self) -> Tensor:
        return self.labels == self.labels[:, None]

    # Contrastive losses (SSD, DCL).

    @property
    def mean_negative(self) -> Tensor:
        """E exp s(x, x-) for each point x, x- from the other classes."""
        chance = self.chance * ~self.is_same_class
        return (self.logits.exp() * chance).sum(1) / chance.sum(1)

    def unbiased_loss(self, n: int) -> float:
        """Lbar (SSD, eq. 11): the unbiased loss (DCL, eq. 2) with Q = n and infinitely many true negatives."""
        odds = n * self.mean_negative[:, None] / self.logits.exp()
        of_case = (torch.log1p(odds) * self.is_same_class).sum(1) / self.n_points
        return (of_case @ self.chance).item()

    def sample_losses(
        self, eta: float | Tensor, n: int, n_drawn: int, m_drawn: int, repeats: int
    ) -> tuple[Tensor, Tensor]:
        """`contrastive_loss` of each point with samples, and its |difference| from the unbiased loss (repeat, case).

        The latter is that of the same positives. `n_drawn` negatives stand for N = `n`; `m_drawn` are the positives.
        """
        generator = torch.Generator().manual_seed(0)
        logits = self.logits.repeat(repeats, 1)
        chance = self.chance.repeat(len(logits), 1).numpy()
        weights = n / n_drawn * torch.from_numpy(np.random.default_rng(0).multinomial(n_drawn, chance))
        first = (self.labels * self.n_points).repeat(repeats)[:, None]
        drawn = torch.randint(self.n_points, (len(logits), m_drawn), generator=generator)
        positives = logits.gather(1, first + drawn)
        is_positive = torch.zeros(len(logits), logits.shape[1] + positives.shape[1], dtype=torch.bool)
        is_positive[:, logits.shape[1] :] = True
        losses = contrastive_loss(
            torch.cat([logits, positives], dim=1),
            is_positive,
            class_probability=eta.repeat(repeats) if isinstance(eta, Tensor) else eta,
            floor=-1.0,
            weights=torch.cat([weights, torch.zeros_like(positives)], dim=1),
            reduction="none",
        )
        log_odds = math.log(n) + self.mean_negative.log().repeat(repeats)
        unbiased = softplus(log_odds[:, None] - positives).mean(1)
        # Every positive's loss rises in g, so the mean of their |differences| is the |difference| of their means.
        return losses.view(repeats, -1), (losses - unbiased).abs().view(repeats, -1)

    def error_bound(self, eta: float | Tensor, n: int, m: int) -> ErrorBound:
        """SSD's proposition 2.1 for these classes, n negatives and m positives."""
        return ssd_error_bound(self.rho, eta, n_negatives=n, n_positives=m, weights=self.chance)

    # Losses of inner products (CURL).

    @property
    def collision(self) -> float:
        """tau: the chance that two independent draws are of one class."""
        return (self.class_probability**2).sum().item()

    def unsupervised_loss(self, loss: str) -> float:
        """L_un (CURL, definition 2.3): x and x+ from one class, one negative from the marginal, all combinations."""
        chosen = self._tuples(3)
        total = 0.0
        for c, rival in itertools.product(range(len(self.points)), repeat=2):
            x, positive = self.points[c, chosen[:, 0]], self.points[c, chosen[:, 1]]
            negatives = self.points[rival, chosen[:, 2:]]
            chance = self.class_probability[c] * self.class_probability[rival]
            total += (chance * k_negative_loss(x, positive, negatives, loss=loss)).item()
        return total

    def block_loss(self, size: int, loss: str) -> float:
        """The same with means of blocks of points for x+ and x- (CURL, eq. 12)."""
        chosen = self._tuples(1 + 2 * size)
        total = 0.0
        for c, r in itertools.product(range(len(self.points)), repeat=2):
            x, positives = self.points[c, chosen[:, 0]], self.points[c, chosen[:, 1 : 1 + size]]
            negatives = self.points[r, chosen[:, 1 + size :]][:, None]
            chance = self.class_probability[c] * self.class_probability[r]
            total += (chance * block_loss(x, positives, negatives, loss=loss)).item()
        return total

    def supervised_loss(self, loss: str) -> float:
        """L_sup of the mean classifier, averaged over tasks of two classes (CURL, definition 2.2)."""
        means, labels = self.points.mean(1), torch.arange(2).repeat_interleave(self.n_points)
        total, chances = 0.0, 0.0
        for pair in itertools.combinations(range(len(self.points)), 2):
            chance = self.class_probability[[*pair]].prod().item()
            cases = self.points[[*pair]].flatten(0, 1)
            total += chance * average_k_metrics(cases, labels, means[[*pair]], 1, loss=loss).loss
            chances += chance
        return total / chances

    def _tuples(self, size: int) -> Tensor:
        """All choices of so many points, one after the other, with repetition."""
        return torch.cartesian_prod(*[torch.arange(self.n_points)] * size).view(-1, size)
