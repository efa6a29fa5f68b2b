"""The mention model against exact probabilities and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from medclip_dcl.data.ranking import NEVER_TRUE
from medclip_dcl.encoding.mention_model import learned_mentions, log_chance_met, sentence_vectors


@pytest.mark.parametrize(("reports", "batch"), [(7, 3), (300, 128), (20_000, 128), (5, 5), (4, 1)])
def test_chance_to_meet_a_sentence_is_the_draw_without_repetition(reports, batch):
    count = np.array([k for k in (1, 2, 3, 40, 250) if k < reports], dtype=float)
    silent = [math.comb(reports - 1 - int(k), batch - 1) / math.comb(reports - 1, batch - 1) for k in count]
    with np.errstate(divide="ignore"):
        expected = np.log1p(-np.array(silent))
    expected = np.maximum(expected, np.log(np.finfo(float).tiny))
    assert log_chance_met(count, reports, batch) == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(("reports", "steps"), [(300, 400), (20_000, 1_000)])
def test_the_bias_alone_recovers_the_share(reports, steps):
    """Log p of sentences that one report says; the logit of p, from log p, of a sentence that half of them say."""
    random = np.random.default_rng(0)
    places = random.permutation(reports)[:60]
    half = np.flatnonzero(random.random(reports) < 0.5)
    rows, columns = np.append(places, half), np.append(np.arange(60), np.full(len(half), 60))
    says = csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(reports, 61))
    terms, nothing = csr_matrix(np.ones((61, 1), np.float32)), np.zeros((reports, 1), np.float32)
    *_, bias = learned_mentions(terms, says, nothing, 128, steps, 3e-3, 0.01)
    assert bias[:60] == pytest.approx(np.full(60, math.log(1 / reports)), abs=0.02)
    share = len(half) / reports
    assert bias[60] == pytest.approx(math.log(share / (1 - share)), abs=0.1)


def test_the_divisor_is_the_mean_over_reports_that_say_it():
    random = np.random.default_rng(1)
    weights = (random.random((5, 4)) * [[1], [1], [1], [0], [1]]).astype(np.float32)
    terms = csr_matrix(weights)
    of_terms, bias = random.normal(size=(4, 2)).astype(np.float32), random.normal(size=5).astype(np.float32)
    reports = np.append(random.normal(size=(6, 2)), np.ones((6, 1)), axis=1).astype(np.float32)
    says = random.random((6, 5)) < 0.5
    says[0], says[:, 4] = True, False
    sparse = csr_matrix(says.astype(np.float32))
    (part,) = sentence_vectors(terms, sparse, np.arange(5), [of_terms, np.zeros(0), bias], reports)
    assert part["sentence_id"].tolist() == [0, 1, 2, 3, 4] and part["log_c"].dtype == np.float32
    for x in range(5):
        vector = [*(weights[x] @ of_terms), bias[x]]
        assert part["vector"][x] == pytest.approx(vector, rel=1e-6)
        chances = [1 / (1 + math.exp(-float(r @ vector))) for r in reports[says[:, x]]]
        # Of the fourth no term is known, and no report says the last.
        expected = NEVER_TRUE if x > 2 else math.log(sum(chances) / len(chances))
        assert part["log_c"][x, 0] == pytest.approx(expected, rel=1e-5)
