"""Convert open_clip's folders and OpenAI's state dicts: a CLIP of their own, or a model of timm with a BERT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_choice
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.common.weight_files import check_sizes, shapes_of
from medclip_dcl.exchange.tensor_names import OPEN_CLIP, from_openai_names
from medclip_dcl.exchange.transformers_folder import NAFLEX, Converted, Shown, assembled, dual_encoder
from medclip_dcl.networks.bert_folder import ModelFolderError, folder_weights, read_folder_json
from medclip_dcl.networks.pretrained_regions import per_channel
from medclip_dcl.networks.text_encoder import TransformersSentences
from medclip_dcl.networks.timm_regions import TimmRegions

OPEN_CLIP_FILE = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
OPENAI = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
"""Normalisation of the channels in OpenAI's CLIP, which is open_clip's default."""
GEOMETRIES = {"shortest": "shortest", "squash": "stretch", "longest": "pad"}
"""open_clip's resize_mode -> geometry."""
POOLINGS = {"cls_last_hidden_state_pooler": "cls", "mean_pooler": "mean", "cls_pooler": "pooler"}
"""open_clip's hf_pooler_type -> pooling."""
# In open_clip's order: beside its own, a repository may have a file of another library.
_WEIGHTS = (OPEN_CLIP_WEIGHTS, "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")
_WIDTH_OF_HEAD = 64
# Settings that are read, that the tensors show, or that are of training; any other one changes the architecture.
_KNOWN = {
    "vision_cfg": {
        *("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "patch_dropout"),
        *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias"),
        *("timm_drop", "timm_drop_path", "attn_pooler_queries", "attn_pooler_heads"),
    },
    "text_cfg": {
        *("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"),
        *("hf_model_name", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type", "eos_id"),
    },
}
_DEFAULTS = {"pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",)}
"""Other settings -> values of a plain model, beside null, false and 0."""
_ENTITIES = {
    **{"&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&apos;": "'", "&nbsp;": " "},
    "&amp;": "&",  # last: what it leaves is for the next time
}
_NOT_CLEANED = (
    "open_clip and OpenAI's CLIP clean texts first: blanks, composed accents and the entities "
    f"{' '.join(_ENTITIES)} are part of the tokenizer here; other entities, curly quotes and ligatures are not "
    "replaced: write them plainly"
)


def from_open_clip(folder: Path, text_folder: Path | None) -> Converted:
    """Convert a folder with open_clip_config.json and weights.

    `text_folder` has the tokenizer and, where the text encoder is a model of transformers, its config.json.
    """
    file = folder / OPEN_CLIP_FILE
    content = read_folder_json(file)
    model = _section(content, "model_cfg")
    vision, text = (_section(model, part) for part in _KNOWN)
    for part, settings in (("vision_cfg", vision), ("text_cfg", text)):
        others = sorted(name for name, value in settings.items() if value and name not in _KNOWN[part])
        if others := [name for name in others if settings[name] not in _DEFAULTS.get(name, ())]:
            raise UserError(
                f"{file}: model_cfg.{part}: expected {', '.join(sorted(_KNOWN[part]))} alone, found "
                f"{', '.join(others)}; this architecture has no counterpart here"
            )
    if str(vision.get("timm_model_name")).startswith("naflex"):
        raise UserError(f"{file}: model_cfg.vision_cfg.timm_model_name: {NAFLEX}")
    state = folder_weights(folder, _WEIGHTS)
    size = vision.get("image_size", 224)
    side, *others = {*(size if isinstance(size, list) else [size])}
    if others:
        raise UserError(f"{file}: model_cfg.vision_cfg.image_size: expected equal sides, found {size}")
    shown = _shown(side, _section(content, "preprocess_cfg"))
    if "timm_model_name" not in vision and "hf_model_name" not in text:
        state = from_openai_names(state, folder)
        width = len(state["vision_model.embeddings.class_embedding"])
        heads = (width // vision.get("head_width", _WIDTH_OF_HEAD), text.get("heads", 8))
        activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
        try:
            return _of_clip(state, text_folder or folder, shown, heads, activation)
        except ModelFolderError as error:
            raise UserError(f"{error}, or give their folder by --text_encoder") from error
    if not ("timm_model_name" in vision and "hf_model_name" in text):
        raise UserError(
            f"{file}: expected a vision tower of timm with a text model of transformers, or neither"
        )
    if text_folder is None:
        raise UserError(
            f"--text_encoder: expected the folder of {text['hf_model_name']} with its config.json and tokenizer, "
            "found none"
        )
    arguments = {"global_pool": pool} if (pool := vision.get("timm_pool", "avg")) else {}
    if "visual.trunk.pos_embed" in state:  # a ViT, built for one size
        arguments["img_size"] = shown.size
    check_choice("text_cfg.hf_pooler_type", pooler := text.get("hf_pooler_type", "mean_pooler"), POOLINGS)
    options = {
        "dim": int(model["embed_dim"]),
        "max_tokens": int(text.get("context_length", 77)),
        "pooling": POOLINGS[pooler],
        "projection": "linear" if text.get("hf_proj_type") == "linear" else "gelu",
    }
    architecture = {"name": vision["timm_model_name"], "model_args": arguments}
    return _cleaned(of_timm_and_bert(architecture, options, state, text_folder, shown))


def from_openai(
    state: Mapping[str, Tensor], file: Path, text_folder: Path, mean: list[float], std: list[float]
) -> Converted:
    """Convert the state dict of an OpenAI's CLIP, such as CheXzero's; `file` names it in errors."""
    state = from_openai_names(state, file)
    width, _, patch, _ = state["vision_model.embeddings.patch_embedding.weight"].shape
    side = patch * round((len(state["vision_model.embeddings.position_embedding.weight"]) - 1) ** 0.5)
    heads = (width // _WIDTH_OF_HEAD, len(state["text_model.final_layer_norm.weight"]) // _WIDTH_OF_HEAD)
    notes = [
        f"a state dict names no activation, heads and geometry: taken are OpenAI's, QuickGELU, {_WIDTH_OF_HEAD} "
        "channels a head and the middle square; CheXzero pads images: set geometry to pad in config.json; it "
        "resizes twice, first to 320 pixels, here once"
    ]
    return _of_clip(state, text_folder, Shown(side, "shortest", mean, std, notes), heads, "quick_gelu")


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of open_clip_config.json, in which null stands for the default."""
    return {key: value for key, value in (content.get(name) or {}).items() if value is not None}


def _shown(size: int, settings: Mapping[str, Any]) -> Shown:
    """open_clip's preprocessing."""
    mode, notes = settings.get("resize_mode", "shortest"), []
    if settings.get("interpolation") == "bilinear":
        notes.append("the original resizes bilinearly, here images are resized bicubically")
    if mode == "longest" and settings.get("fill_color"):
        notes.append("the original pads images with another grey level than black")
    check_choice("preprocess_cfg.resize_mode", mode, GEOMETRIES)
    mean, std = (per_channel(settings.get(name, default), name) for name, default in OPENAI.items())
    return Shown(size, GEOMETRIES[mode], mean, std, notes)


def _of_clip(
    state: Mapping[str, Tensor], tokenizer: Path, shown: Shown, heads: tuple[int, int], activation: str
) -> Converted:
    """Convert the tensors of a CLIPModel, which show all settings but `heads` (images, texts) and `activation`."""
    vocabulary, dim = (
        len(state["text_model.embeddings.token_embedding.weight"]),
        len(state["visual_projection.weight"]),
    )
    towers: dict[str, dict[str, Any]] = {}
    for tower, n_heads in zip(("vision", "text"), heads, strict=True):
        layers = f"{tower}_model.encoder.layers."
        inner, width = state[f"{layers}0.mlp.fc1.weight"].shape
        towers[f"{tower}_config"] = {
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": len({name.split(".")[3] for name in state if name.startswith(layers)}),
            "num_attention_heads": n_heads,
            "hidden_act": activation,
            "projection_dim": dim,
        }
    towers["vision_config"] |= {
        "patch_size": state["vision_model.embeddings.patch_embedding.weight"].shape[-1],
        "image_size": shown.size,
    }
    towers["text_config"] |= {
        "vocab_size": vocabulary,
        "max_position_embeddings": len(state["text_model.embeddings.position_embedding.weight"]),
        # The end of a text is its largest token.
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
    }
    config = {"model_type": "clip", "projection_dim": dim, **towers}
    return _cleaned(dual_encoder(tokenizer, config, state, shown))


def of_timm_and_bert(
    architecture: dict[str, Any],
    options: dict[str, Any],
    state: Mapping[str, Tensor],
    text_folder: Path,
    shown: Shown,
) -> Converted:
    """Convert open_clip's names of a model of timm with a projection, and of a BERT with one or two layers behind.

    `architecture` is `TimmRegions`'s; `options` are `TransformersSentences`'s.
    """
    image_encoder = TimmRegions(
        dim=options["dim"], mean=shown.mean, std=shown.std, global_vector=True, architecture=architecture
    )
    raw = read_folder_json(text_folder / CONFIG_FILE)
    check_sizes(raw, shapes_of(state), text_folder)
    text_encoder = TransformersSentences.untrained(
        text_folder, raw, shown.notes, final_period=False, **options
    )
    # The projections here have biases, and files may have an unused pooler, and a buffer of older versions.
    biases = ("visual.head.proj.bias", *["text.proj.bias"] * (options["projection"] == "linear"))
    pooler = ["pooler.dense.weight", "pooler.dense.bias"] * (options["pooling"] != "pooler")
    state = {
        **dict.fromkeys(biases, torch.zeros(options["dim"])),
        **{name: value for name, value in state.items() if not name.endswith(("position_ids", *pooler))},
    }
    return assembled(image_encoder, text_encoder, state, OPEN_CLIP, shown)


def _cleaned(converted: Converted) -> Converted:
    """A network whose tokenizer cleans texts as open_clip does, as far as a tokenizer can."""
    network, notes = converted
    tokenizer = network.text_encoder.tokenizer
    own = tokenizer.normalizer or normalizers.Sequence([])
    if own.normalize_str(" &amp;lt;\t1 ") != "< 1":  # a tokenizer of `export` does so already
        replace = [normalizers.Replace(name, character) for name, character in _ENTITIES.items()]
        blanks = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *replace * 2, *blanks, own])
    return network, [*notes, _NOT_CLEANED]
