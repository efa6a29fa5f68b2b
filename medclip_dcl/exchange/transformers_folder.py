"""Convert a CLIP or SigLIP in transformers' layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoImageProcessor, CLIPModel, SiglipModel

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.common.weight_files import check_sizes, load_exactly, shapes_of
from medclip_dcl.exchange.tensor_names import TRANSFORMERS, renamed
from medclip_dcl.networks.bert_folder import folder_weights, read_folder_json
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.library_folder import library_config
from medclip_dcl.networks.pretrained_regions import TransformersRegions, normalisation
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import SentenceEncoder, TransformersSentences

FAMILIES: dict[str, Any] = {"clip": CLIPModel, "siglip": SiglipModel}
"""`model_type` of config.json -> class."""
_BICUBIC = (3, "bicubic")
"""PIL's number and name, by which transformers names the filter of a resize."""
_MAX_GAMMA2 = 100.0
# Settings of image processors that are read, or that change no grey picture.
_KNOWN = {
    *("do_resize", "resample", "do_center_crop", "do_pad", "do_rescale", "rescale_factor", "do_normalize"),
    *("image_mean", "image_std", "do_convert_rgb", "use_square_size", "default_to_square", "num_channels"),
    *("image_seq_length", "disable_grouping", "do_reduce_labels"),
}


@dataclass
class Shown:
    """Images as a network sees them: side in pixels, geometry, normalisation; notes on what the original does else."""

    size: int
    geometry: str
    mean: list[float]
    std: list[float]
    notes: list[str] = field(default_factory=list)


IMAGES_ALONE = "a model of images alone is for fit (docs/image_encoders.md) or benchmark FOLDER --probe"
NAFLEX = (
    "NaFlex shows patches of an image's own height and width, here images are squares; give another SigLIP"
)
Converted = tuple[ImageTextNetwork, list[str]]
"""A network, and what a user should know: where its images differ from the original's, the original's logit scale."""


def from_transformers(folder: Path) -> Converted:
    """Convert a folder with config.json, weights, preprocessor_config.json and the tokenizer's files."""
    raw = read_folder_json(folder / CONFIG_FILE)
    if (family := raw.get("model_type")) not in FAMILIES:
        advice = f"give a CLIPModel, SiglipModel, folder of open_clip or file of weights; {IMAGES_ALONE}"
        raise UserError(
            f"{folder / CONFIG_FILE}: model_type: expected {' or '.join(FAMILIES)}, found {family!r}; "
            f"{NAFLEX if family == 'siglip2' else advice}"
        )
    state = folder_weights(folder)
    state = {name: value for name, value in state.items() if not name.endswith("position_ids")}
    return dual_encoder(folder, raw, state, _shown_by_processor(folder, raw))


def dual_encoder(
    folder: Path, raw: Mapping[str, Any], state: Mapping[str, Tensor], shown: Shown
) -> Converted:
    """Convert the tensors of a CLIPModel or SiglipModel whose config.json is `raw`; `folder` has the tokenizer."""
    config = library_config(raw, str(folder / CONFIG_FILE))
    check_sizes(config.to_dict(), shapes_of(state), folder)
    is_clip = config.model_type == "clip"
    dim = config.projection_dim if is_clip else config.vision_config.hidden_size
    options: dict[str, Any] = {"dim": dim, "projection": "pretrained"}
    text = config.text_config
    text_encoder = TransformersSentences.untrained(
        folder, raw, shown.notes, max_tokens=text.max_position_embeddings, final_period=False, **options
    )
    end = text.eos_token_id
    # CLIP's vector of a text is that of its end, or of its largest token (older files, eos_token_id 2).
    ids = text_encoder.tokenize(["a"])[0]
    if is_clip and ids[-1] != (max(ids) if end == 2 else end):
        raise UserError(
            f"tokenizer: expected CLIP's, which ends a text with token {end}, found one that ends it with {ids[-1]}; "
            "give the tokenizer of these weights"
        )
    image_encoder = TransformersRegions(
        architecture=dict(raw), global_vector=True, mean=shown.mean, std=shown.std, **options
    )
    return assembled(image_encoder, text_encoder, state, TRANSFORMERS, shown)


def assembled(
    image_encoder: RegionEncoder,
    text_encoder: SentenceEncoder,
    state: Mapping[str, Tensor],
    beginnings: Mapping[str, str],
    shown: Shown,
) -> Converted:
    """A network that compares global vectors, with the weights of `state`; `beginnings` rename its tensors."""
    scale = state["logit_scale"].float().exp().item()
    similarity = GlobalCosine(gamma2=scale, max_gamma2=max(_MAX_GAMMA2, scale))
    image_encoder.check_sides({"image_size": shown.size})
    network = ImageTextNetwork(
        image_encoder, text_encoder, similarity, shown.size, shown.mean, shown.std, shown.geometry
    )
    if problem := network.unit_problem(network.image_config()):
        raise UserError(f"SOURCE: {problem}")
    others = {name: x for name, x in state.items() if not name.startswith((*beginnings, "logit_bias"))}
    load_exactly(network, others | renamed(state, beginnings, network.state_dict()), "SOURCE")
    notes = [*shown.notes, f"logit scale: {scale:.6g}"]
    if "logit_bias" in state:
        bias = f"{state['logit_bias'].item():.6g}"
        notes.append(
            f"logit bias: {bias} (not in the scores; the start of SigmoidLoss: model.init_args.loss.init_args.bias)"
        )
    return network.eval(), notes


def _shown_by_processor(folder: Path, raw: Mapping[str, Any]) -> Shown:
    """The geometry that comes nearest to the image processor of a folder, and its normalisation."""
    config = library_config(raw, str(folder / CONFIG_FILE))
    try:
        processor = AutoImageProcessor.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each processor checks its settings in its own way
        raise UserError(
            f"{folder}: expected preprocessor_config.json of a known image processor, found none that can be read "
            f"({' '.join(str(error).split())[:200]}); copy the file"
        ) from error
    settings = processor.to_dict()
    flags = [name for name, value in settings.items() if isinstance(value, (int, float)) and value]
    if others := [f"{name} {settings[name]}" for name in flags if name not in _KNOWN]:
        raise UserError(
            f"{folder}: its image processor changes images by {', '.join(others)}, which has no counterpart here; "
            "give another model, or take the setting out of preprocessor_config.json if it was not trained with it"
        )
    size, crop = settings.get("size") or {}, settings.get("do_center_crop") and settings.get("crop_size")
    shown, *others = {*(crop or size).values()} or {None}
    is_resized, filter_ = settings.get("do_resize"), settings.get("resample")
    if crop and ({*size} == {"shortest_edge"} or not is_resized):
        resized, geometry, part = size.get("shortest_edge", shown), "shortest", "middle square is shown whole"
    else:
        resized, geometry, part = size.get("height"), "stretch", "whole image is shown"
    if others or resized is None or resized != size.get("width", resized):
        raise UserError(
            f"{folder}: expected an image processor whose size has height and width alike, or shortest_edge with a "
            f"centre crop, found size {size} and crop {crop}; write one of them into preprocessor_config.json"
        )
    differences = {
        f"the original shows the middle {shown} of {resized} pixels; here the {part}": shown < resized,
        f"the original has black around its {resized} of {shown} pixels; here the {part}": shown > resized,
        "the original does not resize images; here they are fitted to the square": not is_resized,
        "the original pads images; here they are fitted to the square without": settings.get("do_pad"),
        f"the original resizes by filter {filter_} of PIL, here by its bicubic one": (
            is_resized and filter_ not in _BICUBIC
        ),
    }
    mean, std = normalisation(settings, folder)
    return Shown(shown, geometry, mean, std, [text for text, is_true in differences.items() if is_true])
