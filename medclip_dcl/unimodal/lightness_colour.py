"""CMC's two views of an image, its lightness and its colour (L and ab of CIE Lab), each with an encoder of its own."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.unimodal.encoders import SmallImageEncoder, SmallImageResNet

# CIE XYZ from linear sRGB, and that of white: illuminant D65, observer of 2 degrees.
_XYZ = ((0.412453, 0.35758, 0.180423), (0.212671, 0.71516, 0.072169), (0.019334, 0.119193, 0.950227))
_WHITE = (0.95047, 1.0, 1.08883)


def rgb_to_lab(images: Float[Tensor, "image 3 row column"]) -> Float[Tensor, "image 3 row column"]:
    """CIE Lab of sRGB images in [0, 1]: L in [0, 100], a and b in about [-108, 99]."""
    linear = torch.where(images > 0.04045, ((images + 0.055) / 1.055) ** 2.4, images / 12.92)
    # Sums of products and not a matrix product: autocast leaves them in float32.
    red, green, blue = linear.unbind(1)
    x, y, z = (
        torch.where(share > 0.008856, share ** (1 / 3), 7.787 * share + 16 / 116)
        for (of_red, of_green, of_blue), white in zip(_XYZ, _WHITE, strict=True)
        for share in [(of_red * red + of_green * green + of_blue * blue) / white]
    )
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


class LightnessColourResNets(SmallImageEncoder):
    """A ResNet of L and one of ab, whose features are joined (Tian et al., 2019: contrastive multiview coding, CMC).

    The network gives each its own projection and its own embedding, a view of the image: an objective of two views
    needs one augmented image. L and ab are divided by 100 (choice; BatchNorm follows the first convolution).

    Args:
        depth: 18 or 50, of both; see `SmallImageResNet`.
        width: of both.
        large_stem: of both.
    """

    channels, n_parts = 3, 2

    def __init__(self, depth: Literal[18, 50] = 50, width: int = 64, large_stem: bool = False) -> None:
        super().__init__()
        self.depth, self.width, self.large_stem = depth, width, large_stem
        self.lightness = SmallImageResNet(depth, width, 1, large_stem)
        self.colour = SmallImageResNet(depth, width, 2, large_stem)
        self.feature_dim = 2 * self.lightness.feature_dim

    def forward(self, images: Float[Tensor, "image 3 height width"]) -> Float[Tensor, "image feature"]:
        lightness, colour = (rgb_to_lab(images) / 100).split([1, 2], 1)
        return torch.cat([self.lightness(lightness), self.colour(colour)], 1)
