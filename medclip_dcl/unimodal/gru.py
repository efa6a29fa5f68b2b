"""Quick-Thought's sentence encoder: two GRUs over word vectors, which are random or given."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.networks.text_encoder import SentenceEncoder, TokenizerText
from medclip_dcl.networks.transformer import Lengths, Tokens


class GruSentences(SentenceEncoder):
    """Encoders f of anchors and g of candidates: the last states of a bidirectional GRU each (Logeswaran & Lee, 2018).

    Features are f and g joined. Words are in lower case, cut at blanks and punctuation; f and g share the word vectors
    (choices; Quick-Thought's code keeps capitals, trains two tables, and divides f and g by their norms first).
    The reset gate multiplies matrix times state, and biases start near 0 (there: the state alone; gates' start at 1).

    Args:
        dim: size of f and of g, even (Quick-Thought's code: 1200).
        word_dim: of random word vectors, which are trained (620 there).
        word_vectors: file of vectors that stay as they are, a word and its numbers a line, as of GloVe; null: random.
        max_tokens: longer sentences are cut to this many words (30 there).
        tokenizer: content of a tokenizer.json, by which a checkpoint brings its vocabulary.
        trains_words: False in a checkpoint of given word vectors.
    """

    def __init__(
        self,
        dim: int = 256,
        word_dim: int = 100,
        word_vectors: str | None = None,
        max_tokens: int = 64,
        *,
        tokenizer: str | TokenizerText | None = None,
        trains_words: bool = True,
    ) -> None:
        super().__init__()
        check_range("text_encoder", "[2, inf)", dim=dim)
        check_range("text_encoder", "[1, inf)", word_dim=word_dim, max_tokens=max_tokens)
        if dim % 2:
            raise UserError(f"text_encoder.dim: expected an even number, for two directions, found {dim}")
        vectors = None if word_vectors is None else _read_vectors(word_vectors)
        self.max_tokens, self.trains_words = max_tokens, trains_words and vectors is None
        self.dim, self.word_dim = dim, word_dim if vectors is None else vectors.shape[1]
        self.encoders = nn.ModuleList(
            nn.GRU(self.word_dim, dim // 2, batch_first=True, bidirectional=True) for _ in "fg"
        )
        if vectors is not None:
            self._set(_tokenizer([*vectors.index]))
            self.words.weight.data[2:] = torch.from_numpy(vectors.to_numpy())
        elif tokenizer is not None:
            self._set(Tokenizer.from_str(str(tokenizer)))

    def take_words(self, texts: Sequence[str]) -> None:
        """Make the vocabulary of these sentences, with random vectors, unless there is one."""
        if not hasattr(self, "tokenizer"):
            split = _tokenizer([])
            counts = Counter(
                word
                for text in texts
                for word, _ in split.pre_tokenizer.pre_tokenize_str(split.normalizer.normalize_str(text))
            )
            self._set(_tokenizer(sorted(counts, key=lambda word: (-counts[word], word))))

    def _set(self, tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(self.max_tokens)
        self.tokenizer = tokenizer
        self.words = nn.Embedding(tokenizer.get_vocab_size(), self.word_dim, padding_idx=0)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)  # as in Quick-Thought's code
        self.words.weight.requires_grad_(self.trains_words)

    def config(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.to_str() if hasattr(self, "tokenizer") else None
        sizes = {"dim": self.dim, "word_dim": self.word_dim, "max_tokens": self.max_tokens}
        return {**sizes, "tokenizer": tokenizer, "trains_words": self.trains_words}

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
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _read_vectors(file: str) -> pd.DataFrame:
    """Vectors (word, dim) of a file, by word."""
    options: dict[str, Any] = {"header": None, "index_col": 0, "dtype": {0: str}, "quoting": csv.QUOTE_NONE}
    try:
        # Without missing values: GloVe has vectors of "nan" and "null".
        rows = pd.read_csv(file, sep=" ", keep_default_na=False, **options).astype("float32")
    except (OSError, ValueError) as error:
        raise UserError(
            f"text_encoder.word_vectors: {file}: expected a word and as many numbers in each line: {error}"
        ) from error
    return rows[~rows.index.duplicated()]
