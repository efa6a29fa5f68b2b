"""Linear probes against scikit-learn and one by one; the draws of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from medclip_dcl.metrics.linear_probe import LinearProbe, draw_labelled, fit_linear_probes, standardisation

DIGITS = load_digits()
FEATURES, LABELS = torch.tensor(DIGITS.data, dtype=torch.float32) / 16, torch.tensor(DIGITS.target)
OPTIONS: dict[str, Any] = {
    "epochs": 100, "learning_rate": 1e-3, "weight_decay": 1e-6, "batch_size": 128, "seed": 0,
}  # fmt: skip


def fit(
    features: torch.Tensor, labels: torch.Tensor, drawn: torch.Tensor, n: int, **options: Any
) -> LinearProbe:
    return fit_linear_probes(features, labels, drawn, n, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def standardised() -> torch.Tensor:
    shift, scale = standardisation(FEATURES[:1200])
    return (FEATURES - shift) / scale


@pytest.mark.slow
def test_a_probe_is_as_good_as_logistic_regression(standardised):
    drawn = torch.arange(1200)[None]
    probe = fit(standardised, LABELS, drawn, 10)
    reference = LogisticRegression(max_iter=500).fit(standardised[:1200].numpy(), LABELS[:1200].numpy())
    accuracy = (probe.logits(standardised[1200:])[0].argmax(1) == LABELS[1200:]).double().mean().item()
    assert (
        accuracy == pytest.approx(reference.score(standardised[1200:], LABELS[1200:]), abs=0.02)
        and accuracy > 0.88
    )


def test_a_converged_probe_is_logistic_regression():
    """On noisy labels the optimum is finite: weights agree up to the constant that a softmax does not see."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 3, generator=generator)
    labels = (
        features @ torch.randn(3, 4, generator=generator) + 2 * torch.randn(300, 4, generator=generator)
    ).argmax(1)
    options = {"epochs": 800, "learning_rate": 0.05, "weight_decay": 0.0, "batch_size": 300}
    probe = fit(features, labels, torch.arange(300)[None], 4, **options)
    found = probe.weight[0].T - probe.weight[0].mean(1)
    reference = LogisticRegression(C=np.inf, tol=1e-8, max_iter=2000).fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(found, reference.coef_ - reference.coef_.mean(0), atol=2e-3)


def test_draws_are_trained_as_if_each_were_alone(standardised):
    drawn = torch.from_numpy(draw_labelled(LABELS.numpy()[:1200], 0.05, 3, seed=4))
    options = {"epochs": 3, "batch_size": 17, "seed": 9}
    together = fit(standardised, LABELS, drawn, 10, **options)
    alone = fit(standardised, LABELS, drawn[:1], 10, **options)
    torch.testing.assert_close(together.weight[:1], alone.weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(together.bias[:1], alone.bias, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(together.weight[1], together.weight[0])


def test_one_step_is_adams_on_the_mean_gradient():
    """From 0 each number moves by the learning rate against the sign of its gradient."""
    features, labels = torch.tensor([[1.0, -2.0], [0.7, 3.0], [9.0, 9.0]]), torch.tensor([0, 1, 2])
    probe = fit(features, labels, torch.tensor([[0, 1]]), 3, epochs=1, weight_decay=0.0)
    gradient = features[:2].T @ (torch.full((2, 3), 1 / 3) - torch.eye(3)[labels[:2]]) / 2
    torch.testing.assert_close(probe.weight[0], -1e-3 * gradient.sign(), rtol=1e-3, atol=1e-7)


def test_lightnings_inference_mode_does_not_stop_the_training(standardised):
    with torch.inference_mode():
        features = standardised.clone()
        probe = fit(features, LABELS, torch.arange(200)[None], 10, epochs=1)
        assert probe.logits(features).argmax(2).shape == (1, len(features))
    assert probe.weight.abs().max() > 0


def test_labels_are_drawn_class_by_class():
    labels = np.array([0] * 30 + [2] * 7 + [-1] * 5 + [1] * 2)
    drawn = draw_labelled(labels, 0.2, draws=4, seed=3)
    assert drawn.shape == (4, 8)
    for one in drawn:
        assert len(set(one)) == 8 and np.bincount(labels[one]).tolist() == [6, 1, 1]
    assert len({tuple(one) for one in drawn}) == 4
    assert np.array_equal(drawn[:2], draw_labelled(labels, 0.2, draws=2, seed=3))
    for less, more in zip(drawn, draw_labelled(labels, 0.6, draws=4, seed=3), strict=True):
        assert set(less) <= set(more)
    assert draw_labelled(labels, 1.0, draws=1, seed=3)[0].tolist() == np.flatnonzero(labels >= 0).tolist()


def test_constant_features_are_not_amplified():
    features = torch.tensor([[1.0, 4.0, 5.0], [3.0, 4.0, 5.0], [2.0, 4.0, 8.0]])
    shift, scale = standardisation(features)
    torch.testing.assert_close(shift, torch.tensor([2.0, 4.0, 6.0]))
    spread = torch.tensor([(2 / 3) ** 0.5, 0.0, 2**0.5])
    torch.testing.assert_close(scale, torch.maximum(spread, 0.01 * spread.mean()))
    assert standardisation(torch.ones(3, 2))[1].tolist() == [1, 1]
