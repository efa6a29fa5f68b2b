"""The error bounds, their formulas and their truth: the debiased loss on classes whose every expectation is known."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

from medclip_dcl.unimodal.bounds import dcl_error_bound, ssd_error_bound
from medclip_dcl.unimodal.mean_classifier import average_k_metrics, class_means
from medclip_dcl.unimodal.synthetic_classes import SyntheticClasses, multinomial_counts

UNEVEN = (0.5, 0.3, 0.15, 0.05)
UNIFORM = (0.25, 0.25, 0.25, 0.25)


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


# Their truth.


def test_the_classes_is_what_it_says():
    classes = SyntheticClasses.on_sphere()
    assert classes.logits.abs().max() <= 1 + 1e-12
    assert classes.chance.sum().item() == pytest.approx(1)
    # SSD, eq. 4: what subtraction gives is the other classes' mean.
    debiased = (classes.mean_candidate - classes.rho * classes.mean_positive) / (1 - classes.rho)
    torch.testing.assert_close(debiased, classes.mean_negative)
    # Infinitely many samples are the population loss.
    for eta in (classes.rho, 0.0, 0.1, 0.7):
        losses, _ = classes.sample_losses(eta, 10_000)
        assert (losses[0] @ classes.chance).item() == pytest.approx(classes.debiased_loss(eta, 10_000))
    assert classes.debiased_loss(classes.rho, 500) == pytest.approx(classes.unbiased_loss(500))


def test_multinomial_counts_have_the_chances():
    chance = torch.tensor([[0.5, 0.0, 0.2, 0.3]], dtype=torch.float64).repeat(4000, 1)
    counts = multinomial_counts(chance, 50, torch.Generator().manual_seed(0))
    assert (counts.sum(1) == 50).all() and (counts >= 0).all() and (counts[:, 1] == 0).all()
    torch.testing.assert_close(counts.mean(0) / 50, chance[0], rtol=0, atol=0.005)
    assert counts[:, 0].var().item() == pytest.approx(50 * 0.25, rel=0.1)


@pytest.mark.parametrize("rho", [UNEVEN, UNIFORM])
@pytest.mark.parametrize("n, m, repeats", [(10_000, 100, 50), (1_000_000, 10_000, 8)])
def test_the_debiased_loss_is_within_the_bound(rho, n, m, repeats):
    classes = SyntheticClasses.on_sphere(rho)
    losses, differences = classes.sample_losses(classes.rho, n, n, m, repeats)
    found, error = mean_and_error(losses @ classes.chance)
    difference = (differences @ classes.chance).mean().item()
    bound = classes.error_bound(classes.rho, n, m)
    assert bound.misspecification == 0
    assert abs(found - classes.unbiased_loss(n)) <= bound.total
    assert abs(found - classes.unbiased_loss(n)) <= 5 * error + 1 / m
    assert difference <= bound.total  # what the proof bounds
    # Without the proof's slack: E|mean - expectation| <= (e - 1/e) / (2 sqrt N), and log g has no slope above e.
    sharp = 1 / (1 - classes.rho) / math.sqrt(n) + classes.rho / (1 - classes.rho) / math.sqrt(m)
    assert difference <= (math.e**2 - 1) / 2 * (sharp @ classes.chance).item()
    if rho == UNIFORM:
        assert difference <= dcl_error_bound(0.25, n_negatives=n, n_positives=m).total


@pytest.mark.parametrize("eta", [0.0, 0.7, "halved", "reversed"])
def test_a_wrong_eta_leaves_the_predicted_gap(eta):
    # The samples go to the closed form of the wrong limit, which the bound covers.
    classes, n, m = SyntheticClasses.on_sphere(), 1_000_000, 10_000
    if eta == "halved":
        eta = classes.rho / 2
    elif eta == "reversed":  # the rare classes' eta for the common ones
        eta = classes.rho.flip(0)
    losses, _ = classes.sample_losses(eta, n, n, m, repeats=8)
    found, error = mean_and_error(losses @ classes.chance)
    predicted = classes.debiased_loss(eta, n)
    assert abs(found - predicted) <= 5 * error + 1e-4
    gap = abs(predicted - classes.unbiased_loss(n))
    assert gap > 100 * error
    assert abs(found - classes.unbiased_loss(n)) <= classes.error_bound(eta, n, m).total


@pytest.mark.parametrize("side", ["negatives", "positives"])
def test_error_falls_with_root_of_the_sample(side):
    # The expected |difference|, which SSD's proof bounds; the other side's sample is infinite. For large samples it is
    # sqrt(2/pi) times the deviation of g over g (a normal's mean absolute value), which pins the constant as well.
    classes, sizes = SyntheticClasses.on_sphere(), [100 * 4**i for i in range(4)]
    errors = []
    for i, size in enumerate(sizes):
        drawn = {"n_drawn": size} if side == "negatives" else {"m_drawn": size}
        _, differences = classes.sample_losses(classes.rho, 10**7, repeats=40, seed=i, **drawn)
        errors.append((differences @ classes.chance).mean().item())
    assert slope(sizes, errors) == pytest.approx(-0.5, abs=0.1)

    values, rho = classes.logits.exp(), classes.rho
    if side == "negatives":
        variance = (values**2) @ classes.chance - classes.mean_candidate**2
        factor = 1 / (1 - rho)
    else:
        variance = ((values**2) * classes.is_same_class).sum(1) / classes.n_points - classes.mean_positive**2
        factor = rho / (1 - rho)
    expected = math.sqrt(2 / math.pi) * factor * variance.sqrt() / classes.mean_negative
    assert errors[-1] * math.sqrt(sizes[-1]) == pytest.approx((expected @ classes.chance).item(), rel=0.2)


def test_debiasing_converges_and_infonce_does_not():
    classes, n = SyntheticClasses.on_sphere(), 10_000
    unbiased = classes.unbiased_loss(n)
    bias = classes.debiased_loss(0.0, n) - unbiased
    assert bias > 0.3

    def gap(eta, size, **options):
        losses, _ = classes.sample_losses(eta, n, size, size, repeats=10, **options)
        return (losses @ classes.chance - unbiased).abs().mean().item()

    assert gap(classes.rho, 10_000) < min(0.01, 0.2 * gap(classes.rho, 100))
    assert gap(0.0, 10_000, true_negatives=True) < 0.01
    assert gap(0.0, 10_000) == pytest.approx(bias, rel=0.05)


@pytest.mark.parametrize("n_opposite", [0, 1])
@pytest.mark.parametrize("n", [30, 3000, 100_000])
def test_lemma_1_bounds_the_biased_loss(n_opposite, n):
    # DCL, lemma 1, both losses with n negatives. A point opposite to the rest of its class is less similar to its
    # positives than to negatives: there the biased loss is the lower one, and the lemma's middle term counts.
    classes = SyntheticClasses.on_sphere(UNIFORM, n_points=6, n_opposite=n_opposite)
    ratio = (classes.mean_positive / classes.mean_negative).log()
    middle = (ratio.clamp(max=0) @ classes.chance).item()
    biased, _ = classes.sample_losses(0.0, n, n, None, repeats=200)
    unbiased, _ = classes.sample_losses(0.0, n, n, None, repeats=200, seed=1, true_negatives=True)
    gaps = (biased - unbiased).mean(0)
    assert (middle < -0.05) == (gaps.min().item() < -0.05) == bool(n_opposite)
    assert (gaps @ classes.chance).item() >= middle - math.exp(1.5) * math.sqrt(math.pi / (2 * n))


@pytest.mark.parametrize("rho", [UNEVEN, UNIFORM])
@pytest.mark.parametrize("spread", [0.1, 0.4, 2.0])
def test_unbiased_loss_bounds_the_classifiers_cross_entropy(rho, spread):
    # DCL, lemma 4 (equal classes, N >= K - 1); SSD, lemma A.2 (N >= (1 - rho_min) / rho_min). Cross entropy is the
    # logistic loss in nats; in SSD's tasks the classes keep their shares.
    classes = SyntheticClasses.on_sphere(rho, spread)
    means = class_means(classes.cases, classes.labels)
    for k in (1, 2, 3):
        n = k if rho == UNIFORM else round((1 - min(rho)) / min(rho))
        bits = average_k_metrics(
            classes.cases,
            classes.labels,
            means,
            k,
            class_distribution=classes.class_probability,
            labels_are_uniform=False,
        ).loss
        assert bits * math.log(2) <= classes.unbiased_loss(n)
