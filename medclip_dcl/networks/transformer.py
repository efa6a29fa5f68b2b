"""Forward pass of a library's transformer on padded tokens, without a read on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, no_type_check

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Tokens: TypeAlias = Int[Tensor, "sentence token"]
Lengths: TypeAlias = Int[Tensor, " sentence"]

_SDPA, _EAGER = "sdpa_without_host_reads", "eager_without_host_reads"


def _without_reads(mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """transformers' mask, which is else left out if nothing is padded: a read on the host."""

    @no_type_check  # a checked function cannot be compiled
    def masked(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return mask(attention_mask=attention_mask, **options)

    return masked


def _own_eager(attention: nn.Module, *arguments: Any, **options: Any) -> Any:
    """The eager attention in the model's own file, as transformers finds it by the name "eager"."""
    return sys.modules[type(attention).__module__].eager_attention_forward(attention, *arguments, **options)


ALL_MASK_ATTENTION_FUNCTIONS.register(_SDPA, _without_reads(sdpa_mask))
ALL_MASK_ATTENTION_FUNCTIONS.register(_EAGER, _without_reads(eager_mask))
ALL_ATTENTION_FUNCTIONS.register(_SDPA, sdpa_attention_forward)
ALL_ATTENTION_FUNCTIONS.register(_EAGER, _own_eager)  # asked for by LayoutLM of transformers 5.17


def avoid_host_reads(model: PreTrainedModel) -> None:
    """Make the model's attention build its masks without looking at them."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_SDPA)
    elif not model._supports_attention_backend:  # an attention of its own, as MPNet's
        model.config._attn_implementation = _EAGER


def is_token(tokens: Tokens, lengths: Lengths) -> Bool[Tensor, "sentence token"]:
    """False at padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def run(model: PreTrainedModel, tokens: Tokens, lengths: Lengths | None) -> Any:
    """transformers' output for padded sentences; without `lengths` the model sees their padding."""
    mask = None if lengths is None else is_token(tokens, lengths).long()
    # transformers' DeBERTa (not its v2) masks half precision by a number of float32, which fails.
    is_single = model.config.model_type == "deberta" and not tokens.is_meta
    precision = torch.autocast(tokens.device.type, enabled=False) if is_single else nullcontext()
    with attention_kernels(model, tokens.device), precision:
        return model(input_ids=tokens, attention_mask=mask)


def attention_kernels(model: PreTrainedModel, device: torch.device) -> AbstractContextManager[None]:
    """Plain matrix products in training on a CPU below float32, where torch's fused attention is slower."""
    if device.type != "cpu" or not model.training:
        return nullcontext()
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    return sdpa_kernel(SDPBackend.MATH) if torch.finfo(dtype).bits < 32 else nullcontext()
