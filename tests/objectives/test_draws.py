"""Random numbers from keys alone."""

from __future__ import annotations

import torch

from medclip_dcl.objectives.negative_weights import uniform

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_constants_are_those_of_splitmix64():
    """The first output of the published generator seeded with 1234567."""
    assert splitmix64(1234567) == 6457827717110365317


def test_uniform_is_the_loop():
    keys = torch.tensor([[0, 0], [3, 2**40], [-1, 7]])
    found = uniform(keys, 5, 11, 2)
    for row, key in enumerate(keys.tolist()):
        for draw in range(5):
            state = 0
            for word in (11, 2, *key, draw):
                state = splitmix64((state + word) & MASK)
            assert found[row, draw].item() == (state >> 11) / 2**53


def test_uniform_numbers_are_uniform_and_uncorrelated():
    keys = torch.arange(20_000)[:, None]
    found = uniform(keys, 3)
    assert found.min() >= 0 and found.max() < 1
    shares = torch.histc(found.flatten(), 16, 0, 1) / found.numel()
    torch.testing.assert_close(shares, torch.full((16,), 1 / 16, dtype=shares.dtype), atol=0.004, rtol=0)
    assert torch.corrcoef(found.T).fill_diagonal_(0).abs().max() < 0.03
    assert torch.corrcoef(torch.stack([found[1:, 0], found[:-1, 0]]))[0, 1].abs() < 0.03
