"""BioViL (Boecking et al., ECCV 2022) as an `ImageTextNetwork`, from its published weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import WEIGHTS_FILE, load_exactly, read_state_dict, some_of
from medclip_dcl.networks.bert_folder import load_bert_config
from medclip_dcl.networks.image_encoder import ResNetRegions, from_torchvision_names, resnet_depth
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import BertSentences

_RESNET = "encoder.encoder."
_PROJECTOR = "projector.model."
_LAST = "projection.3.weight"
_TEXT_PROJECTION = "cls_projection_head."


def load_biovil(
    image_weights: str | Path, text_folder: str | Path, *, final_period: bool = True
) -> ImageTextNetwork:
    """Load BioViL in evaluation mode: ResNet-50 regions, CXR-BERT's [CLS], the cosine with the mean of the regions.

    Images are in [0, 1] without further normalisation, as in its public inference code. That code resizes the shorter
    side to 512 pixels and crops the middle 480 x 480; here the whole image is stretched to a square (choice, not from
    the paper: no box falls outside the view). The files do not contain gamma^2; no evaluation depends on it.

    Args:
        image_weights: ``biovil_image_resnet50_proj_size_128.pt``.
        text_folder: Hugging Face folder of BiomedVLP-CXR-BERT-specialized.
        final_period: True ends prompts and phrases with a period, as in `BertSentences`.
    """
    file = Path(image_weights)
    folder = Path(text_folder)
    state, depth = _image_state(file)
    dim = int(state[_LAST].shape[0])
    image_encoder = ResNetRegions(depth=depth, dim=dim, projection="mlp")
    positions = int(load_bert_config(folder).max_position_embeddings)
    text_encoder = BertSentences(
        str(folder), dim=dim, max_tokens=positions, final_period=final_period, projection="mlp"
    )
    load_exactly(image_encoder, state, file)
    saved = folder / WEIGHTS_FILE
    if not saved.is_file():
        saved = folder / "pytorch_model.bin"
    projection = {
        name.removeprefix(_TEXT_PROJECTION): x
        for name, x in read_state_dict(saved).items()
        if name.startswith(_TEXT_PROJECTION)
    }
    load_exactly(text_encoder.projection, projection, f"{saved}, {_TEXT_PROJECTION}*")
    network = ImageTextNetwork(
        image_encoder,
        text_encoder,
        GlobalCosine(learn_gamma=False),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    return network.eval()


def is_biovil(file: Path) -> bool:
    """True for a state dict with the names of BioViL's image weights."""
    return any(name.startswith(_RESNET) for name in read_state_dict(file))


def _image_state(file: Path) -> tuple[dict[str, Tensor], Literal[18, 34, 50]]:
    """The image weights under the names of `ResNetRegions`, and the depth of the ResNet."""
    state = read_state_dict(file)
    of_resnet = [name for name in state if name.startswith(_RESNET)]
    resnet = {name.removeprefix(_RESNET): state[name] for name in of_resnet}
    depth = resnet_depth(resnet)
    if depth is None or f"{_PROJECTOR}3.weight" not in state:
        raise UserError(
            f"{file}: expected BioViL's image weights ({_RESNET}* of ResNet-18, -34 or -50, {_PROJECTOR}3.weight), "
            f"found {some_of(sorted(state))}; give biovil_image_resnet50_proj_size_128.pt"
        )
    others = {
        name.replace(_PROJECTOR, "projection."): x for name, x in state.items() if name not in of_resnet
    }
    return {**from_torchvision_names(resnet), **others}, depth
