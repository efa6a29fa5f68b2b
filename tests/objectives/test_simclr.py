"""simclr_loss against a double loop, against contrastive_loss on the whole matrix, its memory and its errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from torch.utils._python_dispatch import TorchDispatchMode

from medclip_dcl.objectives import contrastive_loss, simclr_loss


def loop_loss(first, second, gamma2, eta):
    """DCL, eq. 7 and 8, view by view in plain numbers."""
    views, count = [*first, *second], len(first)
    losses = []
    for i, x in enumerate(views):
        s = [gamma2 * cosine_similarity(x, y, dim=0).item() for y in views]
        positive = (i + count) % (2 * count)
        negatives = [math.exp(s[j]) for j in range(2 * count) if j not in (i, positive)]
        mean = sum(negatives) / len(negatives)
        g = max((mean - eta[i] * math.exp(s[positive])) / (1 - eta[i]), math.exp(-gamma2))
        losses.append(-math.log(math.exp(s[positive]) / (math.exp(s[positive]) + len(negatives) * g)))
    return torch.tensor(losses, dtype=torch.float64)


def loss_of_matrix(first, second, gamma2, eta):
    """The (2B, 2B) matrix, its diagonal taken out by a weight of 0."""
    views = normalize(torch.cat([first, second]), dim=1)
    count = len(views)
    return contrastive_loss(
        gamma2 * views @ views.T,
        (torch.arange(count) + count // 2) % count,
        class_probability=eta,
        floor=-gamma2,
        weights=1 - torch.eye(count, dtype=views.dtype),
        reduction="none",
    )


@pytest.mark.parametrize("gamma2", [2.0, 30.0])
@pytest.mark.parametrize("eta", [0.0, 0.1, "mixed"])
def test_equals_the_double_loop(gamma2, eta):
    first, second = torch.randn(2, 5, 3, dtype=torch.float64)
    eta = torch.linspace(0, 0.5, 10) if eta == "mixed" else eta
    found = simclr_loss(first, second, gamma2=gamma2, class_probability=eta, reduction="none", block=3)
    expected = loop_loss(first, second, gamma2, torch.as_tensor(eta).expand(10).tolist())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("images, dim", [(1, 3), (33, 17)])
@pytest.mark.parametrize("block", [None, 1, 5])
@pytest.mark.parametrize("gamma2, eta", [(2.0, 0.0), (14.0, "by image"), (100.0, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_equal_the_whole_matrix(images, dim, block, gamma2, eta, dtype):
    # Second views near the first ones, so that some anchors reach the floor.
    first = torch.randn(images, dim, dtype=dtype)
    second = first + 0.3 * torch.randn(images, dim, dtype=dtype)
    weight = torch.randn(2 * images, dtype=dtype)  # losses of either sign in the sum
    eta = torch.rand(images, dtype=dtype) * 0.5 if eta == "by image" else eta
    results = []
    for loss in (
        lambda a, b: simclr_loss(a, b, gamma2=gamma2, class_probability=eta, reduction="none", block=block),
        lambda a, b: loss_of_matrix(a, b, gamma2, eta.repeat(2) if isinstance(eta, torch.Tensor) else eta),
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
    views = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: simclr_loss(x[0], x[1], class_probability=0.1, block=4), (views,)
    )


def test_gradient_into_an_eta_of_zero_equals_the_finite_difference():
    first, second = torch.randn(2, 4, 3, dtype=torch.float64)
    eta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    simclr_loss(first, second, class_probability=eta).backward()
    step = 1e-7 * torch.eye(4, dtype=torch.float64)
    losses = torch.stack([simclr_loss(first, second, class_probability=row) for row in step])
    expected = (losses - simclr_loss(first, second)) / 1e-7
    torch.testing.assert_close(eta.grad, expected, rtol=1e-5, atol=1e-8)


def test_torch_func_and_second_derivatives():
    first, second = torch.randn(2, 3, 4, 5, dtype=torch.float64)

    def loss(a, b):
        return simclr_loss(a, b, class_probability=0.1)

    gradients = torch.func.vmap(torch.func.grad(loss))(first, second)
    for i, losses in enumerate(torch.func.vmap(loss)(first, second)):
        leaf = first[i].clone().requires_grad_()
        expected = loss(leaf, second[i])
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(gradients[i], torch.autograd.grad(expected, leaf)[0])
    assert torch.autograd.gradgradcheck(loss, (first[0].requires_grad_(), second[0].requires_grad_()))
    hessian = torch.func.hessian(loss)(first[1].detach(), second[1])
    twice = torch.func.jacrev(torch.func.jacrev(loss))(first[1].detach(), second[1])
    torch.testing.assert_close(hessian, twice)


def test_several_blocks_refuse_torch_func_and_second_derivatives_in_a_line():
    first, second = torch.randn(2, 4, 3)

    def loss(x):
        return simclr_loss(x, second, block=3)

    leaf = first.clone().requires_grad_()
    for function in (
        lambda: torch.autograd.grad(loss(leaf), leaf, create_graph=True),
        lambda: torch.func.grad(loss)(first),
        lambda: torch.func.jvp(loss, (first,), (first,)),
        lambda: torch.func.vmap(loss)(first[None]),
        lambda: torch.func.hessian(loss)(first),
    ):
        with pytest.raises(
            RuntimeError, match="several blocks supports neither .*: set block to .* 2 . images"
        ):
            function()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    first, second = torch.randn(2, 9, 8).to(dtype)
    first.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss = simclr_loss(first, second, gamma2=100.0, class_probability=0.3)
    loss.backward()
    exact = first.detach().float().requires_grad_()
    expected = simclr_loss(exact, second.float(), gamma2=100.0, class_probability=0.3)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(first.grad, exact.grad.to(dtype), rtol=0, atol=0)


def test_reductions_agree():
    first, second = torch.randn(2, 4, 3)
    losses = simclr_loss(first, second, reduction="none")
    assert losses.shape == (8,)
    torch.testing.assert_close(simclr_loss(first, second), losses.mean())
    torch.testing.assert_close(simclr_loss(first, second, reduction="sum"), losses.sum())


class _Largest(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_more_than_a_block_of_rows_exists():
    first, second = torch.randn(2, 50, 4, requires_grad=True)
    with _Largest() as largest:
        simclr_loss(first, second, class_probability=0.1, block=7).backward()
    assert largest.elements == 7 * 100


F = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(3), F, {}), r"first must be floating point of shape \(image, dim\)"),
        ((torch.zeros(0, 3), torch.zeros(0, 3), {}), r"image at least 1, got torch.float32 \(0, 3\)"),
        ((F.long(), F.long(), {}), r"got torch.int64 \(2, 3\)"),
        ((F, torch.zeros(3, 3), {}), r"second must be torch.float32 of shape \(2, 3\) as first is, got"),
        ((F, F.double(), {}), r"got torch.float64 \(2, 3\)"),
        ((F, F, {"gamma2": 0.0}), "gamma2 must be finite and above 0, got 0.0"),
        ((F, F, {"block": 0}), "block must be at least 1 row, got 0"),
        ((F, F, {"class_probability": 1.0}), r"class_probability must lie in \[0, 1\)"),
        ((F, F, {"class_probability": torch.zeros(3)}), r"a number or of shape \(2,\) or \(4,\), got \(3,\)"),
        ((F, F, {"reduction": "max"}), 'reduction must be "mean", "sum" or "none", got \'max\''),
    ],
)
def test_bad_input(arguments, message):
    first, second, options = arguments
    with pytest.raises(ValueError, match=message):
        simclr_loss(first, second, **options)
