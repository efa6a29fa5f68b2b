"""BioViL (Boecking et al., ECCV 2022) from its published weights, as a network that everything here works with.

The files are the user's: a state dict of the image model, and the folder of CXR-BERT-specialized. They are read as
data: no code of theirs runs, and every weight of the network comes from them, with its shape.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from medclip_dcl.encoders.image import BACKBONE, CLASSIFIER, ResNetRegions, backbone_name, resnet_depth
from medclip_dcl.encoders.pretrained import ModelFolderError, load_bert_config, load_part
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.errors import MissingFileError
from medclip_dcl.networks.image_text import ImageTextNetwork, load_exactly
from medclip_dcl.similarity import GlobalCosine
from medclip_dcl.weight_files import read_state_dict

_RESNET = "encoder.encoder."
_PROJECTOR = "projector.model."
_TEXT_PROJECTION = "cls_projection_head."


def load_biovil(
    image_weights: str | Path, text_folder: str | Path, *, image_size: int = 512, final_period: bool = True
) -> ImageTextNetwork:
    """BioViL in evaluation mode: ResNet-50 regions, CXR-BERT's [CLS], the cosine with the mean of the regions.

    Images are in [0, 1] without further normalisation, as its public inference code has them. That code resizes the
    shorter side to 512 pixels and crops the middle 480 x 480; here the whole image is stretched to a square (choice: no
    box falls outside the view). gamma^2 is not in the files; no evaluation depends on it.

    Args:
        image_weights: ``biovil_image_resnet50_proj_size_128.pt``.
        text_folder: Hugging Face folder of BiomedVLP-CXR-BERT-specialized.
        image_size: side of the whole image as the network sees it, in pixels.
        final_period: True ends prompts and phrases with a period, as in `BertSentences`.

    Raises:
        FileNotFoundError: no file at `image_weights`.
        ModelFolderError: weights that are not BioViL's; names what is missing, unexpected or of another shape.
    """
    file = Path(image_weights)
    state = _image_state(file)
    last = state.get("projection.3.weight")
    if last is None:
        raise ModelFolderError(f"{file}: not BioViL's image weights, missing {_PROJECTOR}3.weight")
    dim = int(last.shape[0])
    image_encoder = ResNetRegions(depth=_depth(state, file), dim=dim, projection="mlp")
    positions = int(load_bert_config(text_folder).max_position_embeddings)
    text_encoder = BertSentences(
        str(text_folder), dim=dim, max_tokens=positions, final_period=final_period, projection="mlp"
    )
    try:
        load_exactly(image_encoder, state, str(file))
        load_exactly(
            text_encoder.projection,
            load_part(text_folder, _TEXT_PROJECTION),
            f"{text_folder}, {_TEXT_PROJECTION}*",
        )
    except ModelFolderError:
        raise
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    network = ImageTextNetwork(
        image_encoder,
        text_encoder,
        GlobalCosine(learn_gamma=False),
        image_size=image_size,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    return network.eval()


def _image_state(file: Path) -> dict[str, Tensor]:
    """The image weights under the names of `ResNetRegions`."""
    if not file.is_file():
        raise MissingFileError(f"no file {file} (BioViL's image weights)")
    try:
        state = read_state_dict(file)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    renamed = {_renamed(name): value for name, value in state.items()}
    return {name: value for name, value in renamed.items() if name not in CLASSIFIER}


def _renamed(name: str) -> str:
    if name.startswith(_PROJECTOR):
        return f"projection.{name.removeprefix(_PROJECTOR)}"
    if not name.startswith(_RESNET):
        return name
    return backbone_name(name.removeprefix(_RESNET))


def _depth(state: dict[str, Tensor], file: Path) -> int:
    """Which ResNet it is, by its blocks."""
    third = f"backbone.{BACKBONE['layer3']}"
    depth = resnet_depth(state, third)
    if depth is None:
        blocks = {
            name.removeprefix(f"{third}.").split(".")[0] for name in state if name.startswith(f"{third}.")
        }
        raise ModelFolderError(
            f"{file}: not BioViL's image weights: {len(blocks)} blocks named {_RESNET}layer3.*, which is no ResNet-18, "
            "-34 or -50"
        )
    return depth
