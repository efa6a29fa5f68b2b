"""Prediction of masked tokens: the vocabulary head at these tokens alone, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import BertForMaskedLM, PreTrainedModel

from medclip_dcl.networks.transformer import Tokens

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


@contextmanager
def head_at(model: PreTrainedModel, places: Int[Tensor, " place"]) -> Iterator[None]:
    """Within it a language model's head sees tokens alone, as sentences of one token each.

    `places` are those of the tokens in the flattened (sentence, token).
    """

    def rows(module: nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places][:, None]
        return output

    hook = model.base_model.register_forward_hook(rows)
    try:
        yield
    finally:
        hook.remove()


def masked_places(labels: Tokens) -> Int[Tensor, " masked"]:
    """Places of the masked tokens in `labels.flatten()`; on the host, before a device has to be waited for."""
    return (labels.flatten() != IGNORED).nonzero()[:, 0]


def masked_language_losses(
    logits: Float[Tensor, "masked vocabulary"], labels: Tokens, places: Int[Tensor, " masked"]
) -> Float[Tensor, " masked"]:
    """-log P of each masked token in float32, from the logits at `places`, those of `masked_places(labels)`."""
    return cross_entropy(logits.float(), labels.flatten()[places], reduction="none")
