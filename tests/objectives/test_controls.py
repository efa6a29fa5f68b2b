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


def make_anchors(logits, is_positive, weights, eta) -> Anchors:
    is_negative = ~is_positive & (weights > 0)
    gamma2 = torch.tensor(14.0).to(logits)
    return Anchors(logits, is_positive, is_negative, weights, eta, gamma2, True, {}, {})


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


def loop_stopped(anchors):
    return [
        max(loop_info_nce(p, n) - math.log(1 + eta * count), 0.0) for p, n, count, eta in rows_of(anchors)
    ]


def loop_weighted(anchors):
    losses, weights = [], []
    for positives, negatives, count, eta in rows_of(anchors):
        losses.append(loop_info_nce(positives, negatives))
        q = min(math.exp(-losses[-1]), 1 / (1 + eta * count))
        weights.append(1 / (1 - eta * (count + 1) * q))
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
    stopped = anchors.logits.grad[0].any() or loss is StoppedInfoNCE  # eta 0 never stops
    assert stopped


def gradients(losses, anchors):
    return torch.autograd.grad(losses.sum(), anchors.logits, retain_graph=True)[0]


def test_stop_and_weight_take_the_debiased_gradient_apart():
    """Above its floor the debiased loss has InfoNCE's gradient times the weight; below the stop none is left."""
    anchors = drawn(several=False)
    columns = torch.arange(7)
    options: dict[str, Any] = {"weights": anchors.weights, "reduction": "none"}
    info_nce = contrastive_loss(anchors.logits, columns, **options)
    eta = anchors.class_probability
    debiased = contrastive_loss(anchors.logits, columns, class_probability=eta, **options)
    plain, weighted, stopped = (
        gradients(x, anchors) for x in (info_nce, WeightedInfoNCE()(anchors), StoppedInfoNCE()(anchors))
    )
    is_stopped = StoppedInfoNCE()(anchors) == 0
    assert is_stopped.tolist() == [False, True, True, True, *is_stopped[4:].tolist()]
    of_debiased, ratio = gradients(debiased, anchors), weighted[0, 0] / plain[0, 0]  # eta 0: weight 1 / mean
    torch.testing.assert_close(
        of_debiased[~is_stopped], (weighted / ratio)[~is_stopped], rtol=1e-9, atol=1e-14
    )
    torch.testing.assert_close(stopped[~is_stopped], plain[~is_stopped])
    negatives = ~anchors.is_positive
    assert not stopped[is_stopped].any() and not (of_debiased * negatives)[is_stopped].any()
    figures = StoppedInfoNCE().figures(anchors)
    assert figures["at_floor"].item() == pytest.approx((is_stopped.sum() - 1).item() / 7)  # one has N = 0


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
