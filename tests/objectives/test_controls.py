"""Control arms of eta against slow loops over their formulas, and against the debiased loss that they take apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from medclip_dcl.objectives import (
    Anchors,
    DecoupledLoss,
    StoppedInfoNCE,
    WeightedInfoNCE,
    contrastive_loss,
)

GAMMA2 = 4.0


def make_anchors(logits, is_positive, weights, eta, gamma2=GAMMA2) -> Anchors:
    is_negative = ~is_positive & (weights > 0)
    return Anchors(logits, is_positive, is_negative, weights, eta, logits.new_tensor(gamma2), True, {}, {})


def drawn(several: bool, eta=None) -> Anchors:
    logits = 5 * torch.randn(7, 9, dtype=torch.float64)
    logits[:3].diagonal().add_(9)  # anchors that are stopped
    is_positive = torch.eye(7, 9).bool()
    if several:
        is_positive |= torch.rand(7, 9) < 0.2
    weights = torch.rand(7, 9, dtype=torch.float64).round(decimals=1) * ~is_positive
    weights[3] = 0.0  # an anchor without negatives
    eta = torch.tensor([0.0, 0.3, 0.05, 0.2, 0.1, 0.3, 0.2], dtype=torch.float64) if eta is None else eta
    return make_anchors(logits.requires_grad_(), is_positive, weights, eta)


def rows_of(anchors: Anchors):
    """Per anchor: logits of its positives, (weight, logit) of its negatives, N and eta, in plain numbers."""
    for a, s in enumerate(anchors.logits.tolist()):
        positives = [s[j] for j in range(len(s)) if anchors.is_positive[a, j]]
        negatives = [(anchors.weights[a, j].item(), s[j]) for j in range(len(s)) if anchors.weights[a, j] > 0]
        eta = anchors.class_probability
        yield (
            positives,
            negatives,
            sum(w for w, _ in negatives),
            eta if isinstance(eta, float) else eta[a].item(),
        )


def loop_info_nce(positives, negatives):
    total = sum(w * math.exp(s) for w, s in negatives)
    return sum(-math.log(math.exp(s) / (math.exp(s) + total)) for s in positives) / len(positives)


def loop_debiased(positives, negatives, count, eta):
    if not count:
        return 0.0
    mean = sum(w * math.exp(s) for w, s in negatives) / count
    corrected = (mean - eta * sum(map(math.exp, positives)) / len(positives)) / (1 - eta)
    g = max(corrected, math.exp(-GAMMA2))
    return sum(math.log1p(count * g * math.exp(-s)) for s in positives) / len(positives)


def loop_stopped(anchors):
    return [loop_debiased(*row) for row in rows_of(anchors)]


def loop_weighted(anchors):
    losses, weights = [], []
    for positives, negatives, count, eta in rows_of(anchors):
        losses.append(loop_info_nce(positives, negatives))
        debiased = loop_debiased(positives, negatives, count, eta)
        weights.append(1 + eta * (count + 1) / (1 - eta) * math.exp(-debiased))
    return [w * x * len(weights) / sum(weights) for w, x in zip(weights, losses, strict=True)]


def loop_decoupled(anchors):
    return [
        sum(math.log(sum(w * math.exp(u) for w, u in negatives)) - s for s in positives) / len(positives)
        if negatives
        else 0.0
        for positives, negatives, _, _ in rows_of(anchors)
    ]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("loss", "loop"),
    [(StoppedInfoNCE, loop_stopped), (WeightedInfoNCE, loop_weighted), (DecoupledLoss, loop_decoupled)],
)
@pytest.mark.parametrize("eta", [None, 0.1])
def test_equals_the_loop(loss, loop, several, eta):
    anchors = drawn(several, eta)
    found = loss()(anchors)
    torch.testing.assert_close(found.tolist(), loop(anchors), rtol=1e-11, atol=1e-12)
    found.sum().backward()
    assert anchors.logits.grad is not None and anchors.logits.grad.isfinite().all()
    assert not anchors.logits.grad[3].any()  # N = 0
    assert anchors.logits.grad[0].any()


def gradients(losses, anchors):
    return torch.autograd.grad(losses.sum(), anchors.logits, retain_graph=True)[0]


@pytest.mark.parametrize("gamma2", [1.0, 2.0, 4.0, 14.0])
def test_stop_and_weight_take_the_debiased_gradient_apart(gamma2):
    """Anchor by anchor; at the floor the attraction alone is left, less than InfoNCE's."""
    means = 1.3 * torch.rand(1500, 1, dtype=torch.float64) - 1
    cosines = (means + 0.3 * torch.randn(1500, 40, dtype=torch.float64)).clamp(-1, 1)
    cosines[:, 0] = 2 * torch.rand(1500, dtype=torch.float64) - 1
    logits, eta = (gamma2 * cosines).requires_grad_(), 0.3 * torch.rand(1500, dtype=torch.float64)
    is_positive = (torch.arange(40) == 0).expand(1500, 40)
    anchors = make_anchors(logits, is_positive, (~is_positive).double(), eta, gamma2)
    positive, negatives, b = logits.detach()[:, 0].exp(), logits.detach()[:, 1:].exp(), 40
    at_floor = (negatives.mean(1) - eta * positive) / (1 - eta) <= math.exp(-gamma2)
    assert 0.1 < at_floor.double().mean() < 0.9
    options: dict[str, Any] = {"class_probability": eta, "floor": -gamma2, "reduction": "none"}
    debiased, plain, weighted, stopped = (
        gradients(losses, anchors)
        for losses in (
            contrastive_loss(logits, is_positive, **options),
            contrastive_loss(logits, is_positive, reduction="none"),
            WeightedInfoNCE()(anchors),
            StoppedInfoNCE()(anchors),
        )
    )
    for gradient in (debiased, stopped):
        assert torch.equal(gradient[:, 1:].any(1), ~at_floor)
    torch.testing.assert_close(stopped, debiased.where(at_floor[:, None], plain), rtol=0, atol=1e-13)
    assert StoppedInfoNCE().figures(anchors)["at_floor"].item() == pytest.approx(at_floor.double().mean())
    left = (b - 1) * math.exp(-gamma2)
    torch.testing.assert_close(-stopped[at_floor, 0], (left / (left + positive))[at_floor])
    kept = (stopped / plain)[at_floor, 0]
    assert kept.max() < 1 and (gamma2 > 2 or kept.min() > 0.4)
    limit = 1 / (eta * b + (1 - eta) * (1 + left / positive))
    weight = 1 / (1 - eta * b * (positive / (positive + negatives.sum(1))).minimum(limit))
    torch.testing.assert_close(weighted, plain * (weight / weight.mean())[:, None], rtol=1e-9, atol=1e-13)
    above = ~at_floor[:, None]
    torch.testing.assert_close(debiased * above, weighted * weight.mean() * above, rtol=1e-7, atol=1e-12)
    most = WeightedInfoNCE().figures(anchors)["anchor_weight_max"]
    torch.testing.assert_close(most, weight.max())


def test_decoupled_is_debiased_with_eta_1_over_b():
    """Up to log(B / N), while the positive's softmax share is below B / (2B - 1)."""
    logits = 3 * torch.randn(40, 8, dtype=torch.float64)
    columns, b = torch.arange(40) % 8, 8
    is_positive = columns[:, None] == torch.arange(8)
    found = DecoupledLoss()(make_anchors(logits, is_positive, (~is_positive).double(), 0.0))
    debiased = contrastive_loss(logits, columns, class_probability=1 / b, reduction="none")
    share = logits.softmax(1)[is_positive]
    is_below = share < b / (2 * b - 1)
    assert is_below.any() and not is_below.all()
    torch.testing.assert_close(debiased[is_below], found[is_below] + math.log(b / (b - 1)))
    assert (debiased[~is_below] == 0).all() and (found[~is_below] < 0).all()
