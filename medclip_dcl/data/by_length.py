"""Sentences of like length encoded together, equal ones once: most of a padded batch of report sentences is padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Cost of one more pass of the encoder, in tokens (choice: between a small BERT on a CPU, about 100, and BERT-base on
# an accelerator, estimated).
_PASS = 256

Pieces = list[tuple[Tensor, int]]
"""Places of the sentences of each piece, and the number of tokens of its longest."""


def pieces_by_length(lengths: Sequence[int], most: int | None = None) -> Pieces:
    """Cut the sentences of a batch into pieces of like length, at the least cost in padding and passes.

    The shortest come first; `most` is the max number of sentences in a piece.
    """
    order = np.argsort(lengths, kind="stable")
    of_length, ends = np.unique(np.asarray(lengths)[order], return_index=True)
    starts = [*ends.tolist(), len(lengths)]
    # Least cost of all sentences shorter than the n-th length, and where their last piece begins.
    costs, begins = [0.0], [0]
    for end in range(1, len(of_length) + 1):
        each = [
            costs[begin] + _PASS + int(of_length[end - 1]) * (starts[end] - starts[begin])
            for begin in range(end)
        ]
        begins.append(int(np.argmin(each)))
        costs.append(min(each))
    cuts, end = [], len(of_length)
    while end:
        cuts.append((starts[begins[end]], starts[end]))
        end = begins[end]
    rows = torch.from_numpy(order)
    pieces = [part for start, stop in reversed(cuts) for part in rows[start:stop].split(most or len(lengths))]
    return [(places, int(lengths[int(places[-1])])) for places in pieces]


def rows_of(pieces: Pieces) -> dict[int, int]:
    """The row of each place among the pieces' rows, one piece after the other."""
    every = torch.cat([places for places, _ in pieces]).tolist()
    return {place: row for row, place in enumerate(every)}
