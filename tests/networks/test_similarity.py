"""Similarities against loops over the reconstructed formulas, pair by pair and region by region.

Then what makes them fast and small: parts of the images, blocks of maps, and backward passes of their own.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

from medclip_dcl.networks import similarity as similarity_module
from medclip_dcl.networks.similarity import LSE, GlobalCosine, LSENonLocal, NonLocal, at_image_size
from medclip_dcl.objectives import contrastive_loss
from tests.small import RegionsAndGlobal

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


@pytest.mark.parametrize("images, regions, sentences, dim", [(1, 1, 1, 8), (3, 7, 5, 16)])
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


def test_gamma_is_learned_capped_and_can_be_fixed():
    similarity = LSE(gamma2=90.0)
    with torch.no_grad():
        similarity.log_gamma2.add_(1.0)
    assert similarity.gamma2.item() == pytest.approx(100.0)
    similarity.clamp_gamma_()
    similarity.gamma2.backward()
    assert similarity.log_gamma2.grad is not None and similarity.log_gamma2.grad.item() > 0
    assert not LSE(learn_gamma=False).log_gamma2.requires_grad


WITH_MAPS = {
    "LSE": lambda dim: LSE(sharpness=7.0),
    "NL": lambda dim: NonLocal(dim=dim),
    "LSE+NL": lambda dim: LSENonLocal(dim=dim),
    "LSE+NL of the mean": lambda dim: LSENonLocal(dim=dim, attention="mean"),
}


def value_and_gradients(similarity, regions, sentences, forward=None):
    """Logits, and gradients of a random combination of them, by name."""
    v, t = regions.detach().clone().requires_grad_(), sentences.detach().clone().requires_grad_()
    similarity.zero_grad()
    logits = (forward or similarity)(v, t)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    (logits * weight).sum().backward()
    of_parameters = {name: p.grad.clone() for name, p in similarity.named_parameters()}
    return {"logits": logits.detach(), "regions": v.grad, "sentences": t.grad, **of_parameters}


def plain_scores(similarity, regions, sentences):
    """The reconstructed formulas in plain operations, one image after the other, for autograd."""
    columns = []
    for v in regions:
        c = cosine_similarity(sentences[:, None], v, dim=-1)
        r = getattr(similarity, "sharpness", 1.0)
        lse = (torch.logsumexp(r * c, 1) - math.log(len(v))) / r
        if isinstance(similarity, LSE):
            columns.append(lse)
            continue
        q = similarity.q(v)
        z = (q @ q.T / math.sqrt(v.shape[1])).softmax(1) @ v
        z = z.mean(0)[None] if similarity.attention == "mean" else z[c.argmax(1)]
        non_local = cosine_similarity(z, sentences, dim=-1)
        columns.append(non_local if type(similarity) is NonLocal else (lse + non_local) / 2)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("name", WITH_MAPS)
@pytest.mark.parametrize("images, regions, sentences, dim", [(3, 7, 5, 4), (2, 3, 6, 8), (1, 1, 1, 5)])
def test_gradients_equal_those_of_plain_operations(name, images, regions, sentences, dim, monkeypatch):
    monkeypatch.setitem(similarity_module._BLOCK_ELEMENTS, "cpu", 2 * sentences * regions)
    similarity = WITH_MAPS[name](dim).double()
    # As the network gives them: a transposed feature map.
    v = torch.randn(images, dim, regions, dtype=torch.float64).transpose(1, 2)
    t = torch.randn(sentences, dim, dtype=torch.float64)
    found = value_and_gradients(similarity, v, t)

    def plain(v, t):
        return similarity.gamma2 * plain_scores(similarity, v, t)

    for part, expected in value_and_gradients(similarity, v, t, plain).items():
        torch.testing.assert_close(found[part], expected, rtol=1e-10, atol=1e-12, msg=part)


# dim 8 is more than the 5 regions, dim 3 fewer: two ways to look up the critical region.
@pytest.mark.parametrize(
    "name, dim",
    [
        *(("LSE", 3), ("LSE+NL", 3)),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("NL", 8), ("LSE+NL of the mean", 3))),
    ],
)
def test_torch_func_and_second_derivatives(name, dim):
    similarity = WITH_MAPS[name](dim).double()
    v = torch.randn(3, 2, 5, dim, dtype=torch.float64)
    t = torch.randn(3, 4, dim, dtype=torch.float64)

    def energy(v, t):
        return (similarity(v, t) ** 2).sum()

    logits = torch.func.vmap(similarity)(v, t)
    gradients = torch.func.vmap(torch.func.grad(energy, (0, 1)))(v, t)
    for i in range(3):
        torch.testing.assert_close(logits[i], similarity(v[i], t[i]).detach())
        leaves = [x[i].clone().requires_grad_() for x in (v, t)]
        for found, expected in zip(gradients, torch.autograd.grad(energy(*leaves), leaves), strict=True):
            torch.testing.assert_close(found[i], expected)
    assert torch.autograd.gradgradcheck(energy, (v[0].requires_grad_(), t[0].requires_grad_()))
    v, t = v[1].detach(), t[1]
    hessian = torch.func.hessian(energy, 1)(v, t)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.jacrev(energy, 1), 1)(v, t))


class _Largest(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@pytest.mark.parametrize("name", WITH_MAPS)
@pytest.mark.parametrize("dim", [4, 16])
def test_parts_of_images_change_no_value_or_gradient(name, dim):
    dtype, tolerance = torch.float64, 1e-12
    similarity = WITH_MAPS[name](dim).to(dtype)
    v, t = torch.randn(7, 9, dim, dtype=dtype), torch.randn(11, dim, dtype=dtype)
    whole = value_and_gradients(similarity, v, t)
    for images in (1, 3):
        similarity.map_budget = images * 11 * 9
        for part, found in value_and_gradients(similarity, v, t).items():
            torch.testing.assert_close(found, whole[part], rtol=tolerance, atol=tolerance, msg=part)
        with torch.no_grad():
            torch.testing.assert_close(similarity(v, t), whole["logits"], rtol=tolerance, atol=tolerance)
    similarity.map_budget = 1  # less than one image: one image at a time
    torch.testing.assert_close(similarity(v, t), whole["logits"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", WITH_MAPS)
@pytest.mark.parametrize("dim", [8, 64])
def test_parts_of_the_images_bound_every_tensor(name, dim):
    similarity = WITH_MAPS[name](dim)
    v, t = torch.randn(24, 30, dim, requires_grad=True), torch.randn(100, dim, requires_grad=True)
    similarity.map_budget = budget = max(
        2 * 100 * 30, v.numel()
    )  # the regions and their gradient are the input's
    with _Largest() as largest:
        similarity(v, t).sum().backward()
    assert largest.elements <= budget < 24 * 100 * 30


def test_tensors_are_bounded_without_parts():
    v, t = torch.randn(6, 30, 64, requires_grad=True), torch.randn(100, 64, requires_grad=True)
    with _Largest() as largest:
        LSENonLocal(dim=64)(v, t).sum().backward()
    assert largest.elements <= 6 * 30 * 100


def test_runs_are_bitwise_alike():
    similarity, t = LSENonLocal(dim=16), torch.randn(40, 16)
    for forward, shape in ((similarity, (9, 25, 16)), (similarity.paired, (40, 4, 25, 16))):
        v = torch.randn(shape)
        first, second = (value_and_gradients(similarity, v, t, forward) for _ in range(2))
        assert all(torch.equal(first[part], second[part]) for part in first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WITH_MAPS)
@pytest.mark.parametrize("budget", [2**25, 1])
def test_half_precision_at_the_largest_gamma_equals_float32(dtype, name, budget):
    similarity = WITH_MAPS[name](16)
    similarity.map_budget = budget
    with torch.no_grad():
        similarity.log_gamma2.fill_(math.log(100.0))
    v, t = torch.randn(6, 9, 16).to(dtype), torch.randn(6, 16).to(dtype)
    v[2] = t[2]  # logits from -100 to 100

    def run(v, t, autocast):
        v, t = v.clone().requires_grad_(), t.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss = contrastive_loss(
                similarity(v, t), torch.arange(6), class_probability=0.3, floor=-similarity.gamma2
            )
        leaves = [v, t, *similarity.parameters()]
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    precision = torch.finfo(dtype).eps
    for found, expected in zip(run(v, t, True), run(v.float(), t.float(), False), strict=True):
        assert found.isfinite().all()
        # What stays in float32 is the same; gradients of half-precision leaves are rounded to them.
        tolerance = 1e-5 if found.dtype == torch.float32 else precision
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ALL)
def test_config_builds_the_same_similarity(kind):
    first = kind(gamma2=3.0)
    second = kind(**first.config())
    second.load_state_dict(first.state_dict())
    v, t = torch.randn(2, 5, 128), torch.randn(3, 128)
    torch.testing.assert_close(first(v, t), second(v, t), rtol=0, atol=0)


def test_heat_map_is_right_at_region_centres():
    heat_map = torch.rand(3, 4)
    # 9 pixels a region: region (i, j) is seen at (9 i + 4, 9 j + 4).
    found = at_image_size(heat_map, 27, 36)
    torch.testing.assert_close(found[4::9, 4::9], heat_map)
    assert torch.equal(found[:5, :5], heat_map[:1, :1].expand(5, 5))


@pytest.mark.parametrize("make", [*ALL, lambda dim: NonLocal(dim, attention="mean"), RegionsAndGlobal])
@pytest.mark.parametrize("regions", [3, 17])
def test_paired_logits_are_entries_of_all_pairs(make, regions):
    """Values and gradients, for more and for fewer regions than dimensions."""
    has_dim = make in (NonLocal, LSENonLocal) or make not in (*ALL, RegionsAndGlobal)
    similarity = (make(8) if has_dim else make()).double()
    generator = torch.Generator().manual_seed(regions)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((5, 2, regions, 8), (5, 8), (5, 2, 8))
    ]
    of_images, sentences, vector = leaves
    found = similarity.paired(of_images, sentences, vector)
    every = similarity(of_images.flatten(0, 1), sentences, vector.flatten(0, 1)).unflatten(1, (5, 2))
    expected = every[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    parts = [*leaves, *similarity.parameters()]
    for a, b in zip(
        *(torch.autograd.grad(x, parts, gradient, allow_unused=True) for x in (found, expected)), strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    half = similarity.float().paired(*(x.detach().to(torch.bfloat16) for x in leaves))
    assert half.dtype == torch.float32 and half.shape == (5, 2)
