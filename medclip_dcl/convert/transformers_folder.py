"""A CLIP or SigLIP in transformers' layout as an `ImageTextNetwork`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import CONFIG_FILE
from medclip_dcl.networks.bert_folder import NAMES_OF_CODE, load_from_folder, read_folder_json
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.pretrained_sentences import TransformersSentences
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import SentenceEncoder

PREPROCESSOR_FILE = "preprocessor_config.json"
BICUBIC = 3
"""PIL's number, in which transformers names the filter of a resize."""
FAMILIES: dict[str, tuple[Any, Any]] = {
    "clip": (CLIPModel, CLIPConfig),
    "siglip": (SiglipModel, SiglipConfig),
}
"""`model_type` of config.json -> classes of model and configuration."""
_MAX_GAMMA2 = 100.0


@dataclass
class Converted:
    """A network, where its images differ from the original's, and the original's other numbers by name."""

    network: ImageTextNetwork
    differences: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def from_transformers(folder: Path) -> Converted:
    """Convert a folder with config.json, weights, preprocessor_config.json and the tokenizer's files."""
    raw = read_folder_json(folder / CONFIG_FILE)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"{folder / CONFIG_FILE}: model_type: expected {' or '.join(FAMILIES)}, found {family!r}; give the folder "
            "of a CLIPModel or a SiglipModel, a folder of open_clip, or a state dict of OpenAI's CLIP"
        )
    kind, of_kind = FAMILIES[family]
    config = of_kind.from_dict({name: value for name, value in raw.items() if name not in NAMES_OF_CODE})
    whole = load_from_folder(
        *(kind, folder, config, lambda name: name.endswith("position_ids")), lambda missing: "copy it again"
    )
    dim = config.projection_dim if family == "clip" else config.vision_config.hidden_size
    options: dict[str, Any] = {"dim": dim, "projection": "pretrained"}
    text_encoder = TransformersSentences(str(folder), final_period=False, **options)
    end = config.text_config.eos_token_id
    # CLIP's vector of a text is that of its end, or of its largest token (older files, eos_token_id 2).
    ids = text_encoder.tokenize(["a"])[0]
    if family == "clip" and ids[-1] != (max(ids) if end == 2 else end):
        raise UserError(
            f"tokenizer: expected CLIP's, which ends a text with token {end}, found one that ends it with {ids[-1]}; "
            "give the tokenizer of these weights"
        )
    return assembled(
        TransformersRegions(str(folder), global_vector=True, **options),
        text_encoder,
        whole.logit_scale,
        read_folder_json(folder / PREPROCESSOR_FILE),
        None if family == "clip" else whole.logit_bias.item(),
    )


def assembled(
    image_encoder: RegionEncoder,
    text_encoder: SentenceEncoder,
    logit_scale: Tensor,
    preprocessor: Mapping[str, Any],
    logit_bias: float | None = None,
) -> Converted:
    """A network that compares global vectors; `preprocessor` is the content of transformers' preprocessor_config.json.

    `logit_scale` is the logarithm.
    """
    size, geometry, differences = _view(preprocessor)
    scale = logit_scale.exp().item()
    similarity = GlobalCosine(gamma2=scale, max_gamma2=max(_MAX_GAMMA2, scale))
    with torch.no_grad():
        similarity.log_gamma2.copy_(logit_scale.reshape(()))
    image_encoder.check_sides({"image_size": size})
    network = ImageTextNetwork(
        *(image_encoder, text_encoder, similarity),
        image_size=size,
        mean=image_encoder.mean,
        std=image_encoder.std,
        geometry=geometry,
    )
    facts = {"logit scale": f"{scale:.6g}"}
    if logit_bias is not None:
        facts["logit bias"] = (
            f"{logit_bias:.6g} (not in the scores; the start of SigmoidLoss: model.loss.init_args.bias)"
        )
    return Converted(network.eval(), differences, facts)


def _view(settings: Mapping[str, Any]) -> tuple[int, str, list[str]]:
    """Side of the input, the geometry that comes nearest to the original's, and what differs from it."""
    resized, differences = settings.get("size", {}), []
    shortest = resized.get("shortest_edge") if isinstance(resized, Mapping) else resized
    sides = [resized.get(name) for name in ("height", "width")] if isinstance(resized, Mapping) else []
    if shortest and settings.get("do_center_crop", False):
        crop = settings.get("crop_size", shortest)
        size, geometry = int(crop["height"] if isinstance(crop, Mapping) else crop), "shortest"
        if size != shortest:
            differences.append(
                f"the original shows the middle {size} of {shortest} pixels; here the middle square is shown whole"
            )
    elif shortest is None and len(set(sides)) == 1 and sides[0]:
        size, geometry = int(sides[0]), "stretch"
        crop = settings.get("crop_size", size) if settings.get("do_center_crop", False) else size
        shown = int(crop["height"] if isinstance(crop, Mapping) else crop)
        if shown != size:
            differences.append(
                f"the original shows the middle {shown} of {size} pixels; here the whole image is shown"
            )
            size = shown
    else:
        raise UserError(
            f"{PREPROCESSOR_FILE}: expected size with height and width alike, or shortest_edge with a centre crop, "
            f"found size {resized}; write one of them there"
        )
    if settings.get("do_pad"):
        differences.append("the original pads images; here they are fitted to the square without")
    if settings.get("resample", BICUBIC) != BICUBIC:
        differences.append(
            f"the original resizes by filter {settings['resample']} of PIL, here by its bicubic one"
        )
    return size, geometry, differences
