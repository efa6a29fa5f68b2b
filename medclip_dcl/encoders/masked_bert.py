"""log P(piece | copy of the sentence with it masked), computed with as little work as the definition allows.

The copies of a sentence differ in what is masked only. So the first layer's queries, keys and values are computed once
for each sentence and once for [MASK] in each position, the last layer is computed for the masked position only, and so
is the vocabulary head. All copies of a batch have equal length: nothing is padded, no attention mask is needed. The
result is that of the whole model up to rounding.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from transformers import BertForMaskedLM
from transformers.activations import GELUActivation
from transformers.models.bert import modeling_bert

# All that a plain BertForMaskedLM is made of, besides activations.
_PLAIN = {
    *(BertForMaskedLM, nn.ModuleList, nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout),
    *(
        modeling_bert.BertModel,
        modeling_bert.BertEmbeddings,
        modeling_bert.BertEncoder,
        modeling_bert.BertLayer,
    ),
    *(modeling_bert.BertAttention, modeling_bert.BertSelfAttention, modeling_bert.BertSelfOutput),
    *(modeling_bert.BertIntermediate, modeling_bert.BertOutput, modeling_bert.BertOnlyMLMHead),
    *(modeling_bert.BertLMPredictionHead, modeling_bert.BertPredictionHeadTransform),
}
# Logits that exist at a time: rows on a CPU and on a GPU (0.5 GB at 30,522 word pieces in float32), columns on a CPU.
_HEAD_ROWS = (512, 4096)
_HEAD_COLUMNS = 8192
# The widest activation of the copies that go through a CPU's layers together. The allocator gives blocks above 32 MiB
# back to the system each time, and their pages then fault one by one.
_BLOCK_BYTES = 16 * 2**20
# Word pieces whose logits exist at a time where the whole model is called.
_WHOLE_TOKENS = 4096


@dataclass(frozen=True)
class MaskedCopies:
    """Copies of sentences of one length, each with some positions masked, and the positions that are asked for.

    Attributes:
        tokens: (sentence, token) word pieces with [CLS] and [SEP], nothing masked.
        sentence: (copy,) row of `tokens` that it is a copy of.
        is_masked: (copy, token).
        query_copy: (query,) copy that a query looks into, ascending; None: query i looks into copy i.
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

    def split(self, count: int) -> list[MaskedCopies]:
        """So many copies at a time, with the queries into them, in order."""
        if count >= len(self.sentence):
            return [self]
        return [self._part(start, start + count) for start in range(0, len(self.sentence), count)]

    def _part(self, start: int, stop: int) -> MaskedCopies:
        queries: slice | Tensor = slice(start, stop)
        query_copy = self.query_copy
        if query_copy is not None:
            queries = (query_copy >= start) & (query_copy < stop)
            query_copy = query_copy[queries] - start
        return MaskedCopies(
            tokens=self.tokens,
            sentence=self.sentence[start:stop],
            is_masked=self.is_masked[start:stop],
            query_copy=query_copy,
            query_position=self.query_position[queries],
        )


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
    """The whole model for each copy, whatever it does."""

    def __init__(self, model: BertForMaskedLM, mask_id: int) -> None:
        self.model, self.mask_id = model, mask_id

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        masked = copies.tokens[copies.sentence].masked_fill(copies.is_masked, self.mask_id)
        copy_of_query, targets = copies.copy_of_query, copies.targets
        found = torch.empty(len(targets), device=masked.device, dtype=torch.float64)
        # Logits of all positions: a few copies at a time.
        rows = max(1, _WHOLE_TOKENS // masked.shape[1])
        for start in range(0, len(masked), rows):
            some = (copy_of_query >= start) & (copy_of_query < start + rows)
            logits = self.model(input_ids=masked[start : start + rows]).logits
            logits = logits[copy_of_query[some] - start, copies.query_position[some]]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = logits.gather(1, targets[some][:, None])[:, 0] - logits.logsumexp(dim=1)
            found[some] = chosen.double()
        return found


class SharedMaskedBert:
    """A plain BERT, without the work that copies share and the results that nobody reads."""

    def __init__(self, model: BertForMaskedLM, mask_id: int) -> None:
        self.mask_id = mask_id
        self.embeddings, self.transform = model.bert.embeddings, model.cls.predictions.transform
        self.vocabulary = _Vocabulary(model.cls.predictions.decoder)
        self.layers = [_Layer(layer) for layer in model.bert.encoder.layer]

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        # The last "sentence" is [MASK] in every position: a copy is rows of these tables.
        masks = torch.full_like(copies.tokens[:1], self.mask_id)
        embedded = self.embeddings(input_ids=torch.cat([copies.tokens, masks]))
        projected = self.layers[0].projected(embedded)
        blocks = copies.split(self._copies_at_once(embedded))
        rows = torch.cat([self._at_queries(block, embedded, projected) for block in blocks])
        return self.vocabulary.log_probability(self.transform(rows), copies.targets)

    def _copies_at_once(self, embedded: Float[Tensor, "sentence_or_mask token width"]) -> int:
        if embedded.device.type != "cpu":
            return sys.maxsize
        of_token = self.layers[0].widest * embedded.element_size()
        return max(1, _BLOCK_BYTES // (of_token * embedded.shape[1]))

    def _at_queries(
        self,
        copies: MaskedCopies,
        embedded: Float[Tensor, "sentence_or_mask token width"],
        projected: Float[Tensor, "sentence_or_mask token three_widths"],
    ) -> Float[Tensor, "query width"]:
        """What the last layer gives at the queries."""
        first, *others = self.layers
        length = copies.tokens.shape[1]
        # Rows of the tables.
        source = copies.sentence[:, None].where(~copies.is_masked, len(copies.tokens))
        source = (source * length + torch.arange(length, device=source.device)).flatten()

        def of_copies(table: Tensor) -> Tensor:
            return table.flatten(0, 1).index_select(0, source).unflatten(0, (-1, length))

        hidden = of_copies(embedded)
        one_query_each = copies.query_copy is None
        if others or not one_query_each:
            hidden = first.after_projection(hidden, of_copies(projected))
        for layer in others[:-1] if one_query_each else others:
            hidden = layer.after_projection(hidden, layer.projected(hidden))
        if one_query_each:
            return self.layers[-1].at(hidden, copies.query_position)
        return hidden[copies.copy_of_query, copies.query_position]


class _Layer:
    """One transformer layer, with its query, key and value projections as one."""

    def __init__(self, layer: modeling_bert.BertLayer) -> None:
        attention = layer.attention.self
        projections = (attention.query, attention.key, attention.value)
        self.weight = torch.cat([projection.weight for projection in projections])
        self.bias = torch.cat([projection.bias for projection in projections])
        self.projected = _Linear(self.weight, self.bias)
        self.heads, self.scale = attention.num_attention_heads, attention.scaling
        output = layer.attention.output
        self.attention_output, self.attention_norm = _Linear.of(output.dense), output.LayerNorm
        self.wide, self.activation = (
            _Linear.of(layer.intermediate.dense),
            layer.intermediate.intermediate_act_fn,
        )
        self.narrow, self.norm = _Linear.of(layer.output.dense), layer.output.LayerNorm
        self.widest = max(len(self.weight), layer.intermediate.dense.out_features)

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
        """The layer's output at one position of each copy.

        A head's query q meets every key K h, but q . K h = (K' q) . h, and the sum of p V h is V (sum of p h): the
        projections move from the many tokens to the one query. A key's bias adds the same to all scores of a query,
        which softmax ignores; the value's bias has the weight sum of p = 1.
        """
        rows = hidden[torch.arange(len(hidden), device=hidden.device), position]
        width = hidden.shape[-1]
        of_query, of_key, of_value = self.weight.split(width)
        query = linear(rows, of_query, self.bias[:width]).unflatten(1, (self.heads, -1)).transpose(0, 1)
        query = query @ of_key.unflatten(0, (self.heads, -1))  # (head, copy, width)
        # As one head with as many queries as there are heads.
        tokens = hidden[:, None]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[:, None], tokens, tokens, scale=self.scale
        )
        attended = attended[:, 0].transpose(0, 1) @ of_value.unflatten(0, (self.heads, -1)).transpose(1, 2)
        return self._after_attention(rows, attended.transpose(0, 1).flatten(1) + self.bias[2 * width :])

    def _after_attention(
        self, hidden: Float[Tensor, "*row width"], attended: Float[Tensor, "*row width"]
    ) -> Float[Tensor, "*row width"]:
        hidden = self.attention_norm(self.attention_output.plus(hidden, attended))
        return self.norm(self.narrow.plus(hidden, self.wide.activated(hidden, self.activation)))


class _Linear:
    """A linear layer and what follows it, on a CPU as one kernel.

    There oneDNN gets the weights in its own order once, instead of with each call, and adds the bias, applies GELU and
    adds the residual before the products leave the cache. torch has this for its compiler; where it has not, or not in
    this type, the operations follow one another.
    """

    def __init__(self, weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"]) -> None:
        self.weight, self.bias = weight, bias
        self.packed = _packed(weight)

    @classmethod
    def of(cls, layer: nn.Linear) -> _Linear:
        return cls(layer.weight, layer.bias)

    def __call__(self, rows: Float[Tensor, "*row width"]) -> Float[Tensor, "*row out"]:
        if self.packed is None:
            return linear(rows, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")

    def activated(
        self, rows: Float[Tensor, "*row width"], activation: nn.Module
    ) -> Float[Tensor, "*row out"]:
        """The activation of the layer's output."""
        is_gelu = type(activation) is GELUActivation and activation.act is gelu
        if self.packed is None or not is_gelu:
            return activation(self(rows))
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "gelu", [], "none")

    def plus(
        self, residual: Float[Tensor, "*row out"], rows: Float[Tensor, "*row width"]
    ) -> Float[Tensor, "*row out"]:
        """The layer's output added to the residual."""
        if self.packed is None:
            return self(rows).add_(residual)
        return torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self.packed, self.bias, "add")


def _packed(weight: Float[Tensor, "out width"]) -> Tensor | None:
    """The weights in oneDNN's order; None where it cannot be had."""
    onednn = torch.ops.mkldnn
    is_there = torch.backends.mkldnn.is_available() and hasattr(onednn, "_linear_pointwise")
    if weight.device.type != "cpu" or not is_there:
        return None
    is_supported = (
        weight.dtype == torch.float32
        or (weight.dtype == torch.bfloat16 and onednn._is_mkldnn_bf16_supported())
        or (weight.dtype == torch.float16 and onednn._is_mkldnn_fp16_supported())
    )
    return onednn._reorder_linear_weight(weight.detach(), None) if is_supported else None


class _Vocabulary:
    """log P of word pieces from the last hidden states, over one block of the vocabulary after the other.

    Blocks stay in the cache of a CPU; on a GPU there is one.
    """

    def __init__(self, decoder: nn.Linear) -> None:
        is_cpu = decoder.weight.device.type == "cpu"
        self.rows = _HEAD_ROWS[0 if is_cpu else 1]
        self.step = _HEAD_COLUMNS if is_cpu else len(decoder.weight)
        parts = zip(decoder.weight.split(self.step), decoder.bias.split(self.step), strict=True)
        self.blocks = [_Linear(weight, bias) for weight, bias in parts]

    def log_probability(
        self, hidden: Float[Tensor, "query width"], targets: Int[Tensor, " query"]
    ) -> Float[Tensor, " query"]:
        """log P of the targets among all word pieces, at least float32, some rows at a time."""
        parts = zip(hidden.split(self.rows), targets.split(self.rows), strict=True)
        return torch.cat([self._of_rows(some, pieces) for some, pieces in parts])

    def _of_rows(
        self, hidden: Float[Tensor, "query width"], targets: Int[Tensor, " query"]
    ) -> Float[Tensor, " query"]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        chosen, log_total = hidden.new_empty((2, len(hidden), len(self.blocks)), dtype=precise)
        block_of, place = targets // self.step, (targets % self.step)[:, None]
        for number, block in enumerate(self.blocks):
            logits = block(hidden).to(precise)
            # Of the block with the target its logit, of all others anything.
            torch.gather(logits, 1, place.clamp_max(logits.shape[1] - 1), out=chosen[:, number, None])
            largest = logits.amax(dim=1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(dim=1)
            torch.add(total.log_(), largest[:, 0], out=log_total[:, number])
        return chosen.gather(1, block_of[:, None])[:, 0] - log_total.logsumexp(dim=1)


def _unknown_part(model: BertForMaskedLM) -> str | None:
    """What of the model is not transformers' plain BERT encoder; None if all of it is."""
    if type(model) is not BertForMaskedLM:
        return f"the model is a {type(model).__name__}, not BertForMaskedLM itself"
    if model.config.is_decoder:
        return "the model is a decoder"
    activations = {id(layer.intermediate.intermediate_act_fn) for layer in model.bert.encoder.layer}
    activations.add(id(getattr(model.cls.predictions.transform, "transform_act_fn", None)))
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"module {name or type(model).__name__} has a forward hook"
        if type(module) not in _PLAIN and id(module) not in activations:
            return f"module {name} is a {type(module).__name__}, which plain BERT does not have"
        if isinstance(module, nn.Linear) and module.bias is None:
            return f"module {name} has no bias"
    return None
