"""Read and write BERT folders, such as CXR-BERT's, exactly and without remote code.

CXR-BERT (Boecking et al., ECCV 2022) is a plain BERT whose repositories carry their own Python code, which is never
run here: configuration, tokenizer and weights are read as data, and the file must hold exactly the model's tensors, but
for the exceptions listed by name below.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_exactly,
    read_state_dict,
    write_safetensors,
)

TORCH_FILE = "pytorch_model.bin"
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")

# Entries of config.json that are not settings of a BERT: names of remote code, classes and library versions.
_NOT_BERT_SETTINGS = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "projection_size",
    "torch_dtype",
    "transformers_version",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_MODEL_TYPES = ("bert", "cxr-bert")

_MLM_HEAD = "cls.predictions."
_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_DECODER_WEIGHT = f"{_MLM_HEAD}decoder.weight"
_DECODER_BIAS = f"{_MLM_HEAD}decoder.bias"
_HEAD_BIAS = f"{_MLM_HEAD}bias"

# Weights that a file may hold and the model does not need: buffers of older versions, the pooler, the
# next-sentence-prediction head, CXR-BERT-specialized's projection.
_IGNORED_WEIGHTS = (
    "bert.embeddings.position_ids",
    "bert.embeddings.token_type_ids",
    "bert.pooler.",
    "cls.seq_relationship.",
    "cls_projection_head.",
)
# Texts per call of the tokenizer, whose encodings are large.
_TOKENISED_AT_ONCE = 8192
# A surplus of embedding rows over tokens below this counts as rounding up.
_EMBEDDING_ROWS_MULTIPLE = 128


class ModelFolderError(UserError):
    """A language model's folder is missing, broken or unsuitable; the message says what to do."""


def resolve_folder(name_or_path: str | Path) -> Path:
    """Return a local folder, or the local copy of a Hugging Face repository, downloaded if needed.

    Only configuration, tokenizer and weights are downloaded, never code; the PyTorch file only where there are no
    safetensors.

    Raises:
        ModelFolderError: neither an existing folder nor a reachable repository.
    """
    from huggingface_hub import snapshot_download

    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    try:
        patterns = [CONFIG_FILE, *TOKENIZER_FILES]
        snapshot = Path(snapshot_download(str(name_or_path), allow_patterns=[*patterns, WEIGHTS_FILE]))
        if not (snapshot / WEIGHTS_FILE).is_file():
            snapshot = Path(snapshot_download(str(name_or_path), allow_patterns=[*patterns, TORCH_FILE]))
    except (OSError, ValueError) as error:
        # The hub's messages have many lines.
        reason = str(error).strip().splitlines()
        raise ModelFolderError(
            f"model {str(name_or_path)!r} is neither an existing folder (looked at {folder.absolute()}) nor a "
            "Hugging Face repository that could be downloaded "
            f"({reason[0] if reason else type(error).__name__}); give the path of a local copy, or check the "
            "spelling and the network"
        ) from error
    return snapshot


def load_bert_config(folder: str | Path) -> BertConfig:
    """Read BERT's configuration from the folder's config.json, without remote code.

    Raises:
        ModelFolderError: no config.json, or it does not describe a BERT encoder; names the wrong entries.
    """
    file = Path(folder) / CONFIG_FILE
    return bert_config(_read_json(file), str(file))


def bert_config(raw: Mapping[str, Any], source: str) -> BertConfig:
    """BERT's configuration from the content of a config.json; `source` names it in errors.

    Raises:
        ModelFolderError: it does not describe a BERT encoder.
    """
    found = raw.get("model_type", "bert")
    if found not in _MODEL_TYPES:
        raise ModelFolderError(
            f"{source}: model_type is {found!r}, expected one of {list(_MODEL_TYPES)}; give a BERT folder"
        )
    if missing := [name for name in _SIZES if name not in raw]:
        raise ModelFolderError(f"{source}: not a BERT configuration, missing {', '.join(missing)}")
    if wrong := [f"{name} = {raw[name]!r}" for name in _SIZES if type(raw[name]) is not int or raw[name] < 1]:
        raise ModelFolderError(f"{source}: expected positive integers, found {', '.join(wrong)}")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ModelFolderError(
            f"{source}: position_embedding_type {raw['position_embedding_type']!r}, expected 'absolute'"
        )
    if raw.get("is_decoder", False):
        raise ModelFolderError(f"{source}: is_decoder is true, expected an encoder")
    if raw["hidden_size"] % raw["num_attention_heads"]:
        raise ModelFolderError(
            f"{source}: hidden_size {raw['hidden_size']} is not a multiple of "
            f"num_attention_heads {raw['num_attention_heads']}"
        )
    return BertConfig(**{name: value for name, value in raw.items() if name not in _NOT_BERT_SETTINGS})


def load_tokenizer(folder: str | Path) -> BertTokenizer:
    """Load the folder's WordPiece tokenizer from tokenizer.json or vocab.txt, and check it against config.json.

    It is built from the vocabulary: the class named in tokenizer_config.json (CXR-BERT's is remote code) is ignored,
    its settings are used (lower case, accents, the names of the special tokens).

    Raises:
        ModelFolderError: no tokenizer.json, vocab.txt or config.json; not a BERT tokenizer; it does not fit the
            weights.
    """
    folder = Path(folder)
    config_file = folder / "tokenizer_config.json"
    settings = _read_json(config_file) if config_file.is_file() else {}
    vocabulary, normalizer = _read_vocabulary(folder)
    names = {
        f"{role}_token": _token_text(settings.get(f"{role}_token", f"[{role.upper()}]"))
        for role in ("pad", "unk", "cls", "sep", "mask")
    }
    _check_fit(folder, vocabulary, names)
    # tokenizer.json takes precedence: tokenizer_config.json may be incomplete.
    return BertTokenizer(
        vocab=vocabulary,
        do_lower_case=bool(normalizer.get("lowercase", settings.get("do_lower_case", True))),
        strip_accents=normalizer.get("strip_accents", settings.get("strip_accents")),
        tokenize_chinese_chars=bool(
            normalizer.get("handle_chinese_chars", settings.get("tokenize_chinese_chars", True))
        ),
        **names,
    )


def word_pieces(tokenizer: BertTokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of each text, without [CLS] and [SEP]; a literal "[SEP]" or "[MASK]" in a text is text.

    Same ids as `tokenizer(...)`, without offsets and masks, in half the time.
    """
    backend = tokenizer.backend_tokenizer
    for first in range(0, len(texts), _TOKENISED_AT_ONCE):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        some = list(texts[first : first + _TOKENISED_AT_ONCE])
        for encoding in backend.encode_batch_fast(some, add_special_tokens=False):
            yield encoding.ids


def load_bert(folder: str | Path) -> BertModel:
    """Load the folder's BERT encoder in float32, without pooler, in train mode (so that dropout is active).

    Accepts the weights of a `BertModel`, a `BertForMaskedLM`, a `BertForPreTraining`, and of both CXR-BERT releases.

    Raises:
        UserError: no config.json or no weights; a tensor is missing, unexpected or of another shape.
    """
    folder = Path(folder)
    config = load_bert_config(folder)
    state, file = _read_weights(folder)
    with torch.random.fork_rng(devices=[]):
        model = BertModel(config, add_pooling_layer=False)
    encoder = {
        key.removeprefix("bert."): value for key, value in state.items() if not key.startswith(_MLM_HEAD)
    }
    ignored = tuple(key.removeprefix("bert.") for key in _IGNORED_WEIGHTS)
    load_exactly(model, _without(encoder, ignored), file)
    return model.train()


def load_masked_language_model(folder: str | Path) -> BertForMaskedLM:
    """Load the folder's BERT with its masked-language-model head in float32, in train mode.

    Raises:
        UserError: no config.json, no weights or no such head; a tensor is missing, unexpected or of another shape; the
            configuration says that the decoder is tied to the word embeddings, but they differ.
    """
    folder = Path(folder)
    config = load_bert_config(folder)
    state, file = _read_weights(folder)
    with torch.random.fork_rng(devices=[]):
        model = BertForMaskedLM(config)
    if not any(key.startswith(_MLM_HEAD) for key in state):
        raise ModelFolderError(
            f"{file}: no masked-language-model head (missing {_HEAD_BIAS}, ...); use a folder with one, such as "
            "microsoft/BiomedVLP-CXR-BERT-general, or the export of "
            "`python -m medclip_dcl fit --config configs/language_model.yaml`"
        )
    _fill_tied(state, is_tied=bool(config.tie_word_embeddings), file=file)
    load_exactly(model, _without(state, _IGNORED_WEIGHTS), file)
    return model.train()


def load_part(folder: str | Path, prefix: str) -> dict[str, Tensor]:
    """Load the folder's weights whose names begin with `prefix`, which is removed.

    Raises:
        ModelFolderError: no weights, or none of that name.
    """
    state, file = _read_weights(Path(folder))
    part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if not part:
        raise ModelFolderError(f"{file}: no weights named {prefix}*; give a folder of a model that has them")
    return part


def weights_fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits over the names, shapes and float32 values of the parameters and persistent buffers.

    Independent of the folder, the file format, the data type of the stored values and the device.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        values = value.detach().to(device="cpu", dtype=torch.float32).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()[:16]


def settings_fingerprint(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over the weights and over settings, plain values that they do not show."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(f"{weights_fingerprint(model)}{text}".encode()).hexdigest()[:16]


def save_language_model(
    model: BertForMaskedLM | BertModel,
    tokenizer: BertTokenizer,
    folder: str | Path,
    further_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a plain Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    The folder is written under a temporary name and renamed; an older language model of that name is replaced. It also
    loads with ``from_pretrained`` of the model's class and of ``AutoTokenizer`` of transformers.

    Args:
        model: BERT, with or without its masked-language-model head.
        tokenizer: of the model.
        folder: to write.
        further_files: name -> content of other files of the folder.

    Raises:
        FileExistsError: the folder holds something other than a language model.
    """
    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file())
    ):
        raise FileExistsError(
            f"{folder} exists and is not a language model folder; move it away or choose another name"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Fixed names, so that the next attempt removes the remains of a kill.
    temporary, replaced = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(temporary)
    tied = (_DECODER_WEIGHT, _DECODER_BIAS) if config.tie_word_embeddings else ()
    state = {key: value.cpu().contiguous() for key, value in model.state_dict().items() if key not in tied}
    write_safetensors(state, temporary / WEIGHTS_FILE)
    tokenizer.save_pretrained(temporary)
    _drop_machine_settings(temporary / "tokenizer_config.json")
    for name, content in (further_files or {}).items():
        (temporary / name).write_bytes(content)
    if others := {file.name for file in folder.glob("*")} - {file.name for file in temporary.iterdir()}:
        shutil.rmtree(temporary)
        raise FileExistsError(f"{folder} also holds {min(others)}; move it away or choose another name")
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelFolderError(f"{file.parent} is not a model folder: {file.name} is missing")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{file}: not readable as JSON ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_text(token: str | Mapping[str, Any]) -> str:
    """A special token in tokenizer_config.json: a string or an object with `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _read_vocabulary(folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Tokens with their ids, and the normalizer's settings if there is a tokenizer.json."""
    file = folder / "tokenizer.json"
    if file.is_file():
        raw = _read_json(file)
        kinds = tuple((raw.get(part) or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer"))
        expected = ("WordPiece", "BertNormalizer", "BertPreTokenizer")
        if kinds != expected:
            raise ModelFolderError(f"{file}: expected BERT's tokenizer {expected}, found {kinds}")
        vocabulary = dict(raw["model"]["vocab"])
        vocabulary.update({token["content"]: token["id"] for token in raw.get("added_tokens", [])})
        return vocabulary, raw["normalizer"]
    file = folder / "vocab.txt"
    if not file.is_file():
        raise ModelFolderError(f"{folder} has no tokenizer: neither tokenizer.json nor vocab.txt is there")
    tokens = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return {token.rstrip("\r"): index for index, token in enumerate(tokens)}, {}


def _check_fit(folder: Path, vocabulary: Mapping[str, int], special: Mapping[str, str]) -> None:
    """Check the tokenizer against config.json; the weights are checked when they are loaded."""
    config = load_bert_config(folder)
    rows = int(config.vocab_size)
    complaint = f"{folder}: tokenizer does not fit the weights:"
    advice = "; take tokenizer and weights from the same model"
    if missing := [f"{token} ({role})" for role, token in special.items() if token not in vocabulary]:
        raise ModelFolderError(f"{complaint} no {', '.join(missing)} in its {len(vocabulary)} tokens{advice}")
    tokens = max(vocabulary.values()) + 1
    if not 0 <= rows - tokens < _EMBEDDING_ROWS_MULTIPLE:
        raise ModelFolderError(f"{complaint} {tokens} tokens, but {rows} embedding rows (vocab_size){advice}")
    pad = vocabulary[special["pad_token"]]
    if config.pad_token_id is not None and pad != config.pad_token_id:
        raise ModelFolderError(
            f"{complaint} {special['pad_token']} has id {pad}, config.json says {config.pad_token_id}{advice}"
        )


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """All tensors of the folder under the names of `BertForMaskedLM`, and their file."""
    files = [folder / name for name in (WEIGHTS_FILE, TORCH_FILE) if (folder / name).is_file()]
    if not files:
        raise ModelFolderError(f"{folder} has no weights: neither {WEIGHTS_FILE} nor {TORCH_FILE} is there")
    state = read_state_dict(files[0])
    is_bare = not any(key.startswith("bert.") for key in state)  # saved by `BertModel`
    renamed = {}
    for key, value in state.items():
        # BERT's first releases named them gamma and beta.
        key = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", key)
        key = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", key)
        is_renamed = is_bare and key.startswith(("embeddings.", "encoder.", "pooler."))
        renamed[f"bert.{key}" if is_renamed else key] = value
    return renamed, files[0]


def _fill_tied(state: dict[str, Tensor], is_tied: bool, file: Path) -> None:
    """Add the second name of tied weights that are stored once; refuse tied weights that differ."""
    pairs = [(_HEAD_BIAS, _DECODER_BIAS)]
    if is_tied:
        pairs.append((_WORD_EMBEDDINGS, _DECODER_WEIGHT))
    for first, second in pairs:
        if is_tied and first in state and second in state and not torch.equal(state[first], state[second]):
            raise ModelFolderError(
                f"{file}: {second} differs from {first}, but config.json says that they are tied"
            )
        for one, other in ((first, second), (second, first)):
            # Missing embeddings are an error, even if the decoder is there.
            if one in state and other not in state and other != _WORD_EMBEDDINGS:
                state[other] = state[one]


def _without(state: Mapping[str, Tensor], ignored: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names do not begin with any of `ignored`."""
    return {key: value for key, value in state.items() if not key.startswith(ignored)}


def _drop_machine_settings(file: Path) -> None:
    """Remove settings about remote code and this machine."""
    settings = _read_json(file)
    for name in ("auto_map", "is_local", "local_files_only", "name_or_path", "tokenizer_file"):
        settings.pop(name, None)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
