"""Read the folder of any masked or causal language model of transformers exactly, and without remote code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    __version__,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from medclip_dcl.common.weight_files import CONFIG_FILE
from medclip_dcl.networks.bert_folder import (
    BERT_FAMILIES,
    ModelFolderError,
    first_sentence,
    load_masked_language_model,
    load_tokenizer,
    load_weights,
    read_json,
    silent_transformers,
)

_TOKENIZER_FILE = "tokenizer.json"
# Parts of names of weights that files hold and language models leave out.
_NEEDLESS = ("pooler.", "position_ids", "cls.seq_relationship.")
# A surplus of embedding rows over tokens below this, or this share, counts as rounding up (choice).
_EMBEDDING_ROWS_MULTIPLE, _EMBEDDING_ROWS_SHARE = 128, 0.01


def load_language_model(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a masked or causal language model in float32 and train mode, and its tokenizer.

    BERT's folders are read by `bert_folder`. For the other families, config.json's `architectures` says whether the
    model is a causal one; without it a family with both kinds counts as masked.

    Raises:
        ModelFolderError: of another family, damaged, without the head, or with a tokenizer that does not fit.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG_FILE)
    if raw.get("model_type") in BERT_FAMILIES:
        return load_masked_language_model(folder), load_tokenizer(folder)
    kind, config = _kind(folder, raw)
    tokenizer = _tokenizer(folder, config, is_causal(kind))
    return load_weights(kind, folder, config, _is_needless, _remedy), tokenizer


def is_causal(kind: type) -> bool:
    """True for a class of causal language models, or one derived from it."""
    names = {base.__name__ for base in kind.__mro__}
    causal, masked = (
        set(mapping.values())
        for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    )
    return bool(names & causal) and not names & masked


def _kind(folder: Path, raw: dict[str, Any]) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Class and configuration of the folder's model."""
    family, file = raw.get("model_type"), folder / CONFIG_FILE
    masked = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(family)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if masked is None and causal is None:
        code = f" (it needs the code of {raw['auto_map']}, which is never run)" if "auto_map" in raw else ""
        raise ModelFolderError(
            f"{file}: model_type: expected a masked or causal language model of transformers {__version__}, found "
            f"{family!r}{code}; give another model, or install a version of transformers that has it"
        )
    takes_causal = masked is None or (causal != masked and causal in (raw.get("architectures") or ()))
    try:
        with silent_transformers():
            config = CONFIG_MAPPING[family].from_dict(raw)
    except Exception as error:  # as in `load_weights`
        raise ModelFolderError(f"{file}: {first_sentence(error)}; copy the file again") from error
    if config.is_encoder_decoder or (not takes_causal and getattr(config, "is_decoder", False)):
        raise ModelFolderError(
            f"{file}: expected an encoder with a masked-language-model head, or a causal language model, found another "
            "decoder (is_encoder_decoder or is_decoder); give another model"
        )
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if takes_causal else MODEL_FOR_MASKED_LM_MAPPING
    return mapping[type(config)], config


def _tokenizer(folder: Path, config: PreTrainedConfig, has_no_mask: bool) -> PreTrainedTokenizerFast:
    """tokenizer.json exactly, with the special tokens of transformers' own class, which may rebuild the rest."""
    try:
        with silent_transformers():
            own = AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
            if (folder / _TOKENIZER_FILE).is_file():
                exact = Tokenizer.from_file(str(folder / _TOKENIZER_FILE))
                own = PreTrainedTokenizerFast(tokenizer_object=exact, **own.special_tokens_map)
    except Exception as error:  # as in `load_weights`
        raise ModelFolderError(
            f"{folder}: the tokenizer cannot be read ({first_sentence(error)}); give a folder with {_TOKENIZER_FILE}"
        ) from error
    if not isinstance(own, PreTrainedTokenizerFast):
        raise ModelFolderError(
            f"{folder}: expected a tokenizer of the tokenizers library, found {type(own).__name__}; give a folder with "
            f"{_TOKENIZER_FILE}"
        )
    n_tokens, rows = 1 + max(own.get_vocab().values()), config.vocab_size
    problem = ""
    if not 0 <= rows - n_tokens < max(_EMBEDDING_ROWS_MULTIPLE, _EMBEDDING_ROWS_SHARE * rows):
        problem = f"{n_tokens} tokens, but {rows} embedding rows (vocab_size)"
    elif own.mask_token_id is None and not has_no_mask:
        problem = "it has no mask token"
    if problem:
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: {problem}; take both from the same model"
        )
    return own


def _is_needless(name: str, model: PreTrainedModel) -> bool:
    """True for a weight of another head, or one that the model computes without."""
    own = {*dict(model.named_children()), *dict(model.base_model.named_children())}
    return name.partition(".")[0] not in own or any(part in name for part in _NEEDLESS)


def _remedy(missing: Sequence[str]) -> str:
    return (
        "give a folder with the language model's head, as its architectures in config.json should say (DeBERTa's "
        'published weights have theirs under "legacy": false)'
    )
