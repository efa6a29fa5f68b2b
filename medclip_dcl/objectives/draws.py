"""Random numbers from keys alone: the same in every process and on every device, whatever else stands in the batch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Constants of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) as signed numbers."""


def uniform(keys: Int[Tensor, "row key"], draws: int, *seeds: int) -> Float[Tensor, "row draw"]:
    """Uniform numbers in [0, 1) in float64: splitmix64 of the seeds, the row's keys and the number of the draw.

    Args:
        keys: of each row, int64.
        draws: numbers of a row.
        *seeds: shared by all rows.
    """
    state = torch.zeros(len(keys), 1, dtype=torch.int64, device=keys.device)
    words: list[int | Tensor] = [*seeds, *keys[:, :, None].unbind(1)]
    for word in [*words, torch.arange(draws, device=keys.device)]:
        state = _mixed(state + word)
    return (_shifted(state, 11)).double() * 2.0**-53


def _mixed(state: Int[Tensor, "row draw"]) -> Int[Tensor, "row draw"]:
    """One step of splitmix64; products wrap around at 64 bits."""
    state = state + _STEP
    for places, factor in zip((30, 27), _FACTORS, strict=True):
        state = (state ^ _shifted(state, places)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: Int[Tensor, "row draw"], places: int) -> Int[Tensor, "row draw"]:
    """Shift to the right without the sign."""
    return (state >> places) & (2 ** (64 - places) - 1)
