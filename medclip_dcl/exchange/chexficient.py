"""Convert CheXficient (Wang et al., 2026), and CXR-CLIP (You et al., MICCAI 2023) with a ResNet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import some_of
from medclip_dcl.exchange.open_clip_weights import OPENAI, of_timm_and_bert
from medclip_dcl.exchange.tensor_names import renamed
from medclip_dcl.exchange.transformers_folder import Converted, Shown
from medclip_dcl.networks.image_encoder import IMAGENET_MEAN, IMAGENET_STD, resnet_depth

PROJECTION = "image_projection.projection."
_TRUNK = "visual.trunk."
_NAMES = {
    **dict.fromkeys(("image_encoder.model.", "image_encoder.resnet."), _TRUNK),
    PROJECTION: "visual.head.proj.",
    **dict.fromkeys(("text_encoder.model.", "text_encoder.text_encoder."), "text.transformer."),
    "text_projection.projection.": "text.proj.",
    "logit_scale": "logit_scale",
}
"""Beginnings of the names -> in open_clip's model of timm and transformers."""
# Of CheXficient: prototypes that chose its pairs, their averages, and the token of masked training.
_OF_TRAINING = ("prototype", "batch_", "pending_", "step_count", "image_encoder.model.mask_token")


def from_chexficient(state: Mapping[str, Tensor], file: Path, text_folder: Path) -> Converted:
    """Convert CheXficient's DINOv2 or CXR-CLIP's ResNet, a BERT whose last token is the text's, and two linear heads.

    `text_folder` holds Bio_ClinicalBERT's config.json and tokenizer; `file` names the source in errors.
    """
    state = {name: x for name, x in state.items() if not name.startswith(_OF_TRAINING)}
    named = renamed(state, _NAMES)
    trunk = {name.removeprefix(_TRUNK): x for name, x in named.items() if name.startswith(_TRUNK)}
    if {"pos_embed", "patch_embed.proj.weight"} <= trunk.keys():
        architecture = _dinov2(named, trunk)
        shown = Shown(architecture["model_args"]["img_size"], "shortest", OPENAI["mean"], OPENAI["std"])
    elif depth := resnet_depth(trunk):
        architecture = {"name": f"resnet{depth}"}
        notes = ["the original resizes images bilinearly, here they are resized bicubically"]
        shown = Shown(224, "shortest", [*IMAGENET_MEAN], [*IMAGENET_STD], notes)
    else:
        raise UserError(
            f"{file}: expected CheXficient's DINOv2 or CXR-CLIP's ResNet, found {some_of(sorted(state))}; CXR-CLIP's "
            "Swin takes the vector of its first patch for that of the image, which no encoder here does"
        )
    others = {name: x for name, x in state.items() if not name.startswith(tuple(_NAMES))}
    dim = len(state[f"{PROJECTION}weight"])
    options = {"dim": dim, "max_tokens": 256, "pooling": "last", "projection": "linear"}
    return of_timm_and_bert(architecture, options, others | named, text_folder, shown)


def _dinov2(named: dict[str, Tensor], trunk: Mapping[str, Tensor]) -> dict[str, Any]:
    """timm's description of the DINOv2 that the tensors of `trunk` show; `named` gets its names of registers."""
    positions, (width, _, patch, _) = trunk["pos_embed"], trunk["patch_embed.proj.weight"].shape
    arguments: dict[str, Any] = {
        "img_size": patch * round((positions.shape[1] - 1) ** 0.5),
        "patch_size": patch,
        "embed_dim": width,
        "depth": len({name.split(".")[1] for name in trunk if name.startswith("blocks.")}),
        "num_heads": width // 64,
    }
    if (registers := named.pop(f"{_TRUNK}register_tokens", None)) is not None:
        # timm's class token beside registers includes its position.
        arguments |= {"reg_tokens": registers.shape[1], "no_embed_class": True}
        named[f"{_TRUNK}cls_token"] = trunk["cls_token"] + positions[:, :1]
        named |= {f"{_TRUNK}pos_embed": positions[:, 1:], f"{_TRUNK}reg_token": registers}
    return {"name": "vit_base_patch14_dinov2", "model_args": arguments}
