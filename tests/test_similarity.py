"""Similarities against loops over the reconstructed formulas, pair by pair and region by region."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity

from medclip_dcl.similarity import LSE, GlobalCosine, LSENonLocal, NonLocal

ALL = [GlobalCosine, LSE, NonLocal, LSENonLocal]


def loop_lse(v, t, r):
    c = [cosine_similarity(x, t, dim=0).item() for x in v]
    return math.log(sum(math.exp(r * x) for x in c) / len(c)) / r


def loop_non_local(v, t, q):
    c = torch.stack([cosine_similarity(x, t, dim=0) for x in v])
    m = int(c.argmax())
    scores = torch.stack([q(x) @ q(v[m]) for x in v]) / math.sqrt(v.shape[1])
    z = (scores.softmax(0)[:, None] * v).sum(0)
    return cosine_similarity(z, t, dim=0).item()


def loop_self_attention(v, t, q):
    z = []
    for x in v:
        scores = torch.stack([q(y) @ q(x) for y in v]) / math.sqrt(v.shape[1])
        z.append((scores.softmax(0)[:, None] * v).sum(0))
    return cosine_similarity(torch.stack(z).mean(0), t, dim=0).item()


@pytest.mark.parametrize("images, regions, sentences, dim", [(1, 1, 1, 8), (3, 7, 5, 16), (2, 225, 4, 128)])
@torch.no_grad()
def test_every_similarity_equals_its_loop(images, regions, sentences, dim):
    v = torch.randn(images, regions, dim, dtype=torch.float64)
    t = torch.randn(sentences, dim, dtype=torch.float64)
    both = LSENonLocal(dim=dim, sharpness=3.0).double()
    pooled = LSENonLocal(dim=dim, attention="mean").double()
    non_local = NonLocal(dim=dim).double()
    for s in range(sentences):
        for b in range(images):
            lse = loop_lse(v[b], t[s], 3.0)
            expected = {
                LSE(sharpness=3.0).double(): lse,
                GlobalCosine().double(): cosine_similarity(v[b].mean(0), t[s], dim=0).item(),
                non_local: loop_non_local(v[b], t[s], non_local.q),
                both: (lse + loop_non_local(v[b], t[s], both.q)) / 2,
                pooled: (loop_lse(v[b], t[s], 5.0) + loop_self_attention(v[b], t[s], pooled.q)) / 2,
            }
            for similarity, value in expected.items():
                assert similarity(v, t)[s, b].item() == pytest.approx(14 * value, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_logits_are_bounded_by_gamma2_and_shaped_sentence_image(kind):
    similarity = kind()
    v = torch.randn(3, 9, 128)
    t = torch.cat([v[0, :1], torch.randn(4, 128)])
    logits = similarity(v, t)
    assert logits.shape == (5, 3)
    assert logits.abs().max() <= similarity.gamma2 * (1 + 1e-6)
    assert [name for name, m in similarity.named_modules() if isinstance(m, torch.nn.Linear)] in ([], ["q"])


@pytest.mark.parametrize("kind", ALL)
def test_uniform_regions_equal_to_the_sentence_reach_gamma2(kind):
    t = torch.randn(1, 128)
    similarity = kind()
    assert similarity(t[None].expand(1, 6, 128), t).item() == pytest.approx(14.0, rel=1e-5)


def test_gamma_is_learned_capped_and_can_be_fixed():
    similarity = LSE(gamma2=90.0)
    with torch.no_grad():
        similarity.log_gamma2.add_(1.0)
    assert similarity.gamma2.item() == pytest.approx(100.0)
    similarity.clamp_gamma_()
    similarity.gamma2.backward()
    assert similarity.log_gamma2.grad is not None and similarity.log_gamma2.grad.item() > 0
    assert not LSE(learn_gamma=False).log_gamma2.requires_grad


def test_computed_in_float32_under_autocast():
    similarity = LSENonLocal(dim=16)
    v, t = torch.randn(2, 5, 16), torch.randn(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = similarity(v, t)
    torch.testing.assert_close(logits, similarity(v, t), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ALL)
def test_config_builds_the_same_similarity(kind):
    first = kind(gamma2=3.0)
    second = kind(**first.config())
    second.load_state_dict(first.state_dict())
    v, t = torch.randn(2, 5, 128), torch.randn(3, 128)
    torch.testing.assert_close(first(v, t), second(v, t), rtol=0, atol=0)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: LSE(sharpness=0.0), "sharpness must be finite and above 0, got 0.0"),
        (lambda: NonLocal(attention="max"), 'attention must be "critical" or "mean", got \'max\''),
        (lambda: GlobalCosine(gamma2=0.0), "gamma2 must lie in"),
        (lambda: GlobalCosine(gamma2=101.0), "max_gamma2 = 100.0"),
    ],
)
def test_bad_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()
