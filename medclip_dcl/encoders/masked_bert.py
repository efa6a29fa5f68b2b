"""log P(piece | copy of the sentence with it masked), computed with as little work as the definition allows.

The copies of a sentence differ in what is masked only. So the first layer's queries, keys and values are computed once
for each sentence and once for [MASK] in each position, the last layer is computed for the masked position only, and so
is the vocabulary head. All copies of a batch have equal length: nothing is padded, no attention mask is needed. The
result is that of the whole model up to rounding.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import BertForMaskedLM
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertSelfAttention

# Rows of (row, vocabulary) logits that exist at a time: 0.5 GB at 30,522 word pieces in float32.
_HEAD_ROWS = 4096


@dataclass(frozen=True)
class MaskedCopies:
    """Copies of sentences of one length, each with some positions masked, and the positions that are asked for.

    Attributes:
        tokens: (sentence, token) word pieces with [CLS] and [SEP], nothing masked.
        sentence: (copy,) row of `tokens` that it is a copy of.
        is_masked: (copy, token).
        query_copy: (query,) copy that a query looks into; None: query i looks into copy i.
        query_position: (query,) masked column whose piece is scored.
    """

    tokens: Int[Tensor, "sentence token"]
    sentence: Int[Tensor, " copy"]
    is_masked: Bool[Tensor, "copy token"]
    query_copy: Int[Tensor, " query"] | None
    query_position: Int[Tensor, " query"]

    @property
    def copy_of_query(self) -> Int[Tensor, " query"]:
        """(query,) copy that each query looks into."""
        if self.query_copy is None:
            return torch.arange(len(self.query_position), device=self.query_position.device)
        return self.query_copy

    @property
    def targets(self) -> Int[Tensor, " query"]:
        """(query,) word piece that is scored."""
        return self.tokens[self.sentence[self.copy_of_query], self.query_position]


@runtime_checkable
class MaskedBert(Protocol):
    """Scores masked positions."""

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        """log P of each query's piece, at least float32."""
        ...


def masked_bert(model: BertForMaskedLM, mask_id: int) -> MaskedBert:
    """The fast way where the model is transformers' plain BERT; else the whole model for each copy, with a warning."""
    reason = _unknown_part(model)
    if reason is None:
        return SharedMaskedBert(model, mask_id)
    warnings.warn(
        f"scoring: {reason}, so every copy goes through the whole model, which is slower; results are the same",
        stacklevel=2,
    )
    return WholeMaskedBert(model, mask_id)


class WholeMaskedBert:
    """The whole model for each copy; only the vocabulary head is limited to the masked positions."""

    def __init__(self, model: BertForMaskedLM, mask_id: int) -> None:
        self.model, self.mask_id = model, mask_id

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        masked = copies.tokens[copies.sentence].masked_fill(copies.is_masked, self.mask_id)
        hidden = self.model.bert(input_ids=masked).last_hidden_state
        return _head(self.model.cls, hidden[copies.copy_of_query, copies.query_position], copies.targets)


class SharedMaskedBert:
    """A plain BERT, without the work that copies share and the results that nobody reads."""

    def __init__(self, model: BertForMaskedLM, mask_id: int) -> None:
        self.mask_id = mask_id
        self.embeddings, self.head = model.bert.embeddings, model.cls
        self.layers = [_Layer(layer) for layer in model.bert.encoder.layer]

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        first, *others = self.layers
        of_sentence = self.embeddings(input_ids=copies.tokens)
        of_mask = self.embeddings(input_ids=torch.full_like(copies.tokens[:1], self.mask_id))[0]
        is_masked = copies.is_masked[..., None]

        def of_copies(sentence: Tensor, mask: Tensor) -> Tensor:
            return torch.where(is_masked, mask, sentence[copies.sentence])

        hidden = of_copies(of_sentence, of_mask)
        one_query_each = copies.query_copy is None
        if others or not one_query_each:
            hidden = first.after_projection(
                hidden, of_copies(first.projected(of_sentence), first.projected(of_mask))
            )
        for layer in others[:-1] if one_query_each else others:
            hidden = layer.after_projection(hidden, layer.projected(hidden))
        if one_query_each:
            rows = self.layers[-1].at(hidden, copies.query_position)
        else:
            rows = hidden[copies.copy_of_query, copies.query_position]
        return _head(self.head, rows, copies.targets)


class _Layer:
    """One transformer layer, with its query, key and value projections as one."""

    def __init__(self, layer: BertLayer) -> None:
        attention = layer.attention.self
        projections = (attention.query, attention.key, attention.value)
        self.weight = torch.cat([projection.weight for projection in projections])
        self.bias = torch.cat([projection.bias for projection in projections])
        self.heads, self.scale = attention.num_attention_heads, attention.scaling
        self.attention_output, self.attention_norm = (
            layer.attention.output.dense,
            layer.attention.output.LayerNorm,
        )
        self.wide, self.activation = layer.intermediate.dense, layer.intermediate.intermediate_act_fn
        self.narrow, self.norm = layer.output.dense, layer.output.LayerNorm

    def projected(self, hidden: Float[Tensor, "*row width"]) -> Float[Tensor, "*row three_widths"]:
        """Queries, keys and values side by side."""
        return linear(hidden, self.weight, self.bias)

    def after_projection(
        self, hidden: Float[Tensor, "copy token width"], projected: Float[Tensor, "copy token three_widths"]
    ) -> Float[Tensor, "copy token width"]:
        """The layer's output from its input and the projection of it."""
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, scale=self.scale)
        return self._after_attention(hidden, attended.transpose(1, 2).flatten(2))

    def at(
        self, hidden: Float[Tensor, "copy token width"], position: Int[Tensor, " copy"]
    ) -> Float[Tensor, "copy width"]:
        """The layer's output at one position of each copy."""
        rows = hidden[torch.arange(len(hidden), device=hidden.device), position]
        width = hidden.shape[-1]
        query = linear(rows, self.weight[:width], self.bias[:width]).unflatten(-1, (1, self.heads, -1))
        key_value = linear(hidden, self.weight[width:], self.bias[width:])
        key, value = key_value.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=self.scale)
        return self._after_attention(rows, attended.transpose(1, 2).flatten(1))

    def _after_attention(
        self, hidden: Float[Tensor, "*row width"], attended: Float[Tensor, "*row width"]
    ) -> Float[Tensor, "*row width"]:
        hidden = self.attention_norm(self.attention_output(attended) + hidden)
        return self.norm(self.narrow(self.activation(self.wide(hidden))) + hidden)


def _head(
    head: nn.Module, hidden: Float[Tensor, "query width"], targets: Int[Tensor, " query"]
) -> Float[Tensor, " query"]:
    """log P of the targets; log-softmax in float32 at least."""
    found = []
    for rows, pieces in zip(hidden.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True):
        logits = head(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(logits.gather(1, pieces[:, None])[:, 0] - logits.logsumexp(dim=1))
    return torch.cat(found)


def _unknown_part(model: BertForMaskedLM) -> str | None:
    """What of the model is not transformers' plain BERT encoder; None if all of it is."""
    if type(model) is not BertForMaskedLM:
        return f"the model is a {type(model).__name__}, not BertForMaskedLM itself"
    if type(model.bert.embeddings) is not BertEmbeddings:
        return f"its embeddings are {type(model.bert.embeddings).__name__}"
    if model.config.is_decoder:
        return "the model is a decoder"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"module {name or type(model).__name__} has a forward hook"
    for number, layer in enumerate(model.bert.encoder.layer):
        if type(layer) is not BertLayer or type(layer.attention.self) is not BertSelfAttention:
            return f"layer {number} is no plain BertLayer"
        attention, output = layer.attention.self, layer.attention.output
        matrices = [attention.query, attention.key, attention.value, output.dense]
        matrices += [layer.intermediate.dense, layer.output.dense]
        if any(type(matrix) is not nn.Linear or matrix.bias is None for matrix in matrices):
            return f"layer {number} has a projection that is no plain linear layer"
        if any(type(norm) is not nn.LayerNorm for norm in (output.LayerNorm, layer.output.LayerNorm)):
            return f"layer {number} has a norm that is no plain LayerNorm"
    return None
