"""log P(token | the others) from any masked language model, or log P(token | those before) from any causal one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import BertForMaskedLM, PreTrainedModel

from medclip_dcl.common.devices import is_on_host, widest_float
from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.masked_language import head_at

LAYERS_TOKENS = 4096
"""Tokens per pass through the layers on a CPU."""
_TRIED = 6
"""Tokens of the sentences that are tried."""
_ROUNDING = 1e-4
"""Share of the logits' deviation that counts as rounding (choice)."""
# Logits per pass (CPU, GPU): 0.5 and 2 GB in float32.
_LOGITS = (2**27, 2**29)


@dataclass(frozen=True)
class MaskedCopies:
    """Copies of sentences of one length, each with some positions masked, and the positions to score.

    Attributes:
        tokens: (sentence, token) ids with [CLS] and [SEP], nothing masked.
        sentence: (copy,) row of `tokens`.
        is_masked: (copy, token).
        query_copy: (query,) copy of each query; None: query i belongs to copy i.
        query_position: (query,) masked column whose token is scored.
    """

    tokens: Int[Tensor, "sentence token"]
    sentence: Int[Tensor, " copy"]
    is_masked: Bool[Tensor, "copy token"]
    query_copy: Int[Tensor, " query"] | None
    query_position: Int[Tensor, " query"]

    @property
    def copy_of_query(self) -> Int[Tensor, " query"]:
        if self.query_copy is None:
            return torch.arange(len(self.query_position), device=self.query_position.device)
        return self.query_copy

    @property
    def targets(self) -> Int[Tensor, " query"]:
        return self.tokens[self.sentence[self.copy_of_query], self.query_position]

    def split(self, size: int) -> list[MaskedCopies]:
        """Parts of `size` copies; `sentence` and `query_copy` must be ascending."""
        return [self._part(start, start + size) for start in range(0, len(self.sentence), size)]

    def _part(self, start: int, stop: int) -> MaskedCopies:
        sentence = self.sentence[start:stop]
        first, last = int(sentence[0]), int(sentence[-1])
        queries, query_copy = slice(start, stop), None
        if self.query_copy is not None:
            queries = slice(*(int((self.query_copy < edge).sum()) for edge in (start, stop)))
            query_copy = self.query_copy[queries] - start
        return MaskedCopies(
            tokens=self.tokens[first : last + 1],
            sentence=sentence - first,
            is_masked=self.is_masked[start:stop],
            query_copy=query_copy,
            query_position=self.query_position[queries],
        )


class WholeModel:
    """The model's own forward for each copy; works with any masked or causal language model of transformers.

    The vocabulary head runs at the scored tokens only, where a trial shows that it gives the same as at all of them. A
    causal model reads each sentence once, unmasked, and scores each token by the logits at the one before.

    Args:
        model: in eval mode.
        mask_id: token that masks others; None: the model is causal.

    Attributes:
        takes_threads: True if several threads may call it at a time.
    """

    takes_threads = False

    def __init__(self, model: PreTrainedModel, mask_id: int | None) -> None:
        self.model, self.mask_id = model, mask_id
        # A changed BERT, of which nothing is known.
        has_unknown_parts = isinstance(model, BertForMaskedLM)
        self.has_head_at_rows = not (mask_id is None or has_unknown_parts) and self._head_works_at_rows()

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        """log P of each query's token, at least float32."""
        before = _random_state(copies.tokens.device)
        # Few copies at a time: logits need memory.
        size = self._copies_per_pass(copies.tokens)
        parts = [copies] if len(copies.sentence) <= size else copies.split(size)
        found = torch.cat([self._of_part(part) for part in parts])
        if not torch.equal(before, _random_state(copies.tokens.device)):
            raise UserError(
                f"model: expected one that computes the same each time, found a {type(self.model).__name__}, which "
                "draws random numbers (as Reformer's hashing does); choose another"
            )
        return found

    def _of_part(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        inputs, position = copies.tokens[copies.sentence], copies.query_position
        if self.mask_id is None:
            position = position - 1
        else:
            inputs = inputs.masked_fill(copies.is_masked, self.mask_id)
        logits = self._logits(inputs, copies.copy_of_query, position, self.has_head_at_rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return log_probability_at(logits, copies.targets).to(widest_float(inputs.device))

    def _copies_per_pass(self, tokens: Int[Tensor, "sentence token"]) -> int:
        length = tokens.shape[1]
        rows = 1 if self.has_head_at_rows else length
        size = _LOGITS[not is_on_host(tokens)] // (rows * self.model.config.vocab_size)
        return max(1, min(size, LAYERS_TOKENS // length) if is_on_host(tokens) else size)

    def _logits(
        self,
        inputs: Int[Tensor, "copy token"],
        copy: Int[Tensor, " query"],
        position: Int[Tensor, " query"],
        has_head_at_rows: bool,
    ) -> Float[Tensor, "query vocabulary"]:
        """Logits at some tokens, which the head sees alone, as sentences of one token each, or among the others."""
        if not has_head_at_rows:
            # All keys and values of a causal model would be kept.
            options = {"use_cache": False} if self.mask_id is None else {}
            return self.model(input_ids=inputs, **options).logits[copy, position]

        with head_at(self.model, copy * inputs.shape[1] + position):
            return self.model(input_ids=inputs).logits[:, 0]

    def _head_works_at_rows(self) -> bool:
        """True if the head gives the same at some tokens as at all, which a head across tokens does not."""
        device = next(self.model.parameters()).device
        # The last ids: padding, which models treat in their own ways, is among the first.
        inputs = self.model.config.vocab_size - 1 - torch.arange(6, device=device).view(2, 3)
        copy, position = torch.tensor([[0, 0, 1], [2, 1, 0]], device=device)
        expected = self._logits(inputs, copy, position, False).float()
        try:
            found = self._logits(inputs, copy, position, True).float()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        # Above rounding in half precision, far below what another token would give.
        limit = 0.01 * (expected - expected.mean(dim=0)).std()
        return found.shape == expected.shape and bool((found - expected).abs().max() < limit)


def check_order(model: PreTrainedModel, is_causal: bool) -> None:
    """Refuse a model whose early logits change with the last token though its class is causal, or the reverse."""
    device = next(model.parameters()).device
    before = _random_state(device)
    tokens = model.config.vocab_size - 1 - torch.arange(_TRIED, device=device).expand(2, 1, -1)
    tokens[1, 0, -1] -= 1
    options = {"use_cache": False} if is_causal else {}
    one, two = (model(input_ids=x, **options).logits[0, :-1].float() for x in tokens)
    limit = max(_ROUNDING, torch.finfo(model.dtype).eps) * one.std()
    if ((one - two).abs().max() <= limit) == is_causal or not torch.equal(before, _random_state(device)):
        return
    kind, found, other = (
        ("causal", "whose early words see the last one (is_decoder false, or both directions)", "masked")
        if is_causal
        else ("masked", "whose early words do not see the last one", "causal")
    )
    raise UserError(
        f"model: expected a {kind} language model, found a {type(model).__name__} {found}; name its {other} class as "
        "architectures in config.json, or give another"
    )


def log_probability_at(
    logits: Float[Tensor, "query vocabulary"], targets: Int[Tensor, " query"]
) -> Float[Tensor, " query"]:
    """Log-softmax of the logits at the targets; overwrites the logits."""
    here = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(dim=1, keepdim=True)
    return here - largest[:, 0] - logits.sub_(largest).exp_().sum(dim=1).log_()


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
