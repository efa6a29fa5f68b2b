"""Text encoders of transformers with their own tokenizers: encoders of `AutoModel`, text towers of CLIP and SigLIP."""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer, normalizers, processors
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
    Siglip2TextModel,
    SiglipTextModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from medclip_dcl.common.errors import UserError, check_choice, check_min
from medclip_dcl.common.weight_files import CONFIG_FILE, load_exactly
from medclip_dcl.networks.bert_folder import (
    ModelFolderError,
    load_from_folder,
    read_folder_json,
    resolve_folder,
)
from medclip_dcl.networks.library_config import library_config, longest_sentence, plain_settings
from medclip_dcl.networks.masked_language import attention_kernels, is_token
from medclip_dcl.networks.text_encoder import (
    TransformerEncoder,
    functional_settings,
    sentence_projection,
    trained_arguments,
    trained_encoder,
)

POOLINGS = ("cls", "mean", "last", "pooler")

_CLIP = "clip_text_model"
_SIGLIP = ("siglip_text_model", "siglip2_text_model")
# Without their projections into the space of the images, which folders of a text model alone lack: those are
# `projection`, where frozen features and the transformer's own learning rate end.
_TOWERS: dict[str, type[PreTrainedModel]] = {
    _CLIP: CLIPTextModel,
    **dict(zip(_SIGLIP, (SiglipTextModel, Siglip2TextModel), strict=True)),
}
_DEFAULT_MAX_TOKENS = 128

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
# Buffers that older versions saved.
_BUFFERS = ("position_ids", "token_type_ids")

_SDPA = "sdpa_without_host_reads"


def _mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """transformers' mask of its fused attention, which is else left out if nothing is padded: a read on the host."""
    if attention_mask is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, **options)


ALL_MASK_ATTENTION_FUNCTIONS.register(_SDPA, _mask)
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
        projection: "linear" or "mlp", as in `BertSentences`, or "gelu", two layers without biases as in open_clip, with
            random initial weights; "pretrained": CLIP's
            text_projection, or nothing behind SigLIP's head, so that `dim` is theirs and pooling is "pooler".
        architecture: content of a config.json.
        tokenizer: content of tokenizer.json.
        pad_token_id: id of padding.

    Raises:
        UserError: a setting out of range; pooling that the model does not have.
        ModelFolderError: an unknown family, or one that needs code of its own; no tokenizer; weights that do not fit
            exactly.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        max_tokens: int | None = None,
        dropout: float | None = None,
        final_period: bool = True,
        pooling: Literal["cls", "mean", "last", "pooler"] | None = None,
        projection: Literal["linear", "mlp", "gelu", "pretrained"] = "linear",
        *,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__()
        described: dict[str, Any] = {
            "architecture": architecture,
            "tokenizer": tokenizer,
            "pad_token_id": pad_token_id,
        }
        if (pretrained is None) == (None in described.values()):
            raise UserError(
                "text encoder: give either pretrained (a folder or repository id), or architecture, tokenizer and "
                "pad_token_id"
            )
        check_min("text_encoder", {"dim": (dim, 1)})
        check_choice("text_encoder.projection", projection, ("linear", "mlp", "gelu", "pretrained"))
        trained = None if pretrained is None else trained_encoder(pretrained, [*described], "transformer")
        if trained is not None:
            described = {name: trained_arguments(trained)[name] for name in described}
        folder = None if pretrained is None or trained is not None else resolve_folder(pretrained)
        if folder is None:
            config = _text_config(dict(described["architecture"]), "text_encoder.architecture")
            splitter = Tokenizer.from_str(described["tokenizer"])
            self.pad_token_id: int = described["pad_token_id"]
        else:
            config = _text_config(read_folder_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
            splitter, self.pad_token_id = _load_tokenizer(folder, config)
        if dropout is not None:
            _set_dropout(config, dropout)
        self.family: str = config.model_type
        self.pooling = pooling or ("pooler" if self.family in _TOWERS else "cls")
        self.model = _model(config, self.pooling, folder)
        positions = longest_sentence(self.model)
        self.is_padded_to_positions = self.family in _SIGLIP  # and sees its padding
        least = positions if self.is_padded_to_positions else 1 + splitter.num_special_tokens_to_add(False)
        self.truncation_side = str((splitter.truncation or {})["direction"])
        wanted = min(positions, _DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens
        self.set_tokenizer(splitter, wanted, least, positions, self.truncation_side)
        self.dim, self.final_period = dim, final_period
        self.projection_kind = projection
        if projection == "pretrained":
            self.projection = _own_projection(config, self.pooling, dim, folder)
        else:
            has_head = self.family in _SIGLIP and self.pooling == "pooler"
            size = config.projection_size if has_head else config.hidden_size
            self.projection = sentence_projection(projection, size, dim)
        if trained is not None and projection == "pretrained":
            load_exactly(self, trained.tensors("text_encoder"), trained.path)
        elif trained is not None:
            self.take_transformer(trained)

    @classmethod
    def untrained(cls, folder: Path, **options: Any) -> TransformersSentences:
        """One with random weights, of a folder's configuration and tokenizer; `options` are the constructor's."""
        config = _text_config(read_folder_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
        splitter, pad_token_id = _load_tokenizer(folder, config)
        described: dict[str, Any] = {
            "architecture": plain_settings(config),
            "tokenizer": splitter.to_str(),
            "pad_token_id": pad_token_id,
        }
        return cls(**described, **options)

    @property
    def transformer(self) -> nn.Module:
        return self.model

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
            "architecture": plain_settings(self.model.config),
            "tokenizer": self.tokenizer.to_str(),
            "pad_token_id": self.pad_token_id,
        }

    def transformer_settings(self) -> dict[str, Any]:
        settings = {name: x for name, x in self.config().items() if name not in ("dim", "projection")}
        return {**settings, "architecture": functional_settings(settings["architecture"])}

    def states(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence hidden"]:
        tokens = tokens.masked_fill(~is_token(tokens, lengths), self.pad_token_id)
        if self.is_padded_to_positions:
            padding = tokens.new_full((tokens.shape[0], self.max_tokens), self.pad_token_id)
            tokens = torch.cat([tokens, padding], dim=1)[:, : self.max_tokens]
        is_present = is_token(tokens, lengths)
        # CLIP's tower is causal and SigLIP's sees its padding.
        mask = None if self.family in _TOWERS else is_present.long()
        # transformers' DeBERTa (not its v2) masks half precision by a number of float32, which fails.
        is_single = self.family == "deberta" and not tokens.is_meta
        precision = torch.autocast(tokens.device.type, enabled=False) if is_single else nullcontext()
        with attention_kernels(self.model, tokens.device), precision:
            output = self.model(input_ids=tokens, attention_mask=mask)
        if self.pooling == "pooler":
            return output.pooler_output
        hidden = output.last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        return hidden.masked_fill(~is_present[..., None], 0.0).sum(dim=1) / lengths[:, None]


def _text_config(raw: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """transformers' configuration of a text model, or that of the text tower of two; never runs code of a folder."""
    config = library_config(raw, source, "text_config")
    is_known = config is not None and _model_class(config) is not None and hasattr(config, "vocab_size")
    if is_known and not config.is_encoder_decoder:
        return config
    modules = sorted(set(re.findall(r'(\w+)\.\w+"', json.dumps(raw.get("auto_map")))))
    code = (
        f" with code of its own, {', '.join(f'{x}.py' for x in modules)}, which is never run"
        if modules
        else ""
    )
    raise ModelFolderError(
        f"{source}: model_type: expected an encoder of transformers {transformers.__version__}, CLIP or SigLIP, found "
        f"{raw.get('model_type')!r}{code}; give another model, BertSentences for CXR-BERT, or a class of your own "
        "(docs/contributing.md)"
    )


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = _TOWERS.get(config.model_type) or MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _is_causal(config: PreTrainedConfig) -> bool:
    """True if a token sees those before it alone: CLIP's text tower, and families that are language models only."""
    family = config.model_type
    is_decoder = (
        family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
    return family == _CLIP or is_decoder or bool(getattr(config, "is_decoder", False))


def _set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"dropout: expected a number in [0, 1), found {dropout}")
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, (int, float)):
            setattr(config, name, dropout)


def _model(config: PreTrainedConfig, pooling: str, folder: Path | None) -> PreTrainedModel:
    """The model, without pooler where `pooling` needs none; weights from the folder, or random."""
    kind = _model_class(config)
    assert kind is not None
    has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    known = [*POOLINGS] if has_pooler or config.model_type in _TOWERS else [*POOLINGS[:-1]]
    if _is_causal(config):
        known.remove("cls")  # the first token sees itself alone
    check_choice("text_encoder.pooling", pooling, known)
    options = {"add_pooling_layer": pooling == "pooler"} if has_pooler else {}
    model = kind(config, **options) if folder is None else _load(kind, folder, config, **options)
    if config.model_type in _SIGLIP and pooling != "pooler":
        model.head.requires_grad_(False)  # unused
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_SDPA)
    return model


def _load(
    kind: type[PreTrainedModel], folder: Path, config: PreTrainedConfig, **options: Any
) -> PreTrainedModel:
    """Load a model exactly; heads of other tasks, and the other tower, may be left over."""
    with torch.device("meta"):
        own = {name for name, _ in kind(config, **options).named_children()}
    prefix = f"{kind.base_model_prefix}."

    def is_of_other_heads(name: str) -> bool:
        return name.removeprefix(prefix).split(".")[0] not in own or name.endswith(_BUFFERS)

    remedy = f"give the folder of a {config.model_type}, or another pooling if its pooler is missing"
    return load_from_folder(kind, folder, config, is_of_other_heads, lambda missing: remedy, **options)


def _own_projection(config: PreTrainedConfig, pooling: str, dim: int, folder: Path | None) -> nn.Module:
    """CLIP's projection into the space of the images; SigLIP's pooler has none behind it."""
    own = {_CLIP: "projection_dim", **dict.fromkeys(_SIGLIP, "projection_size")}.get(config.model_type)
    if own is None or pooling != "pooler":
        raise UserError(
            f"text_encoder.projection: expected linear or mlp for a {config.model_type} with pooling {pooling}, found "
            "pretrained; only CLIP and SigLIP with pooling pooler have their own"
        )
    if (size := getattr(config, own)) != dim:
        raise UserError(
            f"text_encoder.dim: expected {size}, the size of the pretrained projection, found {dim}"
        )
    if config.model_type in _SIGLIP:
        return nn.Identity()
    if folder is None:
        return nn.Linear(config.hidden_size, dim, bias=False)
    return _load(CLIPTextModelWithProjection, folder, config).text_projection


def _load_tokenizer(folder: Path, config: PreTrainedConfig) -> tuple[Tokenizer, int]:
    """The folder's tokenizer as transformers builds it, with its side of truncation, and the id of padding."""
    if not any(any(folder.glob(name)) for name in _VOCABULARIES):  # transformers would build an empty one
        raise ModelFolderError(
            f"{folder}: no tokenizer: none of {', '.join(_VOCABULARIES)} is there; copy the tokenizer's files"
        )
    try:
        case = _case(folder / "tokenizer.json")
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **case)
        backend = _backend(found)
    except Exception as error:  # a tokenizer's files are read in many ways
        remedy = "copy its files again"
        if any(folder.glob("*.model")) and not (is_sentencepiece_available() and is_protobuf_available()):
            remedy = "it needs the packages sentencepiece and protobuf: pip install -e '.[sentencepiece]'"
        reason = " ".join(str(error).split())[:300]
        raise ModelFolderError(f"{folder}: the tokenizer cannot be loaded ({reason}); {remedy}") from error
    if (n_tokens := 1 + max(backend.get_vocab().values())) > config.vocab_size:
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: {n_tokens} tokens, but {config.vocab_size} embedding rows "
            "(vocab_size); take both from the same model"
        )
    if config.model_type in _SIGLIP and found.padding_side != "right":
        raise ModelFolderError(
            f"{folder}: padding_side: expected right for a SigLIP, found {found.padding_side}"
        )
    backend.enable_truncation(_DEFAULT_MAX_TOKENS, direction=found.truncation_side)
    known = (x for x in (found.pad_token_id, config.pad_token_id) if x is not None)
    return backend, int(next(known, 0))


def _case(file: Path) -> dict[str, Any]:
    """Treatment of case and accents in tokenizer.json, which transformers' classes of BERT's kind do not read."""
    found = (read_folder_json(file).get("normalizer") if file.is_file() else None) or {}
    names = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
    return {name: found[x] for name, x in names.items()} if found.get("type") == "BertNormalizer" else {}


def _backend(tokenizer: Any) -> Tokenizer:
    """A copy of the tokenizer behind one of transformers; SigLIP's SentencePiece model converted to the same."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if type(tokenizer).__name__ != "SiglipTokenizer":
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json")
    from transformers.convert_slow_tokenizer import SpmConverter

    converted = SpmConverter(tokenizer).converted()
    # `canonicalize_text` of transformers' SiglipTokenizer.
    before = [normalizers.Replace("\u2581", " "), *[normalizers.Lowercase()] * tokenizer.do_lower_case]
    before += [normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), "")]
    before += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    converted.normalizer = normalizers.Sequence([*before, converted.normalizer])
    end = tokenizer.eos_token
    converted.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    return converted
