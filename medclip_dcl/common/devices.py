"""Devices: names, precisions, and the one to use."""

from __future__ import annotations

from typing import Any

import torch

from medclip_dcl.common.errors import UserError


def is_on_host(tensor: torch.Tensor) -> bool:
    """True on a CPU."""
    return tensor.device.type == "cpu"


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def device_name(device: torch.device) -> str:
    """Name of the GPU, or number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def best_precision(accelerator: Any = "auto") -> str:
    """Mixed bfloat16 if the device supports it, else float32 (for ``trainer.precision: null`` of `fit`)."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if has_bf16 else "32-true"


def without_tf32() -> None:
    """Compute float32 in float32: cuDNN's convolutions round to TF32 (10 bits) by default."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def usable_device(device: str | torch.device) -> torch.device:
    """The device, with its number; auto is a GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    # Torch's own errors for a device without a driver, one it was not built for, and an unknown name.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"device {device} cannot be used ({reason}); use cpu") from error
