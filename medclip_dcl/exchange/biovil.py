"""Convert BioViL (Boecking et al., ECCV 2022) and BioViL-T (Bannur et al., CVPR 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tokenizers import Regex, normalizers
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.common.weight_files import load_exactly, some_of
from medclip_dcl.exchange.transformers_folder import Converted
from medclip_dcl.networks.bert_folder import folder_weights, read_folder_json
from medclip_dcl.networks.image_encoder import ResNetRegions, from_torchvision_names, resnet_depth
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import TransformersSentences

RESNET = "encoder.encoder."
"""Beginning of the names of the image weights' ResNet."""
_PROJECTOR = "projector.model."
_LAST = f"{_PROJECTOR}3.weight"
_TEXT_PROJECTION = "cls_projection_head."
# Of BioViL-T: features of the image, then what stands for the difference from a prior image where there is none.
_TO_STATIC, _NO_PRIOR = "encoder.backbone_to_vit.weight", "encoder.missing_previous_emb"
_OF_PRIORS = "encoder.vit_pooler."
_FINAL_MARKS = r"[!?.]+\z"


def from_biovil(state: Mapping[str, Tensor], file: Path, text_folder: Path) -> Converted:
    """Convert image weights: a ResNet's regions, CXR-BERT's [CLS], the cosine with the mean of the regions.

    Images are in [0, 1] without further normalisation, as in the public inference code, which takes final marks off
    texts. The files do not contain gamma^2, on which uncalibrated probabilities alone depend.
    `text_folder` holds BiomedVLP-CXR-BERT-specialized, or BiomedVLP-BioViL-T.
    """
    has_priors = _TO_STATIC in state
    of_image, depth = _image_state(state, file)
    dim = len(state[_LAST])
    image_encoder = ResNetRegions(depth=depth, dim=dim, projection="mlp")
    positions = read_folder_json(text_folder / CONFIG_FILE).get("max_position_embeddings", 512)
    text_encoder = TransformersSentences(
        str(text_folder), dim=dim, max_tokens=positions, projection="mlp", final_period=False
    )
    tokenizer = text_encoder.tokenizer
    own = tokenizer.normalizer or normalizers.Sequence([])
    if own.normalize_str("a.") != "a":  # a tokenizer of `export` does so already
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(_FINAL_MARKS), ""), own])
    load_exactly(image_encoder, of_image, file)
    projection = {
        name.removeprefix(_TEXT_PROJECTION): x
        for name, x in folder_weights(text_folder).items()
        if name.startswith(_TEXT_PROJECTION)
    }
    load_exactly(text_encoder.projection, projection, f"{text_folder}, {_TEXT_PROJECTION}*")
    network = ImageTextNetwork(
        image_encoder,
        text_encoder,
        GlobalCosine(learn_gamma=False),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    notes = [
        "the original resizes the shorter side to 512 pixels, bilinearly, and shows the middle "
        f"{448 if has_priors else 480}; here the whole image is stretched to 512 x 512, bicubically",
        "the original stretches the grey levels of each image, of 8 bits too, from its darkest to its brightest pixel; "
        "here those of 8 bits stay",
        "the original takes periods, exclamation and question marks off the end of a text, and so does this tokenizer",
    ]
    if has_priors:
        notes.append(
            "prior images are left out with the transformer that compares them: every image is read as a first one"
        )
    return network.eval(), notes


def _image_state(state: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], Literal[18, 34, 50]]:
    """The image weights under the names of `ResNetRegions`, and the depth of the ResNet."""
    state = _without_priors(state)
    of_resnet = [name for name in state if name.startswith(RESNET)]
    resnet = {name.removeprefix(RESNET): state[name] for name in of_resnet}
    depth = resnet_depth(resnet)
    if depth is None or _LAST not in state:
        raise UserError(
            f"{file}: expected BioViL's image weights ({RESNET}* of ResNet-18, -34 or -50, {_LAST}), found "
            f"{some_of(sorted(state))}; give biovil_image_resnet50_proj_size_128.pt or "
            "biovil_t_image_model_proj_size_128.pt"
        )
    others = {
        name.replace(_PROJECTOR, "projection."): x for name, x in state.items() if name not in of_resnet
    }
    return {**from_torchvision_names(resnet), **others}, depth


def _without_priors(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """BioViL-T's image weights as BioViL's, exact for images without a prior; any other state dict as it is.

    The projector's first layer sees W_1 (B x) + W_2 c, with the constant c: its weight becomes W_1 B, and W_2 c leaves
    the running mean of the BatchNorm behind it.
    """
    first, mean = f"{_PROJECTOR}0.weight", f"{_PROJECTOR}1.running_mean"
    if not {_TO_STATIC, _NO_PRIOR, first, mean} <= state.keys():
        return state
    to_static, no_prior = state[_TO_STATIC].double().flatten(1), state[_NO_PRIOR].double().flatten()
    of_static, of_prior = state[first].double().flatten(1).split(len(no_prior), dim=1)
    others = {
        name: value
        for name, value in state.items()
        if name not in (_TO_STATIC, _NO_PRIOR) and not name.startswith(_OF_PRIORS)
    }
    weight = (of_static @ to_static)[..., None, None].to(state[first].dtype)
    return {**others, first: weight, mean: (state[mean].double() - of_prior @ no_prior).to(state[mean].dtype)}
