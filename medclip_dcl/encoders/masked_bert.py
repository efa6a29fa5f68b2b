"""log P(piece | copy of the sentence with it masked), computed with as little work as the definition allows.

The copies of a sentence differ in what is masked only. So the first layer's queries, keys and values are computed once
for each sentence and once for [MASK] in each position; the last layer is computed for the masked position only, without
keys and values of the others, and so is the vocabulary head. All copies of a batch have equal length: nothing is
padded, no attention mask is needed. The result is that of the whole model up to rounding.
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
# Logits that exist at a time. On a GPU 4,096 rows: 0.5 GB at 30,522 word pieces in float32. On a CPU blocks of rows and
# columns that stay in the cache.
_HEAD_ROWS = (512, 4096)
_HEAD_COLUMNS = 2048
# Word pieces whose logits exist at a time where the whole model is called.
_WHOLE_TOKENS = 4096


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
        self.embeddings, self.head = model.bert.embeddings, model.cls.predictions
        self.layers = [_Layer(layer) for layer in model.bert.encoder.layer]

    def log_probability(self, copies: MaskedCopies) -> Float[Tensor, " query"]:
        first, *others = self.layers
        of_sentence = self.embeddings(input_ids=copies.tokens)
        of_mask = self.embeddings(input_ids=torch.full_like(copies.tokens[:1], self.mask_id))[0]
        is_masked = copies.is_masked[..., None]

        def of_copies(sentence: Tensor, mask: Tensor) -> Tensor:
            found = sentence[copies.sentence]
            return torch.where(is_masked, mask, found, out=found)

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
        return _log_probability(self.head.transform(rows), self.head.decoder, copies.targets)


class _Layer:
    """One transformer layer, with its query, key and value projections as one."""

    def __init__(self, layer: modeling_bert.BertLayer) -> None:
        attention = layer.attention.self
        projections = (attention.query, attention.key, attention.value)
        self.weight = torch.cat([projection.weight for projection in projections])
        self.bias = torch.cat([projection.bias for projection in projections])
        self.query, self.key, self.value = projections
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
        """The layer's output at one position of each copy.

        With one query a copy, W_q x . W_k y = (W_k^T W_q x) . y, and the weighted sum of W_v y is W_v times that of y:
        width^2 operations a copy instead of a token. Keys' biases shift all logits of a query alike and drop out.
        """
        rows = hidden[torch.arange(len(hidden), device=hidden.device), position]
        query = self._by_head(self.query(rows) * self.scale)
        key, value = (part.weight.unflatten(0, (self.heads, -1)) for part in (self.key, self.value))
        logits = (query @ key).transpose(0, 1) @ hidden.transpose(1, 2)
        seen = (logits.softmax(dim=-1) @ hidden).transpose(0, 1)
        attended = (seen @ value.transpose(1, 2)).transpose(0, 1).flatten(1) + self.value.bias
        return self._after_attention(rows, attended)

    def _by_head(self, rows: Float[Tensor, "copy width"]) -> Float[Tensor, "head copy part"]:
        return rows.unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def _after_attention(
        self, hidden: Float[Tensor, "*row width"], attended: Float[Tensor, "*row width"]
    ) -> Float[Tensor, "*row width"]:
        hidden = self.attention_norm(_added_to(hidden, attended, self.attention_output))
        return self.norm(_added_to(hidden, self.activation(self.wide(hidden)), self.narrow))


def _added_to(
    hidden: Float[Tensor, "*row width"], rows: Float[Tensor, "*row wide"], projection: nn.Linear
) -> Float[Tensor, "*row width"]:
    """hidden + projection(rows), in place of hidden: the product adds itself to it."""
    hidden.view(-1, hidden.shape[-1]).addmm_(rows.flatten(0, -2), projection.weight.t())
    return hidden.add_(projection.bias)


def _log_probability(
    hidden: Float[Tensor, "query width"], decoder: nn.Linear, targets: Int[Tensor, " query"]
) -> Float[Tensor, " query"]:
    """log P of the targets among all word pieces, at least float32, some rows at a time."""
    rows = _HEAD_ROWS[hidden.device.type != "cpu"]
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([_some_log_probability(some, decoder, pieces) for some, pieces in parts])


def _some_log_probability(
    hidden: Float[Tensor, "query width"], decoder: nn.Linear, targets: Int[Tensor, " query"]
) -> Float[Tensor, " query"]:
    """Log-softmax at the targets, over one block of word pieces after the other, so that logits stay in the cache."""
    vocabulary = len(decoder.weight)
    step = _HEAD_COLUMNS if hidden.device.type == "cpu" else vocabulary
    precise = torch.promote_types(hidden.dtype, torch.float32)
    log_total = hidden.new_full((len(hidden),), -torch.inf, dtype=precise)
    found = torch.zeros_like(log_total)
    for start in range(0, vocabulary, step):
        block = slice(start, min(start + step, vocabulary))
        logits = linear(hidden, decoder.weight[block], decoder.bias[block]).to(precise)
        place = targets - start
        is_here = (place >= 0) & (place < logits.shape[1])
        here = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        found = torch.where(is_here, here, found)
        largest = logits.amax(dim=1, keepdim=True)
        total = logits.sub_(largest).exp_().sum(dim=1)
        log_total = torch.logaddexp(log_total, total.log() + largest[:, 0])
    return found - log_total


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
