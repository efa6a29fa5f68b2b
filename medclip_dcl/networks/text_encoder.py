"""Sentence encoders: base classes, and BERT, pooled over its tokens and projected."""

from __future__ import annotations

import json
from collections import OrderedDict, UserString
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from medclip_dcl.common.errors import UserError, check_choice, check_min
from medclip_dcl.common.weight_files import SavedModel, is_exported, read_model
from medclip_dcl.networks.bert_folder import (
    NAMES_OF_CODE,
    load_bert,
    load_masked_language_model,
    resolve_folder,
)
from medclip_dcl.networks.library_folder import OF_TRAINING, check_source, plain_settings
from medclip_dcl.networks.masked_language import (
    Lengths,
    MaskedLanguageHead,
    Tokens,
    is_token,
    last_hidden_states,
    masked_language_losses,
)
from medclip_dcl.networks.tokenizer_files import load_tokenizer

FUNCTION_OF_BERT = ("num_attention_heads", "hidden_act", "layer_norm_eps")
"""Settings of a BERT that change what it computes but none of its tensors."""


class TokenizerText(UserString):
    """Content of a tokenizer.json, which the parser of configurations does not look into: it may have megabytes."""


class SentenceEncoder(nn.Module):
    """Base class: tokens (sentence, token) and lengths (sentence,) to embeddings (sentence, dim), not normalised.

    Attributes:
        dim: size of an embedding.
        tokenizer: splits text into tokens; padding and special tokens are set up.
        has_masked_language_head: True if it can predict masked tokens.
    """

    dim: int
    tokenizer: Tokenizer
    has_masked_language_head: bool = False

    @property
    def transformer(self) -> nn.Module:
        """The pretrained part, which may have its own learning rate."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild the encoder, without its weights."""
        raise NotImplementedError

    def transformer_settings(self) -> dict[str, Any]:
        """Settings, in plain values, on which `states` depend besides the transformer's weights."""
        return self.config()

    def forward_settings(self) -> dict[str, Any]:
        """Settings, in plain values, on which embeddings of texts depend besides the weights."""
        return {**self.config(), **self.transformer_settings()}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with special tokens, not padded."""
        raise NotImplementedError

    def are_truncated(self, texts: Sequence[str]) -> list[bool]:
        """True for each text whose end `tokenize` drops."""
        if not hasattr(self, "tokenizer"):
            return [False] * len(texts)
        return [bool(encoding.overflowing) for encoding in self.tokenizer.encode_batch(list(texts))]

    def are_unknown(self, texts: Sequence[str]) -> list[bool]:
        """True for each text with letters or unknown tokens whose known tokens have no letter, or a stray one.

        That is no more letters than there are unknown tokens (choice): vocabularies of English have some characters of
        other scripts. Such texts have nearly the same embedding. Byte-level tokenizers know every text.
        """
        if not hasattr(self, "tokenizer"):
            return [False] * len(texts)
        return [_is_unknown(self.tokenizer, text) for text in texts]

    def truncated_share(self, texts: Sequence[str]) -> str:
        """Number and share of the texts that `tokenize` cuts, for a warning; "" for none."""
        return share_of_truncated(sum(self.are_truncated(texts)), len(texts))

    def states(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence hidden"]:
        """Output of `transformer` for each sentence: the input of `project`."""
        raise NotImplementedError

    def project(self, states: Float[Tensor, "sentence hidden"]) -> Float[Tensor, "sentence dim"]:
        """Sentence embeddings from `states`."""
        raise NotImplementedError

    def masked_language_loss(
        self, tokens: Tokens, lengths: Lengths, labels: Tokens, places: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        """-log P of each masked token; `labels` are -100 at unmasked tokens, `places` those of the others."""
        raise NotImplementedError


class TransformerEncoder(SentenceEncoder):
    """Base class of encoders around a library's transformer: pooled states, and a projection of them."""

    max_tokens: int
    final_period: bool
    pooling: str
    projection: nn.Module
    projection_kind: str

    def config(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "max_tokens": self.max_tokens,
            "final_period": self.final_period,
            "pooling": self.pooling,
            "projection": self.projection_kind,
            "tokenizer": self.tokenizer.to_str(),
        }

    def transformer_settings(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "final_period": self.final_period, "pooling": self.pooling}
        return {**own, "tokenizer": _tokenizer_settings(json.loads(self.tokenizer.to_str()))}

    def forward_settings(self) -> dict[str, Any]:
        return {"projection": self.projection_kind, **self.transformer_settings()}

    def set_tokenizer(
        self, tokenizer: Tokenizer, max_tokens: int, least: int, positions: int, side: str = "right"
    ) -> None:
        """Take a tokenizer that truncates to `max_tokens`, of `least` to `positions`, and does not pad."""
        if not least <= max_tokens <= positions:
            raise UserError(
                f"max_tokens: expected a number in [{least}, {positions}] for this text encoder, found {max_tokens}"
            )
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens, direction=side)
        # A literal "[SEP]" in a report is text, not the end of the sentence.
        tokenizer.encode_special_tokens = True

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(self._closed(texts))]

    def are_truncated(self, texts: Sequence[str]) -> list[bool]:
        return super().are_truncated(self._closed(texts))

    def forward(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence dim"]:
        return self.project(self.states(tokens, lengths))

    def project(self, states: Float[Tensor, "sentence hidden"]) -> Float[Tensor, "sentence dim"]:
        return self.projection(states)

    def pooled(
        self, hidden: Float[Tensor, "sentence token hidden"], tokens: Tokens, lengths: Lengths
    ) -> Float[Tensor, "sentence hidden"]:
        """The first or the last hidden state of each sentence, or their mean without padding."""
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(hidden.shape[0], device=hidden.device), lengths - 1]
        total = hidden.masked_fill(~is_token(tokens, lengths)[..., None], 0.0).sum(dim=1)
        return total / lengths[:, None]

    def _closed(self, texts: Sequence[str]) -> list[str]:
        return [with_final_period(text) for text in texts] if self.final_period else list(texts)

    def take_transformer(self, saved: SavedModel) -> None:
        """Load all weights but the projection's from a trained encoder of the same configuration."""
        own, state = self.state_dict(), saved.tensors("text_encoder")
        wanted = [name for name in own if not name.startswith("projection.")]
        if missing := [name for name in wanted if name not in state]:
            raise UserError(
                f"{saved.path}: its text encoder has no {', '.join(missing)}; choose masked_language_head: false, "
                "another pooling, or a model that was trained with them"
            )
        self.load_state_dict({**own, **{name: state[name] for name in wanted}})


class BertSentences(TransformerEncoder):
    """BERT (CXR-BERT), pooled last hidden state, projection to `dim`.

    Give either `pretrained`, or `bert` and `tokenizer` as returned by `config`, for random weights. The configurations
    take CXR-BERT-general as `pretrained` (choice, not from the paper, which names CXR-BERT alone).

    Args:
        pretrained: a Hugging Face folder or repository id of a BERT, e.g.
            microsoft/BiomedVLP-CXR-BERT-general, or the export of configs/language_model.yaml; or a checkpoint or an
            exported folder of an image-text model, whose BERT and tokenizer are used.
        dim: size of the projected sentences.
        max_tokens: longer sentences are truncated to this many tokens, [CLS] and [SEP] included.
        dropout: dropout of the transformer, in [0, 1); null keeps the model's own.
        final_period: True ends every text with a period if it has no closing mark, so that prompts look like
            the sentences of reports (choice).
        pooling: "cls" takes the hidden state of [CLS] (choice, not from the paper); "mean" the mean over all
            tokens, [CLS] and [SEP] included, which suits a BERT whose [CLS] was never trained for a task.
        projection: "linear", as in SSD; "mlp" is BioViL's projection (Boecking et al., ECCV 2022): linear map to `dim`,
            GELU, LayerNorm, linear map, with the names, biases and epsilon of the published ``cls_projection_head``.
            Its initial weights are random.
        masked_language_head: True also loads the folder's masked-language-model head, for `masked_language_loss`
            (BioViL's joint loss). Only that loss trains the head, so that every training step must include it.
        bert: configuration of the transformer (BertConfig fields).
        tokenizer: content of tokenizer.json.

    Raises:
        UserError: a setting out of range; a folder that does not fit, or lacks a requested head.
    """

    masked_language_head: MaskedLanguageHead | None

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        max_tokens: int = 128,
        dropout: float | None = None,
        final_period: bool = True,
        pooling: Literal["cls", "mean"] = "cls",
        projection: Literal["linear", "mlp"] = "linear",
        masked_language_head: bool = False,
        *,
        bert: dict[str, Any] | None = None,
        tokenizer: str | TokenizerText | None = None,
    ) -> None:
        super().__init__()
        check_source("text_encoder", pretrained, {"bert": bert, "tokenizer": tokenizer})
        check_min("text_encoder", {"dim": (dim, 1)})
        check_choice("text_encoder.pooling", pooling, ("cls", "mean"))
        check_choice("text_encoder.projection", projection, ("linear", "mlp"))
        trained, described = trained_encoder(pretrained, ("bert", "tokenizer"), "BERT")
        bert, tokenizer = described.get("bert", bert), described.get("tokenizer", tokenizer)
        if bert is None:
            folder = resolve_folder(str(pretrained))
            model = load_masked_language_model(folder) if masked_language_head else load_bert(folder)
            tokenizer = load_tokenizer(folder).backend_tokenizer.to_str()
        else:
            config = BertConfig(**{name: x for name, x in bert.items() if name not in NAMES_OF_CODE})
            if masked_language_head:
                model = BertForMaskedLM(config)
            else:
                model = BertModel(config, add_pooling_layer=False)
        self.bert = model.bert if masked_language_head else model
        self.masked_language_head = MaskedLanguageHead(model) if masked_language_head else None
        self.has_masked_language_head = masked_language_head
        if dropout is not None:
            check_dropout(dropout)
            self.bert.config.hidden_dropout_prob = self.bert.config.attention_probs_dropout_prob = dropout
            for module in self.bert.modules():
                if isinstance(module, nn.Dropout):
                    module.p = dropout
        self.set_tokenizer(
            Tokenizer.from_str(str(tokenizer)), max_tokens, 3, self.bert.config.max_position_embeddings
        )
        self.dim, self.final_period = dim, final_period
        self.pooling, self.projection_kind = pooling, projection
        self.projection = sentence_projection(projection, self.bert.config.hidden_size, dim)
        if trained is not None:
            self.take_transformer(trained)

    @property
    def transformer(self) -> nn.Module:
        """BERT, with its masked-language-model head if it has one."""
        if self.masked_language_head is None:
            return self.bert
        return nn.ModuleList([self.bert, self.masked_language_head])

    def config(self) -> dict[str, Any]:
        bert = plain_settings(self.bert.config)
        bert.pop("model_type")
        head = self.has_masked_language_head
        return {**super().config(), "masked_language_head": head, "bert": bert}

    def transformer_settings(self) -> dict[str, Any]:
        bert = {name: getattr(self.bert.config, name) for name in FUNCTION_OF_BERT}
        return {**super().transformer_settings(), **bert}

    def states(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence hidden"]:
        return self.pooled(last_hidden_states(self.bert, tokens, lengths), tokens, lengths)

    def masked_language_loss(
        self, tokens: Tokens, lengths: Lengths, labels: Tokens, places: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        head = self.masked_language_head
        assert head is not None
        words = self.bert.embeddings.word_embeddings.weight
        hidden = last_hidden_states(self.bert, tokens, lengths)
        return masked_language_losses(hidden, labels, places, lambda rows: head(rows, words))


def _is_unknown(tokenizer: Tokenizer, text: str) -> bool:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    # Unigram shows the text of an unknown token.
    unknown = getattr(tokenizer.model, "unk_token", None)
    known = [
        token
        for token, place in zip(encoding.tokens, encoding.ids, strict=True)
        if token not in (unknown, "") and token == tokenizer.id_to_token(place)
    ]
    n_unknown = len(encoding.ids) - len(known)
    n_letters = sum(map(str.isalpha, "".join(known)))
    return n_letters <= n_unknown and (n_unknown > 0 or any(map(str.isalpha, text)))


def check_dropout(dropout: float) -> None:
    """Refuse a dropout outside of [0, 1)."""
    if not 0 <= dropout < 1:
        raise UserError(f"dropout: expected a number in [0, 1), found {dropout}")


def share_of_truncated(count: int, total: int) -> str:
    """A warning about sentences that are longer than the encoder takes; "" for none."""
    if not count:
        return ""
    return f"{count:,} of {total:,} sentences ({count / total:.2%}) are longer than max_tokens: their end is cut off"


def trained_encoder(
    source: str | None, needed: Sequence[str], kind: str
) -> tuple[SavedModel | None, dict[str, Any]]:
    """The checkpoint or exported folder of an image-text model, and those arguments that rebuild its text encoder.

    None for a folder of weights or a repository id. `needed`: arguments that a new encoder takes over; `kind` names
    such an encoder in the error.
    """
    path = Path(source or "").expanduser()
    if source is None or not (path.is_file() or is_exported(path)):
        return None, {}
    saved = read_model(path)
    found = saved.require_network().get("text_encoder", {}).get("init_args", {})
    if not set(needed) <= found.keys():
        raise UserError(f"{source} has no {kind} as its text encoder; give a {kind} folder (pretrained)")
    return saved, {name: found[name] for name in needed}


def _tokenizer_settings(described: Any) -> Any:
    """Content of a tokenizer.json without entries that are off, of which versions have more or fewer."""
    if isinstance(described, list):
        return [_tokenizer_settings(one) for one in described]
    if not isinstance(described, dict):
        return described
    is_on = {name: value for name, value in described.items() if value is not None and value is not False}
    return {name: _tokenizer_settings(value) for name, value in is_on.items()}


def functional_settings(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a transformer's configuration on which its hidden states depend in evaluation."""
    return {name: value for name, value in architecture.items() if not OF_TRAINING.search(name)}


def sentence_projection(kind: str, hidden_size: int, dim: int) -> nn.Module:
    """From a pooled hidden state to `dim`: "linear", or the two layers of "mlp" (BioViL's) or "gelu" (open_clip's)."""
    if kind == "linear":
        return nn.Linear(hidden_size, dim)
    if kind == "gelu":
        between = (hidden_size + dim) // 2
        layers = (nn.Linear(hidden_size, between, bias=False), nn.Linear(between, dim, bias=False))
        return nn.Sequential(layers[0], nn.GELU(), layers[1])
    return nn.Sequential(
        OrderedDict(
            dense_to_hidden=nn.Linear(hidden_size, dim),
            activation=nn.GELU(),
            LayerNorm=nn.LayerNorm(dim, eps=1e-12),
            dense_to_output=nn.Linear(dim, dim),
        )
    )


def with_final_period(text: str) -> str:
    """The text with a final period, unless it ends with punctuation."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "?", "!", ":", ";")) else stripped + "."
