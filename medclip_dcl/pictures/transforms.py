"""Load and augment prepared images; augmentation is a pure function of an image and a generator."""

from __future__ import annotations

import io

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor


def load_grey(encoded: bytes, size: int) -> UInt8[np.ndarray, "height width"]:
    """Decode a prepared image as grey levels, its shorter side resized to `size` pixels, antialiased.

    Raises:
        OSError: the bytes are no image, or are cut off.
    """
    try:
        image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:
        raise OSError("no image of a known format") from None
    with image:
        # JPEG decodes directly to 1/2, 1/4 or 1/8 of its size, but not below the target.
        target = _scaled_size(image, size)
        drafted = image.draft("L", target)
        grey = image.convert("L")
    if grey.size != target:
        # If a side was odd, the last decoded pixel is half empty.
        box = None if drafted is None else drafted[1]
        grey = grey.resize(target, Image.Resampling.BICUBIC, box)
    return np.asarray(grey)


def scaled(image: Image.Image, size: int) -> Image.Image:
    """Resize a fitted image so that its shorter side has `size` pixels, antialiased."""
    target = _scaled_size(image, size)
    return image if image.size == target else image.resize(target, Image.Resampling.BICUBIC)


def _scaled_size(image: Image.Image, size: int) -> tuple[int, int]:
    shorter = min(image.size)
    return round(image.width * size / shorter), round(image.height * size / shorter)


def to_input(grey: UInt8[np.ndarray, "height width"]) -> Float[Tensor, "3 height width"]:
    """Grey levels as three equal channels in [0, 1].

    The network normalises them, by default with ImageNet's mean and deviation (choice, not from the paper).
    """
    return (torch.from_numpy(grey.astype(np.float32)) / 255).expand(3, -1, -1)


def centre_crop(grey: UInt8[np.ndarray, "height width"], size: int) -> UInt8[np.ndarray, "size size"]:
    """The middle `size` x `size` pixels; half a pixel up and left of the centre if the margin is odd."""
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
