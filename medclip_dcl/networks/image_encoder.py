"""Image encoder: a ResNet cut before its pooling, each region projected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torchvision
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.common.weight_files import check_numbers, compare_state_dicts, read_state_dict

Images: TypeAlias = Float[Tensor, "image 3 height width"]
Features: TypeAlias = Float[Tensor, "image channel region_row region_column"]
Regions: TypeAlias = Float[Tensor, "image dim region_row region_column"]

IMAGENET = "imagenet"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Normalisation of the channels that torchvision's weights expect (choice, not from the paper)."""
BACKBONE = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
"""Parts of torchvision's ResNet -> their indices in `ResNetRegions.backbone`."""
CLASSIFIER = ("fc.weight", "fc.bias")
"""Tensors of torchvision's classifier, which an encoder of regions does not have."""

TORCHVISION_WIDTH = 64
"""Channels of the first stage of torchvision's ResNets."""

_CLASSIFIER, _COUNTER = "fc.", "num_batches_tracked"
_DEPTHS: dict[tuple[bool, int], Literal[18, 34, 50]] = {(False, 2): 18, (False, 6): 34, (True, 6): 50}
"""(has bottlenecks, blocks of the third stage) -> depth."""
RESNET_STAGES: dict[int, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}
"""Depth -> block and number of blocks in each stage."""


class RegionEncoder(nn.Module):
    """Base class: normalised images (image, 3, H, W) to region embeddings (image, dim, row, column), not normalised.

    Attributes:
        dim: size of a region's embedding.
        stride: pixels for each region, in both directions.
        mean: per channel, which a new network subtracts from images in [0, 1]; ImageNet's by default (choice).
        std: per channel; divides what remains.
        has_global_vector: True if it also has a vector of the whole image, with the channels of `features`, which the
            projection of the regions maps into the common space.
    """

    dim: int
    stride: int
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    has_global_vector: bool = False

    @property
    def feature_dim(self) -> int:
        """Channels of `features`."""
        return self.dim

    @property
    def trunk(self) -> nn.Module:
        """The part that computes `features`: all of it where there is no projection."""
        return self

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild the encoder, without its weights."""
        raise NotImplementedError

    def trunk_settings(self) -> dict[str, Any]:
        """Settings, in plain values, on which `features` depend besides the weights."""
        return self.config()

    def forward_settings(self) -> dict[str, Any]:
        """Settings, in plain values, on which regions depend besides the weights."""
        return {**self.config(), **self.trunk_settings()}

    def check_sides(self, sides: Mapping[str, int]) -> None:
        """Refuse sides of images in pixels, by the names of their settings, that the encoder does not take."""

    def features(self, images: Images) -> Features:
        """Input of the projection into the common space; the regions themselves where there is none."""
        return self(images)

    def features_and_global(self, images: Images) -> tuple[Features, Float[Tensor, "image channel"]]:
        """`features`, and the vector of the whole image before the projection."""
        raise NotImplementedError

    def project(self, features: Features) -> Regions:
        """Region embeddings from `features`."""
        return features

    def feature_layers(self) -> list[list[nn.Parameter]]:
        """Parameters that compute `features`, by layer from the input on; one layer unless a subclass overrides it."""
        return [list(self.parameters())]


class ProjectedRegions(RegionEncoder):
    """Base class of encoders with a `backbone`, which gives `features`, and a `projection` of each region."""

    backbone: Any
    projection: nn.Module

    @property
    def trunk(self) -> nn.Module:
        return self.backbone

    def project(self, features: Features) -> Regions:
        return self.projection(features)

    def forward(self, images: Images) -> Regions:
        return self.project(self.features(images))


class _Centred(nn.Sequential):
    """A backbone whose last stage leaves out the first row and column of its input.

    Its strided kernels are then centred half a cell further down and right, and pad both sides alike.
    """

    def forward(self, images: Images) -> Features:
        maps, *stages, last = (images, *self)
        for stage in stages:
            maps = stage(maps)
        return last(maps[..., 1:, 1:])


class ResNetRegions(ProjectedRegions):
    """ResNet up to its last (stride 32) or its last but one stage (stride 16), then a projection of each region.

    ResNet-18 at stride 32 is SSD's encoder: 512-d features, 15 x 15 regions at 480 px, mapped to 128-d. Stride 16
    stops after layer3 (256-d) and suits small images.

    Args:
        depth: 18, 34 or 50.
        stride: 32 or 16 pixels per region.
        dim: size of the projected regions.
        weights: initial weights: null for random ones, "imagenet" for torchvision's (downloaded once by
            torchvision), or the path of a torchvision state dict (.pth or .safetensors); channels are
            normalised as for ImageNet. ImageNet is a choice, not from the paper.
        projection: "linear" maps each region linearly, as SSD does; "mlp" is BioViL's projection (Boecking et al.,
            ECCV 2022): 1 x 1 convolution to `dim`, BatchNorm, ReLU, 1 x 1 convolution, with the names and biases of
            its published weights (``projector.model.{0,1,3}``: no bias before BatchNorm).
        width: channels of the first stage; those of the others and the features grow with it. 64 is torchvision's
            ResNet; with fewer, which suit a CPU and small data, initial weights are random.
        centred: true: the receptive field of a region is centred in the middle of its cell of stride x stride pixels,
            where heat maps show the region; the last stage has its input without the first row and column, and the
            sides of the images must be multiples of the stride. false: torchvision's ResNet, centred on the cell's
            first pixel, half a cell further up and left (choice, not from the paper: docs/results.md).

    Raises:
        UserError: a setting out of range; `weights` with a width other than 64; a weight file that does not fit.
        MissingFileError: no file at `weights`.
    """

    def __init__(
        self,
        depth: Literal[18, 34, 50] = 18,
        stride: Literal[16, 32] = 32,
        dim: int = 128,
        weights: str | None = None,
        projection: Literal["linear", "mlp"] = "linear",
        width: int = TORCHVISION_WIDTH,
        centred: bool = False,
    ) -> None:
        super().__init__()
        check_range("image_encoder", "[1, inf)", dim=dim, width=width)
        check_choice("image_encoder.depth", depth, (18, 34, 50))
        check_choice("image_encoder.stride", stride, (16, 32))
        check_choice("image_encoder.projection", projection, ("linear", "mlp"))
        self.depth, self.stride, self.dim, self.projection_kind = depth, stride, dim, projection
        self.width, self.centred = width, centred
        if width == TORCHVISION_WIDTH:
            resnet = _resnet(depth, weights, stride)
            stages = [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4]
            stem = [resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool]
        elif weights is None:
            convolution = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            stem = [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
            stages = resnet_stages(depth, width)
        else:
            raise UserError(
                f"image encoder: weights {weights} are of torchvision's ResNet of width {TORCHVISION_WIDTH}, not of "
                f"{width}; leave width out, or set weights: null"
            )
        kept = stages if stride == 32 else stages[:3]
        self.backbone = (_Centred if centred else nn.Sequential)(*stem, *kept)
        if width != TORCHVISION_WIDTH:
            draw_kernels(self.backbone)
        self.projection = _projection(projection, self.feature_dim, dim)

    @property
    def feature_dim(self) -> int:
        return self.width * (8 if self.stride == 32 else 4) * (4 if self.depth == 50 else 1)

    def config(self) -> dict[str, Any]:
        own = {"dim": self.dim, "projection": self.projection_kind, "width": self.width}
        return {**self.trunk_settings(), **own}

    def trunk_settings(self) -> dict[str, Any]:
        return {"depth": self.depth, "stride": self.stride, "centred": self.centred}

    def features(self, images: Images) -> Features:
        """Output of the last stage, after its ReLU."""
        return self.backbone(images.contiguous(memory_format=torch.channels_last))

    def feature_layers(self) -> list[list[nn.Parameter]]:
        """The stem (first convolution and its BatchNorm), then each stage, without the projection."""
        places = [(0, 1), *((place,) for place in range(BACKBONE["layer1"], len(self.backbone)))]
        return [[p for place in layer for p in self.backbone[place].parameters()] for layer in places]


def _projection(kind: str, channels: int, dim: int) -> nn.Module:
    if kind == "linear":
        return nn.Conv2d(channels, dim, kernel_size=1)
    return nn.Sequential(
        nn.Conv2d(channels, dim, kernel_size=1, bias=False),
        nn.BatchNorm2d(dim),
        nn.ReLU(inplace=True),
        nn.Conv2d(dim, dim, kernel_size=1),
    )


def resnet_stages(depth: int, width: int) -> list[nn.Sequential]:
    """The four stages of torchvision's ResNet under its names, with `width` channels in the blocks of the first."""
    block, counts = RESNET_STAGES[depth]
    stages, inputs = [], width
    for place, count in enumerate(counts):
        planes, stride, shortcut = width * 2**place, 1 if place == 0 else 2, None
        outputs = planes * block.expansion
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        others = [block(outputs, planes) for _ in range(count - 1)]
        stages.append(nn.Sequential(block(inputs, planes, stride, shortcut), *others))
        inputs = outputs
    return stages


def draw_kernels(module: nn.Module) -> None:
    """Draw the kernels as torchvision's ResNet does (He et al., 2015)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def _resnet(depth: int, weights: str | None, stride: int) -> ResNet:
    """torchvision's ResNet with the wanted initial weights."""
    build = getattr(torchvision.models, f"resnet{depth}")
    if weights is None:
        return build(weights=None)
    if weights == IMAGENET:
        try:
            return build(weights="IMAGENET1K_V1")
        except OSError as error:
            raise UserError(
                f'image encoder weights: "imagenet" could not be downloaded ({error}); give the path of a state dict '
                f"of torchvision's ResNet-{depth} (.pth), or null for random weights"
            ) from error
    resnet = build(weights=None)
    state = _as_torchvision_resnet(read_state_dict(weights), weights, depth)
    # The classifier is not part of the encoder.
    taken = {name: value for name, value in state.items() if name not in CLASSIFIER}
    check_numbers(taken, weights)
    resnet.load_state_dict({**resnet.state_dict(), **taken})
    return resnet


def _as_torchvision_resnet(state: dict[str, Tensor], source: str | Path, depth: int) -> dict[str, Tensor]:
    """`state` if it is that of torchvision's ResNet, perhaps without its classifier."""
    with torch.device("meta"):
        expected = getattr(torchvision.models, f"resnet{depth}")(weights=None).state_dict()
    # Official files of earlier years have no counters of batches.
    is_classifier = any(name.startswith(_CLASSIFIER) for name in state)
    expected = {
        name: value
        for name, value in expected.items()
        if name in state
        or not (name.endswith(_COUNTER) or (name.startswith(_CLASSIFIER) and not is_classifier))
    }
    any_classes = {name: expected[name] for name in CLASSIFIER if name in state}
    if problems := compare_state_dicts(expected, {**state, **any_classes}):
        raise UserError(
            f"image encoder weights {source}: not a torchvision ResNet-{depth} state dict; {problems}"
        )
    return state


def from_torchvision_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A torchvision state dict under the names of `ResNetRegions`, without its classifier."""
    split = {name: name.partition(".") for name in state if name not in CLASSIFIER}
    return {
        f"backbone.{BACKBONE[part]}.{rest}" if part in BACKBONE else name: state[name]
        for name, (part, _, rest) in split.items()
    }


def resnet_depth(names: Iterable[str]) -> Literal[18, 34, 50] | None:
    """18, 34 or 50 from torchvision's names of the third stage; None for any other network."""
    third = {name.removeprefix("layer3.") for name in names if name.startswith("layer3.")}
    blocks = {name.split(".")[0] for name in third}
    return _DEPTHS.get(("0.conv3.weight" in third, len(blocks)))
