"""Synthetic classes of finitely many points, on which docs/theory.md and tests compute the papers' theorems.

Every expectation over the points is a sum. Samples are counts of points, the `weights` of `contrastive_loss`: a million
negatives cost no more than ten, and the exact chances as weights are the limit of infinitely many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize, softplus

from medclip_dcl.objectives.contrastive import contrastive_loss
from medclip_dcl.unimodal.bounds import ErrorBound, ssd_error_bound
from medclip_dcl.unimodal.curl import block_loss, k_negative_loss
from medclip_dcl.unimodal.mean_classifier import average_k_metrics, class_means


@dataclass(frozen=True)
class SyntheticClasses:
    """Classes of a few equally likely points each; logits are inner products, and gamma is 1."""

    points: Float[Tensor, "class point dim"]
    """Embeddings f(x), float64."""
    class_probability: Float[Tensor, "class"]
    """rho(c), float64."""

    @classmethod
    def on_sphere(
        cls,
        rho: Sequence[float] = (0.5, 0.3, 0.15, 0.05),
        spread: float = 0.25,
        n_points: int = 3,
        seed: int = 0,
        n_opposite: int = 0,
    ) -> SyntheticClasses:
        """At most 4 classes around the corners of a tetrahedron, on the unit sphere: all logits lie in [-1, 1].

        Args:
            rho: class probabilities.
            spread: standard deviation of the points around a corner, before they are normalised.
            n_points: points of a class.
            seed: of the points.
            n_opposite: points of each class that lie opposite to its corner.
        """
        generator = torch.Generator().manual_seed(seed)
        corners = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
        noise = torch.randn(len(rho), n_points, 3, dtype=torch.float64, generator=generator)
        points = normalize(normalize(corners[: len(rho), None], dim=-1) + spread * noise, dim=-1)
        points[:, :n_opposite] *= -1
        return cls(points, torch.tensor(rho, dtype=torch.float64))

    @property
    def n_points(self) -> int:
        return self.points.shape[1]

    @cached_property
    def cases(self) -> Float[Tensor, "case dim"]:
        """All points, class by class."""
        return self.points.flatten(0, 1)

    @cached_property
    def labels(self) -> Int[Tensor, "case"]:
        """Class of each point."""
        return torch.arange(len(self.points)).repeat_interleave(self.n_points)

    @cached_property
    def rho(self) -> Float[Tensor, "case"]:
        """Probability of each point's class, the true eta."""
        return self.class_probability[self.labels]

    @cached_property
    def chance(self) -> Float[Tensor, "case"]:
        """Probability of each point."""
        return self.rho / self.n_points

    @cached_property
    def logits(self) -> Float[Tensor, "case case"]:
        return self.cases @ self.cases.T

    @cached_property
    def is_same_class(self) -> Bool[Tensor, "case case"]:
        return self.labels == self.labels[:, None]

    # Contrastive losses (SSD, DCL).

    @property
    def mean_candidate(self) -> Float[Tensor, "case"]:
        """E exp s(x, x') for each point x, x' from the marginal."""
        return self.logits.exp() @ self.chance

    @property
    def mean_positive(self) -> Float[Tensor, "case"]:
        """E exp s(x, x+) for each point x, x+ from its class."""
        return (self.logits.exp() * self.is_same_class).sum(1) / self.n_points

    @property
    def mean_negative(self) -> Float[Tensor, "case"]:
        """E exp s(x, x-) for each point x, x- from the other classes: by their points, not by subtraction."""
        chance = self.chance * ~self.is_same_class
        return (self.logits.exp() * chance).sum(1) / chance.sum(1)

    def unbiased_loss(self, n: int) -> float:
        """Lbar (SSD, eq. 11): the unbiased loss (DCL, eq. 2) with Q = n and infinitely many true negatives."""
        return self._population_loss(self.mean_negative, n)

    def debiased_loss(self, eta: float | Float[Tensor, "case"], n: int) -> float:
        """The debiased loss with infinitely many samples, for an eta that need not be rho (DCL, eq. 6)."""
        g = (self.mean_candidate - eta * self.mean_positive) / (1 - eta)
        return self._population_loss(g.clamp(min=math.exp(-1)), n)

    def _population_loss(self, g: Tensor, n: int) -> float:
        """E -log[ exp s+ / (exp s+ + n g(x)) ] over x and x+."""
        odds = n * g[:, None] / self.logits.exp()
        of_case = (torch.log1p(odds) * self.is_same_class).sum(1) / self.n_points
        return (of_case @ self.chance).item()

    def sample_losses(
        self,
        eta: float | Float[Tensor, "case"],
        n: int,
        n_drawn: int | None = None,
        m_drawn: int | None = None,
        repeats: int = 1,
        seed: int = 0,
        true_negatives: bool = False,
    ) -> tuple[Float[Tensor, "repeat case"], Float[Tensor, "repeat case"]]:
        """`contrastive_loss` of each point with samples, and its |difference| from the unbiased loss.

        Args:
            eta: class probability, one number or one for each point.
            n: N of the loss.
            n_drawn: negatives drawn for each anchor; None: infinitely many.
            m_drawn: positives drawn for each anchor; None: infinitely many.
            repeats: independent samples of everything.
            seed: of the samples.
            true_negatives: True draws negatives from the other classes (with eta = 0: the unbiased loss).

        Returns:
            Losses and differences, the latter from the unbiased loss of the same positives.
        """
        generator = torch.Generator().manual_seed(seed)
        chance = (self.chance * ~self.is_same_class) if true_negatives else self.chance.expand_as(self.logits)
        chance = chance / chance.sum(1, keepdim=True)
        chance, logits = chance.repeat(repeats, 1), self.logits.repeat(repeats, 1)
        if n_drawn is None:
            weights = n * chance
        else:
            weights = n / n_drawn * multinomial_counts(chance, n_drawn, generator)
        if m_drawn is None:
            columns = self.is_same_class.nonzero()[:, 1].view(-1, self.n_points).repeat(repeats, 1)
        else:
            first = (self.labels * self.n_points).repeat(repeats)[:, None]
            columns = first + torch.randint(self.n_points, (len(logits), m_drawn), generator=generator)
        positives = logits.gather(1, columns)
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

    def error_bound(self, eta: float | Float[Tensor, "case"], n: int, m: int) -> ErrorBound:
        """SSD's proposition 2.1 for these classes, n negatives and m positives."""
        return ssd_error_bound(self.rho, eta, n_negatives=n, n_positives=m, weights=self.chance)

    # Losses of inner products (CURL).

    @property
    def collision(self) -> float:
        """tau: the chance that two independent draws are of one class."""
        return (self.class_probability**2).sum().item()

    def unsupervised_loss(self, k: int = 1, loss: str = "logistic") -> float:
        """L_un (CURL, definition 2.3): x and x+ from one class, k negatives from the marginal, all combinations."""
        chosen = self._tuples(2 + k)
        total = 0.0
        for c, *rivals in itertools.product(range(len(self.points)), repeat=1 + k):
            negatives = torch.stack([self.points[r, chosen[:, 2 + i]] for i, r in enumerate(rivals)], dim=1)
            x, positive = self.points[c, chosen[:, 0]], self.points[c, chosen[:, 1]]
            chance = self.class_probability[[c, *rivals]].prod()
            total += (chance * k_negative_loss(x, positive, negatives, loss=loss)).item()
        return total

    def block_loss(self, size: int, loss: str = "logistic") -> float:
        """The same with one negative, and means of blocks of points for x+ and x- (CURL, eq. 12)."""
        chosen = self._tuples(1 + 2 * size)
        total = 0.0
        for c, r in itertools.product(range(len(self.points)), repeat=2):
            x, positives = self.points[c, chosen[:, 0]], self.points[c, chosen[:, 1 : 1 + size]]
            negatives = self.points[r, chosen[:, 1 + size :]][:, None]
            chance = self.class_probability[c] * self.class_probability[r]
            total += (chance * block_loss(x, positives, negatives, loss=loss)).item()
        return total

    def supervised_loss(self, k: int = 1, loss: str = "logistic") -> float:
        """L_sup of the mean classifier, averaged over tasks of k + 1 classes (CURL, definition 2.2)."""
        means = class_means(self.cases, self.labels)
        rho = self.class_probability
        return average_k_metrics(self.cases, self.labels, means, k, class_distribution=rho, loss=loss).loss

    def _tuples(self, size: int) -> Int[Tensor, "tuple position"]:
        """All choices of so many points, one after the other, with repetition."""
        return torch.cartesian_prod(*[torch.arange(self.n_points)] * size).view(-1, size)


def multinomial_counts(
    chance: Float[Tensor, "row column"], n: int, generator: torch.Generator
) -> Float[Tensor, "row column"]:
    """Rows of counts that sum to n: binomial draws of what is left, column by column."""
    left, mass = torch.full((len(chance),), float(n), dtype=torch.float64), torch.ones(len(chance)).double()
    counts = torch.zeros_like(chance)
    for j in range(chance.shape[1]):
        share = (chance[:, j] / mass.clamp(min=1e-300)).clamp(max=1.0)
        counts[:, j] = torch.binomial(left, share, generator=generator)
        left, mass = left - counts[:, j], (mass - chance[:, j]).clamp(min=0)
    counts[:, -1] += left  # rounding of the last share
    return counts
