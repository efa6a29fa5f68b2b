"""Read the folder of any masked or causal language model of transformers exactly, and without remote code."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from medclip_dcl.common.weight_files import CONFIG_FILE
from medclip_dcl.networks.bert_folder import (
    BERT_FAMILIES,
    EMBEDDING_ROWS_MULTIPLE,
    ModelFolderError,
    load_from_folder,
    load_masked_language_model,
    load_tokenizer,
    read_folder_json,
)
from medclip_dcl.networks.library_config import library_config

_TOKENIZER_FILE = "tokenizer.json"
# Families -> names of their classes, masked and causal.
_CLASSES = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Parts of names of weights that files hold and language models leave out.
_NEEDLESS = ("pooler.", "position_ids", "cls.seq_relationship.")
_REMEDY = (
    "give a folder with the language model's head, as its architectures in config.json should say (DeBERTa's published "
    'weights have theirs under "legacy": false)'
)
# So does a surplus below this share (choice).
_EMBEDDING_ROWS_SHARE = 0.01


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
    is_masked_decoder = raw.get("is_decoder") and kind is not None and not is_causal(kind)
    if kind is None or raw.get("is_encoder_decoder") or is_masked_decoder:
        code = f" (it needs the code of {raw['auto_map']}, which is never run)" if "auto_map" in raw else ""
        raise ModelFolderError(
            f"{folder / CONFIG_FILE}: model_type: expected an encoder or a causal language model of transformers "
            f"{transformers.__version__}, found {family!r}{code}; give another, or install a version that has it"
        )
    config = library_config(raw, str(folder / CONFIG_FILE))
    try:
        tokenizer = _tokenizer(folder, config)
    except Exception as error:  # as in `load_from_folder`
        raise ModelFolderError(
            f"{folder}: the tokenizer cannot be read ({' '.join(str(error).split())[:300]}); give a "
            f"folder with {_TOKENIZER_FILE}, which save_pretrained of transformers' AutoTokenizer writes"
        ) from error
    n_tokens, rows = 1 + max(tokenizer.get_vocab().values()), config.vocab_size
    problem = ""
    if not 0 <= rows - n_tokens < max(EMBEDDING_ROWS_MULTIPLE, _EMBEDDING_ROWS_SHARE * rows):
        problem = f"{n_tokens} tokens, but {rows} embedding rows (vocab_size)"
    elif tokenizer.mask_token_id is None and not is_causal(kind):
        problem = "it has no mask token"
    if problem:
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: {problem}; take both from the same model"
        )
    with torch.device("meta"):
        outline = kind(config)
    own = {*dict(outline.named_children()), *dict(outline.base_model.named_children())}

    def is_needless(name: str) -> bool:
        """True for a weight of another head, or one that the model computes without."""
        return name.partition(".")[0] not in own or any(part in name for part in _NEEDLESS)

    return load_from_folder(kind, folder, config, is_needless, lambda missing: _REMEDY), tokenizer


def is_causal(kind: type) -> bool:
    """True for a class of causal language models, or one derived from it."""
    names = {base.__name__ for base in kind.__mro__}
    is_masked, is_causal = (not names.isdisjoint(mapping.values()) for mapping in _CLASSES)
    return is_causal and not is_masked


def _tokenizer(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """tokenizer.json exactly, with the special tokens of transformers' own class, which may rebuild the rest."""
    own = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    if not (folder / _TOKENIZER_FILE).is_file():
        # Without the library tokenizers this raises.
        return PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, **own.special_tokens_map)
    exact = Tokenizer.from_file(str(folder / _TOKENIZER_FILE))
    known, named = exact.get_vocab(), own.special_tokens_map
    # Others would get new numbers, for which there are no weights.
    special = {name: token for name, token in named.items() if str(token) in known}
    return PreTrainedTokenizerFast(tokenizer_object=exact, **special)
