"""A CLIP or a SigLIP in the layout of transformers or open_clip, which load it without medclip_dcl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import write_json, write_text
from medclip_dcl.common.terms import copy_terms_of_model
from medclip_dcl.common.weight_files import load_exactly, read_model, write_safetensors
from medclip_dcl.convert.names import TRANSFORMERS, renamed, to_openai_names
from medclip_dcl.convert.open_clip_weights import GEOMETRIES, OPEN_CLIP_FILE, OPEN_CLIP_WEIGHTS
from medclip_dcl.convert.transformers_folder import BICUBIC, FAMILIES
from medclip_dcl.export.card import CARD_FILE
from medclip_dcl.export.encoders import plain_tokenizer
from medclip_dcl.inference.model import load
from medclip_dcl.networks.bert_folder import silent
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.pretrained_sentences import TransformersSentences
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.runs.checkpoint_files import checkpoint_of_run

LAYOUTS = {"transformers": ("clip", "siglip"), "open_clip": ("clip",)}
"""Library -> families that it has a counterpart of."""

_EPSILON = 1e-5
"""open_clip's, of each LayerNorm."""


def export_layout(source: Path, folder: Path, layout: str) -> list[str]:
    """Write the model of a run, checkpoint or exported folder in a library's layout, into a new folder.

    Position embeddings are interpolated to the network's image size, and those behind `max_tokens` are left out.
    Returns what a user of the library should know, line by line.
    """
    if not source.exists():
        raise MissingFileError(
            f"no file and no folder {source}; give a run, a checkpoint or an exported folder"
        )
    if folder.is_file() or any(folder.glob("*")):
        raise UserError(f"{folder} is there already; give a new folder, or delete this one")
    network = load(source).network
    text: Any = network.text_encoder
    family = _family(network, layout)
    bias = _bias(source) if family == "siglip" else 0.0
    notes = _notes(network, layout, bias)
    model = _model(network, family, bias or 0.0)
    if layout == "open_clip":
        _check_open_clip(text, model.config.vision_config, model.config.text_config)
    tokenizer = plain_tokenizer(text)
    if family == "siglip":  # it sees its padding
        tokenizer.model_input_names = ["input_ids"]
    tokenizer.save_pretrained(folder)
    if layout == "open_clip":
        write_safetensors(to_openai_names(model.state_dict()), folder / OPEN_CLIP_WEIGHTS)
        write_json(_open_clip_config(network, model.config), folder / OPEN_CLIP_FILE)
    else:
        with silent():
            model.save_pretrained(folder)
        write_json(_processor(network), folder / "preprocessor_config.json")
    terms = copy_terms_of_model(source, folder)
    write_text(_card(folder.resolve().name, layout, family, notes, terms), folder / CARD_FILE)
    return notes


def _family(network: ImageTextNetwork, layout: str) -> str:
    """clip or siglip; any other architecture is refused."""
    image, text, similarity = network.image_encoder, network.text_encoder, network.similarity
    found = [type(part).__name__ for part in (image, text, similarity)]
    if isinstance(image, TransformersRegions):
        found[0] = f"{image.backbone.config.model_type} with projection {image.projection_kind}"
    if isinstance(text, TransformersSentences):
        found[1] = f"{text.family} with projection {text.projection_kind}"
    towers = "{0}_vision_model with projection pretrained, {0}_text_model with projection pretrained"
    known = {f"{towers.format(x)}, {GlobalCosine.__name__}": x for x in LAYOUTS[layout]}
    if (described := ", ".join(found)) in known:
        return known[described]
    raise UserError(
        f"--format {layout}: expected {' or '.join(known)}, found {described}; leave --format out"
    )


def _notes(network: ImageTextNetwork, layout: str, bias: float | None) -> list[str]:
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
        "the logit bias is not known (a run or a checkpoint of SigmoidLoss has it): 0 is written; logits are gamma^2 "
        "times the cosine, and their sigmoid is not a probability": bias is None,
    }
    return [note for note, is_true in notes.items() if is_true]


def _bias(source: Path) -> float | None:
    """The bias that SigmoidLoss learned, of a run or a checkpoint."""
    saved = read_model(checkpoint_of_run(source / "checkpoints") or source)
    loss = (saved.checkpoint.get("objective") or {}).get("loss") or {}
    is_sigmoid = str(loss.get("class_path")).endswith(".SigmoidLoss")
    return float(saved.state["objective.loss.bias"]) if is_sigmoid else None


def _model(network: ImageTextNetwork, family: str, bias: float) -> Any:
    """transformers' model of both towers."""
    image: Any = network.image_encoder
    text: Any = network.text_encoder
    kind = FAMILIES[family]
    model = kind(
        kind.config_class(
            vision_config={**image.architecture(), "image_size": network.image_size},
            text_config={**text.config()["architecture"], "max_position_embeddings": text.max_tokens},
            **({"projection_dim": image.dim} if family == "clip" else {}),
        )
    )
    like = model.state_dict()
    state = renamed(network.state_dict(), {own: theirs for theirs, own in TRANSFORMERS.items()}, like)
    of_vision, of_text = (f"{x}_model.embeddings.position_embedding.weight" for x in ("vision", "text"))
    with torch.no_grad():
        state[of_vision] = image.backbone.embeddings.interpolate_pos_encoding(
            like[of_vision][None], network.image_size, network.image_size
        )[0]
        state[of_text] = state[of_text][: text.max_tokens]
        state["logit_scale"] = network.similarity.gamma2.log().reshape(model.logit_scale.shape)
    if family == "siglip":
        state["logit_bias"] = torch.full_like(model.logit_bias, bias)
    load_exactly(model, state, "the network")
    return model


def _processor(network: ImageTextNetwork) -> dict[str, Any]:
    """Content of preprocessor_config.json."""
    side, is_cropped = network.image_size, network.geometry == "shortest"
    square = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side} if is_cropped else square,
        "do_center_crop": is_cropped,
        "crop_size": square,
        "resample": BICUBIC,
        "image_mean": network.mean.flatten().tolist(),
        "image_std": network.std.flatten().tolist(),
    }


def _open_clip_config(network: ImageTextNetwork, config: Any) -> dict[str, Any]:
    """Content of open_clip_config.json, from transformers' configuration."""
    vision, text = config.vision_config, config.text_config
    return {
        "model_cfg": {
            "embed_dim": config.projection_dim,
            "quick_gelu": vision.hidden_act == "quick_gelu",
            "vision_cfg": {
                **_tower(vision),
                "image_size": network.image_size,
                "head_width": vision.hidden_size // vision.num_attention_heads,
                "patch_size": vision.patch_size,
            },
            "text_cfg": {
                **_tower(text),
                "context_length": text.max_position_embeddings,
                "vocab_size": text.vocab_size,
                "heads": text.num_attention_heads,
                # Any name: of a local folder, open_clip takes the tokenizer beside this file.
                "hf_tokenizer_name": "tokenizer",
            },
        },
        "preprocess_cfg": {
            "mean": network.mean.flatten().tolist(),
            "std": network.std.flatten().tolist(),
            "interpolation": "bicubic",
            "resize_mode": next(mode for mode, own in GEOMETRIES.items() if own == network.geometry),
            "fill_color": 0,
        },
    }


def _tower(config: Any) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
    }


def _check_open_clip(encoder: Any, vision: Any, text: Any) -> None:
    """Refuse what open_clip would compute otherwise: it takes the largest token as the end of a text."""
    last = max(encoder.tokenizer.get_vocab().values())
    for name, value, known in (
        ("vision_config.hidden_act", vision.hidden_act, ("gelu", "quick_gelu")),
        ("text_config.hidden_act", text.hidden_act, (vision.hidden_act,)),
        ("vision_config.layer_norm_eps", vision.layer_norm_eps, (_EPSILON,)),
        ("text_config.layer_norm_eps", text.layer_norm_eps, (_EPSILON,)),
        ("text_config.eos_token_id", text.eos_token_id, (2, last)),
    ):
        if value not in known:
            raise UserError(
                f"--format open_clip: {name}: expected {' or '.join(map(str, known))}, found {value}, which open_clip "
                "does not have; write --format transformers"
            )


def _card(name: str, layout: str, family: str, notes: list[str], terms: list[str]) -> str:
    classes = {"clip": "CLIPModel, CLIPProcessor", "siglip": "SiglipModel, SiglipProcessor"}[family]
    how = {
        "transformers": f"{classes} of transformers load this folder by `from_pretrained`.",
        "open_clip": f"Load it by `open_clip.create_model_and_transforms('local-dir:{name}')` and "
        f"`open_clip.get_tokenizer('local-dir:{name}')`. In a repository of the Hugging Face Hub, "
        f"`hf_tokenizer_name` in {OPEN_CLIP_FILE} must be the repository's id.",
    }[layout]
    named = ", ".join(terms) or "see the model that it was made from"
    origin = f"Written by medclip_dcl in the layout of {layout}. Research only, not for clinical use."
    lines = [
        f"# {name}\n\n{origin}\n{how}\n",
        f"- Terms of the published weights that it derives from: {named}",
    ]
    return "\n".join([*lines, *(f"- Note: {note}" for note in notes)]) + "\n"
