"""Weighted nearest neighbours against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.unimodal import neighbours
from medclip_dcl.unimodal.neighbours import neighbour_predictions

GENERATOR = torch.Generator().manual_seed(5)
FEATURES, QUERIES = torch.randn(23, 4, generator=GENERATOR), torch.randn(11, 4, generator=GENERATOR)
LABELS = torch.randint(0, 3, (23,), generator=GENERATOR)


def by_a_loop(queries, features, labels, k, temperature, is_own):
    found = []
    for place, query in enumerate(queries.double().numpy()):
        votes: dict[int, float] = {}
        cosines = []
        for other, feature in enumerate(features.double().numpy()):
            if not (is_own and other == place):
                norm = math.sqrt(float(query @ query) * float(feature @ feature))
                cosines.append((float(query @ feature) / norm, int(labels[other])))
        for cosine, label in sorted(cosines, reverse=True)[:k]:
            votes[label] = votes.get(label, 0.0) + math.exp(cosine / temperature)
        found.append(max(votes, key=lambda label: votes[label]))
    return found


@pytest.mark.parametrize("k, temperature", [(1, 0.5), (5, 0.1), (7, 0.5), (200, 0.07)])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_vote_is_that_of_a_loop(k, temperature, is_own, monkeypatch):
    monkeypatch.setattr(neighbours, "_ELEMENTS_PER_CHUNK", 100)  # four queries at a time
    found = neighbour_predictions(None if is_own else QUERIES, FEATURES, LABELS, k=k, temperature=temperature)
    queries = FEATURES if is_own else QUERIES
    assert found.tolist() == by_a_loop(queries, FEATURES, LABELS, k, temperature, is_own)
