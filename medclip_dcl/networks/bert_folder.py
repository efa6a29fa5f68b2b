"""Read and write folders of transformers exactly and without remote code."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Encoding
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import parse_json
from medclip_dcl.common.find_model import LANGUAGE_MODEL, download, is_exported
from medclip_dcl.common.weight_files import (
    WRAPPER,
    check_numbers,
    check_sizes,
    read_state_dict,
    shapes_of,
    some_of,
)

Model = TypeVar("Model", bound=PreTrainedModel)

# Downloaded from a repository, and the weights in PyTorch's format only where there are no safetensors.
_FILES = ("*.json", "vocab.txt", "merges.txt", "*.model", "model*.safetensors")
_TORCH_FILES = ("pytorch_model*.bin",)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Parts of names of weights that files hold and models leave out.
_NEEDLESS = ("pooler.", "position_ids", "token_type_ids", "cls.seq_relationship.", "mask_token")
_ADAPTER_FILE = "adapter_config.json"

NAMES_OF_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "use_kernels", "kernel_config")
"""Entries of a config.json by which transformers would download code and run it."""
NOT_SETTINGS = (
    *(*NAMES_OF_CODE, "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("id2label", "label2id", "problem_type"),
)
"""These, and entries on which no hidden state depends: names of classes, labels of a head, library versions."""
# Texts per call of the tokenizer, whose encodings are large.
_TOKENISED_AT_ONCE = 8192


class ModelFolderError(UserError):
    """A language model's folder is missing, broken or unsuitable; the message says what to do."""


def resolve_folder(name_or_path: str | Path) -> Path:
    """Return the folder of a library's model: itself, in the run of a language model, or a downloaded repository."""
    folder = Path(name_or_path).expanduser()
    if folder.is_file() or is_exported(folder):
        raise ModelFolderError(
            "a language model: expected a library's folder or repository, or the run of a language model, found a "
            f"model of this program, {folder}; a training starts from it by model.init_args.init_from"
        )
    if folder.is_dir():
        return folder / LANGUAGE_MODEL if (folder / LANGUAGE_MODEL).is_dir() else folder
    snapshot = download(str(name_or_path), _FILES)
    if not any(snapshot.glob("model*.safetensors")):
        snapshot = download(str(name_or_path), (*_FILES, *_TORCH_FILES))
    return snapshot


def word_pieces(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of each text, without [CLS] and [SEP]; a literal "[SEP]" or "[MASK]" in a text is text.

    In half the time of `tokenizer(...)`, which also computes offsets and masks.
    """
    return (encoding.ids for encoding in encodings(tokenizer, texts))


def encodings(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, has_words: bool = False
) -> Iterator[Encoding]:
    """`word_pieces` as encodings, with the word of each token if asked for, which takes longer."""
    backend = tokenizer.backend_tokenizer
    encode = backend.encode_batch if has_words else backend.encode_batch_fast
    for first in range(0, len(texts), _TOKENISED_AT_ONCE):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        some = list(texts[first : first + _TOKENISED_AT_ONCE])
        yield from encode(some, add_special_tokens=False)


def load_library_model(
    kind: type[Model], folder: Path, config: PreTrainedConfig, remedy: str, **options: Any
) -> Model:
    """Load exactly the tensors of a transformers model in float32, in train mode.

    It may be saved alone or as part of a larger model, in one file or several; heads of other tasks and the other
    tower may be left over.

    Args:
        kind: a class of transformers; `options` are its constructor's beside `config`.
        remedy: advice for weights that do not fit.
    """
    prefix = f"{kind.base_model_prefix}."

    @functools.cache
    def own() -> set[str]:
        with torch.device("meta"):
            outline = kind(config, **options)
        return {name for part in (outline, outline.base_model) for name, _ in part.named_children()}

    def is_needless(name: str) -> bool:
        """True for a weight of another head, or one that the model computes without."""
        return name.removeprefix(prefix).partition(".")[0] not in own() or any(x in name for x in _NEEDLESS)

    arguments, stored = dict(options), folder_shapes(folder)
    check_sizes(config.to_dict(), stored, folder)
    if config.model_type == "deberta-v2" and not config.legacy:
        config.tie_word_embeddings = False  # transformers 5.17 ties a weight that this head lacks
    if all(name.startswith(WRAPPER) for name in stored):
        arguments["key_mapping"] = {f"^{re.escape(WRAPPER)}": ""}
    try:
        with torch.random.fork_rng(devices=[]), silent():
            model, found = kind.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **arguments,
            )
    # Readers of both formats fail on other bytes with many exceptions.
    except Exception as error:
        # The first sentence: what follows is long, or advises unsafe loading.
        reason = re.split(r"\. |\n", str(error).strip(), maxsplit=1)[0] or type(error).__name__
        raise ModelFolderError(
            f"{folder}: the weights cannot be loaded ({reason}); copy the folder again (files that hold Python objects "
            "are not opened)"
        ) from error
    problems = {
        "missing": sorted(found["missing_keys"]),
        "unexpected": sorted(x for x in found["unexpected_keys"] if not is_needless(x)),
        "of another shape": [
            f"{name} {tuple(a)} instead of {tuple(b)}" for name, a, b in sorted(found["mismatched_keys"])
        ],
    }
    if listed := ", ".join(f"{problem} {some_of(names)}" for problem, names in problems.items() if names):
        raise ModelFolderError(f"{folder}: weights do not fit config.json: {listed}; {remedy}")
    ties = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if untied := [one for one, other in ties if model.get_parameter(one) is not model.get_parameter(other)]:
        raise ModelFolderError(
            f"{folder}: {', '.join(untied)} differs from the weights that config.json says it is tied to "
            "(tie_word_embeddings); copy the folder again"
        )
    check_numbers(model.state_dict(), folder)
    for parameter in model.parameters():
        # Until here it lies in the file, and would change with it.
        parameter.data = parameter.data.clone()
    return model.train()


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that transformers would read from a folder; none of those that are damaged."""
    files = _weight_files(folder)
    # Others may be masks or places, as GPT-2's attn.bias.
    if found := [name for file in files for name in shapes_of(file, floats=False) if name.endswith("weight")]:
        raise ModelFolderError(
            f"{folder}: expected floats, found quantised {some_of(found)}; give the original weights"
        )
    return {name: shape for file in files for name, shape in shapes_of(file).items()}


def folder_weights(folder: Path, names: Sequence[str] = _WEIGHTS) -> dict[str, Tensor]:
    """Weights of a folder, under the names in its files, which have the first of `names` that exists."""
    files = _weight_files(folder, names)
    if not files:
        raise ModelFolderError(
            f"{folder}: expected weights, {' or '.join(names)}, found none; copy them into it"
        )
    return {name: value for file in files for name, value in read_state_dict(file).items()}


def _weight_files(folder: Path, names: Sequence[str] = _WEIGHTS) -> list[Path]:
    """Files of weights in the first format that a folder has.

    Raises:
        ModelFolderError: its index names files elsewhere, or it holds an adapter of a model elsewhere.
    """
    if (folder / _ADAPTER_FILE).is_file():
        raise ModelFolderError(
            f"{folder}: expected the weights of a whole model, found an adapter ({_ADAPTER_FILE}); merge it into its "
            "model first: PeftModel.merge_and_unload().save_pretrained(FOLDER)"
        )
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            named = read_folder_json(index).get("weight_map")
            shards = sorted({*map(str, named.values())}) if isinstance(named, dict) else []
            if wrong := [x for x in shards if Path(x).name != x]:
                raise ModelFolderError(
                    f"{index}: expected names of files beside it, found {wrong[0]!r}; do not use it"
                )
            return [folder / x for x in shards]
    return []


def weights_fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits over the names, shapes and float32 values of the parameters and persistent buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        values = value.detach().to(device="cpu", dtype=torch.float32).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()[:16]


def model_fingerprint(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over the weights and over settings, plain values that they do not show."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(f"{weights_fingerprint(model)}{text}".encode()).hexdigest()[:16]


def save_language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    further_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a plain Hugging Face folder, atomically; an older language model of that name is replaced.

    It also loads with transformers' ``from_pretrained``. `further_files`: name -> content.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Fixed names, so that the next attempt removes the remains of a kill.
    temporary, replaced = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    with silent():
        model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    _drop_machine_settings(temporary / "tokenizer_config.json")
    for name, content in (further_files or {}).items():
        (temporary / name).write_bytes(content)
    there = [folder] if folder.is_file() else folder.glob("*")
    if others := {file.name for file in there} - {file.name for file in temporary.iterdir()}:
        shutil.rmtree(temporary)
        raise FileExistsError(f"{folder} also holds {min(others)}; move it away or choose another name")
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def read_folder_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file of a model folder."""
    if not file.is_file():
        raise ModelFolderError(f"{file.parent} is not a model folder: {file.name} is missing")
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found a {type(content).__name__}")
        return content
    except ValueError as error:
        raise ModelFolderError(f"{file}: not readable as JSON ({error}); copy the file again") from error


@contextmanager
def silent() -> Iterator[None]:
    """Without transformers' bars, and its tables of weights that are left out."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _drop_machine_settings(file: Path) -> None:
    settings = read_folder_json(file)
    for name in ("auto_map", "is_local", "local_files_only", "name_or_path", "tokenizer_file"):
        settings.pop(name, None)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
