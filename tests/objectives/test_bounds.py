"""The error bounds, their formulas and their truth: the debiased loss on a mixture whose every expectation is known.

The mixture has finitely many points, so that all candidates of an anchor are its points, each as often as it was
drawn: `weights` of `contrastive_loss` are counts, a million negatives cost no more than ten, and the exact chances as
weights are the limit of infinitely many. Positives are columns of their own; each point of the anchor's class once is
again the limit.

The papers have one x+ in the numerator, apart from v_1, ..., v_M; `contrastive_loss` averages over x+ = v_m. The loss
is log N + log g - s(x,x+) + r with 0 <= r <= e^2/N, so that both have the same expectation up to e^2/N. And the proof
of proposition 2.1 bounds the difference of the integrands by e |g - E exp s(x,x-)| before it looks at x+: the bound
holds for the average over positives as it stands.
"""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import config as jaxtyping_config
from scipy.integrate import quad
from torch.nn.functional import normalize, softplus

from medclip_dcl.metrics import average_k_metrics, class_means
from medclip_dcl.objectives import contrastive_loss, dcl_error_bound, ssd_error_bound

UNEVEN = (0.5, 0.3, 0.15, 0.05)
UNIFORM = (0.25, 0.25, 0.25, 0.25)


class Mixture:
    """Classes of a few equally likely points each on the unit sphere: gamma = 1, all logits in [-1, 1]."""

    def __init__(self, rho=UNEVEN, spread=0.25, n_points=3, seed=0, n_opposite=0):
        generator = torch.Generator().manual_seed(seed)
        corners = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
        noise = torch.randn(len(rho), n_points, 3, dtype=torch.float64, generator=generator)
        points = normalize(normalize(corners[: len(rho), None], dim=-1) + spread * noise, dim=-1)
        points[:, :n_opposite] *= -1
        self.n_points = n_points
        self.class_probability = torch.tensor(rho, dtype=torch.float64)
        self.points = points.flatten(0, 1)
        self.labels = torch.arange(len(rho)).repeat_interleave(n_points)
        self.rho = self.class_probability[self.labels]
        self.chance = self.rho / n_points
        self.logits = self.points @ self.points.T
        self.is_same_class = self.labels == self.labels[:, None]

    @property
    def mean_candidate(self):
        """E exp s(x, x'), x' from the marginal, for each point x; `mean_positive`: from the class of x."""
        return self.logits.exp() @ self.chance

    @property
    def mean_positive(self):
        return (self.logits.exp() * self.is_same_class).sum(1) / self.n_points

    @property
    def mean_negative(self):
        """E exp s(x, x-), x- from the other classes: by their points, not by subtraction."""
        chance = self.chance * ~self.is_same_class
        return (self.logits.exp() * chance).sum(1) / chance.sum(1)

    def population_loss(self, g, n):
        """E -log[ exp s+ / (exp s+ + n g(x)) ] over x and x+."""
        odds = n * g[:, None] / self.logits.exp()
        by_point = (torch.log1p(odds) * self.is_same_class).sum(1) / self.n_points
        return (by_point @ self.chance).item()

    def asymptotic_loss(self, n):
        """Lbar (SSD, eq. 11): the unbiased loss (DCL, eq. 2) with Q = n and infinitely many true negatives."""
        return self.population_loss(self.mean_negative, n)

    def misspecified_loss(self, eta, n):
        """The limit of the debiased loss for eta that need not be rho."""
        g = (self.mean_candidate - eta * self.mean_positive) / (1 - eta)
        return self.population_loss(g.clamp(min=math.exp(-1)), n)

    def estimate(self, eta, n, n_drawn=None, m_drawn=None, repeats=1, seed=0, true_negatives=False):
        """Losses and |differences| from the asymptotic loss of the same positives, each (repeat, point).

        None draws: infinitely many. `true_negatives` draws from the other classes, with eta to be 0.
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
            class_probability=eta.repeat(repeats) if isinstance(eta, torch.Tensor) else eta,
            floor=-1.0,
            weights=torch.cat([weights, torch.zeros_like(positives)], dim=1),
            reduction="none",
        )
        log_odds = math.log(n) + self.mean_negative.log().repeat(repeats)
        asymptotic = softplus(log_odds[:, None] - positives).mean(1)
        # Every positive's loss rises in g, so the mean of their |differences| is the |difference| of their means.
        return losses.view(repeats, -1), (losses - asymptotic).abs().view(repeats, -1)

    def bound(self, eta, n, m):
        return ssd_error_bound(self.rho, eta, n_negatives=n, n_positives=m, weights=self.chance)


def multinomial_counts(chance, n, generator):
    """Rows of counts that sum to n: binomial draws of what is left, column by column."""
    left, mass = torch.full((len(chance),), float(n), dtype=torch.float64), torch.ones(len(chance)).double()
    counts = torch.zeros_like(chance)
    for j in range(chance.shape[1]):
        share = (chance[:, j] / mass.clamp(min=1e-300)).clamp(max=1.0)
        counts[:, j] = torch.binomial(left, share, generator=generator)
        left, mass = left - counts[:, j], (mass - chance[:, j]).clamp(min=0)
    counts[:, -1] += left  # rounding of the last share
    return counts


def mean_and_error(values):
    """Mean over repeats and its standard error."""
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


def slope(sizes, errors):
    """Of log error over log size, by least squares."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    return ((x - x.mean()) @ y / ((x - x.mean()) @ (x - x.mean()))).item()


# The formulas.


@pytest.mark.parametrize("n, m", [(1, 1), (7, 3), (10_000, 100)])
def test_proposition_2_1_is_the_integral_of_its_tail_bounds(n, m):
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


def test_for_equal_classes_the_two_bounds_differ_by_a_factor():
    rho = torch.full((4,), 0.25, dtype=torch.float64)
    ssd = ssd_error_bound(rho, 0.25, n_negatives=31, n_positives=5)
    dcl = dcl_error_bound(0.25, n_negatives=31, n_positives=5)
    assert ssd == pytest.approx([3 * math.sqrt(math.e) * term for term in dcl])


# Their truth.


def test_the_mixture_is_what_it_says():
    mixture = Mixture()
    assert mixture.logits.abs().max() <= 1 + 1e-12
    assert mixture.chance.sum().item() == pytest.approx(1)
    # SSD, eq. 4: what subtraction gives is the other classes' mean.
    debiased = (mixture.mean_candidate - mixture.rho * mixture.mean_positive) / (1 - mixture.rho)
    torch.testing.assert_close(debiased, mixture.mean_negative)
    # Infinitely many samples are the population loss.
    for eta in (mixture.rho, 0.0, 0.1, 0.7):
        losses, _ = mixture.estimate(eta, 10_000)
        assert (losses[0] @ mixture.chance).item() == pytest.approx(mixture.misspecified_loss(eta, 10_000))
    assert mixture.misspecified_loss(mixture.rho, 500) == pytest.approx(mixture.asymptotic_loss(500))


def test_multinomial_counts_have_the_chances():
    chance = torch.tensor([[0.5, 0.0, 0.2, 0.3]], dtype=torch.float64).repeat(4000, 1)
    counts = multinomial_counts(chance, 50, torch.Generator().manual_seed(0))
    assert (counts.sum(1) == 50).all() and (counts >= 0).all() and (counts[:, 1] == 0).all()
    torch.testing.assert_close(counts.mean(0) / 50, chance[0], rtol=0, atol=0.005)
    assert counts[:, 0].var().item() == pytest.approx(50 * 0.25, rel=0.1)


@pytest.mark.parametrize("rho", [UNEVEN, UNIFORM])
@pytest.mark.parametrize("n, m, repeats", [(10_000, 100, 50), (1_000_000, 10_000, 8)])
def test_the_debiased_loss_is_within_the_bound(rho, n, m, repeats):
    mixture = Mixture(rho)
    losses, differences = mixture.estimate(mixture.rho, n, n, m, repeats)
    found, error = mean_and_error(losses @ mixture.chance)
    difference = (differences @ mixture.chance).mean().item()
    bound = mixture.bound(mixture.rho, n, m)
    assert bound.misspecification == 0
    assert abs(found - mixture.asymptotic_loss(n)) <= bound.total
    assert abs(found - mixture.asymptotic_loss(n)) <= 5 * error + 1 / m
    assert difference <= bound.total  # what the proof bounds
    # Without the proof's slack: E|mean - expectation| <= (e - 1/e) / (2 sqrt N), and log g has no slope above e.
    sharp = 1 / (1 - mixture.rho) / math.sqrt(n) + mixture.rho / (1 - mixture.rho) / math.sqrt(m)
    assert difference <= (math.e**2 - 1) / 2 * (sharp @ mixture.chance).item()
    if rho == UNIFORM:
        assert difference <= dcl_error_bound(0.25, n_negatives=n, n_positives=m).total


@pytest.mark.parametrize("eta", [0.0, 0.7, "halved", "reversed"])
def test_a_wrong_eta_leaves_the_predicted_gap(eta):
    # The samples go to the closed form of the wrong limit, which the bound covers.
    mixture, n, m = Mixture(), 1_000_000, 10_000
    if eta == "halved":
        eta = mixture.rho / 2
    elif eta == "reversed":  # the rare classes' eta for the common ones
        eta = mixture.rho.flip(0)
    losses, _ = mixture.estimate(eta, n, n, m, repeats=8)
    found, error = mean_and_error(losses @ mixture.chance)
    predicted = mixture.misspecified_loss(eta, n)
    assert abs(found - predicted) <= 5 * error + 1e-4
    gap = abs(predicted - mixture.asymptotic_loss(n))
    assert gap > 100 * error
    assert abs(found - mixture.asymptotic_loss(n)) <= mixture.bound(eta, n, m).total


def test_without_its_last_term_the_bound_is_violated():
    mixture, n, m = Mixture(), 1_000_000, 10_000
    losses, _ = mixture.estimate(0.0, n, n, m, repeats=8)
    bound = mixture.bound(0.0, n, m)
    gap = abs((losses @ mixture.chance).mean().item() - mixture.asymptotic_loss(n))
    assert 1.5 * (bound.negatives + bound.positives) < gap <= bound.total
    # With eta = rho it is far below: the bound tells the two apart.
    right, _ = mixture.estimate(mixture.rho, n, n, m, repeats=8)
    kept = mixture.bound(mixture.rho, n, m).total
    assert abs((right @ mixture.chance).mean().item() - mixture.asymptotic_loss(n)) < 0.02 * kept < gap


@pytest.mark.parametrize("side", ["negatives", "positives"])
def test_the_error_falls_with_the_root_of_the_sample(side):
    # The expected |difference|, which SSD's proof bounds; the other side's sample is infinite. For large samples it is
    # sqrt(2/pi) times the deviation of g over g (a normal's mean absolute value), which pins the constant as well.
    mixture, sizes = Mixture(), [100 * 4**i for i in range(4)]
    errors = []
    for i, size in enumerate(sizes):
        drawn = {"n_drawn": size} if side == "negatives" else {"m_drawn": size}
        _, differences = mixture.estimate(mixture.rho, 10**7, repeats=40, seed=i, **drawn)
        errors.append((differences @ mixture.chance).mean().item())
    assert slope(sizes, errors) == pytest.approx(-0.5, abs=0.1)

    values, rho = mixture.logits.exp(), mixture.rho
    if side == "negatives":
        variance = (values**2) @ mixture.chance - mixture.mean_candidate**2
        factor = 1 / (1 - rho)
    else:
        variance = ((values**2) * mixture.is_same_class).sum(1) / mixture.n_points - mixture.mean_positive**2
        factor = rho / (1 - rho)
    expected = math.sqrt(2 / math.pi) * factor * variance.sqrt() / mixture.mean_negative
    assert errors[-1] * math.sqrt(sizes[-1]) == pytest.approx((expected @ mixture.chance).item(), rel=0.2)


def test_debiasing_converges_to_the_unbiased_loss_and_infonce_does_not():
    mixture, n = Mixture(), 10_000
    unbiased = mixture.asymptotic_loss(n)
    bias = mixture.misspecified_loss(0.0, n) - unbiased
    assert bias > 0.3

    def gap(eta, size, **options):
        losses, _ = mixture.estimate(eta, n, size, size, repeats=10, **options)
        return (losses @ mixture.chance - unbiased).abs().mean().item()

    assert gap(mixture.rho, 10_000) < min(0.01, 0.2 * gap(mixture.rho, 100))
    assert gap(0.0, 10_000, true_negatives=True) < 0.01
    assert gap(0.0, 10_000) == pytest.approx(bias, rel=0.05)


def test_bare_weights_on_true_negatives_are_off_by_log_of_one_minus_rho():
    mixture, n = Mixture(), 10**6
    # Each point twice: as a negative, where its class is another, and as a positive, where it is the anchor's.
    never = torch.zeros_like(mixture.is_same_class)
    weights = n * mixture.chance * ~mixture.is_same_class
    bare = contrastive_loss(
        mixture.logits.repeat(1, 2),
        torch.cat([never, mixture.is_same_class], dim=1),
        weights=torch.cat([weights, never.double()], dim=1),
        reduction="none",
    )
    found = (bare @ mixture.chance).item() - mixture.asymptotic_loss(n)
    assert found == pytest.approx((torch.log(1 - mixture.rho) @ mixture.chance).item(), abs=1e-4)


@pytest.mark.parametrize("n_opposite", [0, 1])
@pytest.mark.parametrize("n", [30, 3000, 100_000])
def test_lemma_1_the_biased_loss_is_no_lower_than_stated(n_opposite, n):
    # DCL, lemma 1, both losses with n negatives. A point opposite to the rest of its class is less similar to its
    # positives than to negatives: there the biased loss is the lower one, and the lemma's middle term counts.
    mixture = Mixture(UNIFORM, n_points=6, n_opposite=n_opposite)
    ratio = (mixture.mean_positive / mixture.mean_negative).log()
    middle = (ratio.clamp(max=0) @ mixture.chance).item()
    biased, _ = mixture.estimate(0.0, n, n, None, repeats=200)
    unbiased, _ = mixture.estimate(0.0, n, n, None, repeats=200, seed=1, true_negatives=True)
    gaps = (biased - unbiased).mean(0)
    assert (middle < -0.05) == (gaps.min().item() < -0.05) == bool(n_opposite)
    assert (gaps @ mixture.chance).item() >= middle - math.exp(1.5) * math.sqrt(math.pi / (2 * n))


@pytest.mark.parametrize("rho", [UNEVEN, UNIFORM])
@pytest.mark.parametrize("spread", [0.1, 0.4, 2.0])
def test_the_asymptotic_loss_bounds_the_mean_classifiers_cross_entropy(rho, spread):
    # DCL, lemma 4 (equal classes, N >= K - 1); SSD, lemma A.2 (N >= (1 - rho_min) / rho_min). Cross entropy is the
    # logistic loss in nats; in SSD's tasks the classes keep their shares.
    mixture = Mixture(rho, spread)
    means = class_means(mixture.points, mixture.labels)
    for k in (1, 2, 3):
        n = k if rho == UNIFORM else round((1 - min(rho)) / min(rho))
        bits = average_k_metrics(
            mixture.points,
            mixture.labels,
            means,
            k,
            class_distribution=mixture.class_probability,
            labels_are_uniform=False,
        ).loss
        assert bits * math.log(2) <= mixture.asymptotic_loss(n)


R = torch.tensor([0.1, 0.5])


@pytest.fixture
def _shapes_unchecked():
    """Own shape errors are seen only where jaxtyping does not speak first, as in production."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    "options, message",
    [
        ({"rho": torch.tensor([0.5, 1.0])}, "rho must lie in [0, 1), got 1 at anchor 1"),
        ({"rho": R[:0]}, "rho must be (anchor,) with at least one anchor, got shape (0,)"),
        ({"rho": R[0]}, "rho must be (anchor,) with at least one anchor, got shape ()"),
        ({"eta": -0.5}, "eta must lie in [0, 1), got -0.5"),
        ({"eta": torch.tensor([0.5, math.nan])}, "eta must lie in [0, 1), got nan at anchor 1"),
        ({"eta": torch.zeros(3)}, "eta must be a number or of shape (2,), got (3,)"),
        ({"n_negatives": 0}, "n_negatives and n_positives must be at least 1, got 0 and 1"),
        ({"n_positives": -1}, "n_negatives and n_positives must be at least 1, got 9 and -1"),
        ({"weights": torch.ones(3)}, "weights must be of shape (2,), got (3,)"),
        ({"weights": torch.tensor([1.0, -0.5])}, "weights must be finite, at least 0 and not all 0"),
        ({"weights": torch.tensor([1.0, math.inf])}, "weights must be finite, at least 0 and not all 0"),
        ({"weights": torch.zeros(2)}, "weights must be finite, at least 0 and not all 0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError) as error:
        ssd_error_bound(**{"rho": R, "eta": 0.1, "n_negatives": 9, "n_positives": 1, **options})
    assert str(error.value) == message


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1.0, 9, 1), "tau_plus must lie in [0, 1), got 1"),
        ((-0.1, 9, 1), "tau_plus must lie in [0, 1), got -0.1"),
        ((0.1, 9, 0), "n_negatives and n_positives must be at least 1, got 9 and 0"),
    ],
)
def test_bad_input_of_theorem_3(arguments, message):
    tau_plus, n, m = arguments
    with pytest.raises(ValueError) as error:
        dcl_error_bound(tau_plus, n_negatives=n, n_positives=m)
    assert str(error.value) == message
