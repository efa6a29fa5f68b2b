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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from medclip_dcl.objectives.contrastive import contrastive_loss
from medclip_dcl.unimodal.curl import k_negative_loss, margin_loss
from medclip_dcl.unimodal.mean_classifier import average_k_metrics
from tests.unimodal.bounds import ErrorBound, ssd_error_bound


class UnsupervisedLosses(NamedTuple):
    """CURL's unsupervised loss and its parts; a negative collides if it is of the anchor's class."""

    whole: float
    """L_un."""
    apart: float
    """L_un^!=: without the colliding negatives, given that one is left."""
    colliding: float
    """L_un^=: with the colliding negatives alone, given that there is one."""
    degenerate: float
    """Loss of as many margins of 0, given that there is a colliding negative; 1 for k = 1."""
    collision: float
    """tau_k: the chance that a negative collides."""
    full_collision: float
    """tau': the chance that all do."""


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
        return (self.logits.exp() * self.negative).sum(1)

    def unbiased_loss(self, n: int) -> float:
        """Lbar (SSD, eq. 11): the unbiased loss (DCL, eq. 2) with Q = n and infinitely many true negatives."""
        odds = n * self.mean_negative[:, None] / self.logits.exp()
        of_case = (torch.log1p(odds) * self.is_same_class).sum(1) / self.n_points
        return (of_case @ self.chance).item()

    def softmax_loss(self, k: int) -> float:
        """L_sup-mu (SSD, eq. 16 and 17): cross entropy of the mean classifier, averaged over tasks of k classes."""
        scores = self.cases @ self.points.mean(1).T
        total, chances = 0.0, 0.0
        for task in map(list, itertools.combinations(range(len(self.points)), k)):
            is_in = torch.isin(self.labels, torch.tensor(task))
            losses = scores[:, task].logsumexp(1) - scores.gather(1, self.labels[:, None])[:, 0]
            chance = self.class_probability[task].prod().item()
            total += chance * (losses[is_in] @ self.chance[is_in] / self.chance[is_in].sum()).item()
            chances += chance
        return total / chances

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

    def expected_loss(self, *of_negatives: Tensor) -> tuple[Tensor, Tensor]:
        """InfoNCE's expectation and variance of each point, x+ from its class, a negative from each distribution.

        Distributions are (case, case): a row for each anchor. All tuples of negatives are enumerated.
        """
        exp = self.logits.exp()
        sums, chances = torch.zeros_like(exp[:, :1]), torch.ones_like(exp[:, :1])
        for distribution in of_negatives:
            sums = (sums[:, :, None] + exp[:, None]).flatten(1)
            chances = (chances[:, :, None] * distribution[:, None]).flatten(1)
        losses = torch.log1p(sums[:, None] / exp[:, :, None])
        chances = self.positive[:, :, None] * chances[:, None]
        mean = (losses * chances).sum((1, 2))
        return mean, (losses**2 * chances).sum((1, 2)) - mean**2

    def expansion(self, n: int) -> tuple[Tensor, Tensor]:
        """DCL's eq. 4 of each point, with eta = rho, and its variance if each of the n + 1 terms is drawn once."""
        total, variance = torch.zeros_like(self.rho), torch.zeros_like(self.rho)
        for k in range(n + 1):
            factor = math.comb(n, k) * (-self.rho) ** k / (1 - self.rho) ** n
            mean, of_draw = self.expected_loss(*[self.positive] * k, *[self.marginal] * (n - k))
            total, variance = total + factor * mean, variance + factor**2 * of_draw
        return total, variance

    @property
    def marginal(self) -> Tensor:
        """p (case, case): a row for each anchor, all alike."""
        return self.chance.expand(len(self.chance), -1)

    @property
    def positive(self) -> Tensor:
        """p+ (case, case): the points of the anchor's class."""
        return self.is_same_class.double() / self.n_points

    @property
    def negative(self) -> Tensor:
        """p- (case, case): the points of the other classes."""
        chance = self.chance * ~self.is_same_class
        return chance / chance.sum(1, keepdim=True)

    def error_bound(self, eta: float | Tensor, n: int, m: int) -> ErrorBound:
        """SSD's proposition 2.1 for these classes, n negatives and m positives."""
        return ssd_error_bound(self.rho, eta, n_negatives=n, n_positives=m, weights=self.chance)

    # Losses of inner products (CURL).

    @property
    def collision(self) -> float:
        """tau: the chance that two independent draws are of one class."""
        return (self.class_probability**2).sum().item()

    def unsupervised_losses(self, loss: str, k: int = 1) -> UnsupervisedLosses:
        """CURL's losses of x and x+ from one class and k negatives from the marginal, all combinations."""
        classes = torch.cartesian_prod(*[torch.arange(len(self.points))] * (k + 1)).view(-1, k + 1)
        chances = self.class_probability[classes].prod(1)
        chosen = self._tuples(k + 2)
        x, positive = (self.points[classes[:, :1], chosen[:, i]] for i in (0, 1))
        negatives = self.points[classes[:, None, 1:], chosen[:, 2:]]
        margins = (x[:, :, None] * (positive[:, :, None] - negatives)).sum(-1)
        collides = classes[:, 1:] == classes[:, :1]

        def mean(margins: Tensor, is_rival: Tensor, of_tuple: Tensor) -> float:
            losses = margin_loss(margins.masked_fill(~is_rival[:, None], math.inf), loss).mean(1)
            return ((chances * losses)[of_tuple].sum() / chances[of_tuple].sum()).item()

        every, some, all_ = torch.ones_like(collides), collides.any(1), collides.all(1)
        return UnsupervisedLosses(
            whole=mean(margins, every, every[:, 0]),
            apart=mean(margins, ~collides, ~all_),
            colliding=mean(margins, collides, some),
            degenerate=mean(torch.zeros_like(margins), collides, some),
            collision=chances[some].sum().item(),
            full_collision=chances[all_].sum().item(),
        )

    def task_losses(self, loss: str, k: int) -> float:
        """E_T[ rho+_min(T) / p_max(T) L_sup(T) ] of the mean classifier (CURL, theorem B.1).

        T is the set of classes among c+ and k negative ones, given that c+ is not among the latter; they are equally
        likely in the task.
        """
        of_task: dict[frozenset[int], dict[int, float]] = {}
        for c, *others in itertools.product(range(len(self.points)), repeat=k + 1):
            if c not in others:
                of_class = of_task.setdefault(frozenset((c, *others)), {})
                chance = self.class_probability[[c, *others]].prod().item()
                of_class[c] = of_class.get(c, 0.0) + chance
        total = sum(
            min(of_class.values()) * len(task) * self.task_loss(sorted(task), loss)
            for task, of_class in of_task.items()
        )
        return total / sum(sum(of_class.values()) for of_class in of_task.values())

    def task_loss(self, task: Sequence[int], loss: str, margin: float = 1.0) -> float:
        """L_sup of the mean classifier on a task of equally likely classes, hinge or logistic of scores / margin."""
        cases, means = self.points[[*task]].flatten(0, 1), self.points[[*task]].mean(1)
        labels = torch.arange(len(task)).repeat_interleave(self.n_points)
        return average_k_metrics(cases, labels, means / margin, len(task) - 1, loss=loss).loss

    def block_loss(self, size: int, loss: str) -> float:
        """The same with means of blocks of points for x+ and x- (CURL, eq. 12)."""
        chosen = self._tuples(1 + 2 * size)
        total = 0.0
        for c, r in itertools.product(range(len(self.points)), repeat=2):
            x, positives = self.points[c, chosen[:, 0]], self.points[c, chosen[:, 1 : 1 + size]]
            negatives = self.points[r, chosen[:, 1 + size :]][:, None]
            chance = self.class_probability[c] * self.class_probability[r]
            total += (chance * k_negative_loss(x, positives.mean(1), negatives.mean(2), loss=loss)).item()
        return total

    def supervised_loss(self, loss: str, margin: float = 1.0) -> float:
        """L_sup of the mean classifier, averaged over tasks of two classes (CURL, definition 2.2)."""
        total, chances = 0.0, 0.0
        for pair in itertools.combinations(range(len(self.points)), 2):
            chance = self.class_probability[[*pair]].prod().item()
            total += chance * self.task_loss(pair, loss, margin)
            chances += chance
        return total / chances

    def _tuples(self, size: int) -> Tensor:
        """All choices of so many points, one after the other, with repetition."""
        return torch.cartesian_prod(*[torch.arange(self.n_points)] * size).view(-1, size)
