"""Weights that training starts from, whichever program or command left them: read, checked, and taken over by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from medclip_dcl.encoders.image import (
    BACKBONE,
    CLASSIFIER,
    RegionEncoder,
    as_torchvision_resnet,
    from_torchvision_names,
)
from medclip_dcl.network import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    WEIGHTS_FILE,
    part_config,
    read_checkpoint,
    read_exported_config,
)
from medclip_dcl.weight_files import as_state_dict, read_state_dict, read_torch_file

_IMAGE_ENCODER = "image_encoder"
_PREFIXES = ("network.", "")


@dataclass(frozen=True)
class EncoderWeights:
    """An image encoder's weights.

    Attributes:
        config: class_path and init_args of the encoder that they are of; None for a torchvision state dict, which
            is of a backbone and has no projection.
        state: tensors under the encoder's own names.
        source: where they were read.
        mean: of the three channels, by which the encoder's images are normalised.
        std: of the three channels.
        left_out: names of the source that belong to no image encoder (torchvision's classifier).
    """

    config: dict[str, Any] | None
    state: dict[str, Tensor]
    source: str
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    left_out: tuple[str, ...] = ()


def image_encoder_weights(source: str | Path) -> EncoderWeights:
    """The image encoder of whatever has one.

    Args:
        source: a checkpoint of this program (image-text model, or any other whose description names an image
            encoder), a folder of `save_pretrained`, or a state dict of torchvision's ResNet (.pth or .safetensors).

    Raises:
        FileNotFoundError: nothing there, or an exported folder with a file missing.
        ValueError: truncated, Python objects, or of another program.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        config, state = read_exported_config(path), read_state_dict(path / WEIGHTS_FILE)
    elif (found := _read_file(path)) is None:
        return _of_torchvision(path)
    else:
        config, state = found
    return _of_description(config, state, str(path))


def take_over_image_encoder(encoder: RegionEncoder, weights: EncoderWeights) -> list[str]:
    """Put the weights into the encoder; normalising images by `weights.mean` and `.std` is the caller's.

    Returns:
        Names of the encoder's tensors that keep the values they have, which the source cannot have: the projection's
        where that is torchvision's. Empty otherwise.

    Raises:
        ValueError: weights of another encoder; names every tensor that is missing, left over or of another shape,
            and the settings that fit.
    """
    expected, state = encoder.state_dict(), dict(weights.state)
    kept: list[str] = []
    if weights.config is None:
        kept = [name for name in expected if name.startswith("projection.")]
        # The last stage is no part of an encoder that stops before it.
        last = f"backbone.{BACKBONE['layer4']}."
        if not any(name.startswith(last) for name in expected):
            state = {name: value for name, value in state.items() if not name.startswith(last)}
    if problems := misfits({name: x for name, x in expected.items() if name not in kept}, state):
        raise ValueError(
            f"{weights.source}: its image encoder does not fit the one that is configured: {problems}; "
            f"{_remedy(weights.config, part_config(encoder))}"
        )
    encoder.load_state_dict({**{name: expected[name] for name in kept}, **state})
    return kept


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Names of all tensors that are missing, unexpected or of another shape; empty if there are none."""
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    named = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return ", ".join(f"{what} {names}" for what, names in named.items() if names)


def _remedy(there: dict[str, Any] | None, here: dict[str, Any]) -> str:
    if there is None:
        return "choose the depth of the file (image_encoder.init_args.depth), or another file"
    return f"set image_encoder to {there} (it is {here}), or start from another source"


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Description and tensors of a checkpoint of this program; None if the file is a bare state dict."""
    if file.suffix == ".safetensors":
        return None
    content = read_torch_file(file)
    if not (isinstance(content, dict) and {"state_dict", "network"} & content.keys()):
        return None
    checkpoint = read_checkpoint(file)
    return checkpoint["network"], as_state_dict(checkpoint.get("state_dict"), file)


def _of_torchvision(file: Path) -> EncoderWeights:
    state = as_torchvision_resnet(read_state_dict(file), file)
    return EncoderWeights(None, from_torchvision_names(state), str(file), left_out=CLASSIFIER)


def _of_description(config: dict[str, Any], state: dict[str, Tensor], source: str) -> EncoderWeights:
    if not isinstance(config, dict) or _IMAGE_ENCODER not in config:
        raise ValueError(
            f"{source} describes no image encoder; give a checkpoint of an image-text model or of a classifier"
        )
    for prefix in _PREFIXES:
        start = f"{prefix}{_IMAGE_ENCODER}."
        own = {name.removeprefix(start): x for name, x in state.items() if name.startswith(start)}
        if own:
            mean, std = config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD)
            return EncoderWeights(config[_IMAGE_ENCODER], own, source, tuple(mean), tuple(std))
    raise ValueError(f"{source} describes an image encoder but has no tensor of one (image_encoder.*)")
