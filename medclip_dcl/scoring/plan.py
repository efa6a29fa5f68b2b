"""Sentences as distinct sequences of tokens, and the batches of copies that score them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.bert_folder import encodings
from medclip_dcl.networks.language_model import Around, special_tokens_around
from medclip_dcl.scoring.whole_model import MaskedCopies


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
        positions: of the model, special tokens included.
        truncate: keep the first tokens of a sentence that is too long, instead of refusing it.
        has_words: keep the word of each token; sequences are distinct if their words are.
        around: special tokens before and after each sentence; None: as the tokenizer adds them.

    Attributes:
        pieces, starts: the distinct sequences end to end, and where each begins (one more: the end).
        words: the word of each of `pieces`, numbered in its sequence; empty without `has_words`.
        row: (sentence,) which distinct sequence each sentence is.
        is_truncated: (sentence,) True where a sentence was too long.
        rows_by_length: number of tokens -> distinct sequences of that length, in the order of the list; longest first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sentences: Sequence[str],
        *,
        positions: int,
        truncate: bool = False,
        has_words: bool = False,
        around: Around | None = None,
    ) -> None:
        self.tokenizer, self.sentences, self.is_truncating = tokenizer, sentences, truncate
        self.has_words = has_words
        self.before, self.after = around or special_tokens_around(tokenizer)
        self.n_special = len(self.before) + len(self.after)
        self.is_truncated = np.zeros(len(sentences), dtype=bool)
        self._tokenise(positions - self.n_special)
        lengths = np.diff(self.starts)
        self.rows_by_length = {
            int(length): np.flatnonzero(lengths == length) for length in np.unique(lengths)[::-1]
        }

    def _tokenise(self, longest: int) -> None:
        row_of: dict[bytes, int] = {}
        self.row = np.empty(len(self.sentences), dtype=np.int64)
        parts: list[np.ndarray] = []
        counts: list[int] = []
        for index, encoding in enumerate(encodings(self.tokenizer, self.sentences, has_words=self.has_words)):
            ids = encoding.ids
            if len(ids) > longest:
                if not self.is_truncating:
                    special = self.tokenizer.convert_ids_to_tokens([*self.before, *self.after])
                    raise ValueError(
                        f"sentence {index} has {len(ids)} tokens, the model takes at most {longest} (besides "
                        f"{' and '.join(special)}); split it, leave it out, or pass truncate=True"
                    )
                self.is_truncated[index] = True
                ids = ids[:longest]
            words = encoding.word_ids[: len(ids)] if self.has_words else []
            key = np.array([*ids, *words], dtype=np.int32)
            row = row_of.setdefault(key.tobytes(), len(row_of))
            if row == len(counts):
                parts.append(key)
                counts.append(len(ids))
            self.row[index] = row
        none = np.empty(0, np.int32)
        self.pieces = np.concatenate([none, *(part[:n] for part, n in zip(parts, counts, strict=True))])
        self.words = np.concatenate([none, *(part[n:] for part, n in zip(parts, counts, strict=True))])
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @property
    def n_distinct(self) -> int:
        """Distinct token sequences, the empty one included."""
        return len(self.starts) - 1

    def bucket(self, length: int) -> Int[np.ndarray, "sentence token"]:
        """Distinct sentences of one length, with the special tokens around them."""
        places = self._places(self.rows_by_length[length], length)
        before, after = (np.tile(np.array(x, np.int64), (len(places), 1)) for x in (self.before, self.after))
        return np.concatenate([before, self.pieces[places], after], axis=1)

    def _places(self, rows: Int[np.ndarray, " sentence"], length: int) -> Int[np.ndarray, "sentence token"]:
        """Places in `pieces` of distinct sentences of one length."""
        return self.starts[rows][:, None] + np.arange(length)

    def in_batches(
        self, token_budget: int, copies_of: Callable[[int], int] = lambda length: 1
    ) -> list[Batch]:
        """All distinct sequences, the longest first; at least one copy a batch, whatever the budget.

        Args:
            token_budget: tokens of a batch, special tokens included.
            copies_of: number of tokens -> copies of each sequence of that length, which follow one another.
        """
        return [
            Batch(length, start, min(start + step, copies))
            for length, rows in self.rows_by_length.items()
            for copies in [len(rows) * copies_of(length)]
            for step in [max(1, token_budget // (length + self.n_special))]
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
        tokenizer, sentences, token_budget, within_word_l2r, truncate: as in `pseudo_log_likelihood`.
        positions: of the model, special tokens included.
        is_causal: for a causal model: each distinct sentence once, behind one token that starts it.

    Attributes:
        batches: every masked copy of every distinct sentence once; the longest sentences first.
        fingerprint: of what is scored: the tokens of each sentence, in order, and the options that give the
            values another meaning. The token budget is not among them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sentences: Sequence[str],
        *,
        positions: int,
        token_budget: int,
        within_word_l2r: bool = False,
        truncate: bool = False,
        is_causal: bool = False,
    ) -> None:
        if is_causal and within_word_l2r:
            raise UserError(
                "within_word_l2r: expected a masked language model, found a causal one, which masks nothing; "
                "leave it out"
            )
        if within_word_l2r and tokenizer.backend_tokenizer.pre_tokenizer is None:
            raise UserError(
                "within_word_l2r: expected a tokenizer that splits words, found none; leave it out"
            )
        super().__init__(
            tokenizer,
            sentences,
            positions=positions,
            truncate=truncate,
            has_words=within_word_l2r,
            around=_start(tokenizer) if is_causal else None,
        )
        self.is_causal = is_causal
        # An empty sentence has no copies, and so no batch.
        self.batches = self.in_batches(token_budget, self.copies_of)
        self.mask_id = None if is_causal else tokenizer.mask_token_id
        special = (self.mask_id, *self.before, *self.after)
        self.fingerprint = self.fingerprint_with(within_word_l2r, None, special)

    def copies_of(self, length: int) -> int:
        """Masked copies of a sentence of this many tokens; of a causal model one, whose tokens are all queries."""
        return min(1, length) if self.is_causal else length

    def work(self, batch: Batch) -> int:
        """Tokens of the batch that go through the model; over all batches quadratic in the lengths."""
        return (batch.stop - batch.start) * (batch.length + self.n_special)

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
        n_copies = batch.stop - batch.start
        of_copy = np.empty(n_copies, dtype=np.int64)
        of_copy[query_copy] = sentence - first
        first_token = len(self.before)
        is_masked = np.zeros((n_copies, batch.length + self.n_special), dtype=bool)
        is_masked[query_copy, position + first_token] = True
        if self.has_words:
            rows = self.rows_by_length[batch.length][sentence]
            words = self.words[self._places(rows, batch.length)]
            is_same = words == np.take_along_axis(words, position[:, None], axis=1)
            is_later = np.arange(batch.length) > position[:, None]
            is_masked[:, first_token : first_token + batch.length] |= is_same & is_later

        def on_device(values: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(values)
            if bucket.device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(bucket.device, non_blocking=True)

        return MaskedCopies(
            tokens=bucket[first : last + 1],
            sentence=on_device(of_copy),
            is_masked=on_device(is_masked),
            query_copy=on_device(query_copy) if self.is_causal else None,
            query_position=on_device(position + first_token),
        )

    def _queries(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sentence of the bucket, token, copy of the batch) of each value that the batch gives."""
        of_copy = batch.length // self.copies_of(batch.length)
        queries = np.arange(batch.start * of_copy, batch.stop * of_copy)
        sentence, position = np.divmod(queries, batch.length)
        return sentence, position, np.arange(batch.stop - batch.start).repeat(of_copy)

    def table(self, values: Float64[np.ndarray, " piece"]) -> pd.DataFrame:
        """The scores of the sentences, in order, from the values of all batches (see `pseudo_log_likelihood`)."""
        lengths = np.diff(self.starts)
        is_unknown = np.isin(self.pieces, [self.tokenizer.unk_token_id])
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

    def token_table(self, values: Float64[np.ndarray, " piece"]) -> pd.DataFrame:
        """One row for each token: number of its sentence, its position, token as in the vocabulary, log_p."""
        lengths = np.diff(self.starts)[self.row]
        sentence = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(sentence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = self.starts[self.row[sentence]] + position
        known, which = np.unique(self.pieces[places], return_inverse=True)
        tokens = np.array(self.tokenizer.convert_ids_to_tokens(known.tolist()), dtype=object)
        columns = {"sentence": sentence, "position": position, "token": tokens[which]}
        return pd.DataFrame({**columns, "log_p": values[places]})


def _start(tokenizer: PreTrainedTokenizerFast) -> Around:
    """The token before the first of a causal model: what the tokenizer puts first, else bos, else eos (choice)."""
    before, _ = special_tokens_around(tokenizer)
    start = next(
        (x for x in (*before[:1], tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None), None
    )
    if start is None:
        raise UserError(
            "the causal model's tokenizer: expected a bos_token or an eos_token, after which the first token is "
            "scored, found none; give tokenizer_config.json one"
        )
    return [start], []
