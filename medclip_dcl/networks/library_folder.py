"""Models of transformers of any family: configuration, tokenizer and weights of a folder, without remote code."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, normalizers, processors
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from medclip_dcl.common.errors import UserError, needs_extra
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import NOT_SETTINGS, ModelFolderError, silent
from medclip_dcl.networks.tokenizer_files import TOKENIZER_FILE, named_class, one_tokenizer

OF_TRAINING = re.compile("drop|initializer|vision_use_head")
"""In names of settings on which nothing depends in evaluation, or that the tensors show."""
BERT_FAMILIES = ("bert", "cxr-bert")
"""Values of `model_type` in config.json that are read as a BERT."""

_SIGLIP = "SiglipTokenizer"
_VOCABULARIES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "*.model")
# A surplus of embedding rows over tokens below this share counts as rounding up, too (choice); below the other, if the
# rows are a multiple of 64, as Phi-2's 51,200 for 50,295 tokens.
_EMBEDDING_ROWS_SHARE, _ROUND_ROWS_SHARE = 0.01, 0.05
_EMBEDDING_ROWS_MULTIPLE = 128


def check_source(part: str, pretrained: str | None, described: Mapping[str, Any]) -> None:
    """Refuse a part of which neither, or both, of `pretrained` and its description are given."""
    if (pretrained is None) == (None in described.values()):
        raise UserError(
            f"{part}: give either pretrained (a folder or repository id), or {' and '.join(described)}"
        )


def library_config(
    raw: Mapping[str, Any], source: str, tower: Literal["vision_config", "text_config"] | None = None
) -> Any:
    """transformers' configuration from the content of a config.json; None for a family that it does not know.

    Args:
        raw: whose entries that name code are left out.
        source: names it in errors.
        tower: that of a model of two towers, which is returned instead.
    """
    family = raw.get("model_type")
    if family in BERT_FAMILIES:
        raw = _of_bert(raw, source)
        family = raw["model_type"]
    if family not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[family].from_dict({k: x for k, x in raw.items() if k not in NOT_SETTINGS})
    except Exception as error:  # transformers checks each family's settings in its own way
        reason = " ".join(str(error).split())[:300]
        raise ModelFolderError(f"{source}: {reason}; correct the setting") from error
    config._attn_implementation = None  # in that of a tower, too
    found = config if tower is None else getattr(config, tower, config)
    if found is not config and hasattr(config, "projection_dim"):
        found.projection_dim = config.projection_dim  # of the weights that both towers share a file with
    return found


def _of_bert(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Configuration of a BERT, CXR-BERT's included, whose settings transformers' class computes with."""
    if (positions := raw.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelFolderError(
            f"{source}: position_embedding_type: expected 'absolute', found {positions!r}; give another BERT"
        )
    return {**{name: x for name, x in raw.items() if name != "projection_size"}, "model_type": "bert"}


def unknown_family(raw: Mapping[str, Any], source: str, expected: str, remedy: str) -> ModelFolderError:
    """An error for a config.json of a model that is not among those expected."""
    files = sorted({f"{x}.py" for x in re.findall(r'(\w+)\.\w+"', json.dumps(raw.get("auto_map")))})
    code = f" with code of its own, {', '.join(files)}, which is never run" if files else ""
    return ModelFolderError(
        f"{source}: model_type: expected {expected}, found {raw.get('model_type')!r}{code}; {remedy}"
    )


def plain_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration's settings as JSON, without names of code, classes, labels and versions."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_SETTINGS}
    return json.loads(json.dumps(settings))


def forward_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings on which hidden states depend in evaluation and that are not the class's default.

    Without those that the class does not know: versions of transformers have more or fewer of both.
    """
    settings, defaults = config.to_dict(), type(config)().to_dict()
    return {
        name: settings[name]
        for name, default in defaults.items()
        if name not in NOT_SETTINGS and not OF_TRAINING.search(name) and settings.get(name) != default
    }


def pretrained_size(part: str, config: Any, sizes: Mapping[str, str], how: str, dim: int) -> None:
    """Refuse a pretrained projection of a family that is not in `sizes` (its setting), or of another size."""
    own = sizes.get(config.model_type)
    if own is None:
        raise UserError(
            f"{part}.projection: expected linear for a {config.model_type} with {how}, found pretrained; only CLIP and "
            "SigLIP have their own, behind their global vector or pooler"
        )
    if (size := getattr(config, own)) != dim:
        raise UserError(f"{part}.dim: expected {size}, the size of the pretrained projection, found {dim}")


def longest_sentence(model: PreTrainedModel) -> int:
    """Tokens that a model takes, special tokens included: its positions, in RoBERTa without those of padding."""
    # Some have no positions, and no limit.
    positions = int(getattr(model.config, "max_position_embeddings", None) or 2**31)
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            positions -= part.padding_idx + 1
    return positions


def load_library_tokenizer(
    folder: Path, raw: Mapping[str, Any], notes: list[str] | None = None
) -> PreTrainedTokenizerFast:
    """tokenizer.json with the special tokens of transformers' own class, which must split texts alike.

    Without that file, the tokenizer of that class, which for a BERT is its own whatever code the folder names.
    `raw`: content of its config.json; `notes`: as in `one_tokenizer`.
    """
    if not any(any(folder.glob(name)) for name in _VOCABULARIES):  # transformers would build an empty one
        raise ModelFolderError(
            f"{folder}: no tokenizer: none of {', '.join(_VOCABULARIES)} is there; copy the tokenizer's files"
        )
    config = library_config(raw, str(folder / CONFIG_FILE))
    is_bert = config.model_type == "bert"
    try:
        with silent():
            if is_bert:
                own: Any = BertTokenizer.from_pretrained(folder, local_files_only=True)
            else:
                own = AutoTokenizer.from_pretrained(
                    folder, config=config, local_files_only=True, trust_remote_code=False
                )
        backend = _backend(own, folder / TOKENIZER_FILE)
    except Exception as error:  # a tokenizer's files are read in many ways
        _, files = named_class(folder, raw)
        remedy = f"give a folder with {TOKENIZER_FILE}, which save_pretrained of its AutoTokenizer writes"
        if files and (folder / TOKENIZER_FILE).is_file():
            remedy = (
                f"copy its files again, or take tokenizer_class out of {files} to read {TOKENIZER_FILE} alone"
            )
        if any(folder.glob("*.model")) and not (is_sentencepiece_available() and is_protobuf_available()):
            remedy = needs_extra("it", "sentencepiece, and protobuf", "models")
        reason = " ".join(str(error).split())[:300]
        raise ModelFolderError(f"{folder}: the tokenizer cannot be read ({reason}); {remedy}") from error
    if type(own).__name__ != _SIGLIP:
        backend = one_tokenizer(backend, folder, raw, notes, None if is_bert else own)
    known, rows = backend.get_vocab(), config.get_text_config().vocab_size
    n_tokens = 1 + max(known.values())
    share = _EMBEDDING_ROWS_SHARE if rows % 64 else _ROUND_ROWS_SHARE
    problem = ""
    if not 0 <= rows - n_tokens < max(_EMBEDDING_ROWS_MULTIPLE, share * rows):
        problem = f"{n_tokens} tokens, but {rows} embedding rows (vocab_size)"
    elif is_bert and config.pad_token_id not in (None, own.pad_token_id):
        problem = f"{own.pad_token} has id {own.pad_token_id}, config.json says {config.pad_token_id}"
    if problem:
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: {problem}; take both from the same model"
        )
    # Others would get new numbers, for which there are no weights.
    special = {name: token for name, token in own.special_tokens_map.items() if str(token) in known}
    settings = ("truncation_side", "padding_side", "model_input_names")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **special, **{name: getattr(own, name) for name in settings}
    )


def _backend(own: Any, file: Path) -> Tokenizer:
    """The tokenizer of a file, or behind one of transformers; SigLIP's SentencePiece model converted to the same."""
    if type(own).__name__ != _SIGLIP:
        return Tokenizer.from_file(str(file)) if file.is_file() else own.backend_tokenizer
    from transformers.convert_slow_tokenizer import SpmConverter

    converted = SpmConverter(own).converted()
    # `canonicalize_text` of transformers' SiglipTokenizer.
    before = [normalizers.Replace("\u2581", " "), *[normalizers.Lowercase()] * own.do_lower_case]
    before += [normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), "")]
    before += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    converted.normalizer = normalizers.Sequence([*before, converted.normalizer])
    converted.post_processor = processors.TemplateProcessing(
        single=f"$A {own.eos_token}", special_tokens=[(own.eos_token, own.eos_token_id)]
    )
    return converted
