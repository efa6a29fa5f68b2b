"""Base class of the networks of radiographs: size, geometry and normalisation of their images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError, check_choice
from medclip_dcl.pictures.geometry import GEOMETRIES

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Normalisation of the channels that torchvision's weights expect (choice, not from the paper)."""


def check_side(setting: str, value: object) -> None:
    """Refuse a side of images in pixels that is not a whole number from 1 to 10,000 (choice)."""
    if not (isinstance(value, int) and value is not True and 1 <= value <= 10_000):
        raise UserError(f"{setting}: expected a whole number of pixels from 1 to 10,000, found {value!r}")


class DescribedNetwork(nn.Module):
    """A network that describes itself."""

    def config(self) -> dict[str, Any]:
        """Plain values from which the network can be built again."""
        raise NotImplementedError


class ImageNetwork(DescribedNetwork):
    """A network of radiographs that describes the images that it was trained with."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        geometry: str,
        crop_size: int | None,
    ) -> None:
        super().__init__()
        check_choice("geometry", geometry, GEOMETRIES)
        check_side("image_size", image_size)
        self.image_size, self.crop_size, self.geometry = image_size, crop_size, geometry
        self.register_buffer("mean", torch.zeros(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(3, 1, 1), persistent=False)
        self.set_normalisation(mean, std)

    def set_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and deviation of the channels, which no state dict holds."""
        if not (all(map(math.isfinite, [*mean, *std])) and min(std) > 0):
            raise UserError(f"mean and std: expected finite numbers, std above 0, found {mean} and {std}")
        self.mean.copy_(torch.tensor(mean).view(3, 1, 1))
        self.std.copy_(torch.tensor(std).view(3, 1, 1))

    def normalised(
        self, images: Float[Tensor, "image 3 height width"]
    ) -> Float[Tensor, "image 3 height width"]:
        """Input of the image encoder; images in [0, 1]."""
        return (images - self.mean) / self.std

    def image_config(self) -> dict[str, Any]:
        return {
            "image_size": self.image_size,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "geometry": self.geometry,
            "crop_size": self.crop_size,
        }

    @staticmethod
    def image_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: config[name] for name in ("image_size", "mean", "std", "geometry", "crop_size")}
