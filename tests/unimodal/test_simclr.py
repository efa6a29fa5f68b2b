"""simclr_loss against a double loop, in half precision, and at its edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from medclip_dcl.common.errors import UserError
from medclip_dcl.objectives import (
    ConstantClassProbability,
    DecoupledLoss,
    StoppedInfoNCE,
    WeightedInfoNCE,
)
from medclip_dcl.unimodal.simclr import SimCLR, simclr_loss


def loop_loss(first, second, gamma2, eta, extra=(), class_id=None, own=True):
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
        of_image = [
            *([s[positive]] if own else []),
            *(gamma2 * cosine_similarity(x, v[i % count], dim=0).item() for v in extra),
        ]
        mean_positive = sum(math.exp(value) for value in of_image) / len(of_image)
        g = max((mean - eta[i] * mean_positive) / (1 - eta[i]), math.exp(-gamma2))
        losses.append(-math.log(math.exp(s[positive]) / (math.exp(s[positive]) + (2 * count - 2) * g)))
    return torch.tensor(losses, dtype=torch.float64)


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


@pytest.mark.parametrize("class_id", [torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])])
def test_anchors_without_negatives_have_finite_gradients(class_id):
    views = torch.randn(2, 3, 4, requires_grad=True)
    simclr_loss(views[0], views[1], class_id=class_id.long()).backward()
    assert views.grad is not None and views.grad.isfinite().all()
    assert bool(views.grad.any()) == bool(class_id.any())


@pytest.mark.parametrize(("members", "gamma2"), [(1, 2.0), (3, 2.0), (3, 30.0)])
def test_class_members_equal_the_double_loop(members, gamma2):
    """v without x+; the objective takes the views after the second for members."""
    views = torch.randn(2 + members, 5, 3, dtype=torch.float64)
    first, second, *extra = views
    expected = loop_loss(first, second, gamma2, [0.2] * 10, extra, own=False)
    options: dict[str, Any] = {"gamma2": gamma2, "class_probability": 0.2, "extra_views": torch.stack(extra)}
    found = simclr_loss(first, second, **options, own_positive=False, reduction="none")
    torch.testing.assert_close(found, expected)
    one = SimCLR(ConstantClassProbability(0.2), gamma2, members, correction_images="class")
    assert (one.n_views, one.n_members, one.requires) == (2 + members, members, ("class_id",))
    loss, figures = one(views, {"class_id": torch.zeros(5)})
    torch.testing.assert_close(loss, expected.mean())
    assert figures["class_probability"].item() == pytest.approx(0.2)
    assert (found - simclr_loss(first, second, **options, reduction="none")).abs().max() > 1e-3


def test_weight_and_stop_take_the_debiased_gradient_apart():
    """The identity for views: above the floor the debiased gradient is the weight arm's up to its mean weight."""
    views = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        views[1, :2] = views[0, :2]  # anchors that the stop reaches
    eta, gamma2 = ConstantClassProbability(0.3), 8.0

    def of(loss: Any, class_probability: Any = eta) -> tuple[Any, Any]:
        mean, figures = SimCLR(class_probability, gamma2, loss=loss)(views, {})
        return torch.autograd.grad(mean, views)[0], figures

    options: dict[str, Any] = {"gamma2": gamma2, "reduction": "none"}
    losses = simclr_loss(views[0], views[1], **options)
    debiased = simclr_loss(views[0], views[1], class_probability=0.3, **options)
    q, b = (-losses.detach()).exp(), 11
    positive = gamma2 * cosine_similarity(views[0], views[1], dim=1).detach().repeat(2)
    limit = 1 / (0.3 * b + 0.7 * (1 + (b - 1) * (-gamma2 - positive).exp()))
    is_stopped, weight = q >= limit, 1 / (1 - 0.3 * b * q.minimum(limit))
    assert 0 < is_stopped.sum() < 12
    stopped, figures = of(StoppedInfoNCE())
    expected = debiased.where(is_stopped, losses).mean()
    torch.testing.assert_close(stopped, torch.autograd.grad(expected, views)[0])
    assert figures["at_floor"].item() == pytest.approx(is_stopped.double().mean().item())
    assert figures["class_probability"].item() == pytest.approx(0.3)
    losses = simclr_loss(views[0], views[1], gamma2=gamma2, reduction="none")
    expected = torch.autograd.grad((losses * weight).mean() / weight.mean(), views)[0]
    torch.testing.assert_close(of(WeightedInfoNCE())[0], expected)
    losses = simclr_loss(views[0], views[1], gamma2=gamma2, reduction="none")
    mean, figures = SimCLR(None, gamma2, loss=DecoupledLoss())(views, {})
    torch.testing.assert_close(mean, losses.expm1().log().mean())  # exp(l) = 1 + negatives / positive
    assert figures.keys() == {"at_floor"} and figures["at_floor"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"correction_images": "class"}, "class_probability and no loss for n_positives 1 and .* class"),
        ({"loss": StoppedInfoNCE(), "unbiased": True}, "unbiased: false with a loss"),
        ({"loss": DecoupledLoss(), "class_probability": ConstantClassProbability(0.1)}, "expected null"),
    ],
)
def test_options_without_a_part_in_the_loss_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        SimCLR(**options)
