"""Weights on disk: state dicts, training checkpoints and exported folders, read as data without running their code."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import parse_json, write_bytes
from medclip_dcl.common.find_model import CONFIG_FILE, WEIGHTS_FILE
from medclip_dcl.common.formats import CHECKPOINT, NETWORK, VERSION_KEY

LORA_A, _LORA_B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
"""Ends of the names that peft gives the two matrices of an adapter; its layer's own weights are in base_layer."""

_SAFETENSORS = ".safetensors"
# Without float8, which is quantised: its numbers have a scale elsewhere.
_FLOATS = ("F16", "BF16", "F32", "F64", torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MODULE = "network."
WRAPPER = "module."
"""Before all names of weights that a DataParallel saved."""
# Settings of an architecture by what they make: layers, and sides of tensors.
_LAYERS = re.compile("num_hidden_layers|num_layers|n_layers?|encoder_layers|layers|depths?")
_SIDES = re.compile(
    "(type_)?vocab_size|hidden_sizes?|intermediate_size|embedding_size|width|embed_dim|dim|hidden_dim|ffn_dim|"
    r"d_model|n_embd|\w+_ratio"
)
_POSITIONS = re.compile(r"position_embeddings?\.weight$")
_OF_IMAGES = re.compile("vision|image_encoder")
KINDS = IMAGE_TEXT, CLASSIFIER, UNIMODAL, SENTENCES = "image-text", "classifier", "unimodal", "sentences"
"""Kinds of models whose networks describe themselves."""
_SOURCES = ("pretrained", "weights")
"""Arguments of parts that name weights elsewhere."""
# Names in an error; a wrong architecture differs in hundreds.
_MAX_NAMES = 20


@dataclass(frozen=True)
class SavedModel:
    """A training checkpoint, an exported folder, or a file with a state dict alone.

    Attributes:
        path: of the file or folder.
        network: configuration of its network; empty where the file has none.
        checkpoint: content of a training checkpoint in today's format; empty for the others.
    """

    path: Path
    network: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """All tensors, under the names in the file; a checkpoint's adapters are merged."""
        if self.checkpoint:
            state = as_state_dict(self.checkpoint.get("state_dict"), self.path)
            lora = self.checkpoint.get("lora")
            return state if lora is None else _merged(state, lora, self.path)
        return read_state_dict(self._file)

    @property
    def _file(self) -> Path:
        return self.path / WEIGHTS_FILE if self.path.is_dir() else self.path

    def checked(self) -> SavedModel:
        """The model, unless its description names weights elsewhere or is larger than its own."""
        # The arguments of a user's own class may mean anything.
        own = {
            part: x["init_args"]
            for part, x in self.network.items()
            if isinstance(x, Mapping) and isinstance(x.get("init_args"), Mapping)
            if _is_own(str(x.get("class_path")))
        }
        for part, arguments in own.items():
            if given := {name: arguments[name] for name in _SOURCES if arguments.get(name) is not None}:
                raise UserError(
                    f"{self.path}: {part}.init_args: expected no {' or '.join(_SOURCES)}, as a saved model holds its "
                    f"own, found {given}; do not use this file"
                )
        if own:
            weights = self.checkpoint.get("state_dict") if self.checkpoint else self._file
            check_sizes(own, shapes_of(weights), self.path)
        return self

    @property
    def prefix(self) -> str:
        """Prefix of the network's tensors: a LightningModule holds it as ``network``."""
        return _MODULE if any(name.startswith(_MODULE) for name in self.state) else ""

    def tensors(self, part: str = "") -> dict[str, Tensor]:
        """Tensors of the network, or of its part of that name, under their own names."""
        start = f"{self.prefix}{part}." if part else self.prefix
        return {
            name.removeprefix(start): value for name, value in self.state.items() if name.startswith(start)
        }

    @property
    def progress(self) -> dict[str, int]:
        """Epoch, counted from 1, and optimiser steps of a training checkpoint (0, 0: untrained); else empty."""
        if "loops" not in self.checkpoint:
            return {}
        epochs = self.checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"]
        return {"epoch": epochs, "step": self.checkpoint["global_step"]}

    @property
    def kind(self) -> str:
        """Kind of the model: one of `KINDS`, "language model", or "" where the file does not say."""
        return "language model" if "language_model" in self.checkpoint else self.network.get("kind", "")

    def require_network(self, *kinds: str) -> dict[str, Any]:
        """The configuration of the network, which is of one of these kinds (none: of any)."""
        if self.kind not in (kinds := kinds or KINDS):
            advice = {
                "language model": "; score, embed and similar take it as --model, and a text encoder as pretrained",
                "": "; a ResNet's state dict is for image_encoder.init_args.weights",
            }.get(self.kind, "")
            raise UserError(
                f"{self.path}: expected a model of kind {' or '.join(kinds)}, found {self.kind or 'none'}{advice}"
            )
        return self.network

    def require_checkpoint(self) -> dict[str, Any]:
        """The content of a training checkpoint that describes its network."""
        self.require_network()
        if not self.checkpoint:
            raise UserError(f"{self.path} is not a checkpoint of training; give a .ckpt file of a run")
        return self.checkpoint


def read_model(path: str | Path, map_location: Any = "cpu") -> SavedModel:
    """Read a checkpoint of `fit`, a folder of `save_pretrained`, or a state dict (.pth or .safetensors)."""
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        return SavedModel(path, _read_exported_config(path)).checked()
    if not path.is_file():
        raise MissingFileError(f"no file or folder {path}; give a checkpoint or an exported folder")
    content = {} if path.suffix == _SAFETENSORS else read_torch_file(path, map_location)
    if not (isinstance(content, dict) and {"state_dict", "network"} & content.keys()):
        return SavedModel(path)
    if VERSION_KEY not in content:  # of another program
        return SavedModel(path, {}, content)
    CHECKPOINT.check(content, str(path))
    network = content.get("network")
    return SavedModel(path, network if isinstance(network, dict) else {}, content).checked()


def _is_own(class_path: str) -> bool:
    """True for a class of this program, also under a name that another module gives it."""
    module, _, name = class_path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    return "medclip_dcl" in (x.split(".")[0] for x in (module, getattr(kind, "__module__", "")))


def check_sizes(
    settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str | Path
) -> None:
    """Refuse an architecture with more layers than its file has tensors, or a side longer than all of theirs.

    Settings that make no tensor, such as the size of images, are not looked at; without any tensors nothing is.
    """
    side = max((max(shape, default=0) for shape in shapes.values()), default=0)
    # Learnt positions have a tensor of that name; rotary and relative ones do not.
    has_positions = any(_POSITIONS.search(x) and not _OF_IMAGES.search(x) for x in shapes)
    for name, value in settings.items() if shapes else ():
        if isinstance(value, Mapping):
            check_sizes(value, shapes, source)
        values = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, (int, float))]
        is_side = _SIDES.fullmatch(str(name)) or (has_positions and name == "max_position_embeddings")
        if values and _LAYERS.fullmatch(str(name)) and not sum(values) <= len(shapes):
            limit, found = f"{len(shapes):,}, the number of tensors in its weights", sum(values)
        elif values and is_side and not max(values) <= side:
            limit, found = f"{side:,}, the longest side in its weights", max(values)
        else:
            continue
        raise UserError(f"{source}: {name}: expected at most {limit}, found {found:,}; copy both again")


def shapes_of(weights: Any, floats: bool = True) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors (or of those that are not floats) of a state dict or file; none of others."""
    if isinstance(weights, Path) and weights.suffix == _SAFETENSORS:
        with suppress(SafetensorError, OSError), safe_open(weights, framework="pt") as stream:
            parts = [(name, stream.get_slice(name)) for name in stream.keys()]  # noqa: SIM118
            return {name: tuple(x.get_shape()) for name, x in parts if floats or x.get_dtype() not in _FLOATS}
    elif isinstance(weights, Path):
        with suppress(UserError):  # named where its tensors are read
            return shapes_of(read_torch_file(weights), floats)
    entries = weights.items() if isinstance(weights, Mapping) else ()
    tensors = ((name, x) for name, x in entries if isinstance(x, Tensor))
    return {name: tuple(x.shape) for name, x in tensors if floats or x.dtype not in _FLOATS}


def require_kind(network: Mapping[str, Any], kind: str) -> None:
    """Refuse the description of a network of another version or kind."""
    NETWORK.check(network, "this model")
    if (found := network.get("kind")) != kind:
        raise UserError(
            f"this model: expected kind {kind}, found {found}; load it with the class of its own kind"
        )


def with_adapters_merged(state: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """A state dict with W + alpha / rank * B A instead of each layer's W, B and A; others stay as they are.

    Bitwise equal on every machine, so that merged weights have one fingerprint: products of matrices are not.
    """
    merged = dict(state)
    for layer in (name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)):
        a, b = merged.pop(f"{layer}{LORA_A}"), merged.pop(f"{layer}{_LORA_B}")
        weight = f"{layer}{_BASE}weight"
        change = torch.zeros_like(merged[weight])
        for row, column in zip(a, b.T, strict=True):
            change += column[:, None] * row
        merged[weight] = merged[weight] + alpha / len(a) * change
    return {name.replace(_BASE, "."): value for name, value in merged.items()}


def _merged(state: Mapping[str, Tensor], lora: Any, source: Path) -> dict[str, Tensor]:
    """`with_adapters_merged` of a checkpoint, whose entries may be damaged."""
    layers = {name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)}
    based = {name.split(_BASE)[0] for name in state if _BASE in name}
    try:
        alpha = float(lora["alpha"])
        shapes = [[state[f"{x}{end}"].shape for end in (LORA_A, _LORA_B, f"{_BASE}weight")] for x in layers]
        is_whole = all(a[0] > 0 and (a[0], b[0], a[1]) == (b[1], *base) for a, b, base in shapes)
    except (IndexError, KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole or not layers or layers != based or not math.isfinite(alpha):
        raise UserError(f"{source}: its LoRA adapters are incomplete or damaged; give an earlier checkpoint")
    return with_adapters_merged(state, alpha)


def compare_state_dicts(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Names of the tensors that are missing, unexpected, of another shape or quantised; empty where `found` fits."""
    both = [(name, value, found[name]) for name, value in expected.items() if name in found]
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} {tuple(b.shape)} instead of {tuple(a.shape)}"
            for name, a, b in both
            if a.shape != b.shape
        ],
        "quantised (give the original weights)": [
            f"{name} {b.dtype}" for name, a, b in both if a.is_floating_point() and b.dtype not in _FLOATS
        ],
    }
    return ", ".join(f"{problem} {some_of(names)}" for problem, names in problems.items() if names)


def load_exactly(module: nn.Module, state: Mapping[str, Tensor], source: str | Path) -> None:
    """Load a state dict in which no tensor is missing, unexpected, of another shape, quantised, NaN or infinite."""
    if problems := compare_state_dicts(module.state_dict(), state):
        raise UserError(f"{source}: weights do not fit the network; {problems}")
    check_numbers(state, source)
    module.load_state_dict(state)


def check_numbers(state: Mapping[str, Tensor], source: str | Path) -> None:
    """Refuse weights that are NaN or infinite, by name."""
    if broken := [name for name, value in state.items() if not value.isfinite().all()]:
        raise UserError(
            f"{source}: weights are NaN or infinite in {some_of(broken)}; give an earlier checkpoint"
        )


def some_of(names: list[str]) -> str:
    """The first names, and the number of others."""
    rest = len(names) - _MAX_NAMES
    return f"{names[:_MAX_NAMES]} and {rest} more" if rest > 0 else str(names)


def read_torch_file(file: str | Path, map_location: Any = "cpu") -> Any:
    """Content of a file of `torch.save`, tensors and plain values only."""
    file = Path(file)
    if not file.is_file():
        raise MissingFileError(f"no file {file}")
    try:
        # Memory-mapped, so that unused parts, such as the optimizer's state, are not read.
        mapped = is_zipfile(file) and map_location == "cpu"
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mapped)
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    # The unpickler fails on other bytes with many exceptions, OSError (EINVAL) among them.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnpicklingError):
            # Torch's own message advises unsafe loading.
            reason = "it was not written by torch.save, or holds more than tensors and plain values"
        elif "TorchScript" in reason:  # likewise
            reason = "it is a TorchScript archive, which is a program"
        raise UserError(
            f"{file} is not a checkpoint that can be loaded safely, or it is truncated: {reason}; copy the file "
            "again, or give one of tensors and plain values (files that hold Python objects are not opened)"
        ) from error


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """Names and tensors of a .safetensors file, or of a state dict saved by `torch.save`."""
    file = Path(file)
    if not file.is_file():
        raise MissingFileError(f"no file {file}")
    if file.suffix != _SAFETENSORS:
        return as_state_dict(read_torch_file(file), file)
    try:
        return _without_wrapper(load_file(file))
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is not a safetensors file, or it is truncated: {error}; copy it again (with `git "
            "lfs pull` from a repository)"
        ) from error


def write_safetensors(state: dict[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, atomically."""
    write_bytes(safetensors_bytes(state), file)


def safetensors_bytes(state: dict[str, Tensor]) -> bytes:
    """Content of a file of `write_safetensors`."""
    state = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    return save(state, metadata={"format": "pt"})


def as_state_dict(content: Any, file: str | Path) -> dict[str, Tensor]:
    """`content` if it maps names to tensors."""
    if (
        isinstance(content, dict)
        and content
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    ):
        return _without_wrapper(content)
    found = sorted(map(str, content))[:8] if isinstance(content, dict) else type(content).__name__
    raise UserError(f"{file} is not a state dict (names and tensors): it holds {found}")


def _without_wrapper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the prefix that DataParallel gives all names."""
    is_wrapped = all(name.startswith(WRAPPER) for name in state)
    return {name.removeprefix(WRAPPER) if is_wrapped else name: value for name, value in state.items()}


def _read_exported_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise MissingFileError(
                f"{folder} is not an exported medclip_dcl model: {name} is missing; give a run folder or an exported "
                "folder, copy all of its files, or write it again: medclip-dcl export RUN --output FOLDER"
            )
    file = folder / CONFIG_FILE
    config = None
    with suppress(ValueError):  # truncated
        config = parse_json(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "image_encoder" not in config:
        raise UserError(
            f"{file} does not describe an image-text network; give a run folder, a .ckpt file, or a folder of "
            "medclip-dcl export RUN --output FOLDER; if it is one, copy it again"
        )
    NETWORK.check(config, str(file))
    return config
