"""Quick-Thought's sentence encoder: two GRUs over word vectors, which are random or given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from medclip_dcl.common.errors import MissingFileError, UserError, check_min
from medclip_dcl.networks.text_encoder import SentenceEncoder, TokenizerText
from medclip_dcl.networks.transformer import Lengths, Tokens

_PAD, _UNKNOWN = "[PAD]", "[UNK]"
_INITIAL = 0.1
"""Greatest random word vector, as in Quick-Thought's code."""


class GruSentences(SentenceEncoder):
    """Two encoders of a sentence, f of anchors and g of candidates: each a bidirectional GRU's last states.

    Logeswaran & Lee (ICLR 2018). The features are f and g joined. Words are in lower case, cut at blanks and
    punctuation; both GRUs read one table of word vectors (choices; Quick-Thought's code keeps capitals, and two tables
    where they are trained).

    Args:
        dim: size of f and of g, even (Quick-Thought's code: 1200).
        word_dim: of random word vectors, which are trained (620 there).
        word_vectors: text file, a word and its numbers a line, as of GloVe; these vectors stay as they are. null for
            random ones.
        max_words: words of the vocabulary: the first of the file, or the most frequent of the training sentences
            (50,000 there).
        max_tokens: longer sentences are cut to this many words (30 there).
        tokenizer: content of a tokenizer.json, by which a checkpoint brings its vocabulary.
        has_given_words: True in a checkpoint whose word vectors came from a file, and stay as they are.
    """

    def __init__(
        self,
        dim: int = 256,
        word_dim: int = 100,
        word_vectors: str | None = None,
        max_words: int = 50_000,
        max_tokens: int = 64,
        *,
        tokenizer: str | TokenizerText | None = None,
        has_given_words: bool = False,
    ) -> None:
        super().__init__()
        check_min("text_encoder", {"dim": (dim, 2), "word_dim": (word_dim, 1), "max_words": (max_words, 1)})
        check_min("text_encoder", {"max_tokens": (max_tokens, 1)})
        if dim % 2:
            raise UserError(f"text_encoder.dim: expected an even number, for two directions, found {dim}")
        self.max_words, self.max_tokens = max_words, max_tokens
        vectors = None if word_vectors is None else _read_vectors(Path(word_vectors), max_words)
        self.dim, self.word_dim = dim, word_dim if vectors is None else vectors[1].shape[1]
        self.encoders = nn.ModuleList(
            nn.GRU(self.word_dim, dim // 2, batch_first=True, bidirectional=True) for _ in "fg"
        )
        self.has_given_words = has_given_words or vectors is not None
        if vectors is not None:
            self._set(_tokenizer(vectors[0]))
            self.words.weight.data[2:] = torch.from_numpy(vectors[1])
        elif tokenizer is not None:
            self._set(Tokenizer.from_str(str(tokenizer)))

    def take_words(self, texts: Sequence[str]) -> None:
        """Make the vocabulary of these sentences, with random vectors, unless there is one."""
        if hasattr(self, "tokenizer"):
            return
        normalizer, splitter = _tokenizer([]).normalizer, pre_tokenizers.BertPreTokenizer()
        counts = Counter(
            word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
        )
        words = sorted(counts, key=lambda word: (-counts[word], word))
        self._set(_tokenizer(words[: self.max_words]))

    def _set(self, tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(self.max_tokens)
        self.tokenizer = tokenizer
        self.words = nn.Embedding(tokenizer.get_vocab_size(), self.word_dim, padding_idx=0)
        nn.init.uniform_(self.words.weight, -_INITIAL, _INITIAL)
        self.words.weight.requires_grad_(not self.has_given_words)

    def config(self) -> dict[str, Any]:
        names = ("dim", "word_dim", "max_words", "max_tokens", "has_given_words")
        options = {name: getattr(self, name) for name in names}
        return {**options, "tokenizer": self.tokenizer.to_str() if hasattr(self, "tokenizer") else None}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids or [1] for encoding in self.tokenizer.encode_batch(list(texts))]

    def forward(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence feature"]:
        """f and g joined (sentence, 2 * dim)."""
        words = pack_padded_sequence(
            self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return torch.cat([encoder(words)[1].transpose(0, 1).flatten(1) for encoder in self.encoders], dim=1)

    states = forward


def _tokenizer(words: Sequence[str]) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate([_PAD, _UNKNOWN, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _read_vectors(file: Path, max_words: int) -> tuple[list[str], np.ndarray]:
    """The first words of a file, and their vectors (word, dim); a first line of two numbers is left out."""
    if not file.is_file():
        raise MissingFileError(f"text_encoder.word_vectors: no file {file}")
    rows: dict[str, np.ndarray] = {}
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            word, *numbers = line.split()
            if number == 1 and len(numbers) == 1:
                continue
            try:
                vector = np.array(numbers, dtype=np.float32)
            except ValueError as error:
                raise UserError(f"text_encoder.word_vectors: {file}: line {number}: {error}") from error
            size = len(next(iter(rows.values()), vector))
            if not len(vector) == size > 0:
                raise UserError(
                    f"text_encoder.word_vectors: {file}: line {number}: expected {size or 'some'} numbers after a "
                    f"word, found {len(vector)}"
                )
            rows.setdefault(word, vector)
            if len(rows) == max_words:
                break
    return list(rows), np.stack(list(rows.values()))
