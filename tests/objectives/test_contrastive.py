"""contrastive_loss against a slow loop over the formula, its limits, its gradients and its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from medclip_dcl.objectives import contrastive_loss, contrastive_statistics


def loop_loss(logits, is_positive, eta, floor, weights, correction=None):
    """SSD, eq. 7 and 8, with its floor, anchor by anchor in plain numbers; v_m are x+ or (anchor, M) `correction`."""
    losses = []
    for a in range(logits.shape[0]):
        s = [float(x) for x in logits[a]]
        positives = [j for j in range(len(s)) if is_positive[a, j]]
        negatives = [j for j in range(len(s)) if not is_positive[a, j]]
        count = sum(float(weights[a, j]) for j in negatives)
        if count == 0:
            losses.append(0.0)
            continue
        mean_negative = sum(float(weights[a, j]) * math.exp(s[j]) for j in negatives) / count
        of_correction = [s[j] for j in positives] if correction is None else correction[a].tolist()
        mean_positive = sum(map(math.exp, of_correction)) / len(of_correction)
        g = max((mean_negative - eta[a] * mean_positive) / (1 - eta[a]), math.exp(floor))
        losses.append(
            sum(-math.log(math.exp(s[j]) / (math.exp(s[j]) + count * g)) for j in positives) / len(positives)
        )
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(
    "anchors, candidates, gamma2, eta, several_positives, weighted, m",
    [
        (1, 2, 1.0, 0.0, False, True, 0),
        (1, 2, 1.0, "mixed", True, False, 0),
        (7, 4, 14.0, 0.3, True, False, 0),
        (7, 4, 14.0, "mixed", True, True, 3),
        (5, 23, 14.0, 0.0, True, True, 0),
        (5, 23, 14.0, 0.3, False, True, 1),
        (5, 23, 14.0, "mixed", False, False, 0),
        (9, 23, 4.0, "mixed", False, False, 8),
    ],
)
def test_equals_the_loop(anchors, candidates, gamma2, eta, several_positives, weighted, m):
    logits = gamma2 * (2 * torch.rand(anchors, candidates, dtype=torch.float64) - 1)
    column = torch.randint(candidates, (anchors,))
    is_positive = torch.arange(candidates) == column[:, None]
    if several_positives:
        is_positive |= torch.rand(anchors, candidates) < 0.3
    weights = torch.rand(anchors, candidates, dtype=torch.float64) if weighted else None
    if weights is not None:
        weights[0] = 0.0  # an anchor without negatives
        weights[:, 1] = 0.0
    eta_of = torch.rand(anchors, dtype=torch.float64) * 0.5 if eta == "mixed" else torch.full((anchors,), eta)
    correction = gamma2 * (2 * torch.rand(anchors, m, dtype=torch.float64) - 1) if m else None
    arguments: dict[str, Any] = {
        "class_probability": eta_of if eta == "mixed" else eta,
        "weights": weights,
        "correction_logits": correction,
    }
    positives = is_positive if several_positives else column
    ones = torch.ones_like(logits) if weights is None else weights
    for floor in (0.75 * gamma2, -gamma2):  # many corrected means lie close to the first, on either side
        arguments["floor"] = floor
        found = contrastive_loss(logits, positives, reduction="none", **arguments)
        expected = loop_loss(logits, is_positive, eta_of.tolist(), floor, ones, correction)
        torch.testing.assert_close(found, expected)
    if correction is not None:
        own = logits.gather(1, column[:, None])
        arguments["correction_logits"] = own
        same = contrastive_loss(logits, column, reduction="none", **arguments)
        arguments["correction_logits"] = None
        torch.testing.assert_close(same, contrastive_loss(logits, column, reduction="none", **arguments))
    integers = column.to(torch.int16)  # of any type
    assert several_positives or torch.equal(
        contrastive_loss(logits, integers, floor=-gamma2),
        contrastive_loss(logits, is_positive, floor=-gamma2),
    )


def test_class_probability_zero_is_cross_entropy():
    logits, columns = 10 * torch.randn(9, 13), torch.randint(13, (9,))
    for reduction in ("mean", "sum", "none"):
        found = contrastive_loss(logits, columns, reduction=reduction)
        torch.testing.assert_close(found, cross_entropy(logits, columns, reduction=reduction))


def test_zero_as_number_and_tensor_are_equal():
    """A number 0 without a floor takes a shorter way to the same bits."""
    logits, weights = 14 * torch.randn(7, 5), torch.rand(7, 5).round(decimals=1)
    weights[3] = 0
    positives = torch.rand(7, 5) < 0.3
    positives[:, 2] = True
    found = []
    for eta in (0.0, torch.zeros(7)):
        leaf = logits.clone().requires_grad_()
        losses = contrastive_loss(leaf, positives, class_probability=eta, weights=weights, reduction="none")
        losses.sum().backward()
        found.append((losses, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_corrected_share_by_hand():
    """eta N q / (1 - q) of the anchor's own positive; with others as v_m their mean in its place."""
    logits = torch.tensor([[1.0, 0.5, -0.5], [0.0, 1.0, 0.3]], dtype=torch.float64)
    q = logits.softmax(1).diagonal()
    options: dict[str, Any] = {"class_probability": torch.tensor([0.1, 0.2]).double(), "floor": -14.0}
    own = contrastive_statistics(logits, torch.arange(2), **options)
    assert own.corrected_share.item() == pytest.approx(
        (options["class_probability"] * 2 * q / (1 - q)).mean().item()
    )
    others = torch.tensor([[0.2, -0.7], [0.1, 0.4]], dtype=torch.float64)
    shares = [
        eta * (math.exp(a) + math.exp(b)) / (math.exp(c) + math.exp(d))
        for eta, (a, b), (c, d) in zip((0.1, 0.2), others.tolist(), ((0.5, -0.5), (0.0, 0.3)), strict=True)
    ]
    found = contrastive_statistics(logits, torch.arange(2), correction_logits=others, **options)
    assert found.corrected_share.item() == pytest.approx(sum(shares) / 2)


def test_gradient_into_correction_logits_equals_finite_differences():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    correction = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    eta = torch.tensor([0.0, 0.3, 0.1, 0.05], dtype=torch.float64)
    for floor in (-14.0, -0.3):
        assert torch.autograd.gradcheck(
            lambda x, v, f=floor: contrastive_loss(
                x, torch.arange(4), class_probability=eta, floor=f, correction_logits=v
            ),
            (logits, correction),
        )


@pytest.mark.parametrize(
    "scale, eta, floor",
    [
        (1.0, 0.0, -math.inf),
        (1.0, 0.3, -14.0),
        (100.0, 0.3, -math.inf),
        (100.0, 0.999, -14.0),
        (5000.0, 0.0, -14.0),
        (5000.0, 0.999, -math.inf),
    ],
)
def test_gradients_are_finite_everywhere(scale, eta, floor):
    logits = (scale * torch.randn(6, 8)).requires_grad_()
    weights = torch.rand(6, 8)
    weights[2] = 0.0
    weights.requires_grad_()
    loss = contrastive_loss(logits, torch.arange(6), class_probability=eta, floor=floor, weights=weights)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and weights.grad is not None
    assert logits.grad.isfinite().all() and weights.grad.isfinite().all()
    assert (logits.grad[2] == 0).all()


@pytest.mark.parametrize(
    "eta, floor, several_positives",
    [(0.0, -math.inf, True), (0.2, -0.2, True), (0.2, -math.inf, False), (0.999, -0.2, False)],
)
def test_gradient_into_eta_equals_finite_differences(eta, floor, several_positives):
    logits = torch.randn(6, 7, dtype=torch.float64)
    weights = torch.rand(6, 7, dtype=torch.float64) if several_positives else None
    if weights is not None:
        weights[2] = 0.0  # an anchor without negatives
    positives = torch.eye(6, 7).bool() | (torch.rand(6, 7) < 0.2) if several_positives else torch.arange(6)

    def loss(eta, dtype=torch.float64):
        own = None if weights is None else weights.to(dtype)
        options = {"class_probability": eta.to(dtype), "floor": floor, "weights": own, "reduction": "none"}
        return contrastive_loss(logits.to(dtype), positives, **options)

    at = torch.full((6,), eta, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(at).sum(), at)
    step = 1e-7
    with torch.no_grad():  # from the right: at 0 there is no other side
        expected = (loss(at + step) - loss(at)) / step
    torch.testing.assert_close(found, expected, rtol=1e-3 if eta == 0.999 else 1e-5, atol=1e-6)
    assert found.any() or floor == -0.2
    (single,) = torch.autograd.grad(loss(at, torch.float32).sum(), at)
    torch.testing.assert_close(single, found, rtol=1e-2, atol=1e-5)


def problems():
    """Three problems of one shape: logits, positives, eta with a 0, floor and weights with a 0."""
    weights = torch.rand(3, 4, 5, dtype=torch.float64)
    weights[:, 1, 2] = 0.0
    eta = torch.tensor([0.0, 0.3, 0.1, 0.5], dtype=torch.float64).repeat(3, 1)
    floors = torch.tensor([-0.1, -3.0, -math.inf], dtype=torch.float64)
    return torch.randn(3, 4, 5, dtype=torch.float64), torch.randint(5, (3, 4)), eta, floors, weights


def loss_of_problem(logits, positives, eta, floor, weights):
    return contrastive_loss(logits, positives, class_probability=eta, floor=floor, weights=weights)


def test_torch_func_gives_each_problems_loss_and_gradients():
    every = problems()
    losses = torch.func.vmap(loss_of_problem)(*every)
    gradients = torch.func.vmap(torch.func.grad(loss_of_problem, (0, 2, 4)))(*every)
    for i, (logits, positives, eta, floor, weights) in enumerate(zip(*every, strict=True)):
        leaves = [x.clone().requires_grad_() for x in (logits, eta, weights)]
        loss = loss_of_problem(leaves[0], positives, leaves[1], floor, leaves[2])
        torch.testing.assert_close(losses[i], loss.detach())
        for found, expected in zip(gradients, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(found[i], expected)


def test_second_derivatives_equal_finite_differences():
    logits, positives, eta, _, weights = (x[0] for x in problems())
    several = torch.eye(4, 5).bool() | (torch.arange(5) == torch.tensor([[4], [3], [2], [2]]))
    leaves = tuple(x.clone().requires_grad_() for x in (logits, eta + 0.01, weights + 0.01))
    for columns, floor in ((positives, -3.0), (several, -math.inf), (several, -0.1)):
        assert torch.autograd.gradgradcheck(
            lambda x, e, w, p=columns, f=floor: loss_of_problem(x, p, e, f, w), leaves
        )
    # Forward over reverse, at an eta of 0, where differences would have one side.
    hessian = torch.func.hessian(lambda x: loss_of_problem(x, positives, eta, -3.0, weights))(logits)
    assert hessian.isfinite().all() and hessian.any()


@pytest.mark.parametrize("several_positives", [False, True])
def test_gradients_into_weights_and_floor_equal_finite_differences(several_positives):
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 5, dtype=torch.float64, requires_grad=True)
    floor = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
    positives = torch.arange(4)
    if several_positives:
        positives = torch.eye(4, 5).bool() | (torch.arange(5) == torch.tensor([[4], [3], [2], [2]]))
    eta = torch.tensor([0.0, 0.3, 0.5, 0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w, f: contrastive_loss(x, positives, class_probability=eta, floor=f, weights=w),
        (logits, weights, floor),
    )


def test_a_nan_logit_is_not_the_floor():
    logits = torch.tensor([[1.0, math.nan, 0.0], [0.0, 1.0, 2.0]])
    for eta in (0.0, 0.1):
        losses = contrastive_loss(
            logits, torch.tensor([0, 1]), class_probability=eta, floor=-14.0, reduction="none"
        )
        assert losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_do_not_overflow(dtype):
    logits = torch.tensor([[80.0, 79.0, -80.0]], dtype=dtype)
    loss = contrastive_loss(logits, torch.tensor([0]), class_probability=0.1, floor=-100.0)
    expected = contrastive_loss(logits.double(), torch.tensor([0]), class_probability=0.1, floor=-100.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
