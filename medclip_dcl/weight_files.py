"""Files of weights, read as plain data: no code of theirs runs, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_SAFETENSORS = ".safetensors"


def read_torch_file(file: str | Path, map_location: Any = "cpu") -> Any:
    """What `torch.save` wrote, of tensors and plain values only.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, not of `torch.save`, or with Python objects in it.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    try:
        # Mapped: of a checkpoint with its optimiser's state only what is used is read.
        mapped = is_zipfile(file) and map_location == "cpu"
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mapped)
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # bytes that are no pickle end the unpickler in many ways, OSError (EINVAL) is one
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
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
        raise FileNotFoundError(f"no file {file}")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is no safetensors file, or it is truncated: {error}; copy it again"
        ) from error


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
    raise ValueError(f"{file} is no state dict (names and tensors): it holds {found}")
