"""Low-rank adapters (LoRA; Hu et al., ICLR 2022) in the linear layers of an encoder's blocks, by peft."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from medclip_dcl.common.errors import UserError, check_range, needs_extra
from medclip_dcl.common.weight_files import LORA_A, with_adapters_merged

_IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True)
class LoRA:
    """Adapters of every linear layer of the blocks (choice): W + alpha / rank * B A, where B starts at 0.

    Args:
        rank: of B A.
        alpha: scale of the adapters, times rank.
    """

    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        check_range("model.lora", "[1, inf)", rank=self.rank)
        check_range("model.lora", "(0, inf)", alpha=self.alpha)


def check_adaptable(encoder: nn.Module) -> None:
    """Refuse an encoder without a model of transformers; timm's EVA uses weights of layers without calling them."""
    if not any(isinstance(part, PreTrainedModel) for part in encoder.modules()):
        raise UserError(
            f"model.lora: expected models of transformers as both encoders, found {type(encoder).__name__}; choose "
            "TransformersRegions and TransformersSentences, or set lora to null"
        )


def add_adapters(encoder: nn.Module, lora: LoRA) -> None:
    """Freeze an encoder, and put new adapters, which are trained, into its blocks.

    Raises:
        UserError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(needs_extra("model.lora", "peft", "models")) from error
    layers = [
        name for name, part in encoder.named_modules() if type(part) is nn.Linear and _IN_A_BLOCK.search(name)
    ]
    encoder.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers), encoder)


def has_adapters(encoder: nn.Module) -> bool:
    """True if there are adapters that are not merged."""
    return any(name.endswith(LORA_A) for name in encoder.state_dict())


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, with adapters merged that an interrupted training has left."""
    adapted: list[Any] = [part for part in network.modules() if hasattr(part, "base_layer")]
    return with_adapters_merged(network.state_dict(), adapted[0].lora_alpha["default"] if adapted else 0.0)


def merge_adapters(encoder: nn.Module, lora: LoRA) -> None:
    """Add the adapters to the weights, and leave the encoder without them."""
    state = with_adapters_merged(encoder.state_dict(), lora.alpha)
    for owner in [*encoder.modules()]:
        for name, part in owner.named_children():
            if hasattr(part, "base_layer"):
                setattr(owner, name, part.base_layer)
    encoder.load_state_dict(state)
