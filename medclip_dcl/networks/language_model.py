"""Read the folder of any masked or causal language model of transformers exactly, and without remote code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import ModelFolderError, load_library_model, read_folder_json
from medclip_dcl.networks.library_folder import (
    library_config,
    load_library_tokenizer,
    unknown_family,
)

# Families -> names of their classes, masked and causal.
_CLASSES = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_REMEDY = (
    "give a folder with the language model's head, as its architectures in config.json should say (DeBERTa's published "
    'weights have theirs under "legacy": false), or train one: --config language_model'
)


def load_language_model(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a masked or causal language model in float32 and train mode, and its tokenizer.

    config.json's `architectures` says whether the model is a causal one; without it a family with both kinds counts as
    masked.

    Raises:
        ModelFolderError: of an unknown family, damaged, without the head, or with a tokenizer that does not fit.
    """
    folder = Path(folder)
    kind, config, tokenizer = _read(folder)
    return load_library_model(kind, folder, config, _REMEDY), tokenizer


def load_masked_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a masked language model.

    Raises:
        ModelFolderError: of a causal language model, or as in `load_language_model`.
    """
    kind, _, tokenizer = _read(Path(folder))
    if is_causal(kind):
        raise ModelFolderError(
            f"{folder}: expected a masked language model, found a causal one, {kind.__name__}, which masks no token; "
            "give another (causal ones score sentences as they are)"
        )
    return tokenizer


def language_model_class(
    raw: Mapping[str, Any], source: str
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Class and configuration of a language model from the content of its config.json; `source` names it in errors."""
    config = library_config(raw, source)
    family = getattr(config, "model_type", None)
    names = [mapping[family] for mapping in _CLASSES if family in mapping]
    named = [name for name in names if name in (raw.get("architectures") or ())]
    kind = getattr(transformers, (named or names)[0]) if names else None
    is_masked_decoder = getattr(config, "is_decoder", False) and not (kind and is_causal(kind))
    if kind is None or config.is_encoder_decoder or is_masked_decoder:
        expected = f"an encoder or a causal language model of transformers {transformers.__version__}"
        raise unknown_family(raw, source, expected, "give another, or install a version that has it")
    return kind, config


def _read(folder: Path) -> tuple[type[PreTrainedModel], PreTrainedConfig, PreTrainedTokenizerFast]:
    raw = read_folder_json(folder / CONFIG_FILE)
    kind, config = language_model_class(raw, str(folder / CONFIG_FILE))
    tokenizer = load_library_tokenizer(folder, raw)
    if tokenizer.mask_token_id is None and not is_causal(kind):
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: it has no mask token; take both from the same model"
        )
    return kind, config, tokenizer


def is_causal(kind: type) -> bool:
    """True for a class of causal language models, or one derived from it."""
    names = {base.__name__ for base in kind.__mro__}
    is_masked, is_causal = (not names.isdisjoint(mapping.values()) for mapping in _CLASSES)
    return is_causal and not is_masked
