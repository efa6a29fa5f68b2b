"""Language models and tokenizers of model folders of any family of transformers, exactly and without remote code.

Where tokenizer.json and the class that a folder names split texts differently, that is said.
"""

from __future__ import annotations

import json
import re
import string
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, normalizers, processors
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import modeling_auto
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from medclip_dcl.common.errors import needs_extra
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import ModelFolderError, load_library_model, read_folder_json, silent
from medclip_dcl.networks.library_folder import library_config, unknown_family

# Families -> names of their classes, masked and causal.
_CLASSES = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_REMEDY = (
    "give a folder with the language model's head, as its architectures in config.json should say (DeBERTa's published "
    'weights have theirs under "legacy": false), or train one: --config language_model'
)

Around = tuple[Sequence[int], Sequence[int]]

TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_TRIED = (
    "heart",
    "No Pleural EFFUSION.",
    "\u0152d\u00e8me aigu \u00e0 droite; na\u00efve caf\u00e9, \u00c4rzte",
    "  two  blanks\tand\na line ",
    '(?) 3-4 mm/5.6 cm: "q" don\'t \u2014 \u201cx\u201d...',
    "\u4e2d\u6587 \ufb01 \u00bd 12345 \u00b5g",
)
"""Texts with capitals, accents, blanks, punctuation, digits and other scripts."""
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor")
_LONGEST = 120
_SIGLIP = "SiglipTokenizer"
_VOCABULARIES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "*.model")
# A surplus of embedding rows over tokens below this share counts as rounding up, too (choice); below the other, if the
# rows are a multiple of 64, as Phi-2's 51,200 for 50,295 tokens.
_EMBEDDING_ROWS_SHARE, _ROUND_ROWS_SHARE = 0.01, 0.05
_EMBEDDING_ROWS_MULTIPLE = 128


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


def special_tokens_around(tokenizer: PreTrainedTokenizerFast) -> Around:
    """Ids that the tokenizer puts before and after the tokens of a text, such as [CLS] and [SEP]."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoding = backend.encode("a")
    own = [place for place, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def one_tokenizer(
    backend: Tokenizer, folder: Path, raw: Mapping[str, Any], notes: list[str] | None = None, own: Any = None
) -> Tokenizer:
    """The tokenizer of a folder's files if the class that the folder names splits texts alike.

    A folder that names no class, or remote code, has one statement alone. `raw`: content of its config.json.

    Where they differ, an error says so; with `notes`, of a model that transformers alone has trained, the tokenizer of
    the class is taken, and the notes say so. `own`: what `AutoTokenizer` makes of the folder; None: it is read here.
    """
    name, files = named_class(folder, raw)
    if not name:
        return backend
    reason = "which is written in Python"
    if own is None:
        try:
            with silent():
                own = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a tokenizer's files are read in many ways
            reason = f"which cannot be read here ({' '.join(str(error).split())[:_LONGEST]})"
    other = getattr(own, "backend_tokenizer", None)
    if not isinstance(other, Tokenizer):
        text = f"its tokenizer's files are read without {name}, {reason}: compare some texts with it"
        warnings.warn(f"{folder}: {text}", stacklevel=2) if notes is None else notes.append(text)
        return backend
    for tokenizer in (backend, other):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    if all(backend.encode(text).ids == other.encode(text).ids for text in _TRIED):
        return backend
    of_files, of_class = ({x: json.loads(y.to_str())[x] for x in _PARTS} for y in (backend, other))
    here, there = _difference(of_files, of_class)
    if notes is not None:
        notes.append(f"texts are split as by transformers' {name}, with {there}; {TOKENIZER_FILE} has {here}")
        return other
    raise ModelFolderError(
        f"{folder}: expected files that state one tokenizer, found {here} in {TOKENIZER_FILE} and {there} in {name} "
        f"of {files}; save the tokenizer of its class into the folder "
        "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or, where the model was trained with "
        f"{TOKENIZER_FILE}, take tokenizer_class out of {files}"
    )


def named_class(folder: Path, raw: Mapping[str, Any]) -> tuple[str, str]:
    """The class of transformers that a folder names for its tokenizer, and the files that do.

    Empty where none does, or where they name remote code.
    """
    found, files = "", list[str]()
    own = read_folder_json(folder / _SETTINGS_FILE) if (folder / _SETTINGS_FILE).is_file() else {}
    for file, settings in ((CONFIG_FILE, raw), (_SETTINGS_FILE, own)):
        code = settings.get("auto_map") or ()
        if code and (file == _SETTINGS_FILE or "AutoTokenizer" in code):
            return "", ""
        if name := settings.get("tokenizer_class"):
            found, files = name, [*files, file]
    return found, " and ".join(files)


def _difference(one: Any, two: Any, name: str = "") -> tuple[str, str]:
    """The first part in which two contents of tokenizer.json differ."""
    if isinstance(one, dict) and isinstance(two, dict) and one.get("type") == two.get("type"):
        pairs = ((one, two), (two, one))
        one, two = ({k: x for k, x in a.items() if k not in b or x != b[k]} for a, b in pairs)
        if one and one.keys() == two.keys():
            key = next(iter(one))
            return _difference(one[key], two[key], f"{name}.{key}".strip("."))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        place = next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), 0)
        return _difference(one[place], two[place], f"{name}.{place}")
    here, there = (f"{name} {json.dumps(x, ensure_ascii=False)[:_LONGEST]}" for x in (one, two))
    return here, there
