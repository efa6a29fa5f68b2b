"""The mention model: the chance that a report says a sentence, from the report's labels and the sentence's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix
from scipy.special import expit, gammaln

from medclip_dcl.common.command_line import progress_bar
from medclip_dcl.data.ranking import NEVER_TRUE

if TYPE_CHECKING:
    import torch

_DIM = 16
# Of a sentence's bias: share of a Newton step, and weight of its start (choices).
_BIAS_RATE, _BIAS_DECAY = 0.1, 0.1
# Sentences that are encoded at once.
ROWS = 8_192


def learned_mentions(
    terms: csr_matrix,
    says: csr_matrix,
    features: Float[np.ndarray, "report feature"],
    batch: int,
    steps: int,
    learning_rate: float,
    weight_decay: float,
) -> list[np.ndarray]:
    """A (term, dim), B (feature, dim), b (sentence,): report r says x with chance sigmoid(b_x + <A tfidf(x), B f(r)>).

    Learned by cross entropy of batches of reports with the distinct sentences that these say. A report that does not
    say x meets x only where another of the batch does: in training the log of that chance is subtracted from the logit,
    and b_x is that of all pairs. b_x starts at log p_x, the share of reports that say x, and is drawn back to it.

    Args:
        terms: tf-idf of sentences, (sentence, term).
        says: (report, sentence) 1 where the report has the sentence.
        features: f(r).
        batch: reports of a step, at most all.
        learning_rate: of AdamW, which learns A and B.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    reports, batch = len(features), min(batch, len(features))
    count = np.asarray(says.sum(0), dtype=np.float64)[0]
    log_p = torch.from_numpy(np.log(count.clip(0.5) / reports)).float()
    log_met = torch.from_numpy(log_chance_met(count, reports, batch)).float()
    bias, inputs = log_p.clone(), torch.from_numpy(features)
    draws, weights = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sizes = (terms.shape[1], features.shape[1])
    parts = [torch.randn(size, _DIM, generator=weights).div_(_DIM**0.5).requires_grad_() for size in sizes]
    optimizer = torch.optim.AdamW(parts, learning_rate, weight_decay=weight_decay, fused=True)
    drawn = batches(draws, np.arange(reports), batch)
    for _ in progress_bar(iterable=range(steps), desc="mentions"):
        chosen = next(drawn)
        said = says[chosen]
        columns, place = np.unique(said.indices, return_inverse=True)
        is_said = torch.zeros(batch, len(columns))
        is_said[np.repeat(np.arange(batch), np.diff(said.indptr)), place] = 1
        own = torch.from_numpy(columns)
        products = inputs[chosen] @ parts[1] @ embedded(terms[columns], parts[0]).T
        logits = products + (bias - log_met)[own]
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(logits, is_said).backward()
        optimizer.step()
        # Not by AdamW, whose steps are as long for a sentence that is seldom said.
        chance = logits.detach().sigmoid()
        slope = (chance - is_said).sum(0) + _BIAS_DECAY * (bias - log_p)[own]
        bias[own] -= _BIAS_RATE * slope / ((chance * (1 - chance)).sum(0) + _BIAS_DECAY)
    return [part.detach().numpy() for part in (*parts, bias)]


def log_chance_met(count: np.ndarray, reports: int, batch: int) -> np.ndarray:
    """Log of the chance that one of the other reports of a batch says a sentence that a report does not say.

    Of `reports`, from which a batch is drawn without repetition, `count` say it.
    """
    others, silent = batch - 1, reports - count
    none = gammaln(silent) + gammaln(reports - others) - gammaln((silent - others).clip(1)) - gammaln(reports)
    return np.log(-np.expm1(np.where(silent > others, none, -np.inf)).clip(max=-np.finfo(float).tiny))


def sentence_vectors(
    terms: csr_matrix,
    says: csr_matrix,
    ids: Int[np.ndarray, " sentence"],
    weights: list[np.ndarray],
    reports: Float[np.ndarray, "report dim"],
) -> Iterator[dict[str, np.ndarray]]:
    """Parts of the table of sentences, float32: A tfidf(x) and b_x; and log c_x.

    c_x is the mean chance of x over the training reports that say it; `reports` are their vectors, B f(r) and 1.
    """
    said_by = says.T.tocsr()
    for part in (slice(start, start + ROWS) for start in range(0, len(ids), ROWS)):
        vectors = np.concatenate([terms[part] @ weights[0], weights[2][part, None]], axis=1)
        count = np.diff(said_by[part].indptr)
        row = np.repeat(np.arange(len(count)), count)
        logits = np.einsum("nd,nd->n", vectors[row], reports[said_by[part].indices]).astype(np.float64)
        mean = np.bincount(row, expit(logits), len(count)) / count.clip(1)
        is_known = (count > 0) & (np.diff(terms[part].indptr) > 0)
        log_c = np.where(is_known, np.log(mean.clip(np.finfo(float).tiny)), NEVER_TRUE)
        yield {"sentence_id": ids[part], "vector": vectors, "log_c": log_c[:, None].astype(np.float32)}


def batches(
    draws: np.random.Generator, rows: Int[np.ndarray, " row"], size: int
) -> Iterator[Int[np.ndarray, " size"]]:
    """Batches of rows without end, no row twice before all were drawn; the last few of a round are left out."""
    left = rows[:0]
    while True:
        if len(left) < size:
            left = draws.permutation(rows)
        yield left[:size]
        left = left[size:]


def embedded(rows: csr_matrix, weights: torch.Tensor) -> torch.Tensor:
    """(row, dim) product of sparse rows with the weights."""
    import torch

    index, ends, values = map(torch.from_numpy, (rows.indices, rows.indptr[:-1], rows.data))
    return torch.nn.functional.embedding_bag(index, weights, ends, mode="sum", per_sample_weights=values)
