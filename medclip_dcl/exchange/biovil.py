"""BioViL (Boecking et al., ECCV 2022) and BioViL-T (Bannur et al., CVPR 2023), from their published weights."""

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
# Of BioViL-T: features of the image, then what stands for the difference from a prior image where there is none.
_TO_STATIC, _NO_PRIOR = "encoder.backbone_to_vit.weight", "encoder.missing_previous_emb"
_OF_PRIORS = "encoder.vit_pooler."


def load_biovil(
    image_weights: str | Path, text_folder: str | Path, *, final_period: bool = True
) -> ImageTextNetwork:
    """Load BioViL in evaluation mode: ResNet-50 regions, CXR-BERT's [CLS], the cosine with the mean of the regions.

    Images are in [0, 1] without further normalisation, as in its public inference code. That code resizes the shorter
    side to 512 pixels and crops the middle 480 x 480 (BioViL-T: 448 x 448); here the whole image is stretched to a
    square (choice, not from the paper: no box falls outside the view). The files do not contain gamma^2; no evaluation
    depends on it. BioViL-T sees each image as one without a prior.

    Args:
        image_weights: ``biovil_image_resnet50_proj_size_128.pt``, or ``biovil_t_image_model_proj_size_128.pt``.
        text_folder: Hugging Face folder of BiomedVLP-CXR-BERT-specialized, or BiomedVLP-BioViL-T.
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
    """True for a state dict with the names of BioViL's or BioViL-T's image weights."""
    return any(name.startswith(_RESNET) for name in read_state_dict(file))


def biovil_differences(file: Path) -> list[str]:
    """Differences of `load_biovil` from the public inference code."""
    has_priors = _TO_STATIC in read_state_dict(file)
    crop = (
        f"the original resizes the shorter side to 512 pixels, bilinearly, and shows the middle "
        f"{448 if has_priors else 480}; here the whole image is stretched to 512 x 512, bicubically"
    )
    priors = "prior images are left out with the transformer that compares them: every image is read as a first one"
    return [crop, priors] if has_priors else [crop]


def _image_state(file: Path) -> tuple[dict[str, Tensor], Literal[18, 34, 50]]:
    """The image weights under the names of `ResNetRegions`, and the depth of the ResNet."""
    state = _without_priors(read_state_dict(file))
    of_resnet = [name for name in state if name.startswith(_RESNET)]
    resnet = {name.removeprefix(_RESNET): state[name] for name in of_resnet}
    depth = resnet_depth(resnet)
    if depth is None or f"{_PROJECTOR}3.weight" not in state:
        raise UserError(
            f"{file}: expected BioViL's image weights ({_RESNET}* of ResNet-18, -34 or -50, {_PROJECTOR}3.weight), "
            f"found {some_of(sorted(state))}; give biovil_image_resnet50_proj_size_128.pt or "
            "biovil_t_image_model_proj_size_128.pt"
        )
    others = {
        name.replace(_PROJECTOR, "projection."): x for name, x in state.items() if name not in of_resnet
    }
    return {**from_torchvision_names(resnet), **others}, depth


def _without_priors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """BioViL-T's image weights as BioViL's, exact for images without a prior; any other state dict as it is.

    The projector's first layer sees W_1 (B x) + W_2 c, with the constant c: its weight becomes W_1 B, and W_2 c leaves
    the running mean of the BatchNorm behind it.
    """
    first, mean = f"{_PROJECTOR}0.weight", f"{_PROJECTOR}1.running_mean"
    if not {_TO_STATIC, _NO_PRIOR, first, mean} <= state.keys():
        return state
    to_static, no_prior = state[_TO_STATIC].double().flatten(1), state[_NO_PRIOR].double().flatten()
    of_static, of_prior = state[first].double().flatten(1).split(len(no_prior), dim=1)
    kept = {
        name: value
        for name, value in state.items()
        if name not in (_TO_STATIC, _NO_PRIOR) and not name.startswith(_OF_PRIORS)
    }
    weight = (of_static @ to_static)[..., None, None].to(state[first].dtype)
    return {**kept, first: weight, mean: (state[mean].double() - of_prior @ no_prior).to(state[mean].dtype)}
