"""Tokenizers of model folders, whose tokenizer.json and tokenizer_config.json state one thing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import ModelFolderError, read_folder_json, silent

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


def special_tokens_around(tokenizer: PreTrainedTokenizerFast) -> Around:
    """Ids that the tokenizer puts before and after the tokens of a text, such as [CLS] and [SEP]."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encoding = backend.encode("a")
    own = [place for place, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def one_tokenizer(
    backend: Tokenizer,
    folder: Path,
    raw: Mapping[str, Any],
    notes: list[str] | None = None,
    own: Any = None,
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
