"""simclr_loss against a double loop, against contrastive_loss on the whole matrix, and its gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from medclip_dcl.objectives import contrastive_loss
from medclip_dcl.unimodal.simclr import simclr_loss


def loop_loss(first, second, gamma2, eta, extra=(), class_id=None):
    """DCL, eq. 7 and 8, or eq. 2 where classes are known, view by view in plain numbers."""
    views, count = [*first, *second], len(first)
    class_id = list(range(count)) if class_id is None else class_id.tolist()
    losses = []
    for i, x in enumerate(views):
        s = [gamma2 * cosine_similarity(x, y, dim=0).item() for y in views]
        positive = (i + count) % (2 * count)
        left = [j for j in range(2 * count) if class_id[j % count] != class_id[i % count]]
        if not left:
            losses.append(0.0)
            continue
        mean = sum(math.exp(s[j]) for j in left) / len(left)
        of_image = [s[positive], *(gamma2 * cosine_similarity(x, v[i % count], dim=0).item() for v in extra)]
        mean_positive = sum(math.exp(value) for value in of_image) / len(of_image)
        g = max((mean - eta[i] * mean_positive) / (1 - eta[i]), math.exp(-gamma2))
        losses.append(-math.log(math.exp(s[positive]) / (math.exp(s[positive]) + (2 * count - 2) * g)))
    return torch.tensor(losses, dtype=torch.float64)


def loss_of_matrix(first, second, gamma2, eta, class_id=None):
    """The (2B, 2B) matrix, its diagonal taken out by a weight of 0, known false negatives as well."""
    views = normalize(torch.cat([first, second]), dim=1)
    count = len(views)
    weights = 1 - torch.eye(count, dtype=views.dtype)
    if class_id is not None:
        is_left = class_id.repeat(2)[:, None] != class_id.repeat(2)
        weights = is_left * (count - 2) / is_left.to(views.dtype).sum(1, keepdim=True).clamp(min=1)
    return contrastive_loss(
        gamma2 * views @ views.T,
        (torch.arange(count) + count // 2) % count,
        class_probability=eta,
        floor=-gamma2,
        weights=weights,
        reduction="none",
    )


@pytest.mark.parametrize("gamma2", [2.0, 30.0])
@pytest.mark.parametrize("eta", [0.0, 0.1, "mixed"])
def test_equals_the_double_loop(gamma2, eta):
    first, second = torch.randn(2, 5, 3, dtype=torch.float64)
    eta = torch.linspace(0, 0.5, 10) if eta == "mixed" else eta
    found = simclr_loss(first, second, gamma2=gamma2, class_probability=eta, reduction="none")
    expected = loop_loss(first, second, gamma2, torch.as_tensor(eta).expand(10).tolist())
    torch.testing.assert_close(found, expected)


def labels_of(classes, images):
    """Every class but the last has several images; -1 is a class as any other."""
    return torch.arange(images) % classes - 1


@pytest.mark.parametrize(
    "images, dim, extra, eta, gamma2",
    [(5, 3, 1, "mixed", 2.0), (5, 3, 1, 0.1, 30.0), (3, 4, 7, 0.1, 2.0), (1, 3, 2, "mixed", 30.0)],
)
def test_extra_views_equal_the_double_loop(images, dim, extra, eta, gamma2):
    first, second, *extra_views = torch.randn(2 + extra, images, dim, dtype=torch.float64)
    eta = torch.linspace(0, 0.5, 2 * images) if eta == "mixed" else eta
    options = {"gamma2": gamma2, "class_probability": eta, "extra_views": torch.stack(extra_views)}
    found = simclr_loss(first, second, **options, reduction="none")
    expected = loop_loss(first, second, gamma2, torch.as_tensor(eta).expand(2 * images).tolist(), extra_views)
    if images == 1:
        expected = torch.zeros(2, dtype=torch.float64)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("gamma2", [2.0, 30.0])
@pytest.mark.parametrize("images, classes", [(5, 2), (7, 3), (4, 9), (3, 1), (1, 1)])
def test_the_unbiased_loss_equals_the_double_loop(images, classes, gamma2):
    first, second = torch.randn(2, images, 3, dtype=torch.float64)
    class_id = labels_of(classes, images)
    expected = loop_loss(first, second, gamma2, [0.0] * (2 * images), class_id=class_id)
    options = {"gamma2": gamma2, "class_id": class_id}
    torch.testing.assert_close(simclr_loss(first, second, **options, reduction="none"), expected)
    if classes > images > 1:
        torch.testing.assert_close(simclr_loss(first, second, gamma2=gamma2), expected.mean())
    assert bool(expected.any()) == (classes > 1)
    # A correction without a cause.
    eta, extra = torch.linspace(0.1, 0.6, images, dtype=torch.float64), torch.randn(2, images, 3).double()
    wrong = loop_loss(first, second, gamma2, eta.tolist() * 2, extra, class_id)
    options = {"gamma2": gamma2, "class_id": class_id, "class_probability": eta, "extra_views": extra}
    torch.testing.assert_close(simclr_loss(first, second, **options, reduction="none"), wrong)


def test_the_unbiased_loss_is_equation_2_of_dcl():
    """Its mean over all batches of a small world is eq. 2 with Q = N = 2B - 2 and as many negatives as are left.

    Two classes of two points: x, x+ and the negatives of eq. 2 are independent draws, and so are views of images.
    """
    chances, images = (0.3, 0.7), 3
    points = torch.randn(2, 2, 3, dtype=torch.float64)
    cosines = torch.cosine_similarity(points.view(4, 1, 3), points.view(4, 3), dim=2).tolist()
    states = list(itertools.product(range(2), range(2), range(2)))  # class, point of each view
    found = 0.0
    for batch in itertools.combinations_with_replacement(states, images):
        orders = len(set(itertools.permutations(batch)))
        chance = orders * math.prod(chances[c] / 4 for c, _, _ in batch)
        classes = torch.tensor([c for c, _, _ in batch])
        first, second = (points[classes, [state[view] for state in batch]] for view in (1, 2))
        found += chance * simclr_loss(first, second, class_id=classes).item()

    def equation_2(c, n, q):
        """Its expectation over x and x+ of class c and n negatives of the other class."""
        total, other = 0.0, (2 * (1 - c), 2 * (1 - c) + 1)
        for x, positive in itertools.product((2 * c, 2 * c + 1), repeat=2):
            for negatives in itertools.product(other, repeat=n):
                up = math.exp(2 * cosines[x][positive])
                down = up + q / n * sum(math.exp(2 * cosines[x][u]) for u in negatives)
                total += -math.log(up / down) / 4 / 2**n
        return total

    expected = 0.0
    for c in range(2):
        for others in range(1, images):  # of the other class; without one there is nothing to contrast
            ways = math.comb(images - 1, others)
            of_batch = ways * chances[1 - c] ** others * chances[c] ** (images - 1 - others)
            expected += chances[c] * of_batch * equation_2(c, 2 * others, 2 * images - 2)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "images, gamma2, eta, labels, dtype",
    [
        (1, 14.0, "by image", None, torch.float64),
        (33, 2.0, 0.0, None, torch.float32),
        (33, 100.0, 0.3, None, torch.float64),
        (33, 14.0, 0.0, labels_of(4, 33), torch.float64),
        (6, 14.0, 0.0, torch.full((6,), 5), torch.float64),
        (3, 14.0, 0.0, torch.tensor([3, 3, 8]), torch.float32),
    ],
)
def test_value_and_gradient_equal_the_whole_matrix(images, gamma2, eta, labels, dtype):
    # Second views near the first ones, so that some anchors reach the floor.
    first = torch.randn(images, 17, dtype=dtype)
    second = first + 0.3 * torch.randn(images, 17, dtype=dtype)
    weight = torch.randn(2 * images, dtype=dtype)  # losses of either sign in the sum
    eta = torch.rand(images, dtype=dtype) * 0.5 if eta == "by image" else eta
    options = {"gamma2": gamma2, "class_probability": eta, "class_id": labels, "reduction": "none"}
    of_views = eta.repeat(2) if isinstance(eta, torch.Tensor) else eta
    results = []
    for loss in (
        lambda a, b: simclr_loss(a, b, **options),
        lambda a, b: loss_of_matrix(a, b, gamma2, of_views, labels),
    ):
        a, b = first.clone().requires_grad_(), second.clone().requires_grad_()
        losses = loss(a, b)
        (losses * weight).sum().backward()
        results.append((losses.detach(), a.grad, b.grad))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_gradient_equals_finite_differences():
    views = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)
    for options in (
        {"class_probability": 0.1},
        {"class_probability": 0.1, "extra_views": views[2:]},
        {"class_id": torch.tensor([0, 1, 0])},
    ):
        assert torch.autograd.gradcheck(lambda x, o=options: simclr_loss(x[0], x[1], **o), (views,))
        assert torch.autograd.gradgradcheck(lambda x, o=options: simclr_loss(x[0], x[1], **o), (views,))


def test_gradient_into_eta_zero_equals_the_difference():
    first, second = torch.randn(2, 4, 3, dtype=torch.float64)
    eta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    simclr_loss(first, second, class_probability=eta).backward()
    step = 1e-7 * torch.eye(4, dtype=torch.float64)
    losses = torch.stack([simclr_loss(first, second, class_probability=row) for row in step])
    expected = (losses - simclr_loss(first, second)) / 1e-7
    torch.testing.assert_close(eta.grad, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["debiased", "M = 3", "unbiased"])
def test_half_precision_is_computed_in_float32(dtype, kind):
    first, second, *extra = torch.randn(4, 9, 8).to(dtype)
    first.requires_grad_()
    options: dict[str, Any] = (
        {"class_id": labels_of(3, 9)} if kind == "unbiased" else {"class_probability": 0.3}
    )
    extra_views = torch.stack(extra) if kind == "M = 3" else None
    with torch.autocast("cpu", dtype=dtype):
        loss = simclr_loss(first, second, gamma2=100.0, extra_views=extra_views, **options)
    assert loss.dtype == torch.float32
    loss.backward()
    exact = first.detach().float().requires_grad_()
    if extra_views is not None:
        extra_views = extra_views.float()
    expected = simclr_loss(exact, second.float(), gamma2=100.0, extra_views=extra_views, **options)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(first.grad, exact.grad.to(dtype), rtol=0, atol=0)
