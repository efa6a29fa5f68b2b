"""Negative weights: each rule against a loop over pairs, its limits and its refusals."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5, CHEXPERT
from medclip_dcl.objectives import (
    HardNegatives,
    RankedByText,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    ReweightByTextSimilarity,
    TrueNegatives,
    contrastive_loss,
)
from medclip_dcl.objectives.negative_weights import uniform

SIZES = [(1, 2), (3, 5), (7, 4), (5, 23)]


def cosine(x, y) -> float:
    dot = sum(float(a) * float(b) for a, b in zip(x, y, strict=True))
    return dot / math.sqrt(sum(float(a) ** 2 for a in x) * sum(float(b) ** 2 for b in y))


def positives(anchors, candidates):
    return torch.randint(candidates, (anchors,))


@pytest.mark.parametrize(
    "anchors, candidates, normals", [(1, 2, False), (3, 5, True), (7, 4, False), (5, 23, True)]
)
def test_remove_by_label_is_the_loop(anchors, candidates, normals):
    labels = torch.randint(-1, 2, (candidates, 14)).float()
    labels[labels == 0] = math.nan
    labels[0] = math.nan
    own = positives(anchors, candidates)
    found = RemoveByLabel(normals=normals)(own, labels=labels)
    columns = [CHEXPERT.index(finding) for finding in CHEX5]
    for a in range(anchors):
        for c in range(candidates):
            mine = {i for i in columns if labels[own[a], i] == 1}
            other = {i for i in columns if labels[c, i] == 1}
            is_removed = bool(mine & other) or (normals and not mine and not other) or c == own[a]
            assert found[a, c] == (0.0 if is_removed else 1.0)


def test_remove_by_label_reads_its_findings_alone():
    labels = torch.zeros(3, 14)
    labels[:2, CHEXPERT.index("Fracture")] = 1
    own = torch.tensor([0, 1, 2])
    assert RemoveByLabel()(own, labels=labels).sum() == 6  # Fracture is none of CheX5
    rule = RemoveByLabel(findings=["Fracture"])
    expected = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    assert torch.equal(rule(own, labels=labels), expected)


@pytest.mark.parametrize(
    "anchors, candidates, threshold", [(1, 2, -1.0), (3, 5, 1.0), (7, 4, 0.0), (5, 23, 0.3)]
)
def test_remove_by_text_is_the_loop(anchors, candidates, threshold):
    embedding = torch.randn(candidates, 3, dtype=torch.float64)
    own = positives(anchors, candidates)
    found = RemoveByTextSimilarity(threshold)(own, text_embedding=embedding)
    for a in range(anchors):
        for c in range(candidates):
            is_kept = c != own[a] and cosine(embedding[own[a]], embedding[c]) <= threshold
            assert found[a, c] == float(is_kept)


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("anchors, candidates", SIZES)
def test_reweight_by_text_is_the_loop(anchors, candidates, threshold):
    embedding = torch.randn(candidates, 3, dtype=torch.float64)
    own = positives(anchors, candidates)
    found = ReweightByTextSimilarity(threshold)(own, text_embedding=embedding)
    for a in range(anchors):
        cosines = [cosine(embedding[own[a]], embedding[c]) for c in range(candidates)]
        raw = [1.0 if c <= threshold else (1 - c) / (1 - threshold) for c in cosines]
        raw[own[a]] = 0.0
        expected = [w * (candidates - 1) / sum(raw) for w in raw]
        assert found[a].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "rule", [ReweightByTextSimilarity(), ReweightByTextSimilarity(0.98), ResampleByTextSimilarity()]
)
def test_equal_reports_are_no_negatives_whatever_their_rounding(rule):
    embedding = torch.randn(1, 700) * torch.tensor([[1.0], [0.3], [7.7]])
    weights = rule(torch.arange(3), text_embedding=embedding)
    assert torch.equal(weights, torch.zeros(3, 3))
    assert contrastive_loss(torch.randn(3, 3), torch.arange(3), weights=weights).item() == 0.0


def test_resample_draws_in_proportion_and_by_key():
    embedding = torch.randn(6, 3, dtype=torch.float64)
    own = torch.tensor([2, 2, 4])
    keys = torch.tensor([[8, 2], [9, 2], [8, 4]])
    rule = ResampleByTextSimilarity(seed=3)
    first = rule(own, keys=keys, step=1, text_embedding=embedding)
    assert first.sum(1).tolist() == [5.0, 5.0, 5.0] and (first == first.round()).all()
    assert (first[torch.arange(3), own] == 0).all()
    assert torch.equal(first, rule(own, keys=keys, step=1, text_embedding=embedding))
    others = [
        rule(own, keys=keys, step=2, text_embedding=embedding),
        rule(own, keys=keys + 1, step=1, text_embedding=embedding),
        ResampleByTextSimilarity(seed=4)(own, keys=keys, step=1, text_embedding=embedding),
    ]
    assert not any(torch.equal(first, other) for other in others)
    # The same key draws the same, whatever stands in the other rows.
    alone = rule(own[1:2], keys=keys[1:2], step=1, text_embedding=embedding)
    assert torch.equal(alone[0], first[1])
    total = torch.zeros(6, dtype=torch.float64)
    many = ResampleByTextSimilarity(draws=50)
    for step in range(400):
        total += many(own[:1], keys=keys[:1], step=step, text_embedding=embedding)[0]
    chance = torch.tensor(
        [0.0 if c == 2 else 1 - max(cosine(embedding[2], embedding[c]), 0.0) for c in range(6)]
    )
    assert total.sum() == 20_000
    torch.testing.assert_close(total / total.sum(), (chance / chance.sum()).double(), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "anchors, candidates, beta, gamma2",
    [(1, 2, 0.5, 14.0), (3, 5, 0.0, 1.0), (7, 4, 2.0, 100.0), (5, 23, 2.0, 14.0)],
)
def test_hard_negatives_is_the_loop(anchors, candidates, beta, gamma2):
    scores = gamma2 * (2 * torch.rand(anchors, candidates, dtype=torch.float64) - 1)
    own = positives(anchors, candidates)
    found = HardNegatives(beta)(own, logits=scores)
    for a in range(anchors):
        importance = [0.0 if c == own[a] else math.exp(beta * float(scores[a, c])) for c in range(candidates)]
        mean = sum(importance) / (candidates - 1)
        assert found[a].tolist() == pytest.approx([i / mean for i in importance])


def test_hard_negatives_in_half_precision_and_detached():
    scores = torch.tensor([[100.0, 99.0, -100.0]], dtype=torch.float16, requires_grad=True)
    own = torch.tensor([0])
    weights = HardNegatives(beta=10.0)(own, logits=scores)
    assert weights.dtype == torch.float32 and weights[0].tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert weights.requires_grad
    # A row whose candidates are all its own has no negatives: zeros, not NaN.
    nothing = HardNegatives()(own, logits=scores[:, :1].float())
    assert nothing.tolist() == [[0.0]]


@pytest.mark.parametrize("anchors, candidates", SIZES)
def test_true_negatives_are_the_loop(anchors, candidates):
    classes = torch.randint(2, (candidates, 4)).to(torch.uint8)
    of_anchor = torch.randint(4, (anchors,))
    own = positives(anchors, candidates)
    found = TrueNegatives()(own, class_id=of_anchor, image_classes=classes)
    for a in range(anchors):
        true = [float(c != own[a] and classes[c, of_anchor[a]] == 0) for c in range(candidates)]
        scale = (candidates - 1) / sum(true) if sum(true) else 0.0
        assert found[a].tolist() == pytest.approx([w * scale for w in true])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule", [RemoveByTextSimilarity(0.98), ReweightByTextSimilarity(), ResampleByTextSimilarity()]
)
def test_autocast_does_not_round_the_cosines(rule, dtype):
    """Reports' cosines crowd near 1, where bfloat16 knows steps of .004."""
    embedding = torch.randn(1, 64) + 0.15 * torch.randn(9, 64)
    own = torch.arange(9)
    expected = rule(own, text_embedding=embedding)
    with torch.autocast("cpu", dtype=dtype):
        found = rule(own, text_embedding=embedding)
    assert torch.equal(found, expected) and 0 < expected.mean() < 1
    assert ReweightByTextSimilarity()(own, text_embedding=embedding.to(dtype)).dtype == torch.float32


def test_draws_do_not_hang_on_the_last_digit():
    """Several processes round the cosines differently; among equal reports numpy's multinomial then draws anew."""
    embedding = torch.randn(7, 5, dtype=torch.float64)
    embedding[5:] = embedding[5]
    own, keys = torch.zeros(300, dtype=torch.int64), torch.arange(300)[:, None]
    rule = ResampleByTextSimilarity()
    exact = rule(own, keys=keys, text_embedding=embedding)
    rounded = rule(own, keys=keys, text_embedding=embedding.float())
    assert (exact == rounded.double()).all(1).float().mean() > 0.99
    assert len(exact.unique(dim=0)) > 50


def test_a_threshold_of_one_keeps_equal_reports():
    embedding = torch.randn(1, 700) * torch.linspace(0.1, 9, 40)[:, None]
    assert RemoveByTextSimilarity(1.0)(torch.arange(40), text_embedding=embedding).sum() == 40 * 39


def test_a_threshold_that_removes_everything_is_refused():
    alike = torch.ones(50, 8) + 0.01 * torch.randn(50, 8)
    with pytest.raises(UserError, match="threshold: 0.9 removes 100% of the pairs of reports"):
        RemoveByTextSimilarity(0.9).check({"text_embedding": alike})
    unlike = torch.randn(50, 8)
    with pytest.warns(UserWarning, match=r"threshold: 0.0 removes \d\d% of the pairs"):
        RemoveByTextSimilarity(0.0).check({"text_embedding": unlike + 0.2})
    RemoveByTextSimilarity(0.9).check({"text_embedding": unlike})
    with pytest.warns(UserWarning, match="no training study is positive for any of"):
        RemoveByLabel().check({"labels": torch.zeros(5, 14)})


# Random numbers from keys alone.

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_uniform_is_the_loop():
    keys = torch.tensor([[0, 0], [3, 2**40], [-1, 7]])
    found = uniform(keys, 5, 11, 2)
    for row, key in enumerate(keys.tolist()):
        for draw in range(5):
            state = 0
            for word in (11, 2, *key, draw):
                state = splitmix64((state + word) & MASK)
            assert found[row, draw].item() == (state >> 11) / 2**53


def ranked_fields(anchors, candidates, dim=6):
    """Log p, sentences with the quantiles of their scores over 37 reports, candidates; sentence 0 has no known term."""
    sentences = torch.randn(anchors, dim, dtype=torch.float64)
    sentences[0] = 0
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    quantiles = (sentences @ torch.randn(dim, 37, dtype=torch.float64)).quantile(shares, dim=1).T.half()
    return {
        "log_p": -8 * torch.rand(anchors, dtype=torch.float64),
        "sentence_ranking": torch.cat([sentences, quantiles], dim=1),
        "report_ranking": torch.randn(candidates, dim, dtype=torch.float64),
    }


@pytest.mark.parametrize("anchors, candidates", [(3, 5), (7, 4), (5, 23)])
def test_ranked_by_text_is_the_loop(anchors, candidates):
    fields, own = ranked_fields(anchors, candidates), positives(anchors, candidates)
    found = RankedByText(mean_share=None, k=0.2, c=1.5)(own, **fields)
    for a in range(anchors):
        share = min(1.5 * math.exp(0.2 * fields["log_p"][a].item()), 0.95)
        vector, quantiles = fields["sentence_ranking"][a, :6], fields["sentence_ranking"][a, 6:]
        place = 100 * (1 - share)
        below = min(int(place), 99)
        least = quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])
        kept = [
            c != int(own[a]) and float((vector @ fields["report_ranking"][c]).half()) <= float(least)
            for c in range(candidates)
        ]
        # N is kept; an anchor with nothing left has weights 0.
        expected = [(candidates - 1) / max(sum(kept), 1) * bool(is_kept) for is_kept in kept]
        assert found[a].tolist() == pytest.approx(expected)
    assert found[0].count_nonzero() == candidates - 1


@pytest.mark.parametrize("score", [1.0003, 0.9997])
def test_equal_reports_at_the_quantile_are_kept(score):
    """Float16 has 1 for both: below, equal and above the quantile of 60% equal reports."""
    quantiles = torch.cat([torch.zeros(20), torch.full((60,), score), 2 * torch.ones(21)]).half().float()
    fields = {
        "sentence_ranking": torch.cat([torch.ones(1), quantiles])[None],
        "report_ranking": torch.tensor([[0.0], [0.5], [score], [score], [2.0]]),
    }
    weights = RankedByText(None, k=0.0, c=0.5)(torch.tensor([0]), **fields)
    assert weights[0].tolist() == pytest.approx([0, 4 / 3, 4 / 3, 4 / 3, 0])


def test_c_that_was_not_solved_is_said():
    fields, own = ranked_fields(3, 5), positives(3, 5)
    for rule in (RankedByText(), RankedByText(k=0.0)):
        with pytest.raises(UserError, match="negative_weights.c: expected a number, found none"):
            rule(own, **fields)


def test_no_negative_left_costs_nothing():
    fields = ranked_fields(2, 6)
    fields["report_ranking"] = fields["sentence_ranking"][1:, :6] * torch.arange(1.0, 7)[:, None] * 9
    rule = RankedByText(mean_share=None, k=0.0, c=0.95)
    weights = rule(torch.tensor([2, 3]), **fields)
    assert weights[1].count_nonzero() == 0 and weights[0].count_nonzero() == 5
    loss = contrastive_loss(torch.randn(2, 6), torch.tensor([2, 3]), weights=weights, reduction="none")
    assert loss[1].item() == 0.0 and loss[0].item() > 0
    raw = rule.pair_weights(fields, fields, None)
    is_negative = torch.arange(6) != torch.tensor([[2], [3]])
    figures = {name: value.item() for name, value in rule.figures(raw, is_negative, fields).items()}
    assert figures == pytest.approx({"share": 0.95, "left_out": 0.5, "unranked": 0.5, "nothing_left": 0.5})


@pytest.mark.parametrize("mean_share, k", [(0.5, 0.35), (0.9, 0.1), (0.02, 1.0), (0.3, 0.0)])
def test_c_gives_the_mean_share_over_anchors(mean_share, k):
    anchors, log_p = torch.rand(101) * 9, -60 * torch.rand(101)
    rule = RankedByText(mean_share, k)
    assert "c " in rule.prepare(anchors, {"log_p": log_p})
    share = rule.share({"log_p": log_p})
    assert (share * anchors).sum() / anchors.sum() == pytest.approx(
        mean_share, abs=1e-5
    ) and share.max() <= 0.9501
    # The checkpoint keeps c, and another training takes it as given.
    restored = RankedByText(mean_share, k)
    restored.load_state_dict(rule.state_dict())
    given = RankedByText(None, k, c=math.exp(rule.log_c))
    assert torch.equal(restored.share({"log_p": log_p}), share)
    assert given.share({"log_p": log_p}) == pytest.approx(share, rel=1e-5)


def test_an_unscored_sentence_keeps_its_negatives():
    fields = ranked_fields(4, 9)
    fields["log_p"][2] = math.nan
    weights = RankedByText(None, c=0.9)(
        torch.arange(4), **{**fields, "report_ranking": fields["report_ranking"] / 99}
    )
    assert weights[2].count_nonzero() == 8
    with pytest.raises(UserError, match="log_p: expected a number for each sentence of the training reports"):
        RankedByText().prepare(torch.ones(4), fields)
    with pytest.warns(UserWarning, match="1 of 4 sampled anchors have no known term, or one score"):
        RankedByText().check_sentences(fields)


def test_a_random_ranking_is_drawn_by_pair_and_step():
    fields = {
        "sentence_id": torch.tensor([8, 9, 8]),
        "image_row": torch.randperm(10**6)[:4000],
        "log_p": torch.zeros(3),
    }
    rule = RankedByText(None, c=0.3, random_seed=3)
    own = torch.tensor([5, 6, 7])
    first = rule(own, step=1, **fields) == 0
    others = (torch.arange(4000) > 7).expand(3, -1)
    assert first[:, 8:].float().mean(1).tolist() == pytest.approx([0.3] * 3, abs=0.03)
    # The same sentence and image give the same draw, whatever stands beside them.
    assert torch.equal(first[0][others[0]], first[2][others[2]]) and not torch.equal(first[0], first[1])
    alone = rule(
        own[:1],
        step=1,
        sentence_id=torch.tensor([8]),
        image_row=fields["image_row"][2000:],
        log_p=torch.zeros(1),
    )
    assert torch.equal(alone[0, 8:] == 0, first[0, 2008:])
    for changed in (
        rule(own, step=2, **fields),
        RankedByText(None, c=0.3, random_seed=4)(own, step=1, **fields),
    ):
        assert not torch.equal(changed == 0, first)
