"""Facts about retrieval ranks, against a loop over candidates."""

from __future__ import annotations

import pytest
import torch

import medclip_dcl.metrics.retrieval as retrieval_module
from medclip_dcl.metrics import (
    cosine_retrieval_ranks,
    retrieval_metrics,
    retrieval_ranks,
)


def ranks_by_loop(similarities, correct):
    """1 + the incorrect candidates above the best correct one + half of those that tie with it."""
    ranks = []
    for scores, right in zip(similarities.tolist(), correct, strict=True):
        best, rank = max(scores[c] for c in right), 1.0
        for candidate, score in enumerate(scores):
            if candidate not in right and score >= best:
                rank += 0.5 if score == best else 1.0
        ranks.append(rank)
    return ranks


def tied_scores(n_queries, n_candidates):
    return torch.randint(-4, 3, (n_queries, n_candidates)) / 4


@pytest.mark.parametrize(("n_queries", "n_candidates"), [(1, 1), (5, 3), (7, 13), (11, 11)])
@pytest.mark.parametrize("make", [torch.randn, tied_scores])
def test_ranks_are_those_of_a_loop(n_queries, n_candidates, make, monkeypatch):
    monkeypatch.setattr(retrieval_module, "_ELEMENTS_PER_CHUNK", 2 * n_candidates)
    similarities = make(n_queries, n_candidates)
    index = torch.randint(n_candidates, (n_queries,))
    expected = ranks_by_loop(similarities, [[i] for i in index.tolist()])
    assert retrieval_ranks(similarities, index).tolist() == expected

    several = torch.rand(n_queries, n_candidates) < 0.4
    several[torch.arange(n_queries), index] = True
    expected = ranks_by_loop(similarities, [row.nonzero().flatten().tolist() for row in several])
    assert retrieval_ranks(similarities, several).tolist() == expected


def test_without_targets_the_diagonal_is_correct():
    similarities = torch.randn(9, 9)
    assert torch.equal(retrieval_ranks(similarities), retrieval_ranks(similarities, torch.arange(9)))
    one_hot = torch.eye(9, dtype=torch.bool)
    assert torch.equal(retrieval_ranks(similarities), retrieval_ranks(similarities, one_hot))


def test_a_constant_score_is_chance():
    found = retrieval_metrics(torch.full((21, 21), -0.3), ks=(1, 10, 11))
    assert found == {"R@1": 0.0, "R@10": 0.0, "R@11": 1.0, "MedR": 11.0}


def test_equal_items_cost_a_perfect_model_nothing():
    phrase = torch.arange(70) % 2
    perfect, collapsed = torch.eye(2)[phrase], torch.ones(70, 2)
    assert set(cosine_retrieval_ranks(perfect, perfect, groups=(phrase, phrase)).tolist()) == {1.0}
    assert set(cosine_retrieval_ranks(perfect, perfect).tolist()) == {18.0}
    assert set(cosine_retrieval_ranks(collapsed, collapsed, groups=(phrase, phrase)).tolist()) == {18.5}


def test_recall_and_median_by_hand():
    similarities = -torch.arange(12.0).repeat(4, 1)
    found = retrieval_metrics(similarities, torch.tensor([0, 9, 10, 11]), ks=(1, 10))
    assert found == {"R@1": 1 / 4, "R@10": 2 / 4, "MedR": 10.5}


def duplicated_embeddings(n_distinct, n, dim=5):
    """Whole numbers, so that cosines of equal embeddings are equal in any order of summation; some tie."""
    return torch.randint(-3, 4, (n_distinct, dim)).float()[torch.arange(n) % n_distinct] + 0.5


@pytest.mark.parametrize(("n_queries", "n_candidates"), [(13, 13), (7, 29), (31, 5)])
def test_ranks_of_embeddings_are_the_matrixs(n_queries, n_candidates, monkeypatch):
    queries, candidates = duplicated_embeddings(9, n_queries), duplicated_embeddings(4, n_candidates)
    monkeypatch.setattr(retrieval_module, "_ELEMENTS_PER_CHUNK", 3 * n_candidates)
    index = torch.randint(n_candidates, (n_queries,))
    unit = [rows / rows.norm(dim=1, keepdim=True) for rows in (queries, candidates)]
    # Rounded: cosines that are equal on paper may differ in their last bits.
    matrix = (unit[0].double() @ unit[1].double().T).round(decimals=6)
    expected = ranks_by_loop(matrix, [[i] for i in index.tolist()])
    groups = index, torch.arange(n_candidates)
    assert cosine_retrieval_ranks(queries, candidates, groups=groups).tolist() == expected
    if n_queries == n_candidates:
        paired = ranks_by_loop(matrix, [[i] for i in range(n_queries)])
        assert cosine_retrieval_ranks(queries, candidates).tolist() == paired
    groups = torch.arange(n_queries) % 3, torch.arange(n_candidates) % 3
    several = groups[0][:, None] == groups[1]
    expected = ranks_by_loop(matrix, [row.nonzero().flatten().tolist() for row in several])
    assert cosine_retrieval_ranks(queries, candidates, groups=groups).tolist() == expected


def test_equal_embeddings_tie_exactly():
    candidates = torch.randn(3, 128)[torch.arange(301) % 3]
    ranks = cosine_retrieval_ranks(torch.randn(301, 128), candidates)
    # 101 candidates are like the first, 100 like each other: the mean ranks of the first, second and third of them.
    assert set(ranks.tolist()) <= {51.0, 50.5, 151.5, 151.0, 150.5, 251.0, 251.5, 250.5}
