"""Encoders of small images: a ResNet with a 3 x 3 stem for 32 pixels, three convolutions for 8 x 8 digits."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from medclip_dcl.common.errors import check_range
from medclip_dcl.networks.image_encoder import RESNET_STAGES, draw_kernels, resnet_stages
from medclip_dcl.objectives.part import ObjectivePart


class SmallImageEncoder(ObjectivePart):
    """Base class: images to one feature vector each.

    Images are in [0, 1] and not normalised: the BatchNorm after the first convolution does it (choice).

    Attributes:
        feature_dim: size of the features.
        channels: of the images.
        n_parts: parts of one size that the features join, each of which gets a projection of its own.
    """

    feature_dim: int
    channels: int
    n_parts: int = 1

    def forward(self, images: Float[Tensor, "image channel height width"]) -> Float[Tensor, "image feature"]:
        """Features on which linear probes are trained, not normalised."""
        raise NotImplementedError


class SmallImageResNet(SmallImageEncoder):
    """torchvision's ResNet with a 3 x 3 stem of stride 1 and no max-pooling, as is usual for images of 32 pixels.

    With width 64 its parameters are those of torchvision's ResNet but for the stem, under the same names. SSD's
    CIFAR10-r experiments use ResNet-18, those of DCL ResNet-50.

    Args:
        depth: 18 or 50.
        width: channels of the first stage; those of the others and the features grow with it (64: the papers'; 16
            serves a CPU).
        channels: of the images.
        large_stem: True: torchvision's 7 x 7 stem of stride 2 with max-pooling, for images of about 224 pixels.
    """

    def __init__(
        self, depth: Literal[18, 50] = 18, width: int = 64, channels: int = 3, large_stem: bool = False
    ) -> None:
        super().__init__()
        check_range("image_encoder", "[1, inf)", width=width, channels=channels)
        self.depth, self.width, self.channels, self.large_stem = depth, width, channels, large_stem
        kernel, stride = (7, 2) if large_stem else (3, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        for place, stage in enumerate(resnet_stages(depth, width)):
            self.add_module(f"layer{place + 1}", stage)
        self.feature_dim = 8 * width * RESNET_STAGES[depth][0].expansion
        draw_kernels(self)

    def forward(self, images: Float[Tensor, "image channel height width"]) -> Float[Tensor, "image feature"]:
        features = self.relu(self.bn1(self.conv1(images.contiguous(memory_format=torch.channels_last))))
        if self.large_stem:
            features = max_pool2d(features, 3, stride=2, padding=1)
        for place in range(1, 5):
            features = self.get_submodule(f"layer{place}")(features)
        return features.mean((2, 3))


class SmallConvNet(SmallImageEncoder):
    """Three 3 x 3 convolutions, each with BatchNorm and ReLU, the second of stride 2, and the mean over places.

    For images of about 8 x 8 pixels, such as scikit-learn's digits: a step of 256 views takes 14 ms on an EPYC core.

    Args:
        width: channels of the first convolution; the second has twice, the third four times as many.
        channels: of the images.
    """

    def __init__(self, width: int = 16, channels: int = 1) -> None:
        super().__init__()
        check_range("image_encoder", "[1, inf)", width=width, channels=channels)
        self.width, self.channels, self.feature_dim = width, channels, 4 * width
        sizes = (channels, width, 2 * width, 4 * width)
        self.layers = nn.Sequential(
            *(
                layer
                for inputs, outputs, stride in zip(sizes[:-1], sizes[1:], (1, 2, 1), strict=True)
                for layer in (
                    nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                )
            )
        )
        draw_kernels(self)

    def forward(self, images: Float[Tensor, "image channel height width"]) -> Float[Tensor, "image feature"]:
        return self.layers(images).mean((2, 3))
