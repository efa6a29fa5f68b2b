"""One positive: eta weighs an anchor's gradient and stops it, exactly (docs/theory.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal
from medclip_dcl.objectives import ConstantClassProbability, HardNegatives, contrastive_loss, in_batch


@pytest.mark.parametrize("gamma2", [2.0, 4.0, 14.0])
@pytest.mark.parametrize("rule", ["none", "weights", "hard"])
def test_debiased_loss_and_gradient_are_those_of_info_nce(gamma2, rule):
    """log(exp(l) - eta B) - log(1 - eta), and InfoNCE's gradient times 1 / (1 - eta B q), with any weights."""
    torch.manual_seed(1)
    columns, eta = torch.arange(300) % 23, 0.3 * torch.rand(300, dtype=torch.float64)
    is_negative = columns[:, None] != torch.arange(23)
    cosines = (0.3 * torch.randn(300, 23, dtype=torch.float64)).clamp(-1, 1)
    cosines = cosines.where(is_negative, torch.linspace(-1, 1, 300, dtype=torch.float64)[:, None])
    logits = (gamma2 * cosines).requires_grad_()
    weights = None
    if rule == "weights":
        weights = torch.rand(300, 23, dtype=torch.float64).round(decimals=1)
    if rule == "hard":  # with their own gradient
        weights = HardNegatives(0.4)(columns, logits)
    count = 22.0 if weights is None else (weights * is_negative).sum(1)
    options: dict[str, Any] = {"weights": weights, "reduction": "none"}
    plain = contrastive_loss(logits, columns, **options)
    debiased = contrastive_loss(logits, columns, class_probability=eta, floor=-gamma2, **options)
    of_plain, of_debiased = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (plain, debiased)
    )
    if rule == "hard":  # `count` is the number of negatives; its gradient is 0
        torch.testing.assert_close(count, torch.full_like(plain, 22.0))
    above = (of_debiased * is_negative).abs().amax(1) > 1e-12  # the rounding of hard negatives' count
    assert above.sum() > 150 and (above.sum() < 295 or gamma2 == 2.0)
    b = 1 + torch.as_tensor(count, dtype=torch.float64).detach().expand(300)
    expected = torch.log(plain.exp() - eta * b) - torch.log1p(-eta)
    torch.testing.assert_close(debiased[above], expected[above], rtol=1e-9, atol=1e-9)
    weight = 1 / (1 - eta * b * (-plain).exp())
    torch.testing.assert_close(of_debiased[above], (weight[:, None] * of_plain)[above], rtol=1e-7, atol=1e-9)
    level = (b - 1) * torch.tensor(-gamma2).double().exp()
    positive = logits.gather(1, columns[:, None])[:, 0]
    at_floor = of_debiased[~above].gather(1, columns[~above, None])[:, 0]
    torch.testing.assert_close(at_floor, (-level / (level + positive.exp()))[~above], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("image_to_text", [0.0, 1.0])
@pytest.mark.parametrize("similarity", [GlobalCosine, lambda: LSENonLocal(8)])
def test_an_anchors_gradient_keeps_its_direction(image_to_text, similarity, monkeypatch):
    """Of regions, sentences and the similarity's parameters, in both directions, where an image has one sentence."""
    torch.manual_seed(2)
    similarity = similarity().double()
    leaves = torch.randn(5, 6, 8).double().requires_grad_(), torch.randn(5, 8).double().requires_grad_()
    numbers = {name: torch.arange(5) for name in ("image_index", "view_of", "study_id", "sentence_id")}
    only_one = in_batch._THIS_PROCESS._replace(mean=lambda losses: losses[2])
    monkeypatch.setattr(in_batch, "_THIS_PROCESS", only_one)
    found = []
    for eta in (0.0, 0.05):
        objective = in_batch.InBatchObjective(ConstantClassProbability(eta), image_to_text=image_to_text)
        loss, _ = objective(similarity, *leaves, {**numbers, "anchor": {}, "candidate": {}}, False)
        found.append((loss.detach(), torch.autograd.grad(loss, [*leaves, *similarity.parameters()])))
    (loss, plain), (_, debiased) = found
    weight = 1 / (1 - 0.05 * 5 * (-loss).exp())
    assert weight > 1.01
    for of_debiased, of_plain in zip(debiased, plain, strict=True):
        torch.testing.assert_close(of_debiased, weight * of_plain, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("case", ["several positives", "v apart"])
def test_the_identity_does_not_hold(case):
    logits = torch.randn(50, 20, dtype=torch.float64, requires_grad=True)
    positives = torch.zeros(50, 20, dtype=torch.bool)
    positives[:, : 3 if case == "several positives" else 1] = True
    options: dict[str, Any] = {"reduction": "none"}
    if case == "v apart":
        options["correction_logits"] = logits[:, 4:6]
    gradients = [
        torch.autograd.grad(
            contrastive_loss(logits, positives, class_probability=eta, **options).sum(), logits
        )[0]
        for eta in (0.0, 0.1)
    ]
    assert cosine_similarity(gradients[0], gradients[1]).min() < 0.99
