"""How probable a masked language model finds each sentence: exact pseudo-log-likelihood in bulk.

The sum over a sentence's word pieces of log P(piece | sentence with that piece masked) (Salazar et al., ACL 2020,
eq. 1) costs one forward pass for each piece. Sentences with the same word pieces are scored once; the masked copies
of sentences of equal length share batches, so that nothing is padded and no attention mask is needed; the vocabulary
head runs at the masked position only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertTokenizer

from medclip_dcl.encoders.pretrained import word_pieces

# Word pieces in a batch, [CLS] and [SEP] included. Measured on CPU: flat from 2,048 to 8,192.
_DEFAULT_TOKEN_BUDGET = {"cpu": 4096, "cuda": 65536}
# Rows of (row, vocabulary) logits that exist at a time: 0.5 GB at 30,522 word pieces in float32.
_HEAD_ROWS = 4096
_EDGES = 2  # [CLS] and [SEP]


def pseudo_log_likelihood(
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    sentences: Sequence[str],
    *,
    token_budget: int | None = None,
    within_word_l2r: bool = False,
    truncate: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """Pseudo-log-likelihood of each sentence under a masked language model.

    log_p = sum over t of log P(piece t | sentence with piece t masked), natural logarithm, [CLS] and [SEP] excluded
    (Salazar et al., ACL 2020, eq. 1). The model is scored in eval mode on the device and in the type that it has,
    and left in the mode in which it was; log-softmax and sums are at least float32 and float64.

    Args:
        model: a BERT with its masked-language-model head.
        tokenizer: the model's own. Special tokens that stand in a sentence as text are text.
        sentences: any strings, repeats included: equal word pieces get bitwise equal values.
        token_budget: word pieces in a batch, [CLS] and [SEP] included; at least one row whatever it is. None:
            4,096 on a CPU, 65,536 on a GPU. It changes the speed, and the values by rounding only.
        within_word_l2r: mask the later pieces of the same word, too (Kauf & Ivanova, ACL 2023, PLL-word-l2r): the
            original over-scores words of several pieces. Choice; the default is the original.
        truncate: score the first pieces of a sentence that is too long for the model, instead of refusing it;
            adds the column truncated.
        progress: show a bar on standard error; it counts word pieces through the model, which is what takes time.

    Returns:
        One row for each sentence, in order: text; n_tokens (word pieces); log_p; n_unknown ([UNK] among the word
        pieces, which score as easy tokens); truncated if asked for. An empty sentence has n_tokens 0, log_p NaN.

    Raises:
        TypeError: a single string, or a sentence that is none.
        ValueError: without `truncate`, a sentence with more word pieces than the model has positions (names its
            index and length).
    """
    _check_are_strings(sentences)
    pieces = [tuple(ids) for ids in word_pieces(tokenizer, sentences)]
    longest = int(model.config.max_position_embeddings) - _EDGES
    is_too_long = [len(key) > longest for key in pieces]
    if not truncate:
        _check_lengths(pieces, longest)
    pieces = [key[:longest] for key in pieces]
    index = {key: row for row, key in enumerate(dict.fromkeys(pieces))}
    distinct = list(index)
    device = next(model.parameters()).device
    budget = _DEFAULT_TOKEN_BUDGET.get(device.type, 65536) if token_budget is None else token_budget
    scores = torch.full((len(distinct),), math.nan, dtype=torch.float64)
    masking = _Masking.of(tokenizer, within_word_l2r)
    with _evaluating(model), torch.inference_mode(), _progress_bar(_work(distinct), progress) as advance:
        for rows, tokens in _buckets(distinct, tokenizer):
            tokens = tokens.to(device)
            length = tokens.shape[1] - _EDGES
            values = torch.empty(len(rows) * length, dtype=torch.float64)
            step = max(1, budget // tokens.shape[1])
            for start in range(0, len(values), step):
                copies = torch.arange(start, min(start + step, len(values)), device=device)
                sentence, position = copies // length, copies % length + 1
                found = _masked_log_probability(model, masking, tokens[sentence], position)
                values[start : start + step] = found.cpu()
                advance(len(copies) * tokens.shape[1])
            scores[rows] = values.view(len(rows), length).sum(dim=1)
    table = pd.DataFrame(
        {
            "text": pd.Series(list(sentences), dtype=object),
            "n_tokens": pd.Series([len(key) for key in pieces], dtype="int64"),
            "log_p": pd.Series([scores[index[key]].item() for key in pieces], dtype="float64"),
            "n_unknown": pd.Series([key.count(tokenizer.unk_token_id) for key in pieces], dtype="int64"),
        }
    )
    return table.assign(truncated=pd.Series(is_too_long, dtype=bool)) if truncate else table


@dataclass(frozen=True)
class _Masking:
    """Which pieces a masked copy hides: the scored one and, if asked, the later ones of its word."""

    mask_id: int
    continues_word: Bool[Tensor, "piece"] | None

    @staticmethod
    def of(tokenizer: BertTokenizer, within_word_l2r: bool) -> _Masking:
        continues = None
        if within_word_l2r:
            continues = torch.zeros(max(tokenizer.get_vocab().values()) + 1, dtype=torch.bool)
            for piece, number in tokenizer.get_vocab().items():
                continues[number] = piece.startswith("##") and len(piece) > 2
        return _Masking(tokenizer.mask_token_id, continues)

    def hidden(
        self, tokens: Int[Tensor, "copy token"], position: Int[Tensor, " copy"]
    ) -> Bool[Tensor, "copy token"]:
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        scored = columns == position[:, None]
        if self.continues_word is None:
            return scored
        starts = ~self.continues_word.to(tokens.device)[tokens]
        word = starts.cumsum(dim=1)
        same_word = word == word.gather(1, position[:, None])
        return scored | (same_word & (columns > position[:, None]))


def _masked_log_probability(
    model: BertForMaskedLM,
    masking: _Masking,
    tokens: Int[Tensor, "copy token"],
    position: Int[Tensor, " copy"],
) -> Float[Tensor, " copy"]:
    """log P(the piece at `position` | the copy with it masked), for copies of equal length."""
    copies = torch.arange(len(tokens), device=tokens.device)
    targets = tokens[copies, position]
    masked = tokens.masked_fill(masking.hidden(tokens, position), masking.mask_id)
    hidden = model.bert(input_ids=masked).last_hidden_state[copies, position]
    found = []
    for some_hidden, some_targets in zip(hidden.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True):
        logits = model.cls(some_hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(logits.gather(1, some_targets[:, None])[:, 0] - logits.logsumexp(dim=1))
    return torch.cat(found)


def _check_are_strings(sentences: Sequence[object]) -> None:
    if isinstance(sentences, str):
        raise TypeError("sentences must be a sequence of strings, got a single string; wrap it in a list")
    for row, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentence {row} must be a string, got {type(sentence).__name__}")


def _check_lengths(pieces: Sequence[tuple[int, ...]], longest: int) -> None:
    for row, key in enumerate(pieces):
        if len(key) > longest:
            raise ValueError(
                f"sentence {row} has {len(key)} word pieces, the model takes at most {longest} (besides [CLS] "
                "and [SEP]); split it, leave it out, or pass truncate=True"
            )


def _buckets(
    distinct: Sequence[tuple[int, ...]], tokenizer: BertTokenizer
) -> Iterator[tuple[list[int], Int[Tensor, "sentence token"]]]:
    """Rows of equal length with their tokens, [CLS] and [SEP] at the ends; empty sentences are left out."""
    by_length: dict[int, list[int]] = {}
    for row, key in enumerate(distinct):
        by_length.setdefault(len(key), []).append(row)
    by_length.pop(0, None)
    for length in sorted(by_length):
        rows = by_length[length]
        tokens = torch.empty(len(rows), length + _EDGES, dtype=torch.long)
        tokens[:, 0], tokens[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
        tokens[:, 1:-1] = torch.tensor([distinct[row] for row in rows])
        yield rows, tokens


def _work(distinct: Sequence[tuple[int, ...]]) -> int:
    """Word pieces that go through the model: quadratic in the length of a sentence."""
    return sum(len(key) * (len(key) + _EDGES) for key in distinct)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every sub-module is in the mode in which it was."""
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training:
            module.training = training


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("word pieces scored"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task("scoring", total=total)
        yield lambda done: bar.advance(task, done)
