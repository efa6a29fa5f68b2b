"""log P(token | sentence with that token masked) from a BERT, without the work that copies of a sentence share.

The copies of a sentence differ only in their masked tokens. So the first layer's queries, keys and values are computed
once for each sentence and once for [MASK] at each position; the last layer is computed at the masked position only,
without keys and values of its own, and so is the vocabulary head. All copies of a batch have the same length: no
padding, no attention mask. Memory passes dominate beside the matrix products, so biases are fused into passes that are
made anyway. The result equals that of the whole model up to rounding.
"""

from __future__ import annotations

import math
import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention
from transformers import BertForMaskedLM
from transformers.activations import GELUActivation
from transformers.models.bert import modeling_bert

from medclip_dcl.common.devices import is_on_host, widest_float
from medclip_dcl.scoring.whole_model import LAYERS_TOKENS, MaskedCopies, WholeModel, log_probability_at

Rows = Float[Tensor, "query width"]
Targets = Int[Tensor, " query"]
Values = Float[Tensor, " query"]

# Modules of a plain BertForMaskedLM, besides activations.
_PLAIN = {
    *(BertForMaskedLM, nn.ModuleList, nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout),
    *(modeling_bert.BertModel, modeling_bert.BertEmbeddings, modeling_bert.BertEncoder),
    *(modeling_bert.BertLayer, modeling_bert.BertAttention, modeling_bert.BertSelfAttention),
    *(modeling_bert.BertSelfOutput, modeling_bert.BertIntermediate, modeling_bert.BertOutput),
    *(modeling_bert.BertOnlyMLMHead, modeling_bert.BertLMPredictionHead),
    modeling_bert.BertPredictionHeadTransform,
}
# Rows of logits in memory at a time (CPU, GPU): on a GPU 0.5 GB for a vocabulary of 30,522 in float32; on a CPU blocks
# of rows and columns that stay in the cache.
_HEAD_ROWS = (1024, 4096)
_HEAD_COLUMNS = 1024
# Largest bias of a token whose exponential can be applied as a separate factor.
_MODERATE_BIAS = 20.0
# Smallest sum of exponentials beside which those that underflowed are negligible.
_SMALL_TOTAL = 1e-20


def masked_bert(model: BertForMaskedLM, mask_id: int) -> MaskedBert:
    """The fast scorer if the model is transformers' plain BERT; else the whole model for each copy, with a warning."""
    reason = _unknown_part(model)
    if reason is None:
        return SharedMaskedBert(model, mask_id)
    warnings.warn(
        f"scoring: {reason}, so every copy goes through the whole model, which is slower; results are the same",
        stacklevel=2,
    )
    return WholeModel(model, mask_id)


class SharedMaskedBert:
    """A plain BERT without shared work and unused outputs."""

    takes_threads = True

    def __init__(self, model: BertForMaskedLM, mask_id: int) -> None:
        self.mask_id = mask_id
        self.embeddings, self.transform = model.bert.embeddings, model.cls.predictions.transform
        self.head = _Head(model.cls.predictions.decoder)
        layers = list(model.bert.encoder.layer)
        # Each layer's output includes the bias that the next one would add.
        biases = [layer.attention.output.dense.bias for layer in layers]
        self.first_bias = biases[0]
        self.layers = [_Layer(layer, bias) for layer, bias in zip(layers, [*biases[1:], None], strict=True)]

    def log_probability(self, copies: MaskedCopies) -> Values:
        """log P of each query's token, at least float32."""
        parts = [copies]
        if is_on_host(copies.tokens):
            parts = copies.split(max(1, LAYERS_TOKENS // copies.tokens.shape[1]))
        rows = torch.cat([self._rows(part) for part in parts])
        return self.head.log_probability(self.transform(rows), copies.targets)

    def _rows(self, copies: MaskedCopies) -> Rows:
        """Output of the last layer at each query's position."""
        first, *others = self.layers
        of_sentence = self.embeddings(input_ids=copies.tokens) + self.first_bias
        of_mask = (
            self.embeddings(input_ids=torch.full_like(copies.tokens[:1], self.mask_id)) + self.first_bias
        )
        copied = _Copied(copies)
        hidden = copied(of_sentence, of_mask)
        if others:
            hidden = first.after_projection(
                hidden, copied(first.projected(of_sentence), first.projected(of_mask))
            )
        for layer in others[:-1]:
            hidden = layer.after_projection(hidden, layer.projected(hidden))
        return self.layers[-1].at(hidden, copies.query_position)


MaskedBert = SharedMaskedBert | WholeModel


class _Copied:
    """Expands values of sentences, and of [MASK] at each position, to the copies."""

    def __init__(self, copies: MaskedCopies) -> None:
        self.sentence, self.is_masked = copies.sentence, copies.is_masked
        # On a GPU the host would wait for the device.
        self.places = copies.is_masked.nonzero(as_tuple=True) if is_on_host(copies.tokens) else None

    def __call__(
        self, of_sentence: Float[Tensor, "sentence token part"], of_mask: Float[Tensor, "1 token part"]
    ) -> Float[Tensor, "copy token part"]:
        found = of_sentence.index_select(0, self.sentence)
        if self.places is None:
            return torch.where(self.is_masked[..., None], of_mask, found, out=found)
        copy, token = self.places
        found[copy, token] = of_mask[0, token]
        return found


class _Layer:
    """One transformer layer with fused query, key and value projections.

    The input is x + b, where b is the bias that the layer adds to x after attention: the norm before has added it. As
    W x = W (x + b) - W b, the biases of the projections compensate. The norm after attention adds the last bias of the
    layer in the same way. A bias of the keys shifts all logits of a query equally and drops out.
    `next_bias` is added to the output.
    """

    def __init__(self, layer: modeling_bert.BertLayer, next_bias: Tensor | None) -> None:
        attention, output = layer.attention.self, layer.attention.output
        self.heads, self.scale = attention.num_attention_heads, attention.scaling
        self.weights = tuple(part.weight for part in (attention.query, attention.key, attention.value))
        self.weight = torch.cat(self.weights)
        self.query_bias = _bias_without(attention.query, output.dense.bias)
        self.value_bias = _bias_without(attention.value, output.dense.bias)
        self.bias = torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        self.attention_output = output.dense.weight
        self.attention_norm = _Norm(output.LayerNorm, layer.output.dense.bias)
        self.wide_weight = layer.intermediate.dense.weight
        self.wide_bias = _bias_without(layer.intermediate.dense, layer.output.dense.bias)
        self.activation = layer.intermediate.intermediate_act_fn
        self.narrow = layer.output.dense.weight
        self.norm = _Norm(layer.output.LayerNorm, next_bias)

    def projected(self, hidden: Float[Tensor, "*row width"]) -> Float[Tensor, "*row three_widths"]:
        """Queries, keys and values side by side."""
        return linear(hidden, self.weight, self.bias)

    def after_projection(
        self, hidden: Float[Tensor, "copy token width"], projected: Float[Tensor, "copy token three_widths"]
    ) -> Float[Tensor, "copy token width"]:
        """The layer's output from its input and the input's projection; overwrites the input."""
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, scale=self.scale)
        return self._after_attention(hidden, attended.transpose(1, 2).flatten(2))

    def at(
        self, hidden: Float[Tensor, "copy token width"], position: Int[Tensor, " copy"]
    ) -> Float[Tensor, "copy width"]:
        """The layer's output at one position of each copy.

        With one query per copy, W_q x . W_k y = (W_k^T W_q x) . y, and the weighted sum of W_v y is W_v times that of
        y: width^2 operations per copy instead of per token.
        """
        rows = hidden[torch.arange(len(hidden), device=hidden.device), position]
        query_weight, *others = self.weights
        query = linear(rows, query_weight, self.query_bias) * self.scale
        query = query.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        key, value = (weight.unflatten(0, (self.heads, -1)) for weight in others)
        logits = (query @ key).transpose(0, 1) @ hidden.transpose(1, 2)
        seen = (logits.softmax(dim=-1) @ hidden).transpose(0, 1)
        attended = (seen @ value.transpose(1, 2)).transpose(0, 1).flatten(1) + self.value_bias
        return self._after_attention(rows, attended)

    def _after_attention(
        self, hidden: Float[Tensor, "*row width"], attended: Float[Tensor, "*row width"]
    ) -> Float[Tensor, "*row width"]:
        hidden = self.attention_norm(_add_product(hidden, attended, self.attention_output))
        if is_on_host(hidden) and hidden.dtype in (torch.float32, torch.float64):
            # A BLAS adds no bias: torch would copy it first and add the product to it, which is one more pass.
            wide = (hidden @ self.wide_weight.t()).add_(self.wide_bias)
        else:
            wide = linear(hidden, self.wide_weight, self.wide_bias)
        if type(self.activation) is GELUActivation and self.activation.act is gelu:
            wide = torch.ops.aten.gelu_(wide)  # there is no functional in-place gelu
        else:
            wide = self.activation(wide)
        return self.norm(_add_product(hidden, wide, self.narrow))


class _Norm:
    """LayerNorm with an additional bias."""

    def __init__(self, norm: nn.LayerNorm, added: Tensor | None) -> None:
        self.shape, self.weight, self.eps = norm.normalized_shape, norm.weight, norm.eps
        self.bias = norm.bias if added is None else norm.bias + added

    def __call__(self, hidden: Float[Tensor, "*row width"]) -> Float[Tensor, "*row width"]:
        return layer_norm(hidden, self.shape, self.weight, self.bias, self.eps)


def _bias_without(projection: nn.Linear, added: Float[Tensor, " width"]) -> Float[Tensor, " wide"]:
    """The bias with which the projection of x + added equals that of x."""
    parts = (projection.bias, projection.weight, added)
    bias, weight, more = (part.to(widest_float(added.device)) for part in parts)
    return (bias - weight @ more).to(projection.bias.dtype)


def _add_product(
    hidden: Float[Tensor, "*row width"], rows: Float[Tensor, "*row wide"], weight: Float[Tensor, "width wide"]
) -> Float[Tensor, "*row width"]:
    """hidden + rows W^T, in place."""
    hidden.view(-1, hidden.shape[-1]).addmm_(rows.flatten(0, -2), weight.t())
    return hidden


class _Head:
    """The vocabulary head after its transform: log-softmax at one token per row, at least float32."""

    def __init__(self, decoder: nn.Linear) -> None:
        self.decoder = decoder
        self.precise = torch.promote_types(decoder.weight.dtype, torch.float32)
        bias = decoder.bias.to(self.precise)
        # exp(z + b) = exp(z) exp(b): the matrix product that sums over the vocabulary applies moderate biases.
        self.has_moderate_bias = bool(bias.abs().amax() < _MODERATE_BIAS)
        self.exponential_bias = bias.exp()

    def log_probability(self, hidden: Rows, targets: Targets) -> Values:
        """log P of the targets over the vocabulary, some rows at a time."""
        rows = _HEAD_ROWS[not is_on_host(hidden)]
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([self._of_some(some, tokens) for some, tokens in parts])

    def _of_some(self, hidden: Rows, targets: Targets) -> Values:
        if not is_on_host(hidden) or not self.has_moderate_bias:
            return self._at_once(hidden, targets)
        found = self._by_blocks(hidden, targets)
        # Logits whose exponentials overflow or underflow, or that are not finite.
        return found if found.isfinite().all() else self._at_once(hidden, targets)

    def _at_once(self, hidden: Rows, targets: Targets) -> Values:
        return log_probability_at(self.decoder(hidden).to(self.precise), targets)

    def _by_blocks(self, hidden: Rows, targets: Targets) -> Values:
        """The same in blocks of the vocabulary whose logits stay in the cache."""
        here, total = hidden.new_zeros(2, len(hidden), dtype=self.precise)
        blocks = range(0, len(self.exponential_bias), _HEAD_COLUMNS)
        in_block = (targets // _HEAD_COLUMNS).bincount(minlength=len(blocks)).tolist()
        for start, rows in zip(blocks, targets.argsort().split(in_block), strict=True):
            block = slice(start, start + _HEAD_COLUMNS)
            logits = (hidden @ self.decoder.weight[block].t()).to(self.precise)
            here[rows] = logits[rows, targets[rows] - start]
            total += logits.exp_() @ self.exponential_bias[block]
        # Underflow is negligible unless the total is small.
        total = total.where(total > _SMALL_TOTAL, math.nan)
        found = here.double() + self.decoder.bias[targets] - total.double().log_()
        return found.clamp_(max=0.0)  # rounding


def _unknown_part(model: BertForMaskedLM) -> str | None:
    """A part of the model that is not transformers' plain BERT; None if there is none."""
    if type(model) is not BertForMaskedLM:
        return f"the model is a {type(model).__name__}, not BertForMaskedLM itself"
    if model.config.is_decoder:
        return "the model is a decoder"
    if not len(model.bert.encoder.layer):
        return "the model has no layers"
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "there is a forward hook for all modules"
    activations = {id(layer.intermediate.intermediate_act_fn) for layer in model.bert.encoder.layer}
    activations.add(id(getattr(model.cls.predictions.transform, "transform_act_fn", None)))
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"module {name or type(model).__name__} has a forward hook"
        if "forward" in vars(module):
            return f"module {name or type(model).__name__} has a forward of its own"
        if type(module) not in _PLAIN and id(module) not in activations:
            return f"module {name} is a {type(module).__name__}, which plain BERT does not have"
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is None:
            return f"module {name} has no bias"
    return None
