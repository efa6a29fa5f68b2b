"""A BERT's hidden states, and prediction of masked tokens from them: the vocabulary head and its loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear
from transformers import BertForMaskedLM, BertModel, PreTrainedModel

Tokens: TypeAlias = Int[Tensor, "sentence token"]
Lengths: TypeAlias = Int[Tensor, " sentence"]

IGNORED = -100
"""Label of a token that is not to be predicted."""


class MaskedLanguageHead(nn.Module):
    """BERT's masked-language-model head (Devlin et al., NAACL 2019), tied to the word embeddings by construction.

    `forward` takes the word embeddings, so that no state dict holds them twice, and copying or loading cannot untie
    them. A decoder that is not tied to them is kept as `weight`.
    """

    weight: nn.Parameter | None

    def __init__(self, model: BertForMaskedLM) -> None:
        super().__init__()
        predictions = model.cls.predictions
        is_tied = predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        self.transform = predictions.transform
        self.bias = predictions.decoder.bias
        self.register_parameter("weight", None if is_tied else predictions.decoder.weight)

    def forward(
        self, hidden: Float[Tensor, "*row width"], word_embeddings: Float[Tensor, "vocabulary width"]
    ) -> Float[Tensor, "*row vocabulary"]:
        weight = word_embeddings if self.weight is None else self.weight
        return linear(self.transform(hidden), weight, self.bias)


def last_hidden_states(
    bert: BertModel, tokens: Tokens, lengths: Lengths
) -> Float[Tensor, "sentence token hidden"]:
    """Last hidden states; undefined at padding, which `tokens` beyond `lengths` are."""
    # Of the shape that attention takes: from (sentence, token) transformers reads whether there is padding at all.
    mask = is_token(tokens, lengths)[:, None, None]
    with attention_kernels(bert, tokens.device):
        return bert(input_ids=tokens, attention_mask=mask).last_hidden_state


def attention_kernels(model: PreTrainedModel, device: torch.device) -> AbstractContextManager[None]:
    """Plain matrix products in training on a CPU below float32, where torch's fused attention is slower."""
    if device.type != "cpu" or not model.training:
        return nullcontext()
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    return sdpa_kernel(SDPBackend.MATH) if torch.finfo(dtype).bits < 32 else nullcontext()


def is_token(tokens: Tokens, lengths: Lengths) -> Bool[Tensor, "sentence token"]:
    """False at padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def masked_places(labels: Tokens) -> Int[Tensor, " masked"]:
    """Places of the masked tokens in `labels.flatten()`; on the host, before a device has to be waited for."""
    return (labels.flatten() != IGNORED).nonzero()[:, 0]


def masked_language_losses(
    hidden: Float[Tensor, "sentence token width"],
    labels: Tokens,
    places: Int[Tensor, " masked"],
    head: Callable[[Tensor], Tensor],
) -> Float[Tensor, " masked"]:
    """-log P of each masked token in float32, row by row; the vocabulary head runs at these positions only.

    `hidden` are last hidden states of the masked sentences, `labels` -100 at unmasked tokens, `places` those of
    `masked_places(labels)`; `head` maps hidden states (masked, width) to logits (masked, vocabulary).
    """
    logits = head(hidden.flatten(0, 1)[places])
    return cross_entropy(logits.float(), labels.flatten()[places], reduction="none")
