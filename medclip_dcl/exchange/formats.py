"""A CLIP or a SigLIP in the layout of transformers or open_clip, which load it without medclip_dcl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CLIPImageProcessor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import new_folder, write_json, write_text
from medclip_dcl.common.find_model import CONFIG_FILE, find_model
from medclip_dcl.common.terms import copy_terms
from medclip_dcl.common.weight_files import load_exactly, read_model, write_safetensors
from medclip_dcl.exchange.convert import plain_card
from medclip_dcl.exchange.encoders import plain_tokenizer
from medclip_dcl.exchange.open_clip_weights import GEOMETRIES, OPEN_CLIP_FILE, OPEN_CLIP_WEIGHTS, POOLINGS
from medclip_dcl.exchange.tensor_names import OPEN_CLIP, TRANSFORMERS, backwards, renamed, to_openai_names
from medclip_dcl.exchange.transformers_folder import FAMILIES
from medclip_dcl.metrics.calibration import CARD_FILE
from medclip_dcl.networks.bert_folder import silent
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.text_encoder import TransformersSentences
from medclip_dcl.networks.timm_regions import TimmRegions

_CLIP, _SIGLIP = (
    f"{x}_vision_model with projection pretrained, {x}_text_model with projection pretrained, GlobalCosine"
    for x in ("clip", "siglip")
)
_BIOMED_CLIP = "TimmRegions with projection linear, bert with projection gelu, GlobalCosine"
LAYOUTS = {"transformers": (_CLIP, _SIGLIP), "open_clip": (_CLIP, _BIOMED_CLIP)}
"""Library -> architectures that it has a counterpart of."""


_HOW = {
    "transformers": "The model's class and its processor in transformers load this folder by `from_pretrained`.",
    "open_clip": "Load it by `open_clip.create_model_and_transforms('local-dir:{0}')` and "
    "`open_clip.get_tokenizer('local-dir:{0}')`. In a repository of the Hugging Face Hub, `hf_tokenizer_name` in "
    f"{OPEN_CLIP_FILE} must be the repository's id.",
}


def export_layout(source: str | Path, folder: Path, layout: str) -> list[str]:
    """Write the model of a run, checkpoint or exported folder in a library's layout, into a new folder.

    Position embeddings are interpolated to the network's image size, and those behind `max_tokens` are left out.
    Returns what a user of the library should know, line by line.
    """
    found = find_model(source)
    with new_folder(folder, "FOLDER") as temporary:
        network = ImageTextNetwork.from_pretrained(found.path)
        kind = _architecture(network, layout)
        bias = _bias(found.path) if kind == _SIGLIP else 0.0
        notes = _notes(network, layout, kind, bias)
        tokenizer = plain_tokenizer(cast(TransformersSentences, network.text_encoder))
        if layout == "open_clip":
            is_clip = kind == _CLIP
            state, config = (
                _clip_of_open_clip(network) if is_clip else _timm_and_bert(network, temporary, folder)
            )
            _write_open_clip(network, state, config, temporary)
        else:
            with silent():
                _model(network, bias).save_pretrained(temporary)
            _processor(network).save_pretrained(temporary)
        if kind == _SIGLIP:  # it sees its padding
            tokenizer.model_input_names = ["input_ids"]
        tokenizer.save_pretrained(temporary)
        terms, name = copy_terms(found.folder, temporary), folder.resolve().name
        origin = f"Written by medclip_dcl in the layout of {layout}. {_HOW[layout].format(name)}"
        write_text(plain_card(name, origin, terms, notes), temporary / CARD_FILE)
    return notes


def _architecture(network: ImageTextNetwork, layout: str) -> str:
    """One of `LAYOUTS`; any other is refused."""
    image, text, similarity = network.image_encoder, network.text_encoder, network.similarity
    found = [type(part).__name__ for part in (image, text, similarity)]
    if isinstance(image, TransformersRegions):
        found[0] = f"{image.backbone.config.model_type} with projection {image.projection_kind}"
    if isinstance(image, TimmRegions) and image.has_global_vector:
        found[0] += f" with projection {image.projection_kind}"
    if isinstance(text, TransformersSentences):
        found[1] = f"{text.family} with projection {text.projection_kind}"
    if (described := ", ".join(found)) not in LAYOUTS[layout]:
        raise UserError(
            f"--format {layout}: expected {' or '.join(LAYOUTS[layout])}, found {described}; leave --format out"
        )
    return described


def _notes(network: ImageTextNetwork, layout: str, kind: str, bias: float | None) -> list[str]:
    """What the library does otherwise, or cannot know."""
    text: Any = network.text_encoder
    size, prepared = network.image_size, network.prepared_size or network.image_size
    notes = {
        "a text without a final mark gets a period in medclip_dcl; end texts with one": text.final_period,
        "the processor stretches images; pad them to a square with black before": (
            network.geometry == "pad" and layout == "transformers"
        ),
        f"medclip_dcl fits images to {prepared} pixels, then scales them to {size}; the library resizes once": (
            prepared != size
        ),
        "medclip_dcl resizes bilinearly, as its preparation of images does; the library bicubically": (
            network.prepared_size == size
        ),
        "the logit bias is not known (a run or a checkpoint of SigmoidLoss has it): 0 is written; logits are gamma^2 "
        "times the cosine, and their sigmoid is not a probability": bias is None,
        f"open_clip reads {CONFIG_FILE}, of the text model, in the folder that {OPEN_CLIP_FILE} calls hf_model_name: "
        "change it there where this folder moves": kind == _BIOMED_CLIP,
    }
    return [note for note, is_true in notes.items() if is_true]


def _bias(source: Path) -> float | None:
    """The bias that SigmoidLoss learned, of a run or a checkpoint."""
    saved = read_model(source)
    loss = (saved.checkpoint.get("objective") or {}).get("loss") or {}
    is_sigmoid = str(loss.get("class_path")).endswith(".SigmoidLoss")
    return float(saved.state["objective.loss.bias"]) if is_sigmoid else None


def _model(network: ImageTextNetwork, bias: float | None) -> Any:
    """transformers' CLIPModel or SiglipModel, with both towers."""
    image: Any = network.image_encoder
    text: Any = network.text_encoder
    is_clip = text.family == "clip_text_model"
    kind = FAMILIES["clip" if is_clip else "siglip"]
    model = kind(
        kind.config_class(
            vision_config={**image.architecture(), "image_size": network.image_size},
            text_config={**text.config()["architecture"], "max_position_embeddings": text.max_tokens},
            **({"projection_dim": image.dim} if is_clip else {}),
        )
    )
    like = model.state_dict()
    state = renamed(network.state_dict(), backwards(TRANSFORMERS), like)
    of_vision, of_text = (f"{x}_model.embeddings.position_embedding.weight" for x in ("vision", "text"))
    with torch.no_grad():
        state[of_vision] = image.backbone.embeddings.interpolate_pos_encoding(
            like[of_vision][None], network.image_size, network.image_size
        )[0]
        state[of_text] = state[of_text][: text.max_tokens]
        state["logit_scale"] = network.similarity.gamma2.log().reshape(model.logit_scale.shape)
    if not is_clip:
        state["logit_bias"] = torch.full_like(model.logit_bias, bias or 0.0)
    load_exactly(model, state, "the network")
    return model


def _processor(network: ImageTextNetwork) -> CLIPImageProcessor:
    side, is_cropped = network.image_size, network.geometry == "shortest"
    square = {"height": side, "width": side}
    return CLIPImageProcessor(
        size={"shortest_edge": side} if is_cropped else square,
        do_center_crop=is_cropped,
        crop_size=square,
        image_mean=network.mean.flatten().tolist(),
        image_std=network.std.flatten().tolist(),
    )


def _write_open_clip(
    network: ImageTextNetwork, state: dict[str, Tensor], config: dict[str, Any], folder: Path
) -> None:
    """Write weights and open_clip_config.json, whose model_cfg is `config`."""
    write_safetensors(state, folder / OPEN_CLIP_WEIGHTS)
    config["embed_dim"] = network.image_encoder.dim
    config["vision_cfg"]["image_size"] = network.image_size
    # Any name: of a local folder, open_clip takes the tokenizer in it.
    config["text_cfg"]["hf_tokenizer_name"] = "tokenizer"
    preprocessing = {
        "mean": network.mean.flatten().tolist(),
        "std": network.std.flatten().tolist(),
        "interpolation": "bicubic",
        "resize_mode": backwards(GEOMETRIES)[network.geometry],
        "fill_color": 0,
    }
    write_json({"model_cfg": config, "preprocess_cfg": preprocessing}, folder / OPEN_CLIP_FILE)


def _clip_of_open_clip(network: ImageTextNetwork) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and model_cfg of a CLIP; one that open_clip would compute otherwise is refused."""
    model, encoder = _model(network, None), network.text_encoder
    vision, text = model.config.vision_config, model.config.text_config
    # The largest token is open_clip's end of a text.
    last = max(encoder.tokenizer.get_vocab().values())
    for name, value, known in (
        ("vision_config.hidden_act", vision.hidden_act, ("gelu", "quick_gelu")),
        ("text_config.hidden_act", text.hidden_act, (vision.hidden_act,)),
        ("vision_config.layer_norm_eps", vision.layer_norm_eps, (1e-5,)),
        ("text_config.layer_norm_eps", text.layer_norm_eps, (1e-5,)),
        ("text_config.eos_token_id", text.eos_token_id, (2, last)),
    ):
        if value not in known:
            raise UserError(
                f"--format open_clip: {name}: expected {' or '.join(map(str, known))}, found {value}, which open_clip "
                "does not have; write --format transformers"
            )
    config: dict[str, Any] = {
        part: {
            "layers": tower.num_hidden_layers,
            "width": tower.hidden_size,
            "mlp_ratio": tower.intermediate_size / tower.hidden_size,
        }
        for part, tower in (("vision_cfg", vision), ("text_cfg", text))
    }
    config["quick_gelu"] = vision.hidden_act == "quick_gelu"
    config["vision_cfg"] |= {
        "head_width": vision.hidden_size // vision.num_attention_heads,
        "patch_size": vision.patch_size,
    }
    config["text_cfg"] |= {
        "context_length": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
        "heads": text.num_attention_heads,
    }
    return to_openai_names(model.state_dict()), config


def _timm_and_bert(
    network: ImageTextNetwork, temporary: Path, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and model_cfg of a model of timm with a BERT, whose config.json is written into `temporary`."""
    image: Any = network.image_encoder
    text: Any = network.text_encoder
    poolers, built_for = backwards(POOLINGS), image.backbone.model.pretrained_cfg["input_size"][-1]
    state = renamed(network.state_dict(), backwards(OPEN_CLIP))
    state["visual.head.proj.weight"] = state["visual.head.proj.weight"].flatten(1)
    state["logit_scale"] = network.similarity.gamma2.log()
    settings = {"img_size": built_for, **image.model_args, "image_size": network.image_size}
    has_one_size = "visual.trunk.pos_embed" in state
    known = {"img_size": built_for, "image_size": built_for if has_one_size else network.image_size}
    if settings != known or text.pooling not in poolers:
        raise UserError(
            f"--format open_clip: expected {image.name} as timm builds it, {known}, and pooling "
            f"{' or '.join(poolers)}, found {settings} and {text.pooling}, which open_clip does not build"
        )
    text.model.config.save_pretrained(temporary)
    vision = {"timm_model_name": image.name, "timm_pool": "", "timm_proj": "linear", "timm_proj_bias": True}
    words = {"hf_model_name": str(folder), "hf_proj_type": "mlp", "hf_pooler_type": poolers[text.pooling]}
    return state, {"vision_cfg": vision, "text_cfg": {**words, "context_length": text.max_tokens}}
