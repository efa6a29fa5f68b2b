"""From a prepared JPEG to the network's input; augmentation as a pure function of an image and a generator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor


def load_grey(file: Path, size: int) -> UInt8[np.ndarray, "size size"]:
    """A prepared image as grey levels at `size` x `size` pixels (antialiased if it is stored larger).

    Raises:
        OSError: the file is missing or cannot be decoded.
    """
    with Image.open(file) as image:
        # JPEG decodes straight to 1/2, 1/4 or 1/8, not below the size that is asked for.
        image.draft("L", (size, size))
        grey = image.convert("L")
    return np.asarray(resize_grey(grey, size))


def resize_grey(image: Image.Image, size: int) -> Image.Image:
    """The image stretched to `size` x `size`, antialiased (geometry: stretch)."""
    return image if image.size == (size, size) else image.resize((size, size), Image.Resampling.BICUBIC)


def to_input(grey: UInt8[np.ndarray, "height width"]) -> Float[Tensor, "3 height width"]:
    """Grey levels as three equal channels in [0, 1]; the network normalises them."""
    return (torch.from_numpy(grey.astype(np.float32)) / 255).expand(3, -1, -1)


def centre_crop(grey: UInt8[np.ndarray, "height width"], size: int) -> UInt8[np.ndarray, "size size"]:
    """The middle `size` x `size` pixels; where it does not lie in the middle exactly, half a pixel up and left."""
    top, left = (grey.shape[0] - size) // 2, (grey.shape[1] - size) // 2
    return grey[top : top + size, left : left + size]


def augment(
    grey: UInt8[np.ndarray, "height width"],
    crop_size: int,
    brightness: float,
    contrast: float,
    generator: np.random.Generator,
) -> Float[Tensor, "3 crop_size crop_size"]:
    """Random crop, then brightness and contrast variation (SSD section 3.2).

    Brightness multiplies by a factor drawn from [1 - brightness, 1 + brightness]; contrast moves grey levels away
    from their mean by a factor drawn likewise. The result stays in [0, 1].
    """
    top = int(generator.integers(grey.shape[0] - crop_size + 1))
    left = int(generator.integers(grey.shape[1] - crop_size + 1))
    image = grey[top : top + crop_size, left : left + crop_size].astype(np.float32) / 255
    image = image * np.float32(generator.uniform(1 - brightness, 1 + brightness))
    factor = np.float32(generator.uniform(1 - contrast, 1 + contrast))
    image = np.clip(factor * image + (1 - factor) * image.mean(), 0, 1)
    return torch.from_numpy(image).expand(3, -1, -1)
