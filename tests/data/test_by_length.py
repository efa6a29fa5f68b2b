"""Sentences are cut into pieces at the least cost, and come back in their order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from medclip_dcl.data import by_length
from medclip_dcl.data.by_length import pieces_by_length


def cost(lengths, cuts):
    """Padded tokens and passes of sorted lengths, cut at these places."""
    bounds = [0, *cuts, len(lengths)]
    return sum(by_length._PASS + (b - a) * max(lengths[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_costs_less(seed, monkeypatch):
    monkeypatch.setattr(by_length, "_PASS", 9)
    lengths = np.random.default_rng(seed).integers(3, 30, 9).tolist()
    pieces = pieces_by_length(lengths)
    found = sum(9 + len(places) * longest for places, longest in pieces)
    ordered = sorted(lengths)
    every = [cuts for n in range(9) for cuts in itertools.combinations(range(1, 9), n)]
    assert found == min(cost(ordered, cuts) for cuts in every)
    assert 1 < len(pieces) < 9


@pytest.mark.parametrize("most", [None, 1, 4])
def test_every_sentence_is_in_one_piece(most):
    lengths = np.random.default_rng(0).integers(3, 120, 50).tolist()
    pieces = pieces_by_length(lengths, most)
    assert len(pieces) > 1 and max(len(places) for places, _ in pieces) <= (most or 50)
    assert sorted(torch.cat([places for places, _ in pieces]).tolist()) == list(range(50))
    assert all(longest == max(lengths[i] for i in places.tolist()) for places, longest in pieces)
