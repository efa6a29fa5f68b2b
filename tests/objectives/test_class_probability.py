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


def test_language_model_is_a_times_p_to_the_k():
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


@pytest.mark.parametrize("a, k", [(-0.1, 0.3), (1.0, 0.3), (math.nan, 0.3), (0.2, -1.0), (0.2, math.inf)])
def test_language_model_refuses_bad_parameters(a, k):
    with pytest.raises(ValueError, match="must"):
        LanguageModelClassProbability(a=a, k=k)


def test_language_model_refuses_nan_and_logits():
    with pytest.raises(ValueError, match=r"NaN for 1 of 3 anchors \(first: 1\)"):
        LanguageModelClassProbability()(torch.tensor([-1.0, math.nan, -2.0]))
    with pytest.raises(ValueError, match="natural logarithms"):
        LanguageModelClassProbability()(torch.tensor([2.0]))


def test_constant():
    assert ConstantClassProbability(0.05)() == 0.05
    with pytest.raises(ValueError, match=r"eta must lie in \[0, 1\), got 1.0"):
        ConstantClassProbability(1.0)
    with pytest.warns(UserWarning, match="eta 0.5 is capped at max_eta 0.3"):
        assert ConstantClassProbability(0.5)() == 0.3
    assert ConstantClassProbability(0.5, max_eta=0.6)() == 0.5


def test_known_from_a_table_and_from_fields():
    table = KnownClassProbability({3: 0.1, 8: 0.9})
    assert table.requires == ("class_id",)
    assert table(class_id=torch.tensor([8, 3, 3])).tolist() == pytest.approx([0.3, 0.1, 0.1])
    assert table.share_capped == pytest.approx(1 / 3)
    served = KnownClassProbability(share="sentence_share")
    assert served.requires == ("sentence_share",)
    assert served(sentence_share=torch.tensor([0.02])).tolist() == pytest.approx([0.02])
    assert KnownClassProbability([0.1, 0.2])(class_id=torch.tensor([1])).tolist() == pytest.approx([0.2])


def test_known_refuses():
    with pytest.raises(ValueError, match=r"lacks the classes \[7\]"):
        KnownClassProbability({1: 0.1})(class_id=torch.tensor([7, 1]))
    with pytest.raises(ValueError, match="shares must lie in"):
        KnownClassProbability({1: 1.5})
    with pytest.raises(ValueError, match="needs the field rho"):
        KnownClassProbability()(sentence_share=torch.tensor([0.1]))
    with pytest.raises(ValueError, match="not be NaN"):
        KnownClassProbability()(rho=torch.tensor([math.nan]))
