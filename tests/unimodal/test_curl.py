"""CURL's losses against slow loops over their formulas, and in half precision."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.unimodal.curl import k_negative_loss, margin_loss

LOSSES = ["hinge", "logistic"]


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def loop_loss(anchors, positives, negatives, loss):
    """Saunshi et al., definition 2.3, anchor by anchor in plain numbers."""
    losses = []
    for x, positive, rivals in zip(anchors, positives, negatives, strict=True):
        margins = []
        for rival in rivals:
            margins.append(dot(x, [p - n for p, n in zip(positive, rival, strict=True)]))
        if loss == "hinge":
            losses.append(max(0.0, 1 + max(-v for v in margins)))
        else:
            losses.append(math.log2(1 + sum(math.exp(-v) for v in margins)))
    return torch.tensor(losses, dtype=torch.float64)


def random_blocks(anchors, negatives, similar, dim, scale=1.0, dtype=torch.float64):
    shapes = [(anchors, dim), (anchors, similar, dim), (anchors, negatives, similar, dim)]
    return [(math.sqrt(scale) * torch.randn(shape, dtype=torch.float64)).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    "loss, anchors, negatives, dim, scale, dtype",
    [
        ("hinge", 3, 1, 5, 0.01, torch.float64),
        ("logistic", 5, 23, 2, 30.0, torch.float64),
        ("hinge", 5, 23, 2, 30.0, torch.float32),
        ("logistic", 3, 1, 5, 0.01, torch.float32),
        ("hinge", 5, 23, 2, 0.01, torch.bfloat16),
        ("logistic", 3, 1, 5, 30.0, torch.bfloat16),
    ],
)
def test_equals_the_loop(loss, anchors, negatives, dim, scale, dtype):
    x, positives, rivals = random_blocks(anchors, negatives, 1, dim, scale, dtype)
    expected = loop_loss(x.tolist(), positives[:, 0].tolist(), rivals[:, :, 0].tolist(), loss)
    found = k_negative_loss(x, positives[:, 0], rivals[:, :, 0], loss=loss, reduction="none")
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * scale)
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        found = k_negative_loss(x, positives[:, 0], rivals[:, :, 0], loss=loss, reduction=reduction)
        torch.testing.assert_close(found.double(), value, rtol=tolerance, atol=anchors * tolerance * scale)


def test_a_large_margin_keeps_its_small_loss():
    found = margin_loss(torch.tensor([[50.0]]), "logistic").item()
    assert found == pytest.approx(math.exp(-50) / math.log(2), rel=1e-5)
    assert margin_loss(torch.tensor([[-1e30]]), "logistic").item() == pytest.approx(
        1e30 / math.log(2), rel=1e-6
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_does_not_overflow(loss):
    # Inner products of 3 * 300 * 300 leave float16.
    x = torch.full((1, 3), 300.0, dtype=torch.float16)
    positive = torch.full((1, 3), 30_000.0, dtype=torch.float16)
    negatives = torch.full((1, 1, 3), 30_016.0, dtype=torch.float16)
    margin = 3 * 300.0 * (30_000.0 - 30_016.0)
    expected = 1 - margin if loss == "hinge" else -margin / math.log(2)
    assert k_negative_loss(x, positive, negatives, loss=loss).item() == pytest.approx(expected, rel=1e-6)
