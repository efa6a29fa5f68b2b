"""Tensors of a dual encoder by the names of transformers, of OpenAI and open_clip, and of an `ImageTextNetwork`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from medclip_dcl.common.errors import UserError

TRANSFORMERS = {
    "vision_model.": "image_encoder.backbone.",
    "text_model.": "text_encoder.model.",
    "visual_projection.": "image_encoder.projection.",
    "text_projection.": "text_encoder.projection.",
    "logit_scale": "similarity.log_gamma2",
}
"""Beginnings of the names in a CLIPModel or SiglipModel -> in the network."""
OPEN_CLIP = {
    "visual.trunk.": "image_encoder.backbone.model.",
    "visual.head.proj.": "image_encoder.projection.",
    "text.transformer.": "text_encoder.model.",
    "text.proj.": "text_encoder.projection.",
    "logit_scale": "similarity.log_gamma2",
}
"""Beginnings of the names in open_clip's model of timm and transformers (BiomedCLIP's layout) -> in the network."""

_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
"""Entries of OpenAI's files."""
_TRANSPOSED = ("visual.proj", "text_projection")
_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TOWERS = {
    ("visual.", "vision_model."): {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",
        "ln_pre.bias": "pre_layrnorm.bias",
        "ln_post.weight": "post_layernorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    },
    ("", "text_model."): {
        "token_embedding.weight": "embeddings.token_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_final.weight": "final_layer_norm.weight",
        "ln_final.bias": "final_layer_norm.bias",
    },
}


def renamed(
    state: Mapping[str, Tensor], beginnings: Mapping[str, str], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors whose names begin so, under the other beginnings; others are left out.

    Axes of length 1 are those of `like`: a projection is a matrix or a convolution of 1 x 1, a scale a scalar or not.
    """
    found = {
        f"{new}{name.removeprefix(old)}": value
        for old, new in beginnings.items()
        for name, value in state.items()
        if name.startswith(old)
    }
    shapes = {name: value.shape for name, value in like.items() if name in found}
    fits = {name for name in shapes if like[name].squeeze().shape == found[name].squeeze().shape}
    return {name: value.reshape(shapes[name]) if name in fits else value for name, value in found.items()}


def from_openai_names(state: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The state dict of a CLIP under OpenAI's names, which are open_clip's -> that of a CLIPModel."""
    state = {name.removeprefix("text."): value for name, value in state.items() if name not in _NO_WEIGHTS}
    table = _openai_names(state, "transformer.resblocks.")
    if others := sorted(state.keys() ^ table.keys()):
        raise UserError(
            f"{source}: expected the tensors of OpenAI's CLIP with a vision transformer, found a difference in "
            f"{', '.join(others[:8])}; this architecture has no counterpart here"
        )
    state["logit_scale"] = state["logit_scale"].reshape(1)
    found: dict[str, Tensor] = {}
    for name, parts in table.items():
        value = state[name].T if name in _TRANSPOSED else state[name]
        found |= dict(zip(parts, value.chunk(len(parts)), strict=True))
    return found


def to_openai_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a CLIPModel under OpenAI's names."""
    found = {
        name: torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]
        for name, parts in _openai_names(state, "encoder.layers.").items()
    }
    return {name: value.T if name in _TRANSPOSED else value for name, value in found.items()}


def _openai_names(state: Mapping[str, Tensor], layers: str) -> dict[str, list[str]]:
    """OpenAI's name of each tensor -> transformers' name, or those of its parts.

    `layers` stands before the number of a layer in the names of `state`.
    """
    table = {"logit_scale": ["logit_scale"], "visual.proj": ["visual_projection.weight"]}
    table["text_projection"] = ["text_projection.weight"]
    for (own, theirs), names in _TOWERS.items():
        table |= {f"{own}{name}": [f"{theirs}{other}"] for name, other in names.items()}
        numbers = {
            name.removeprefix(start).split(".")[0]
            for start in (f"{own}{layers}", f"{theirs}{layers}")
            for name in state
            if name.startswith(start)
        }
        for number in numbers:
            here, there = f"{own}transformer.resblocks.{number}.", f"{theirs}encoder.layers.{number}."
            for kind in ("weight", "bias"):
                table[f"{here}attn.in_proj_{kind}"] = [f"{there}self_attn.{x}_proj.{kind}" for x in "qkv"]
                table |= {f"{here}{name}.{kind}": [f"{there}{x}.{kind}"] for name, x in _LAYER.items()}
    return table
