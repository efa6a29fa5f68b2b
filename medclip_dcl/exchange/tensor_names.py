"""Names of a dual encoder's tensors in transformers, open_clip and OpenAI's files: tables read in both directions."""

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
"""Beginnings of the names in a CLIPModel or SiglipModel -> in an `ImageTextNetwork`."""
OPEN_CLIP = {
    "visual.trunk.": "image_encoder.backbone.model.",
    "visual.head.proj.": "image_encoder.projection.",
    "text.transformer.": "text_encoder.model.",
    "text.proj.": "text_encoder.projection.",
    "logit_scale": "similarity.log_gamma2",
}
"""Beginnings in open_clip's model of timm and transformers (BiomedCLIP's layout) -> in an `ImageTextNetwork`."""
_OPENAI = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}
"""Beginnings in OpenAI's CLIP, which are open_clip's -> in a CLIPModel."""
_IN_LAYER = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
_TRANSPOSED = ("visual_projection.weight", "text_projection.weight")
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
"""Entries of OpenAI's files."""


def backwards(table: Mapping[str, str]) -> dict[str, str]:
    """The table in the other direction."""
    return {value: key for key, value in table.items()}


def renamed(
    state: Mapping[str, Tensor], beginnings: Mapping[str, str], like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Tensors with one of these beginnings, under the other one; all others are left out.

    Axes of length 1 are those of `like`: a projection is a matrix or a convolution of 1 x 1, a scale a scalar or not.
    """
    tensors = {
        f"{new}{name.removeprefix(old)}": value
        for old, new in beginnings.items()
        for name, value in state.items()
        if name.startswith(old)
    }
    for name, value in (like or {}).items():
        if name in tensors and value.squeeze().shape == tensors[name].squeeze().shape:
            tensors[name] = tensors[name].reshape(value.shape)
    return tensors


def from_openai_names(state: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The state dict of a CLIP under OpenAI's names -> that of a CLIPModel; `source` names it in errors."""
    state = {name.removeprefix("text."): value for name, value in state.items() if name not in _NO_WEIGHTS}
    if others := sorted(name for name in state if not name.startswith(tuple(_OPENAI))):
        raise UserError(
            f"{source}: expected the tensors of OpenAI's CLIP with a vision transformer, found "
            f"{', '.join(others[:8])}, too; this architecture has no counterpart here"
        )
    found: dict[str, Tensor] = {}
    for name, value in renamed(state, _OPENAI).items():
        for old, new in _IN_LAYER.items():
            name = name.replace(old, new)
        if ".attn.in_proj_" in name:
            parts = zip("qkv", value.chunk(3), strict=True)
            found |= {name.replace(".attn.in_proj_", f".self_attn.{x}_proj."): part for x, part in parts}
        else:
            found[name] = value.T if name in _TRANSPOSED else value
    return found


def to_openai_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a CLIPModel under OpenAI's names."""
    state = {name: value.T if name in _TRANSPOSED else value for name, value in state.items()}
    own, found = renamed(state, backwards(_OPENAI)), {}
    for name, value in own.items():
        if ".self_attn.q_proj." in name:
            value = torch.cat([own[name.replace(".q_proj.", f".{x}_proj.")] for x in "qkv"])
            name = name.replace(".self_attn.q_proj.", ".attn.in_proj_")
        for old, new in _IN_LAYER.items():
            name = name.replace(new, old)
        if ".self_attn." not in name:  # keys and values are in in_proj
            found[name] = value
    return found
