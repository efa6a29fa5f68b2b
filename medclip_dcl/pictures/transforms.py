"""Load and augment prepared images; augmentation is a pure function of an image and a generator."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import default_collate

from medclip_dcl.common.errors import UserError


class GreyCrop(NamedTuple):
    """Part of an image, with brightness, contrast and mean, by which `to_input` changes its grey levels."""

    grey: UInt8[np.ndarray, "height width"]
    scale: Float32[np.ndarray, "3"] = np.array([1, 1, 0], np.float32)


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
        image.load()
        grey = image if image.mode == "L" else image.convert("L")  # which copies
    if grey.size != target:
        # If a side was odd, the last decoded pixel is half empty.
        box = None if drafted is None else drafted[1]
        grey = grey.resize(target, Image.Resampling.BICUBIC, box)
    return np.array(grey)


def scaled(image: Image.Image, size: int) -> Image.Image:
    """Resize a fitted image so that its shorter side has `size` pixels, antialiased."""
    target = _scaled_size(image, size)
    return image if image.size == target else image.resize(target, Image.Resampling.BICUBIC)


def _scaled_size(image: Image.Image, size: int) -> tuple[int, int]:
    shorter = min(image.size)
    return round(image.width * size / shorter), round(image.height * size / shorter)


def batch_of(crops: Sequence[GreyCrop]) -> dict[str, Tensor]:
    """Entries of a batch: images, uint8 (image, 1, height, width), and image_scale, float32 (image, 3)."""
    # In a loader process this stacks in the memory that it shares; writable arrays are not copied before.
    images, scale = default_collate(list(crops))
    return {"images": images[:, None], "image_scale": scale}


def to_input(
    images: UInt8[Tensor, "image 1 height width"] | Float[Tensor, "image 3 height width"],
    image_scale: Float[Tensor, "image 3"] | None = None,
) -> Float[Tensor, "image 3 height width"]:
    """Images in [0, 1] in three channels, from those or from grey levels; float32 from grey levels.

    Columns of `image_scale`: the factor that multiplies the image (brightness); the factor by which its distance from
    a mean grows (contrast), after which values are clipped to [0, 1]; and this mean. None changes nothing.
    """
    expected = "images: expected grey levels as uint8, or floating-point images in [0, 1], found"
    if not images.is_floating_point():
        if images.dtype != torch.uint8:
            raise UserError(f"{expected} {images.dtype}; convert them")
        # CUDA multiplies by the rounded reciprocal of a number, but divides by a tensor as a CPU does.
        images = images / torch.full((1,), 255, dtype=torch.float32, device=images.device)
    # Reading values waits for a device, and an export has none.
    elif images.is_cpu and not torch.compiler.is_compiling() and not ((images - 0.5).abs() <= 1).all():
        raise UserError(f"{expected} NaN or values far beyond; divide by 255, and do not normalise them")
    if image_scale is not None:
        if (found := tuple(image_scale.shape)) != (len(images), 3):
            raise UserError(f"image_scale: expected {(len(images), 3)}, a row for each image, found {found}")
        brightness, contrast, mean = image_scale.float().T[:, :, None, None, None]
        images = (contrast * (images * brightness) + (1 - contrast) * mean).clamp(0, 1)
    return images if images.shape[1] == 3 else images.expand(-1, 3, -1, -1)


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
) -> GreyCrop:
    """Random crop, then brightness and contrast variation (SSD section 3.2), which `to_input` carries out.

    Brightness multiplies by a factor drawn from [1 - brightness, 1 + brightness]; contrast moves grey levels away
    from their mean by a factor drawn likewise. The mean is taken here: a device sums in another order.
    """
    top = int(generator.integers(grey.shape[0] - crop_size + 1))
    left = int(generator.integers(grey.shape[1] - crop_size + 1))
    crop = grey[top : top + crop_size, left : left + crop_size]
    image = np.divide(crop, 255, dtype=np.float32)
    image *= (multiplied := np.float32(generator.uniform(1 - brightness, 1 + brightness)))
    factor = generator.uniform(1 - contrast, 1 + contrast)
    return GreyCrop(crop, np.array([multiplied, factor, image.mean()], np.float32))
