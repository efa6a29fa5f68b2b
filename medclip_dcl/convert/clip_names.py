"""Tensors of a CLIP under OpenAI's and open_clip's names, and under those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from medclip_dcl.common.errors import UserError

INPUT = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
"""Entries of OpenAI's files that hold no weights."""

_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_VISION = {
    "class_embedding": "embeddings.class_embedding",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre.weight": "pre_layrnorm.weight",
    "ln_pre.bias": "pre_layrnorm.bias",
    "ln_post.weight": "post_layernorm.weight",
    "ln_post.bias": "post_layernorm.bias",
}
_TEXT = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


def to_transformers_names(state: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """OpenAI's names -> transformers' names of a CLIPModel; every tensor has one, or the file is refused."""
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, value in state.items():
        is_vision = name.startswith("visual.")
        own, tower = name.removeprefix("visual."), "vision_model" if is_vision else "text_model"
        if name == "logit_scale":
            found[name] = value.reshape(())
        elif name in _PROJECTIONS:
            found[_PROJECTIONS[name]] = value.T
        elif own in (known := _VISION if is_vision else _TEXT):
            found[f"{tower}.{known[own]}"] = value
        elif own.startswith("transformer.resblocks."):
            _, _, layer, rest = own.split(".", maxsplit=3)
            found |= _of_layer(f"{tower}.encoder.layers.{layer}", rest, value, unknown, name)
        else:
            unknown.append(name)
    if unknown:
        raise UserError(
            f"{source}: expected the tensors of OpenAI's CLIP, found {', '.join(unknown[:8])}, too; this architecture "
            "has no counterpart here"
        )
    return {name: value.contiguous().clone() for name, value in found.items()}


def to_openai_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a CLIPModel under OpenAI's names, which are open_clip's."""
    found = {"logit_scale": state["logit_scale"]}
    found |= {name: state[own].T for name, own in _PROJECTIONS.items()}
    for tower, start, known in (("vision_model", "visual.", _VISION), ("text_model", "", _TEXT)):
        found |= {f"{start}{name}": state[f"{tower}.{own}"] for name, own in known.items()}
        layers = {name.split(".")[3] for name in state if name.startswith(f"{tower}.encoder.layers.")}
        for layer in layers:
            here, there = f"{tower}.encoder.layers.{layer}.", f"{start}transformer.resblocks.{layer}."
            for kind in ("weight", "bias"):
                parts = [state[f"{here}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                found[f"{there}attn.in_proj_{kind}"] = torch.cat(parts)
                found |= {
                    f"{there}{name}.{kind}": state[f"{here}{own}.{kind}"] for name, own in _LAYER.items()
                }
    return found


def _of_layer(prefix: str, rest: str, value: Tensor, unknown: list[str], name: str) -> dict[str, Tensor]:
    part, _, kind = rest.rpartition(".")
    if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = rest.rpartition("_")[2]
        return {f"{prefix}.self_attn.{x}_proj.{kind}": y for x, y in zip("qkv", value.chunk(3), strict=True)}
    if part in _LAYER:
        return {f"{prefix}.{_LAYER[part]}.{kind}": value}
    unknown.append(name)
    return {}
