"""Text encoders of transformers with their own tokenizers: encoders of `AutoModel`, text towers of CLIP and SigLIP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipTextModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from medclip_dcl.common.errors import UserError, check_choice, check_min
from medclip_dcl.common.weight_files import CONFIG_FILE, load_exactly
from medclip_dcl.networks.bert_folder import ModelFolderError, read_folder_json, resolve_folder
from medclip_dcl.networks.library_folder import (
    check_source,
    forward_settings,
    library_config,
    load_library_model,
    load_library_tokenizer,
    longest_sentence,
    plain_settings,
    pretrained_size,
    unknown_family,
)
from medclip_dcl.networks.masked_language import Lengths, Tokens, attention_kernels, is_token
from medclip_dcl.networks.text_encoder import (
    TokenizerText,
    TransformerEncoder,
    check_dropout,
    sentence_projection,
    trained_encoder,
)

POOLINGS = ("cls", "mean", "last", "pooler")

_CLIP, _SIGLIP = "clip_text_model", "siglip_text_model"
# Without their projections into the space of the images, which folders of a text model alone lack: those are
# `projection`, where frozen features and the transformer's own learning rate end.
_TOWERS: dict[str, type[PreTrainedModel]] = {_CLIP: CLIPTextModel, _SIGLIP: SiglipTextModel}
_DEFAULT_MAX_TOKENS = 128
# Share of the states' deviation that counts as rounding (choice).
_ROUNDING = 1e-4

_SDPA, _EAGER = "sdpa_without_host_reads", "eager_without_host_reads"


def _without_reads(mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """transformers' mask, which is else left out if nothing is padded: a read on the host."""

    def masked(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return mask(attention_mask=attention_mask, **options)

    return masked


ALL_MASK_ATTENTION_FUNCTIONS.register(_SDPA, _without_reads(sdpa_mask))
ALL_MASK_ATTENTION_FUNCTIONS.register(_EAGER, _without_reads(eager_mask))
ALL_ATTENTION_FUNCTIONS.register(_SDPA, sdpa_attention_forward)


class TransformersSentences(TransformerEncoder):
    """A text encoder of transformers: RoBERTa, MPNet, ModernBERT, DeBERTa, DistilBERT, text towers of CLIP and SigLIP.

    Pooled last hidden state, projected to `dim`. Special tokens are the tokenizer's; a sentence is padded as the model
    was trained: SigLIP's to its number of positions, and its padding is seen. Give either `pretrained`, or
    `architecture`, `tokenizer` and `pad_token_id` as returned by `config`, for random weights.

    Args:
        pretrained: a Hugging Face folder or repository id of an encoder that transformers knows, with its tokenizer, or
            of a CLIP or SigLIP, whose text tower is used; or a checkpoint or an exported folder of an image-text model
            with such a text encoder.
        dim: size of the projected sentences.
        max_tokens: longer sentences are truncated to this many tokens, special tokens included; null for the model's
            positions, at most 128 (choice).
        dropout: every dropout of the model, in [0, 1); null keeps the model's own.
        final_period: True ends every text with a period if it has no closing mark (choice). SigLIP's first tokenizer
            drops all punctuation.
        pooling: "cls" takes the hidden state of the first token, "mean" the mean over all tokens, special ones
            included, "last" that of the last one, "pooler" transformers' `pooler_output` (CLIP: the state of the end of
            the text; SigLIP: the last place through its head; BERT: its pooler). null: "pooler" for CLIP and SigLIP,
            "cls" for all others (choice).
        projection: "linear", or "gelu", two layers without biases as in open_clip, with random initial weights;
            "pretrained": CLIP's text_projection, or nothing behind SigLIP's head, so that `dim` is theirs and pooling
            is "pooler".
        architecture: content of a config.json.
        tokenizer: content of tokenizer.json.
        pad_token_id: id of padding.

    Raises:
        UserError: a setting out of range; pooling that the model does not have.
        ModelFolderError: an unknown family, one that needs code of its own, or one whose sentences depend on padding;
            no tokenizer; weights that do not fit exactly.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        max_tokens: int | None = None,
        dropout: float | None = None,
        final_period: bool = True,
        pooling: Literal["cls", "mean", "last", "pooler"] | None = None,
        projection: Literal["linear", "gelu", "pretrained"] = "linear",
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
        check_min("text_encoder", {"dim": (dim, 1)})
        check_choice("text_encoder.projection", projection, ("linear", "gelu", "pretrained"))
        trained, of_trained = trained_encoder(pretrained, [*described], "transformer")
        described |= of_trained
        folder = None if pretrained is None or trained is not None else resolve_folder(pretrained)
        if folder is not None:
            config, described = _described(folder, read_folder_json(folder / CONFIG_FILE))
        else:
            config = _text_config(dict(described["architecture"]), "text_encoder.architecture")
        splitter = Tokenizer.from_str(str(described["tokenizer"]))
        self.pad_token_id: int = described["pad_token_id"]
        if dropout is not None:
            check_dropout(dropout)
            for name, value in config.to_dict().items():
                if "dropout" in name and isinstance(value, (int, float)):
                    setattr(config, name, dropout)
        self.family: str = config.model_type
        self.pooling = pooling or ("pooler" if self.family in _TOWERS else "cls")
        self.model = _model(config, self.pooling, folder)
        positions = longest_sentence(self.model)
        self.is_padded_to_positions = self.family == _SIGLIP  # and sees its padding
        least = positions if self.is_padded_to_positions else 1 + splitter.num_special_tokens_to_add(False)
        self.truncation_side = str((splitter.truncation or {})["direction"])
        wanted = min(positions, _DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens
        self.set_tokenizer(splitter, wanted, least, positions, self.truncation_side)
        self.dim, self.final_period, self.projection_kind = dim, final_period, projection
        if projection == "pretrained":
            self.projection = self._own_projection(config, folder)
        else:
            has_head = self.family == _SIGLIP and self.pooling == "pooler"
            size = config.projection_size if has_head else config.hidden_size
            self.projection = sentence_projection(projection, size, dim)
        if folder is not None:
            self._try_out(folder)
        if trained is not None and projection == "pretrained":
            load_exactly(self, trained.tensors("text_encoder"), trained.path)
        elif trained is not None:
            self.take_transformer(trained)

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
        return self.model

    @property
    def model_class(self) -> str:
        """Class of transformers whose `from_pretrained` loads the model."""
        return type(self.model).__name__ if self.family in _TOWERS else "AutoModel"

    def config(self) -> dict[str, Any]:
        own = {"architecture": plain_settings(self.model.config), "pad_token_id": self.pad_token_id}
        return {**super().config(), **own}

    def transformer_settings(self) -> dict[str, Any]:
        own = {"architecture": forward_settings(self.model.config), "pad_token_id": self.pad_token_id}
        return {**super().transformer_settings(), "family": self.family, **own}

    def states(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "sentence hidden"]:
        tokens = tokens.masked_fill(~is_token(tokens, lengths), self.pad_token_id)
        if self.is_padded_to_positions:
            padding = tokens.new_full((tokens.shape[0], self.max_tokens), self.pad_token_id)
            tokens = torch.cat([tokens, padding], dim=1)[:, : self.max_tokens]
        # CLIP's tower is causal and SigLIP's sees its padding.
        mask = None if self.family in _TOWERS else is_token(tokens, lengths).long()
        # transformers' DeBERTa (not its v2) masks half precision by a number of float32, which fails.
        is_single = self.family == "deberta" and not tokens.is_meta
        precision = torch.autocast(tokens.device.type, enabled=False) if is_single else nullcontext()
        with attention_kernels(self.model, tokens.device), precision:
            output = self.model(input_ids=tokens, attention_mask=mask)
        if self.pooling == "pooler":
            return output.pooler_output
        return self.pooled(output.last_hidden_state, tokens, lengths)

    @torch.no_grad()
    def _try_out(self, folder: Path) -> None:
        """Refuse a model that padding changes, as FNet and ConvBERT, or whose first token sees itself alone."""
        (ids,) = self.tokenize(
            ["No focal consolidation, effusion or pneumothorax. Normal heart. " * self.max_tokens]
        )
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
    remedy = "give another, BertSentences for CXR-BERT, or a class of your own (docs/contributing.md)"
    raise unknown_family(raw, source, expected, remedy)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = _TOWERS.get(config.model_type) or MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _model(config: PreTrainedConfig, pooling: str, folder: Path | None) -> PreTrainedModel:
    """The model, without pooler where `pooling` needs none; weights from the folder, or random."""
    kind = _model_class(config)
    assert kind is not None
    has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    known = [*POOLINGS] if has_pooler or config.model_type in _TOWERS else [*POOLINGS[:-1]]
    check_choice("text_encoder.pooling", pooling, known)
    options = {"add_pooling_layer": pooling == "pooler"} if has_pooler else {}
    remedy = f"give the folder of a {config.model_type}, or another pooling if its pooler is missing"
    if folder is None:
        model = kind(config, **options)
    else:
        model = load_library_model(kind, folder, config, remedy, **options)
    if config.model_type == _SIGLIP and pooling != "pooler":
        model.head.requires_grad_(False)  # unused
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_SDPA)
    elif not model._supports_attention_backend:  # an attention of its own, as MPNet's
        model.config._attn_implementation = _EAGER
    return model
