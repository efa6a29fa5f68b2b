"""open_clip's layout and OpenAI's state dicts, rewritten as a folder of transformers, or built from timm and BERT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    as_state_dict,
    load_exactly,
    read_state_dict,
    read_torch_file,
)
from medclip_dcl.convert.clip_names import INPUT, to_transformers_names
from medclip_dcl.convert.transformers_folder import (
    BICUBIC,
    PREPROCESSOR_FILE,
    Converted,
    assembled,
    from_transformers,
)
from medclip_dcl.networks.bert_folder import read_folder_json
from medclip_dcl.networks.pretrained_sentences import TransformersSentences
from medclip_dcl.networks.timm_regions import TimmRegions

OPEN_CLIP_FILE = "open_clip_config.json"
OPENAI_MEAN, OPENAI_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_WEIGHTS = (
    "open_clip_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
)
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
)
_WIDTH_OF_HEAD = 64
_KNOWN_VISION = {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"}
_KNOWN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"}
_KNOWN_TIMM = {"image_size", "timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj"}
_KNOWN_BERT = {
    *(
        "hf_model_name",
        "hf_tokenizer_name",
        "hf_proj_type",
        "hf_pooler_type",
        "proj",
        "proj_type",
        "pooler_type",
    ),
    *("context_length", "hf_model_pretrained"),
}
_POOLERS = {"cls_last_hidden_state_pooler": "cls", "mean_pooler": "mean", "cls_pooler": "pooler"}


def from_open_clip(folder: Path, text_folder: Path | None, work: Path) -> Converted:
    """Convert a folder with open_clip_config.json and weights; `work` is an empty folder that is used meanwhile.

    `text_folder` has the tokenizer and, where the text encoder is a model of transformers, its config.json.
    """
    file = folder / OPEN_CLIP_FILE
    content = read_folder_json(file)
    model, shown = content.get("model_cfg", {}), content.get("preprocess_cfg", {})
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise UserError(f"{folder}: expected weights, {' or '.join(_WEIGHTS)}, found none; copy them into it")
    state = {name: value.float() for name, value in read_state_dict(weights).items()}
    modes = {"shortest": True, "squash": False}
    if (mode := shown.get("resize_mode", "shortest")) not in modes:
        raise UserError(f"{file}: preprocess_cfg.resize_mode: expected {' or '.join(modes)}, found {mode!r}")
    side = vision.get("image_size")
    preprocessor = preprocessor_settings(
        side,
        shown.get("mean", OPENAI_MEAN),
        shown.get("std", OPENAI_STD),
        modes[mode],
        shown.get("interpolation"),
    )
    if "timm_model_name" in vision or "hf_model_name" in text:
        if not ("timm_model_name" in vision and "hf_model_name" in text):
            raise UserError(
                f"{file}: expected a vision tower of timm with a text model of transformers, or neither"
            )
        _require_known(file, vision, _KNOWN_TIMM, "vision_cfg")
        _require_known(file, text, _KNOWN_BERT, "text_cfg")
        return _of_timm_and_bert(
            file, model, state, _required(text_folder, text["hf_model_name"]), preprocessor
        )
    _require_known(file, vision, _KNOWN_VISION, "vision_cfg")
    _require_known(file, text, _KNOWN_TEXT, "text_cfg")
    heads = {"vision": vision["width"] // vision.get("head_width", _WIDTH_OF_HEAD), "text": text["heads"]}
    quick = bool(model.get("quick_gelu", False))
    write_clip(state, weights, text_folder or folder, preprocessor, work, heads, quick_gelu=quick)
    return from_transformers(work)


def from_openai(file: Path, text_folder: Path, mean: list[float], std: list[float], work: Path) -> Converted:
    """Convert a state dict of OpenAI's CLIP, such as CheXzero's; the geometry is the middle square of its input."""
    content = {} if file.suffix == ".safetensors" else read_torch_file(file)
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    state = as_state_dict(content, file) if content else read_state_dict(file)
    state = {name.removeprefix("module."): value.float() for name, value in state.items()}
    state = {name: value for name, value in state.items() if name not in INPUT}
    if "visual.conv1.weight" not in state or "visual.proj" not in state:
        raise UserError(
            f"{file}: expected a CLIP with a vision transformer (visual.conv1.weight, visual.proj), found "
            f"{', '.join(sorted(state)[:8])}; ResNets of CLIP are not known"
        )
    patch, places = state["visual.conv1.weight"].shape[-1], len(state["visual.positional_embedding"]) - 1
    heads = {
        "vision": state["visual.conv1.weight"].shape[0] // _WIDTH_OF_HEAD,
        "text": state["ln_final.weight"].shape[0] // _WIDTH_OF_HEAD,
    }
    preprocessor = preprocessor_settings(patch * round(places**0.5), mean, std, True, "bicubic")
    write_clip(state, file, text_folder, preprocessor, work, heads, quick_gelu=True)
    return from_transformers(work)


def write_clip(
    state: Mapping[str, Tensor],
    source: Path,
    tokenizer: Path,
    preprocessor: Mapping[str, Any],
    folder: Path,
    heads: Mapping[str, int],
    quick_gelu: bool,
) -> None:
    """Write a folder of transformers' CLIPModel from a state dict in OpenAI's names."""
    state = {name.removeprefix("text."): value for name, value in state.items() if name not in INPUT}
    renamed = to_transformers_names(state, source)
    width, dim = state["visual.conv1.weight"].shape[0], state["text_projection"].shape[1]
    side = int(preprocessor["size"].get("shortest_edge") or preprocessor["size"]["height"])
    vocabulary, text_width = state["token_embedding.weight"].shape
    act = "quick_gelu" if quick_gelu else "gelu"
    config = {
        "model_type": "clip",
        "projection_dim": dim,
        "vision_config": {
            **_sizes(renamed, "vision_model", width, heads["vision"], act),
            "patch_size": state["visual.conv1.weight"].shape[-1],
            "image_size": side,
            "projection_dim": dim,
        },
        "text_config": {
            **_sizes(renamed, "text_model", text_width, heads["text"], act),
            "vocab_size": vocabulary,
            "max_position_embeddings": len(state["positional_embedding"]),
            "projection_dim": dim,
            # The end of a text is its largest token.
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
    }
    save_file(renamed, folder / WEIGHTS_FILE, {"format": "pt"})
    for name, content in ((CONFIG_FILE, config), (PREPROCESSOR_FILE, preprocessor)):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _sizes(renamed: Mapping[str, Tensor], tower: str, width: int, heads: int, act: str) -> dict[str, Any]:
    layers = {name.split(".")[3] for name in renamed if name.startswith(f"{tower}.encoder.layers.")}
    return {
        "hidden_size": width,
        "intermediate_size": len(renamed[f"{tower}.encoder.layers.0.mlp.fc1.bias"]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "hidden_act": act,
    }


def _of_timm_and_bert(
    file: Path,
    model: Mapping[str, Any],
    state: Mapping[str, Tensor],
    text_folder: Path,
    preprocessor: Mapping[str, Any],
) -> Converted:
    """BiomedCLIP and its like: a model of timm with a projection, and a BERT with two layers behind its pooling."""
    vision, text, dim = model["vision_cfg"], model["text_cfg"], int(model["embed_dim"])
    if vision.get("timm_proj") != "linear":
        raise UserError(f"{file}: vision_cfg.timm_proj: expected linear, found {vision.get('timm_proj')!r}")
    arguments = {"global_pool": vision["timm_pool"]} if vision.get("timm_pool") else {}
    image_encoder = TimmRegions(
        dim=dim,
        mean=list(preprocessor["image_mean"]),
        std=list(preprocessor["image_std"]),
        global_vector=True,
        architecture={"name": vision["timm_model_name"], "model_args": arguments},
    )
    trunk, head = "visual.trunk.", "visual.head.proj.weight"
    own = {f"model.{name.removeprefix(trunk)}": x for name, x in state.items() if name.startswith(trunk)}
    load_exactly(image_encoder.backbone, own, file)
    projection = {"weight": state[head][..., None, None], "bias": torch.zeros(dim)}
    load_exactly(image_encoder.projection, projection, f"{file}, {head}")
    pooler = text.get("hf_pooler_type", text.get("pooler_type", "mean_pooler"))
    if pooler not in _POOLERS:
        raise UserError(
            f"{file}: text_cfg.hf_pooler_type: expected {' or '.join(_POOLERS)}, found {pooler!r}"
        )
    kind = text.get("hf_proj_type", text.get("proj_type", text.get("proj")))
    text_encoder = TransformersSentences.untrained(
        text_folder,
        dim=dim,
        max_tokens=int(text.get("context_length", 77)),
        final_period=False,
        pooling=_POOLERS[pooler],
        projection="linear" if kind == "linear" else "gelu",
    )
    own = {
        name.removeprefix("text.transformer."): x
        for name, x in state.items()
        if name.startswith("text.transformer.")
    }
    known = text_encoder.model.state_dict()
    own = {name: x for name, x in own.items() if name in known or not name.startswith("pooler.")}
    own = {name: x for name, x in own.items() if not name.endswith("position_ids")}
    load_exactly(text_encoder.model, own, file)
    projection = {
        name.removeprefix("text.proj."): x for name, x in state.items() if name.startswith("text.proj.")
    }
    projection |= {"bias": torch.zeros(dim)} if kind == "linear" else {}
    load_exactly(text_encoder.projection, projection, f"{file}, text.proj.*")
    return assembled(image_encoder, text_encoder, state["logit_scale"], preprocessor)


def preprocessor_settings(
    side: Any, mean: list[float], std: list[float], is_cropped: bool, interpolation: str | None
) -> dict[str, Any]:
    """Content of transformers' preprocessor_config.json for the same preprocessing; bicubic unless named."""
    side = int(side[0] if isinstance(side, list) else side)
    size = {"shortest_edge": side} if is_cropped else {"height": side, "width": side}
    crop = {"do_center_crop": is_cropped, "crop_size": {"height": side, "width": side}}
    resample = {"bilinear": 2, "random": BICUBIC}.get(interpolation or "", BICUBIC)
    kind = {"image_processor_type": "CLIPImageProcessor"}
    return {**kind, "size": size, **crop, "resample": resample, "image_mean": mean, "image_std": std}


def _require_known(file: Path, found: Mapping[str, Any], known: set[str], part: str) -> None:
    """Other settings change the architecture."""
    if others := sorted(name for name, value in found.items() if name not in known and value):
        raise UserError(
            f"{file}: model_cfg.{part}: expected {', '.join(sorted(known))} alone, found {', '.join(others)}; this "
            "architecture has no counterpart here"
        )


def _required(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise UserError(
            f"--text_encoder: expected the folder of {name} with its config.json and tokenizer, found none"
        )
    return folder
