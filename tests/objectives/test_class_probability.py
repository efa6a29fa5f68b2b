"""Class probabilities: the formula, the cap, and the refusals."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.objectives import (
    ConstantClassProbability,
    KnownClassProbability,
    LanguageModelClassProbability,
)


def test_language_model_eta_is_the_formula():
    log_p = torch.tensor([0.0, -1.0, -10.0, -40.0])
    eta = LanguageModelClassProbability()(log_p)
    expected = [0.2 * math.exp(x) ** 0.35 for x in log_p.tolist()]
    assert eta.tolist() == pytest.approx(expected)


def test_language_model_cap_counts_the_capped():
    rule = LanguageModelClassProbability(a=0.9, k=1.0, max_eta=0.25)
    eta = rule(log_p=torch.tensor([0.0, -0.1, -5.0, -9.0]))
    assert eta.max().item() == pytest.approx(0.25)
    assert rule.share_capped == 0.5
    assert rule.requires == ("log_p",)


def test_constant():
    assert ConstantClassProbability(0.05)() == 0.05
    with pytest.warns(UserWarning, match="eta 0.5 is capped at max_eta 0.3"):
        assert ConstantClassProbability(0.5)() == 0.3
    assert ConstantClassProbability(0.5, max_eta=0.6)() == 0.5


def test_known_is_the_capped_field():
    rule = KnownClassProbability(share="sentence_share")
    assert rule.requires == ("sentence_share",)
    found = rule(sentence_share=torch.tensor([0.9, 0.02, 0.1]))
    assert found.tolist() == pytest.approx([0.3, 0.02, 0.1]) and rule.share_capped == pytest.approx(1 / 3)
