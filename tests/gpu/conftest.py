"""The device that these tests compare with the CPU."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

DEVICE = os.environ.get("MEDCLIP_DCL_TEST_DEVICE", "cuda")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device; `cpu` in MEDCLIP_DCL_TEST_DEVICE checks the tests themselves where there is no GPU."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device (MEDCLIP_DCL_TEST_DEVICE=cpu runs the same comparisons on the CPU)")
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def accelerator(device: torch.device) -> str:
    """The device as Lightning names it."""
    return "gpu" if device.type == "cuda" else device.type


@pytest.fixture(autouse=True)
def _all_digits_of_float32() -> Generator[None]:
    """No TF32, which has 10 bits of mantissa and is torch's default for convolutions on a GPU."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, is_allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = is_allowed
