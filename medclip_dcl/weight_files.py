"""Files of weights, read as plain data: no code of theirs runs, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medclip_dcl.errors import MissingFileError, UserError
from medclip_dcl.formats import CHECKPOINT, NETWORK

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_SAFETENSORS = ".safetensors"


def read_torch_file(file: str | Path, map_location: Any = "cpu") -> Any:
    """What `torch.save` wrote, of tensors and plain values only.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, not of `torch.save`, or with Python objects in it.
    """
    file = Path(file)
    if not file.is_file():
        raise MissingFileError(f"no file {file}")
    try:
        # Mapped: of a checkpoint with its optimiser's state only what is used is read.
        mapped = is_zipfile(file) and map_location == "cpu"
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mapped)
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    # Bytes that are no pickle end the unpickler in many ways, OSError (EINVAL) is one.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnpicklingError):
            # Torch's own words advise to load it unsafely.
            reason = "it was not written by torch.save, or holds more than tensors and plain values"
        raise UserError(
            f"{file} is no checkpoint that can be loaded safely, or it is truncated: {reason}; copy the file again, "
            "or give one of tensors and plain values (files that hold Python objects are not opened)"
        ) from error


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """Names and tensors of a .safetensors file, or of a state dict that `torch.save` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, or anything but names and tensors.
    """
    file = Path(file)
    if file.suffix != _SAFETENSORS:
        return as_state_dict(read_torch_file(file), file)
    if not file.is_file():
        raise MissingFileError(f"no file {file}")
    try:
        # Of a file that may not be read safetensors says that there is none.
        file.open("rb").close()
        return load_file(file)
    except PermissionError:
        raise
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is no safetensors file, or it is truncated: {error}; copy it again"
        ) from error


def write_safetensors(state: dict[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, with the permissions of any new file (safetensors' own are 0600)."""
    file.touch()
    mode = file.stat().st_mode
    save_file(state, file, metadata={"format": "pt"})
    file.chmod(mode)


def as_state_dict(content: Any, file: str | Path) -> dict[str, Tensor]:
    """`content` if it is names and tensors.

    Raises:
        ValueError: it is something else; names the file.
    """
    if (
        isinstance(content, dict)
        and content
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    ):
        return dict(content)
    found = sorted(map(str, content))[:8] if isinstance(content, dict) else type(content).__name__
    raise UserError(f"{file} is no state dict (names and tensors): it holds {found}")


def read_checkpoint(file: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A training checkpoint that describes its network, in this program's format, read without running code of it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, not loadable safely, of a newer format, or not of an image-text model.
    """
    checkpoint = read_torch_file(file, map_location)
    if not isinstance(checkpoint, dict) or "network" not in checkpoint:
        raise UserError(
            f"{file} is no checkpoint of an image-text model: it has no description of its network"
        )
    CHECKPOINT.upgrade(checkpoint, str(file))
    return checkpoint


def read_exported_config(folder: Path) -> dict[str, Any]:
    """What `ImageTextNetwork.save_pretrained` wrote into config.json.

    Raises:
        FileNotFoundError: config.json or model.safetensors is missing.
        ValueError: config.json is truncated, describes no network, or is of a format that this program does not read.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder} is no exported medclip_dcl model: {name} is missing")
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no JSON, or it is truncated: {error}; copy it again") from error
    if not isinstance(config, dict) or "image_encoder" not in config:
        raise UserError(f"{file} describes no image-text network; give a folder that save_pretrained wrote")
    NETWORK.upgrade(config, str(file))
    return config


def checkpoint_of_run(checkpoints: Path) -> Path | None:
    """Of a run's checkpoints the best by validation, else the last; None if there is neither."""
    files = (checkpoints / name for name in ("best.ckpt", "last.ckpt"))
    return next((file for file in files if file.is_file()), None)


def is_exported(folder: Path) -> bool:
    """True for a folder that `ImageTextNetwork.save_pretrained` wrote, whole or not."""
    file = folder / CONFIG_FILE
    return file.is_file() and b'"image_encoder"' in file.read_bytes()
