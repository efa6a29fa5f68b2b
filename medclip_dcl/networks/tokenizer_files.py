"""Tokenizers of model folders, whose tokenizer.json and tokenizer_config.json state one thing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

from medclip_dcl.common.weight_files import CONFIG_FILE
from medclip_dcl.networks.bert_folder import (
    EMBEDDING_ROWS_MULTIPLE,
    ModelFolderError,
    load_bert_config,
    read_folder_json,
    silent,
)

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
_SEQUENCES = ("normalizers", "pretokenizers", "processors")
_TABLES = ("vocab", "merges")
_LONGEST = 120


def load_tokenizer(folder: str | Path) -> BertTokenizer:
    """Load the folder's WordPiece tokenizer from tokenizer.json or vocab.txt, and check that it fits config.json."""
    folder = Path(folder)
    settings = _normalizer(folder)
    try:
        with silent():
            tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # a tokenizer's files are read in many ways
        raise ModelFolderError(
            f"{folder}: the tokenizer cannot be read ({error!r}); copy its files again"
        ) from error
    config = load_bert_config(folder)
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    special = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token]
    missing = [token for token in (*special, tokenizer.mask_token) if token not in vocabulary]
    n_tokens = 1 + max(tokenizer.get_vocab().values())
    problem = ""
    if not any((folder / name).is_file() for name in (TOKENIZER_FILE, "vocab.txt")):
        problem = f"neither {TOKENIZER_FILE} nor vocab.txt is there"
    elif missing:
        problem = f"no {', '.join(missing)} in its {len(vocabulary)} tokens"
    elif not 0 <= config.vocab_size - n_tokens < EMBEDDING_ROWS_MULTIPLE:
        problem = f"{n_tokens} tokens, but {config.vocab_size} embedding rows (vocab_size)"
    elif config.pad_token_id not in (None, tokenizer.pad_token_id):
        problem = f"{special[0]} has id {tokenizer.pad_token_id}, config.json says {config.pad_token_id}"
    if problem:
        raise ModelFolderError(
            f"{folder}: tokenizer does not fit the weights: {problem}; take both from the same model"
        )
    one_tokenizer(tokenizer.backend_tokenizer, folder)
    return tokenizer


def one_tokenizer(
    backend: Tokenizer, folder: Path, notes: list[str] | None = None, own: Any = None
) -> Tokenizer:
    """The tokenizer of a folder's files if the class that the folder names splits texts alike.

    A folder that names no class, or remote code, has one statement alone.

    Args:
        backend: read from the folder's files.
        folder: of a model.
        notes: for a model that transformers alone has trained: the tokenizer of its class is then taken where they
            differ, and the notes say so.
        own: what `AutoTokenizer` makes of the folder; None: it is read here.

    Raises:
        ModelFolderError: they differ, and there are no notes.
    """
    if not (name := _named_class(folder)):
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
        text = (
            f"{folder}: its tokenizer's files are read without {name}, {reason}: compare some texts with it"
        )
        warnings.warn(text, stacklevel=2) if notes is None else notes.append(text)
        return backend
    for tokenizer in (backend, other):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    if all(backend.encode(text).ids == other.encode(text).ids for text in _TRIED):
        return backend
    here, there = _differences(backend, other)
    if notes is not None:
        notes.append(f"texts are split as by transformers' {name}, with {there}; {TOKENIZER_FILE} has {here}")
        return other
    raise ModelFolderError(
        f"{folder}: expected files that state one tokenizer, found {here} in {TOKENIZER_FILE} and {there} in {name} "
        f"of {_SETTINGS_FILE}; save the tokenizer of its class into the folder "
        "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or, where the model was trained with "
        f"{TOKENIZER_FILE}, take tokenizer_class out of {_SETTINGS_FILE}"
    )


def _normalizer(folder: Path) -> dict[str, Any]:
    """Settings of tokenizer.json, of which transformers' class reads the vocabulary alone."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return {}
    raw = read_folder_json(file)
    kinds = tuple((raw.get(part) or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer"))
    expected = ("WordPiece", "BertNormalizer", "BertPreTokenizer")
    if kinds != expected:
        raise ModelFolderError(f"{file}: expected BERT's tokenizer {expected}, found {kinds}")
    names = {"lowercase": "do_lower_case", "handle_chinese_chars": "tokenize_chinese_chars"}
    found = raw["normalizer"]
    return {names.get(name, name): found[name] for name in (*names, "strip_accents") if name in found}


def _named_class(folder: Path) -> str:
    """The class of transformers that a folder names for its tokenizer; "" for none, and for remote code."""
    found = ""
    for file in (folder / CONFIG_FILE, folder / _SETTINGS_FILE):
        settings = read_folder_json(file) if file.is_file() else {}
        code = settings.get("auto_map") or ()
        if code and (file.name == _SETTINGS_FILE or "AutoTokenizer" in code):
            return ""
        found = settings.get("tokenizer_class") or found
    return found


def _differences(backend: Tokenizer, other: Tokenizer) -> tuple[str, str]:
    """The settings of each in which the first part differs that does."""
    parts = [json.loads(x.to_str()) for x in (backend, other)]
    for part in _PARTS:
        one, two = (_steps(found.get(part)) for found in parts)
        one, two = [x for x in one if x not in two], [x for x in two if x not in one]
        if len(one) == len(two) == 1 and one[0].get("type") == two[0].get("type"):
            pairs = {name: (one[0].get(name), two[0].get(name)) for name in {**one[0], **two[0]}}
            one, two = (
                [{name: pair[i] for name, pair in pairs.items() if pair[0] != pair[1]}] for i in (0, 1)
            )
        if one or two:
            return _shown(part, one), _shown(part, two)
    return "its steps", "them in another order"


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, those within sequences one by one."""
    if part is None or isinstance(part, list):
        return part or []
    inner = next((x for name, x in part.items() if name in _SEQUENCES), None)
    return [part] if inner is None else [step for x in inner for step in _steps(x)]


def _shown(part: str, steps: list[dict[str, Any]]) -> str:
    """A line of a part's steps, without their tables."""
    plain = [{k: x if k not in _TABLES else f"{len(x)} entries" for k, x in step.items()} for step in steps]
    return (
        f"{part} {', '.join(json.dumps(x, ensure_ascii=False) for x in plain)[:_LONGEST] or 'without more'}"
    )
