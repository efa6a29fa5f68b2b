"""Losses of metric learning against loops over their formulas and against torch's; gradients and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import TripletMarginWithDistanceLoss

from medclip_dcl.unimodal.metric_learning import (
    contrastive_pair_loss,
    soft_nearest_neighbour_loss,
    triplet_loss,
)


def squared(x, y):
    return math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def loop_of_pairs(first, second, is_same, margin):
    losses = []
    for x, y, same in zip(first.tolist(), second.tolist(), is_same.tolist(), strict=True):
        distance = math.sqrt(squared(x, y))
        losses.append(0.5 * distance**2 if same else 0.5 * max(0.0, margin - distance) ** 2)
    return torch.tensor(losses, dtype=torch.float64)


def loop_of_neighbours(embeddings, class_id, temperature):
    points, classes = embeddings.tolist(), class_id.tolist()
    losses = []
    for i, x in enumerate(points):
        near = {j: math.exp(-squared(x, y) / temperature) for j, y in enumerate(points) if j != i}
        same = sum(value for j, value in near.items() if classes[j] == classes[i])
        losses.append(-math.log(same / sum(near.values())) if same else 0.0)
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("pairs, dim", [(1, 3), (17, 5)])
@pytest.mark.parametrize("margin", [0.3, 2.5])
def test_pairs_equal_the_loop(pairs, dim, margin):
    first, second = torch.randn(2, pairs, dim, dtype=torch.float64)
    is_same = torch.arange(pairs) % 3 == 0
    expected = loop_of_pairs(first, second, is_same, margin)
    found = contrastive_pair_loss(first, second, is_same, margin=margin, reduction="none")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(contrastive_pair_loss(first, second, is_same, margin=margin), expected.mean())


@pytest.mark.parametrize("anchors, dim", [(1, 3), (17, 5)])
@pytest.mark.parametrize("margin", [0.2, 3.0])
def test_triplets_equal_torchs_with_squared_distances(anchors, dim, margin):
    x, positives, negatives = torch.randn(3, anchors, dim, dtype=torch.float64)
    oracle = TripletMarginWithDistanceLoss(
        distance_function=lambda a, b: (a - b).square().sum(1), margin=margin, reduction="none"
    )
    expected = oracle(x, positives, negatives)
    found = triplet_loss(x, positives, negatives, margin=margin, reduction="none")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        triplet_loss(x, positives, negatives, margin=margin, reduction="sum"), expected.sum()
    )


@pytest.mark.parametrize("points, classes, dim", [(1, 1, 3), (2, 2, 3), (7, 3, 1), (23, 5, 4)])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 20.0])
def test_soft_nearest_neighbours_equal_the_loop(points, classes, dim, temperature):
    embeddings = torch.randn(points, dim, dtype=torch.float64)
    class_id = torch.arange(points) % classes
    expected = loop_of_neighbours(embeddings, class_id, temperature)
    options = {"temperature": temperature}
    found = soft_nearest_neighbour_loss(embeddings, class_id, **options, reduction="none")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(soft_nearest_neighbour_loss(embeddings, class_id, **options), expected.mean())


def test_far_neighbours_and_equal_points_are_finite_with_a_gradient():
    # exp(-d^2) of the points of one class is 0 in float32, points of two classes are near or in one place.
    points = torch.tensor([[0.0], [40.0], [40.0], [0.5]], requires_grad=True)
    losses = soft_nearest_neighbour_loss(points, torch.tensor([0, 0, 1, 1]), reduction="none")
    assert losses.tolist() == pytest.approx([1599.75, 1600, 1560.25, 1560])
    (gradient,) = torch.autograd.grad(losses.sum(), points)
    assert gradient.isfinite().all() and gradient.abs().min() > 1
    pair = torch.zeros(2, 3, requires_grad=True)
    loss = contrastive_pair_loss(pair, pair.detach(), torch.tensor([True, False]))
    assert torch.autograd.grad(loss, pair)[0].eq(0).all()


def test_gradients_equal_finite_differences():
    x, y, z = torch.randn(3, 6, 3, dtype=torch.float64, requires_grad=True)
    class_id = torch.tensor([0, 1, 0, 2, 1, 1])
    for function in (
        lambda a: contrastive_pair_loss(a, y, class_id == 1, margin=3.0),
        lambda a: triplet_loss(a, y, z, margin=4.0),
        lambda a: soft_nearest_neighbour_loss(a, class_id, temperature=2.0),
    ):
        assert torch.autograd.gradcheck(function, (x.detach().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    x, y, z = (300 * torch.randn(3, 5, 4)).to(dtype)  # squares leave float16
    class_id = torch.tensor([0, 1, 0, 1, 1])
    for function in (
        lambda a, b, c: contrastive_pair_loss(a, b, class_id == 0),
        triplet_loss,
        lambda a, b, c: soft_nearest_neighbour_loss(a, class_id),
    ):
        found = function(x, y, z)
        assert found.dtype == torch.float32 and found.isfinite()
        assert found.item() == function(x.float(), y.float(), z.float()).item()


X, S = torch.zeros(2, 3), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contrastive_pair_loss(X, X, S, margin=0.0), "margin must be finite and above 0, got 0.0"),
        (lambda: contrastive_pair_loss(X[:0], X[:0], S[:0]), r"at least one pair, got shape \(0, 3\)"),
        (lambda: triplet_loss(X, X, X, margin=math.inf), "margin must be finite and above 0, got inf"),
        (lambda: triplet_loss(X[:0], X[:0], X[:0]), r"at least one anchor, got shape \(0, 3\)"),
        (
            lambda: soft_nearest_neighbour_loss(X, S.long(), temperature=-1.0),
            "temperature must be finite and above 0, got -1.0",
        ),
        (lambda: soft_nearest_neighbour_loss(X[:0], S[:0].long()), "at least one point"),
        (lambda: triplet_loss(X, X, X, reduction="max"), 'reduction must be "mean", "sum" or "none"'),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
