"""Read the folder of any masked or causal language model of transformers exactly, and without remote code."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from medclip_dcl.common.weight_files import CONFIG_FILE
from medclip_dcl.networks.bert_folder import (
    BERT_FAMILIES,
    ModelFolderError,
    load_masked_language_model,
    read_folder_json,
)
from medclip_dcl.networks.library_folder import (
    library_config,
    load_library_model,
    load_library_tokenizer,
    unknown_family,
)
from medclip_dcl.networks.tokenizer_files import load_tokenizer

# Families -> names of their classes, masked and causal.
_CLASSES = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_REMEDY = (
    "give a folder with the language model's head, as its architectures in config.json should say (DeBERTa's published "
    'weights have theirs under "legacy": false)'
)


def load_language_model(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a masked or causal language model in float32 and train mode, and its tokenizer.

    BERT's folders are read by `bert_folder`. For the other families, config.json's `architectures` says whether the
    model is a causal one; without it a family with both kinds counts as masked.

    Raises:
        ModelFolderError: of another family, damaged, without the head, or with a tokenizer that does not fit.
    """
    folder = Path(folder)
    raw = read_folder_json(folder / CONFIG_FILE)
    family = raw.get("model_type")
    if family in BERT_FAMILIES:
        return load_masked_language_model(folder), load_tokenizer(folder)
    names = [mapping[family] for mapping in _CLASSES if family in mapping]
    named = [name for name in names if name in (raw.get("architectures") or ())]
    kind = getattr(transformers, (named or names)[0]) if names else None
    config = library_config(raw, source := str(folder / CONFIG_FILE))
    is_masked_decoder = getattr(config, "is_decoder", False) and not (kind and is_causal(kind))
    if kind is None or config.is_encoder_decoder or is_masked_decoder:
        expected = f"an encoder or a causal language model of transformers {transformers.__version__}"
        raise unknown_family(raw, source, expected, "give another, or install a version that has it")
    tokenizer = load_library_tokenizer(folder, raw)
    if tokenizer.mask_token_id is None and not is_causal(kind):
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: it has no mask token; take both from the same model"
        )
    return load_library_model(kind, folder, config, _REMEDY), tokenizer


def is_causal(kind: type) -> bool:
    """True for a class of causal language models, or one derived from it."""
    names = {base.__name__ for base in kind.__mro__}
    is_masked, is_causal = (not names.isdisjoint(mapping.values()) for mapping in _CLASSES)
    return is_causal and not is_masked
