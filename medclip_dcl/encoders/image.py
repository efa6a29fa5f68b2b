"""Image encoder: a ResNet cut before its pooling, each region projected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchvision
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models import ResNet

IMAGENET = "imagenet"


class RegionEncoder(nn.Module):
    """Base class: images to a map of region embeddings.

    Attributes:
        dim: size of a region's embedding.
        stride: pixels for each region, in both directions.
    """

    dim: int
    stride: int

    @property
    def region_centre(self) -> float:
        """Where the receptive field of a region is centred in the region's cell of stride x stride pixels.

        A share of the cell's side, from its left (upper) edge; 0.5 is the middle.
        """
        return 0.5

    def config(self) -> dict[str, Any]:
        """Arguments that build the same encoder again, without its weights."""
        raise NotImplementedError

    def forward(
        self, images: Float[Tensor, "image 3 height width"]
    ) -> Float[Tensor, "image dim region_row region_column"]:
        """Region embeddings, not normalised; `images` are normalised by the network's mean and deviation."""
        raise NotImplementedError


class ResNetRegions(RegionEncoder):
    """ResNet up to its last (stride 32) or its last but one stage (stride 16), then a projection of each region.

    ResNet-18 at stride 32 is SSD's encoder: 512-d features, 15 x 15 regions at 480 px, mapped to 128-d. Stride 16
    stops after layer3 (256-d) and suits small images.

    Args:
        depth: 18, 34 or 50.
        stride: 32 or 16 pixels per region.
        dim: size of the projected regions.
        weights: initial weights: null for random ones, "imagenet" for torchvision's (downloaded once by
            torchvision), or the path of a torchvision state dict (.pth). ImageNet is a choice, not from the paper.
        projection: "linear" maps each region linearly, as SSD does; "mlp" is BioViL's projection (Boecking et al.,
            ECCV 2022): 1 x 1 convolution to `dim`, BatchNorm, ReLU, 1 x 1 convolution. Its layers have the names and
            biases of BioViL's published weights (``projector.model.{0,1,3}``: no bias before BatchNorm).

    Raises:
        ValueError: an unknown depth, stride or projection; a weight file whose keys do not fit, all named.
        FileNotFoundError: no file at `weights`.
    """

    def __init__(
        self,
        depth: int = 18,
        stride: int = 32,
        dim: int = 128,
        weights: str | None = None,
        projection: str = "linear",
    ) -> None:
        super().__init__()
        if depth not in (18, 34, 50):
            raise ValueError(f"depth must be 18, 34 or 50, got {depth}")
        if stride not in (16, 32):
            raise ValueError(f"stride must be 16 or 32, got {stride}")
        if projection not in ("linear", "mlp"):
            raise ValueError(f'image encoder: projection must be "linear" or "mlp", got {projection!r}')
        self.depth, self.stride, self.dim, self.projection_kind = depth, stride, dim, projection
        resnet = _resnet(depth, weights)
        stages = [resnet.layer1, resnet.layer2, resnet.layer3]
        if stride == 32:
            stages.append(resnet.layer4)
        self.backbone = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, *stages)
        channels = (512 if stride == 32 else 256) * (4 if depth == 50 else 1)
        self.projection = _projection(projection, channels, dim)

    def config(self) -> dict[str, Any]:
        config = {"depth": self.depth, "stride": self.stride, "dim": self.dim}
        # Unsaid where it is the default, so that a checkpoint from before this option describes the same encoder.
        return config if self.projection_kind == "linear" else {**config, "projection": self.projection_kind}

    @property
    def region_centre(self) -> float:
        """The middle of the cell's first pixel.

        A kernel of odd size k, padded by (k - 1) / 2, is centred on the pixels 0, stride, 2 stride, ... that it steps
        to: every layer of a ResNet is such, so region n is centred on pixel n * stride, and not in the middle of the
        stride pixels that follow. With random weights the centre of the gradient is there within a pixel (depth 18
        and 50, stride 16 and 32). What a trained region shows is not: on the phantom (ResNet-18 from scratch, stride
        16, three runs, 797 boxes) the mean signed CNR with regions here was 1.01, 0.74 and 1.45, in the middle of
        their cells 1.03, 0.86 and 1.58, and no place was better than those from 0.35 to 0.5 of a cell.
        """
        return 0.5 / self.stride

    def forward(
        self, images: Float[Tensor, "image 3 height width"]
    ) -> Float[Tensor, "image dim region_row region_column"]:
        return self.projection(self.backbone(images.contiguous(memory_format=torch.channels_last)))


def _projection(kind: str, channels: int, dim: int) -> nn.Module:
    """From features of the backbone to regions in the common space."""
    if kind == "linear":
        return nn.Conv2d(channels, dim, kernel_size=1)
    return nn.Sequential(
        nn.Conv2d(channels, dim, kernel_size=1, bias=False),
        nn.BatchNorm2d(dim),
        nn.ReLU(inplace=True),
        nn.Conv2d(dim, dim, kernel_size=1),
    )


def _resnet(depth: int, weights: str | None) -> ResNet:
    """torchvision's ResNet with the wanted initial weights."""
    build = getattr(torchvision.models, f"resnet{depth}")
    if weights is None:
        return build(weights=None)
    if weights == IMAGENET:
        return build(weights="IMAGENET1K_V1")
    file = Path(weights)
    if not file.is_file():
        raise FileNotFoundError(
            f'image encoder weights: no file {file} (a .pth state dict, "imagenet" or null)'
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    resnet = build(weights=None)
    expected = set(resnet.state_dict())
    missing, unexpected = sorted(expected - set(state)), sorted(set(state) - expected)
    if missing or unexpected:
        raise ValueError(
            f"image encoder weights {file}: not a torchvision ResNet-{depth} state dict; "
            f"missing {missing or 'none'}, unexpected {unexpected or 'none'}"
        )
    resnet.load_state_dict(state)
    return resnet
