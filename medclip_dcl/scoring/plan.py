"""Sentences as distinct sequences of tokens, and the batches of masked copies that score them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor
from transformers import BertTokenizer

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.bert_folder import word_pieces
from medclip_dcl.scoring.masked_bert import MaskedCopies

_EDGES = 2  # [CLS] and [SEP]


class Batch(NamedTuple):
    """Copies start to stop of the sentences of one length, that go through a model together."""

    length: int
    start: int
    stop: int


class DistinctPieces:
    """A list of sentences as distinct sequences of tokens, to be looked up by their length.

    Args:
        tokenizer: of the model. Special tokens that stand in a sentence as text are text.
        sentences: any strings, repeats included.
        positions: of the model, [CLS] and [SEP] included.
        truncate: keep the first tokens of a sentence that is too long, instead of refusing it.

    Attributes:
        pieces, starts: the distinct sequences end to end, and where each begins (one more: the end).
        row: (sentence,) which distinct sequence each sentence is.
        is_truncated: (sentence,) True where a sentence was too long.
        rows_by_length: number of tokens -> distinct sequences of that length, in the order of the list; longest first.
    """

    def __init__(
        self, tokenizer: BertTokenizer, sentences: Sequence[str], *, positions: int, truncate: bool = False
    ) -> None:
        self.tokenizer, self.sentences, self.is_truncating = tokenizer, sentences, truncate
        self.is_truncated = np.zeros(len(sentences), dtype=bool)
        self._tokenise(positions - _EDGES)
        lengths = np.diff(self.starts)
        self.rows_by_length = {
            int(length): np.flatnonzero(lengths == length) for length in np.unique(lengths)[::-1]
        }

    def _tokenise(self, longest: int) -> None:
        row_of: dict[bytes, int] = {}
        self.row = np.empty(len(self.sentences), dtype=np.int64)
        parts: list[np.ndarray] = []
        counts: list[int] = []
        for index, ids in enumerate(word_pieces(self.tokenizer, self.sentences)):
            if len(ids) > longest:
                if not self.is_truncating:
                    raise ValueError(
                        f"sentence {index} has {len(ids)} tokens, the model takes at most {longest} (besides "
                        "[CLS] and [SEP]); split it, leave it out, or pass truncate=True"
                    )
                self.is_truncated[index] = True
                ids = ids[:longest]
            key = np.array(ids, dtype=np.int32)
            row = row_of.setdefault(key.tobytes(), len(row_of))
            if row == len(counts):
                parts.append(key)
                counts.append(len(key))
            self.row[index] = row
        self.pieces = np.concatenate([np.empty(0, np.int32), *parts])
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @property
    def n_distinct(self) -> int:
        """Distinct token sequences, the empty one included."""
        return len(self.starts) - 1

    def bucket(self, length: int) -> Int[np.ndarray, "sentence token"]:
        """Distinct sentences of one length, with [CLS] and [SEP]."""
        rows = self.rows_by_length[length]
        tokens = np.empty((len(rows), length + _EDGES), dtype=np.int64)
        tokens[:, 0], tokens[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        tokens[:, 1:-1] = self.pieces[self.starts[rows][:, None] + np.arange(length)]
        return tokens

    def in_batches(
        self, token_budget: int, copies_of: Callable[[int], int] = lambda length: 1
    ) -> list[Batch]:
        """All distinct sequences, the longest first; at least one copy a batch, whatever the budget.

        Args:
            token_budget: tokens of a batch, [CLS] and [SEP] included.
            copies_of: number of tokens -> copies of each sequence of that length, which follow one another.
        """
        return [
            Batch(length, start, min(start + step, copies))
            for length, rows in self.rows_by_length.items()
            for copies in [len(rows) * copies_of(length)]
            for step in [max(1, token_budget // (length + _EDGES))]
            for start in range(0, copies, step)
        ]

    def fingerprint_with(self, *options: object) -> str:
        """16 hexadecimal digits of the tokens of each sentence, in order, and of the options that decide the values."""
        digest = hashlib.sha256(repr(options).encode())
        for part in (self.row, self.starts, self.pieces):
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]


class ScoringPlan(DistinctPieces):
    """The batches that score a list of sentences, one masked copy per token of each distinct sentence.

    Args:
        tokenizer, sentences, token_budget, within_word_l2r, mask_every, truncate: as in `pseudo_log_likelihood`.
        positions: of the model, [CLS] and [SEP] included.

    Attributes:
        batches: every masked copy of every distinct sentence once; the longest sentences first.
        fingerprint: of what is scored: the tokens of each sentence, in order, and the options that give the
            values another meaning. The token budget is not among them.
    """

    def __init__(
        self,
        tokenizer: BertTokenizer,
        sentences: Sequence[str],
        *,
        positions: int,
        token_budget: int,
        within_word_l2r: bool = False,
        mask_every: int | None = None,
        truncate: bool = False,
    ) -> None:
        if mask_every is not None and (mask_every < 1 or within_word_l2r):
            raise UserError(
                f"mask_every: expected at least 1, without within_word_l2r, found {mask_every} and {within_word_l2r}"
            )
        super().__init__(tokenizer, sentences, positions=positions, truncate=truncate)
        self.mask_every = mask_every
        self.continues_word = _continuations(tokenizer) if within_word_l2r else None
        # An empty sentence has no copies, and so no batch.
        self.batches = self.in_batches(token_budget, self.copies_of)
        special = (tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
        self.fingerprint = self.fingerprint_with(within_word_l2r, mask_every, special)

    def copies_of(self, length: int) -> int:
        """Masked copies of a sentence of this many tokens."""
        return length if self.mask_every is None else min(self.mask_every, length)

    def work(self, batch: Batch) -> int:
        """Tokens of the batch that go through the model; over all batches quadratic in the lengths."""
        return (batch.stop - batch.start) * (batch.length + _EDGES)

    def empty_values(self) -> Float64[np.ndarray, " piece"]:
        """NaN for the log probability of each token of each distinct sentence."""
        return np.full(len(self.pieces), math.nan, dtype=np.float64)

    def places(self, number: int) -> Int[np.ndarray, " query"]:
        """Positions of a batch's values among all values."""
        sentence, position, _ = self._queries(self.batches[number])
        rows = self.rows_by_length[self.batches[number].length]
        return self.starts[rows[sentence]] + position

    def copies(self, batch: Batch, bucket: Int[Tensor, "sentence token"]) -> MaskedCopies:
        """Input of the model for a batch; `bucket` holds the sentences of its length, on the device."""
        sentence, position, query_copy = self._queries(batch)
        first = batch.start // self.copies_of(batch.length)
        last = (batch.stop - 1) // self.copies_of(batch.length)
        tokens = bucket[first : last + 1]
        n_copies = batch.stop - batch.start
        of_copy = np.empty(n_copies, dtype=np.int64)
        of_copy[query_copy] = sentence - first
        is_masked = np.zeros((n_copies, batch.length + _EDGES), dtype=bool)
        is_masked[query_copy, position + 1] = True

        def on_device(values: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(values)
            if bucket.device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(bucket.device, non_blocking=True)

        masked, copy_sentence, query_position = (
            on_device(is_masked),
            on_device(of_copy),
            on_device(position + 1),
        )
        if self.continues_word is not None:
            masked = masked | self._later_pieces(tokens[copy_sentence], query_position)
        is_one_each = self.mask_every is None
        return MaskedCopies(
            tokens=tokens,
            sentence=copy_sentence,
            is_masked=masked,
            query_copy=None if is_one_each else on_device(query_copy),
            query_position=query_position,
        )

    def _queries(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sentence of the bucket, token, copy of the batch) of each value that the batch gives."""
        stride = self.copies_of(batch.length)
        copies = np.arange(batch.start, batch.stop)
        sentence, first = copies // stride, copies % stride
        position = first[:, None] + stride * np.arange(-(-batch.length // stride))
        copy_number, which = np.nonzero(position < batch.length)
        return sentence[copy_number], position[copy_number, which], copy_number

    def _later_pieces(
        self, tokens: Int[Tensor, "copy token"], position: Int[Tensor, " copy"]
    ) -> Bool[Tensor, "copy token"]:
        """The tokens of the scored token's word that follow it."""
        assert self.continues_word is not None
        word = (~self.continues_word.to(tokens.device)[tokens]).cumsum(dim=1)
        is_same_word = word == word.gather(1, position[:, None])
        return is_same_word & (torch.arange(tokens.shape[1], device=tokens.device) > position[:, None])

    def table(self, values: Float64[np.ndarray, " piece"]) -> pd.DataFrame:
        """The scores of the sentences, in order, from the values of all batches (see `pseudo_log_likelihood`)."""
        lengths = np.diff(self.starts)
        is_unknown = self.pieces == self.tokenizer.unk_token_id
        # One more element, so that an empty last sentence has a start.
        sums = np.add.reduceat(np.append(values, 0.0), self.starts)[:-1]
        unknown = np.add.reduceat(np.append(is_unknown, False).astype(np.int64), self.starts)[:-1]
        columns = {
            "text": pd.Series(list(self.sentences), dtype=object),
            "n_tokens": pd.Series(lengths[self.row], dtype="int64"),
            "log_p": pd.Series(np.where(lengths > 0, sums, math.nan)[self.row], dtype="float64"),
            "n_unknown": pd.Series(np.where(lengths > 0, unknown, 0)[self.row], dtype="int64"),
        }
        if self.is_truncating:
            columns["truncated"] = pd.Series(self.is_truncated, dtype=bool)
        return pd.DataFrame(columns)


def _continuations(tokenizer: BertTokenizer) -> Bool[Tensor, " piece"]:
    """True for tokens that continue a word."""
    vocabulary = tokenizer.get_vocab()
    continues = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.bool)
    for piece, number in vocabulary.items():
        continues[number] = piece.startswith("##") and len(piece) > 2
    return continues
