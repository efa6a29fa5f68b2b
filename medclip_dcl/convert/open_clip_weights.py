"""open_clip's layout and OpenAI's state dicts: a CLIP of their own, or a model of timm with a BERT."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import CONFIG_FILE, load_exactly, read_state_dict
from medclip_dcl.convert.names import OPEN_CLIP, from_openai_names, renamed
from medclip_dcl.convert.transformers_folder import Converted, Shown, assembled, dual_encoder
from medclip_dcl.networks.bert_folder import read_folder_json
from medclip_dcl.networks.pretrained_sentences import TransformersSentences
from medclip_dcl.networks.timm_regions import TimmRegions

OPEN_CLIP_FILE = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
OPENAI = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
}
"""Normalisation of the channels in OpenAI's CLIP, which is open_clip's default."""
GEOMETRIES = {"shortest": "shortest", "squash": "stretch", "longest": "pad"}
"""open_clip's resize_mode -> geometry."""
POOLERS = {"cls_last_hidden_state_pooler": "cls", "mean_pooler": "mean", "cls_pooler": "pooler"}
"""open_clip's hf_pooler_type -> pooling."""
_WEIGHTS = (OPEN_CLIP_WEIGHTS, "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
_WIDTH_OF_HEAD = 64
# Settings that are read, or that the tensors show; any other one changes the architecture.
_KNOWN = {
    "vision_cfg": {
        *("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"),
        *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias"),
    },
    "text_cfg": {
        *("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"),
        *("hf_model_name", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"),
        *("proj", "proj_type", "pooler_type"),
    },
}


def from_open_clip(folder: Path, text_folder: Path | None) -> Converted:
    """Convert a folder with open_clip_config.json and weights.

    `text_folder` has the tokenizer and, where the text encoder is a model of transformers, its config.json.
    """
    file = folder / OPEN_CLIP_FILE
    content = read_folder_json(file)
    model = content.get("model_cfg", {})
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    for part, found in (("vision_cfg", vision), ("text_cfg", text)):
        if others := sorted(name for name, value in found.items() if name not in _KNOWN[part] and value):
            raise UserError(
                f"{file}: model_cfg.{part}: expected {', '.join(sorted(_KNOWN[part]))} alone, found "
                f"{', '.join(others)}; this architecture has no counterpart here"
            )
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise UserError(f"{folder}: expected weights, {' or '.join(_WEIGHTS)}, found none; copy them into it")
    state = {name: value.float() for name, value in read_state_dict(weights).items()}
    shown = _shown(file, int(vision.get("image_size", 224)), content.get("preprocess_cfg", {}))
    if ("timm_model_name" in vision) != ("hf_model_name" in text):
        raise UserError(
            f"{file}: expected a vision tower of timm with a text model of transformers, or neither"
        )
    if "hf_model_name" in text:
        if text_folder is None:
            name = text["hf_model_name"]
            raise UserError(
                f"--text_encoder: expected the folder of {name} with its config.json and tokenizer, found none"
            )
        return _of_timm_and_bert(file, model, state, text_folder, shown)
    heads = {"vision": _heads(state, vision.get("head_width", _WIDTH_OF_HEAD)), "text": text.get("heads", 8)}
    return _of_clip(state, weights, text_folder or folder, shown, heads, bool(model.get("quick_gelu", False)))


def from_openai(state: Mapping[str, Tensor], file: Path, text_folder: Path, shown: Shown) -> Converted:
    """Convert the state dict of an OpenAI's CLIP, such as CheXzero's; `file` names it in errors."""
    state = {name: value.float() for name, value in state.items()}
    places = len(state["visual.positional_embedding"]) - 1
    shown.size = state["visual.conv1.weight"].shape[-1] * round(places**0.5)
    heads = {"vision": _heads(state), "text": state["ln_final.weight"].shape[0] // _WIDTH_OF_HEAD}
    return _of_clip(state, file, text_folder, shown, heads, quick_gelu=True)


def _heads(state: Mapping[str, Tensor], width_of_head: int = _WIDTH_OF_HEAD) -> int:
    return state["visual.conv1.weight"].shape[0] // width_of_head


def _shown(file: Path, size: int, settings: Mapping[str, Any]) -> Shown:
    """open_clip's preprocessing."""
    mode = settings.get("resize_mode", "shortest")
    if mode not in GEOMETRIES:
        raise UserError(
            f"{file}: preprocess_cfg.resize_mode: expected {' or '.join(GEOMETRIES)}, found {mode!r}"
        )
    mean, std = (settings.get(name, default) for name, default in OPENAI.items())
    shown = Shown(size, GEOMETRIES[mode], mean, std)
    if settings.get("interpolation") == "bilinear":
        shown.differences.append("the original resizes bilinearly, here images are resized bicubically")
    if mode == "longest" and settings.get("fill_color"):
        shown.differences.append("the original pads images with another grey level than black")
    return shown


def _of_clip(
    state: Mapping[str, Tensor],
    source: Path,
    tokenizer: Path,
    shown: Shown,
    heads: Mapping[str, int],
    quick_gelu: bool,
) -> Converted:
    """A CLIP from a state dict in OpenAI's names, by transformers' configuration of the same."""
    renamed_state = from_openai_names(state, source)
    dim, width = renamed_state["visual_projection.weight"].shape
    vocabulary, text_width = renamed_state["text_model.embeddings.token_embedding.weight"].shape
    positions = renamed_state["text_model.embeddings.position_embedding.weight"]
    config: dict[str, Any] = {
        "model_type": "clip",
        "projection_dim": dim,
        "vision_config": {
            "hidden_size": width,
            "patch_size": renamed_state["vision_model.embeddings.patch_embedding.weight"].shape[-1],
            "image_size": shown.size,
        },
        "text_config": {
            "hidden_size": text_width,
            "vocab_size": vocabulary,
            "max_position_embeddings": len(positions),
            # The end of a text is its largest token.
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
    }
    for tower in ("vision", "text"):
        layer = f"{tower}_model.encoder.layers."
        config[f"{tower}_config"] |= {
            "intermediate_size": len(renamed_state[f"{layer}0.mlp.fc1.bias"]),
            "num_hidden_layers": len({x.split(".")[3] for x in renamed_state if x.startswith(layer)}),
            "num_attention_heads": heads[tower],
            "hidden_act": "quick_gelu" if quick_gelu else "gelu",
            "projection_dim": dim,
        }
    if not any((tokenizer / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(
            f"{tokenizer}: expected CLIP's tokenizer (tokenizer.json, or vocab.json and merges.txt), found none; give "
            "its folder as --text_encoder"
        )
    with tempfile.TemporaryDirectory() as work:
        for file in (*tokenizer.glob("*.json"), *tokenizer.glob("*.txt")):
            shutil.copyfile(file, Path(work) / file.name)
        (Path(work) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        return dual_encoder(Path(work), renamed_state, shown)


def _of_timm_and_bert(
    file: Path, model: Mapping[str, Any], state: Mapping[str, Tensor], text_folder: Path, shown: Shown
) -> Converted:
    """BiomedCLIP and its like: a model of timm with a projection, and a BERT with two layers behind its pooling."""
    vision, text, dim = model["vision_cfg"], model["text_cfg"], int(model["embed_dim"])
    if (kind := vision.get("timm_proj", "linear")) != "linear":
        raise UserError(f"{file}: vision_cfg.timm_proj: expected linear, found {kind!r}")
    pooler = text.get("hf_pooler_type", text.get("pooler_type", "mean_pooler"))
    if pooler not in POOLERS:
        raise UserError(f"{file}: text_cfg.hf_pooler_type: expected {' or '.join(POOLERS)}, found {pooler!r}")
    pool = vision.get("timm_pool", "avg")
    arguments = {"global_pool": pool} if pool else {}
    if "visual.trunk.pos_embed" in state:  # of one size
        arguments["img_size"] = shown.size
    image_encoder = TimmRegions(
        dim=dim,
        mean=shown.mean,
        std=shown.std,
        global_vector=True,
        architecture={"name": vision["timm_model_name"], "model_args": arguments},
    )
    is_linear = text.get("hf_proj_type", text.get("proj_type", text.get("proj"))) == "linear"
    text_encoder = TransformersSentences.untrained(
        text_folder,
        dim=dim,
        max_tokens=int(text.get("context_length", 77)),
        final_period=False,
        pooling=POOLERS[pooler],
        projection="linear" if is_linear else "gelu",
    )
    found = assembled(image_encoder, text_encoder, state["logit_scale"], shown)
    like = found.network.state_dict()
    biases = {name: torch.zeros(dim) for name in like if name.endswith("_encoder.projection.bias")}
    own = renamed(state, OPEN_CLIP, like)
    # An unused pooler, and a buffer that older versions saved.
    leftover = {x for x in own.keys() - like.keys() if ".pooler." in x or x.endswith("position_ids")}
    load_exactly(found.network, biases | {name: x for name, x in own.items() if name not in leftover}, file)
    return found
