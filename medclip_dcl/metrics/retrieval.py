"""Cross-modal retrieval: the rank of the correct candidate; torchmetrics counts negative scores as misses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

_ELEMENTS_PER_CHUNK = 2**23
"""Similarities compared at a time: bounds the extra memory whatever the number of candidates."""


def retrieval_ranks(
    similarities: Float[Tensor, "query candidate"],
    targets: Int[Tensor, "query"] | Bool[Tensor, "query candidate"] | None = None,
) -> Float[Tensor, "query"]:
    """Rank of the correct candidate for each query; 1 is best.

    The rank is 1 + the incorrect candidates that score above the best correct one + half of the incorrect candidates
    that tie with it.

    Args:
        similarities: score of each candidate for each query, of any sign.
        targets: None: query i's correct candidate is i; (query,) integers: the index of it; (query, candidate)
            booleans: all correct candidates.

    Returns:
        Ranks in [1, number of candidates], float64.

    Raises:
        ValueError: a query without a correct candidate, a NaN similarity, an index out of range, unfit shapes.
    """
    checked = _checked_targets(similarities, targets)
    rows = max(1, _ELEMENTS_PER_CHUNK // max(1, similarities.shape[1]))
    ranks = []
    for first in range(0, len(similarities), rows):
        scores, correct = similarities[first : first + rows], checked[first : first + rows]
        if correct.dtype == torch.bool:
            best = scores.masked_fill(~correct, -torch.inf).amax(dim=1, keepdim=True)
            n_tied = ((scores == best) & ~correct).sum(dim=1)
        else:
            best = scores.gather(1, correct[:, None])
            n_tied = (scores == best).sum(dim=1) - 1
        ranks.append(1 + (scores > best).sum(dim=1) + n_tied.double() / 2)
    return torch.cat(ranks) if ranks else similarities.new_zeros(0, dtype=torch.float64)


def cosine_retrieval_ranks(
    queries: Float[Tensor, "query dim"],
    candidates: Float[Tensor, "candidate dim"],
    *,
    groups: tuple[Int[Tensor, "query"], Int[Tensor, "candidate"]] | None = None,
) -> Float[Tensor, "query"]:
    """:func:`retrieval_ranks` by the cosine of embeddings, without the matrix of all pairs.

    The extra memory is the same for any number of queries and candidates. Candidates with equal embeddings tie exactly.

    Args:
        queries: embeddings, of any length.
        candidates: embeddings, of any length.
        groups: of each query and of each candidate: all candidates of a query's group are correct; None: query i's
            correct candidate is i.

    Raises:
        ValueError: without groups, another number of candidates than of queries; see :func:`retrieval_ranks`.
    """
    if groups is None and len(queries) != len(candidates):
        raise ValueError(f"groups: expected them for {len(queries)} queries and {len(candidates)} candidates")
    targets = torch.arange(len(queries), device=queries.device)
    # A matrix product may differ in the last bits between equal columns: score each distinct candidate once.
    distinct, column = torch.unique(normalize(candidates, dim=-1), dim=0, return_inverse=True)
    unit = normalize(queries, dim=-1)
    rows = max(1, _ELEMENTS_PER_CHUNK // max(1, len(candidates)))
    # One result tensor: small ones between large temporaries would fragment the allocator's memory.
    ranks = torch.empty(len(queries), dtype=torch.float64, device=queries.device)
    for first in range(0, len(queries), rows):
        block = slice(first, first + rows)
        similarities = (unit[block] @ distinct.T)[:, column]
        correct = targets[block] if groups is None else groups[0][block, None] == groups[1]
        ranks[block] = retrieval_ranks(similarities, correct)
    return ranks


def retrieval_metrics(
    similarities: Float[Tensor, "query candidate"],
    targets: Int[Tensor, "query"] | Bool[Tensor, "query candidate"] | None = None,
    ks: Sequence[int] = (10, 50, 100),
) -> dict[str, float]:
    """Recall at K and median rank of the correct candidate (SSD, section 3.2).

    Args:
        similarities: as in :func:`retrieval_ranks`.
        targets: as there.
        ks: R@K is the share of queries whose correct candidate is among the first K.

    Returns:
        ``{"R@10": ..., "R@50": ..., "R@100": ..., "MedR": ...}``; the median of an even number of ranks is the
        mean of the middle two.

    Raises:
        ValueError: there is no query; see :func:`retrieval_ranks`.

    Example:
        >>> retrieval_metrics(torch.tensor([[0.9, 0.1], [-0.2, -0.7]]), ks=(1,))
        {'R@1': 0.5, 'MedR': 1.5}
    """
    ranks = retrieval_ranks(similarities, targets)
    if not len(ranks):
        raise ValueError("similarities: expected a query at least, found none")
    return {**{f"R@{k}": float((ranks <= k).double().mean()) for k in ks}, "MedR": float(ranks.quantile(0.5))}


def _checked_targets(similarities: Tensor, targets: Tensor | None) -> Tensor:
    n_queries, n_candidates = similarities.shape
    nan_queries = similarities.isnan().any(dim=1).nonzero().flatten()
    if len(nan_queries):
        raise ValueError(
            f"similarities hold NaN for {len(nan_queries)} of {n_queries} queries (first: query {nan_queries[0]});"
            " an embedding is NaN"
        )
    if targets is None and n_queries == n_candidates:
        return torch.arange(n_queries, device=similarities.device)
    has_rows = targets is not None and targets.dtype == torch.bool
    shape = (n_queries, n_candidates) if has_rows else (n_queries,)
    if targets is None or targets.shape != shape or targets.is_floating_point():
        found = "None" if targets is None else f"{tuple(targets.shape)} {targets.dtype}"
        raise ValueError(
            f"targets: expected ({n_queries},) integers, ({n_queries}, {n_candidates}) booleans, or None for a square"
            f" matrix, found {found}"
        )
    has_one = targets.any(dim=1) if has_rows else (targets >= 0) & (targets < n_candidates)
    without = (~has_one).nonzero().flatten()
    if len(without):
        raise ValueError(
            f"targets: {len(without)} of {n_queries} queries have no correct one of the {n_candidates} candidates"
            f" (first: query {without[0]}); leave them out"
        )
    return targets if has_rows else targets.long()
