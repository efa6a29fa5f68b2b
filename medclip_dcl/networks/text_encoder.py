"""Text encoders: the base class, and encoders of transformers, pooled over their tokens and projected."""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict, UserString
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipTextModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.common.files import digest
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import (
    ModelFolderError,
    load_library_model,
    read_folder_json,
    resolve_folder,
)
from medclip_dcl.networks.language_model import load_library_tokenizer
from medclip_dcl.networks.library_folder import (
    check_source,
    forward_settings,
    library_config,
    longest_sentence,
    plain_settings,
    pretrained_size,
    unknown_family,
)
from medclip_dcl.networks.masked_language import MaskedLanguageHead, masked_language_losses
from medclip_dcl.networks.transformer import Lengths, Tokens, avoid_host_reads, is_token, run

Pooling = Literal["cls", "mean", "last", "pooler"]
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last", "pooler")

_CLIP, _SIGLIP = "clip_text_model", "siglip_text_model"
# Without their projections into the space of the images, which folders of a text model alone lack: those are
# `projection`, where frozen features and the transformer's own learning rate end.
_TOWERS: dict[str, type[PreTrainedModel]] = {_CLIP: CLIPTextModel, _SIGLIP: SiglipTextModel}
_DEFAULT_MAX_TOKENS = 128
_TRIED = "No focal consolidation, effusion or pneumothorax. Normal heart. "
# Share of the states' deviation that counts as rounding (choice).
_ROUNDING = 1e-4


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

    def tokenizer_identity(self) -> str:
        """Digest of all that `tokenize` depends on; "" where it is not known, as of a class of your own."""
        return ""

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


class TransformersSentences(SentenceEncoder):
    """A text encoder of transformers: BERT (CXR-BERT), RoBERTa, ModernBERT, DeBERTa, ..., or CLIP's or SigLIP's.

    Pooled last hidden state, projected to `dim`. Special tokens are the tokenizer's; a sentence is padded as the model
    was trained: SigLIP's to its number of positions, and its padding is seen. Give either `pretrained`, or
    `architecture`, `tokenizer` and `pad_token_id` as returned by `config`, for random weights. The configurations take
    CXR-BERT-general as `pretrained` (choice, not from the paper, which names CXR-BERT alone).

    Args:
        pretrained: a Hugging Face folder or repository id of an encoder that transformers knows, with its tokenizer,
            e.g. microsoft/BiomedVLP-CXR-BERT-general; the run folder of a language model
            (--config language_model); or a CLIP or SigLIP, whose text tower is used.
        dim: size of the projected sentences.
        max_tokens: longer sentences are truncated to this many tokens, special tokens included; null for the model's
            positions, at most 128 (choice).
        dropout: every dropout of the model, in [0, 1); null keeps the model's own.
        final_period: True ends every text with a period if it has no closing mark, so that prompts look like the
            sentences of reports (choice). SigLIP's first tokenizer drops all punctuation.
        pooling: "cls" takes the hidden state of the first token (choice, not from the paper), "mean" the mean over all
            tokens, special ones included, which suits a model whose first token was never trained for a task, "last"
            that of the last one, "pooler" transformers' `pooler_output` (CLIP: the state of the end of the text;
            SigLIP: the last place through its head; BERT: its pooler). null: "pooler" for CLIP and SigLIP, "cls" for
            all others (choice).
        projection: "linear", as in SSD; "mlp" is BioViL's projection (Boecking et al., ECCV 2022): linear map to `dim`,
            GELU, LayerNorm, linear map, with the names, biases and epsilon of the published ``cls_projection_head``;
            "gelu", two layers without biases as in open_clip; all three with random initial weights. "pretrained":
            CLIP's text_projection, or nothing behind SigLIP's head, so that `dim` is theirs and pooling is "pooler".
        masked_language_head: True also loads the masked-language-model head of a BERT, for `masked_language_loss`
            (BioViL's joint loss). Only that loss trains the head, so that every training step must include it.
        architecture: content of a config.json.
        tokenizer: content of tokenizer.json.
        pad_token_id: id of padding.

    Raises:
        UserError: a setting out of range; pooling or a head that the model does not have.
        ModelFolderError: an unknown family, one that needs code of its own, or one whose sentences depend on padding;
            no tokenizer; weights that do not fit exactly.
    """

    masked_language_head: MaskedLanguageHead | None

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        max_tokens: int | None = None,
        dropout: float | None = None,
        final_period: bool = True,
        pooling: Pooling | None = None,
        projection: Literal["linear", "mlp", "gelu", "pretrained"] = "linear",
        masked_language_head: bool = False,
        *,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | TokenizerText | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__()
        described: dict[str, Any] = {
            "architecture": architecture,
            "tokenizer": tokenizer,
            "pad_token_id": pad_token_id,
        }
        check_source("text_encoder", pretrained, described)
        check_range("text_encoder", "[1, inf)", dim=dim)
        check_choice("text_encoder.projection", projection, ("linear", "mlp", "gelu", "pretrained"))
        check_range("text_encoder", "[0, 1)", dropout=dropout)
        folder = None if pretrained is None else resolve_folder(pretrained)
        if folder is not None:
            config, described = _described(folder, read_folder_json(folder / CONFIG_FILE))
        else:
            config = _text_config(dict(described["architecture"]), "text_encoder.architecture")
        splitter = Tokenizer.from_str(str(described["tokenizer"]))
        self.pad_token_id: int = described["pad_token_id"]
        if dropout is not None:
            for name, value in config.to_dict().items():
                if "dropout" in name and isinstance(value, (int, float)):
                    setattr(config, name, dropout)
        self.family: str = config.model_type
        self.own_pooling = "pooler" if self.family in _TOWERS else "cls"
        self.pooling = pooling or self.own_pooling
        self.has_masked_language_head = masked_language_head
        whole = _model(config, self.pooling, masked_language_head, folder)
        self.model: PreTrainedModel = whole.bert if masked_language_head else whole
        self.masked_language_head = MaskedLanguageHead(whole) if masked_language_head else None
        positions = longest_sentence(self.model)
        self.is_padded_to_positions = self.family == _SIGLIP  # and sees its padding
        least = positions if self.is_padded_to_positions else 1 + splitter.num_special_tokens_to_add(False)
        self.max_tokens = min(positions, _DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens
        if not least <= self.max_tokens <= positions:
            raise UserError(
                f"text_encoder.max_tokens: expected a number in [{least}, {positions}] for this text encoder, found "
                f"{self.max_tokens}"
            )
        self.truncation_side = str((splitter.truncation or {})["direction"])
        self.tokenizer = splitter
        splitter.no_padding()
        splitter.enable_truncation(self.max_tokens, direction=self.truncation_side)
        # A literal "[SEP]" in a report is text, not the end of the sentence.
        splitter.encode_special_tokens = True
        self.dim, self.final_period, self.projection_kind = dim, final_period, projection
        if projection == "pretrained":
            self.projection = self._own_projection(config, folder)
        else:
            has_head = self.family == _SIGLIP and self.pooling == "pooler"
            size = config.projection_size if has_head else config.hidden_size
            self.projection = _projection(projection, size, dim)
        if folder is not None:
            self._try_out(folder)

    @classmethod
    def untrained(
        cls, folder: Path, raw: Mapping[str, Any], notes: list[str], **options: Any
    ) -> TransformersSentences:
        """One with random weights, of the content of a config.json and a folder's tokenizer.

        `notes`: as in `one_tokenizer`; `options`: the constructor's.
        """
        return cls(**_described(folder, raw, notes)[1], **options)

    @property
    def transformer(self) -> nn.Module:
        """The model, with its masked-language-model head if it has one."""
        if self.masked_language_head is None:
            return self.model
        return nn.ModuleList([self.model, self.masked_language_head])

    @property
    def model_class(self) -> str:
        """Class of transformers whose `from_pretrained` loads the model."""
        return type(self.model).__name__ if self.family in _TOWERS else "AutoModel"

    def config(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "max_tokens": self.max_tokens,
            "final_period": self.final_period,
            "pooling": self.pooling,
            "projection": self.projection_kind,
            "masked_language_head": self.has_masked_language_head,
            "architecture": plain_settings(self.model.config),
            "tokenizer": self.tokenizer.to_str(),
            "pad_token_id": self.pad_token_id,
        }

    def transformer_settings(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "final_period": self.final_period,
            "pooling": self.pooling,
            "tokenizer": _tokenizer_settings(json.loads(self.tokenizer.to_str())),
            "family": self.family,
            "architecture": forward_settings(self.model.config),
            "pad_token_id": self.pad_token_id,
        }

    def forward_settings(self) -> dict[str, Any]:
        return {"projection": self.projection_kind, **self.transformer_settings()}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(self._closed(texts))]

    def tokenizer_identity(self) -> str:
        if type(self).tokenize is not TransformersSentences.tokenize:
            return ""
        settings = self.tokenizer.to_str(), self.max_tokens, self.truncation_side, self.final_period
        return digest(json.dumps(settings).encode())

    def are_truncated(self, texts: Sequence[str]) -> list[bool]:
        return super().are_truncated(self._closed(texts))

    def _closed(self, texts: Sequence[str]) -> list[str]:
        return [with_final_period(text) for text in texts] if self.final_period else list(texts)

    def forward(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence dim"]:
        return self.project(self.states(tokens, lengths))

    def states(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence hidden"]:
        tokens = tokens.masked_fill(~is_token(tokens, lengths), self.pad_token_id)
        if self.is_padded_to_positions:
            padding = tokens.new_full((tokens.shape[0], self.max_tokens), self.pad_token_id)
            tokens = torch.cat([tokens, padding], dim=1)[:, : self.max_tokens]
        # CLIP's tower is causal and SigLIP's sees its padding.
        output = run(self.model, tokens, None if self.family in _TOWERS else lengths)
        if self.pooling == "pooler":
            return output.pooler_output
        hidden = output.last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(hidden.shape[0], device=hidden.device), lengths - 1]
        total = hidden.masked_fill(~is_token(tokens, lengths)[..., None], 0.0).sum(dim=1)
        return total / lengths[:, None]

    def project(self, states: Float[Tensor, "sentence hidden"]) -> Float[Tensor, "sentence dim"]:
        return self.projection(states)

    def masked_language_loss(
        self, tokens: Tokens, lengths: Lengths, labels: Tokens, places: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        head = self.masked_language_head
        assert head is not None
        hidden = run(self.model, tokens, lengths).last_hidden_state.flatten(0, 1)[places]
        logits = head(hidden, self.model.get_input_embeddings().weight)
        return masked_language_losses(logits, labels, places)

    def freeze_unused(self) -> dict[str, Tensor]:
        """Freeze the parameters on which no embedding depends, and return them by name: processes would wait for them.

        Nothing else changes. The masked-language-model head has a loss of its own.
        """
        trained = {x: p for x, p in self.named_parameters() if p.requires_grad and "language_head" not in x}
        if not trained:
            return {}
        modes = [(part, part.training) for part in self.modules()]
        (ids,) = self.tokenize([_TRIED * self.max_tokens])
        tokens = torch.tensor([ids], device=next(self.parameters()).device)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            total = self.eval()(tokens, tokens.new_tensor([len(ids)])).sum()
        gradients = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
        for part, mode in modes:
            part.training = mode
        found = zip(trained.items(), gradients, strict=True)
        return {name: p.requires_grad_(False) for (name, p), gradient in found if gradient is None}

    @torch.no_grad()
    def _try_out(self, folder: Path) -> None:
        """Refuse a model that padding changes, as FNet and ConvBERT, or whose first token sees itself alone."""
        (ids,) = self.tokenize([_TRIED * self.max_tokens])
        length = max(min(2, self.max_tokens), self.max_tokens // 2)  # the rest is padding
        padding = [0] * (self.max_tokens - length)
        tokens, lengths = torch.tensor([[*ids[: length - 1], ids[-1], *padding]]), torch.tensor([length])
        self.eval()
        try:
            states = [self.states(tokens[:, :n], lengths.clamp(max=n)) for n in (length, self.max_tokens, 1)]
        except Exception as error:  # each family in its own way
            reason = " ".join(str(error).split())[:200]
            raise ModelFolderError(
                f"{folder}: transformers' {self.family} cannot encode sentences ({reason})"
            ) from error
        self.train()
        alone, padded, first = states
        is_unchanged, is_causal = (
            bool((x - alone).abs().max() <= _ROUNDING * alone.std()) for x in (padded, first)
        )
        if not is_unchanged:
            raise ModelFolderError(
                f"{folder}: expected a model that padding does not change, found a {self.family}; give another model"
            )
        if self.pooling == "cls" and is_causal:
            raise UserError(
                f"text_encoder.pooling: expected mean or last for a causal model, {self.family}, found cls"
            )

    def _own_projection(self, config: PreTrainedConfig, folder: Path | None) -> nn.Module:
        """CLIP's projection into the space of the images; SigLIP's pooler has none behind it."""
        own = {_CLIP: "projection_dim", _SIGLIP: "projection_size"} if self.pooling == "pooler" else {}
        pretrained_size("text_encoder", config, own, f"pooling {self.pooling}", self.dim)
        if self.family == _SIGLIP:
            return nn.Identity()
        if folder is None:
            return nn.Linear(config.hidden_size, self.dim, bias=False)
        advice = "give a folder of CLIP that has both towers"
        return load_library_model(CLIPTextModelWithProjection, folder, config, advice).text_projection


BertSentences = TransformersSentences
"""The text encoder under the name of the family that the configurations start from."""


def _described(
    folder: Path, raw: Mapping[str, Any], notes: list[str] | None = None
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Configuration of a folder's model, and the arguments that describe model and tokenizer."""
    config = _text_config(raw, str(folder / CONFIG_FILE))
    tokenizer = load_library_tokenizer(folder, raw, notes)
    if config.model_type == _SIGLIP and tokenizer.padding_side != "right":
        raise ModelFolderError(
            f"{folder}: padding_side: expected right for a SigLIP, found {tokenizer.padding_side}"
        )
    splitter = tokenizer.backend_tokenizer
    splitter.enable_truncation(_DEFAULT_MAX_TOKENS, direction=tokenizer.truncation_side)
    known = (x for x in (tokenizer.pad_token_id, config.pad_token_id) if x is not None)
    return config, {
        "architecture": plain_settings(config),
        "tokenizer": splitter.to_str(),
        "pad_token_id": int(next(known, 0)),
    }


def _text_config(raw: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """transformers' configuration of a text model, or that of the text tower of two; never runs code of a folder."""
    config = library_config(raw, source, "text_config")
    is_known = config is not None and _model_class(config) is not None and hasattr(config, "vocab_size")
    if is_known and not config.is_encoder_decoder:
        return config
    expected = f"an encoder of transformers {transformers.__version__}, CLIP or SigLIP"
    raise unknown_family(raw, source, expected, "give another, or a class of your own (docs/contributing.md)")


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = _TOWERS.get(config.model_type) or MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _model(config: PreTrainedConfig, pooling: str, has_head: bool, folder: Path | None) -> PreTrainedModel:
    """The model, without pooler where `pooling` needs none; weights from the folder, or random."""
    family = config.model_type
    if has_head and family != "bert":
        raise UserError(
            f"text_encoder.masked_language_head: expected false for a {family}, found true; choose a BERT"
        )
    kind = BertForMaskedLM if has_head else _model_class(config)
    assert kind is not None
    has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    known = [*POOLINGS] if has_pooler or family in _TOWERS else [*POOLINGS[:-1]]
    check_choice("text_encoder.pooling", pooling, known)
    options = {"add_pooling_layer": pooling == "pooler"} if has_pooler else {}
    remedy = f"give the folder of a {family}, or set what is missing otherwise (pooling, masked_language_head"
    remedy += ", which the result of fit --config language_model has)"
    if folder is None:
        model = kind(config, **options)
    else:
        model = load_library_model(kind, folder, config, remedy, **options)
    if family == _SIGLIP and pooling != "pooler":
        model.head.requires_grad_(False)  # unused
    avoid_host_reads(model)
    return model


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


def share_of_truncated(count: int, total: int) -> str:
    """A warning about sentences that are longer than the encoder takes; "" for none."""
    if not count:
        return ""
    return f"{count:,} of {total:,} sentences ({count / total:.2%}) are longer than max_tokens: their end is cut off"


def _tokenizer_settings(described: Any) -> Any:
    """Content of a tokenizer.json without entries that are off, of which versions have more or fewer."""
    if isinstance(described, list):
        return [_tokenizer_settings(one) for one in described]
    if not isinstance(described, dict):
        return described
    is_on = {name: value for name, value in described.items() if value is not None and value is not False}
    return {name: _tokenizer_settings(value) for name, value in is_on.items()}


def _projection(kind: str, hidden_size: int, dim: int) -> nn.Module:
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
