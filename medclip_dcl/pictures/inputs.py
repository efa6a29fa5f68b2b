"""Images that a user gives, as paths, PIL images or arrays, and the input of a network from them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.geometry import View, fit
from medclip_dcl.pictures.grey import UnusableImageError, notes_of, to_grey
from medclip_dcl.pictures.image_file import read_grey
from medclip_dcl.pictures.transforms import centre_crop, scaled

ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray"
Images: TypeAlias = "ImageLike | Sequence[ImageLike] | Iterable[ImageLike]"

MIN_SIDE = 8
"""Images with a shorter side, in pixels, are refused (choice): a radiograph has hundreds."""


class ImageWarning(UserWarning):
    """An image that is read may not show what it should."""


class ConstantImageWarning(ImageWarning):
    """All pixels of an image have the same grey level."""


def as_grey(image: ImageLike) -> Image.Image:
    """Convert a path, PIL image or uint8 array to an 8-bit grey image, as in data preparation.

    Files may be DICOM (needs the extra ``dicom``). More than 8 bits are scaled from the image's own range, or a robust
    one (`medclip_dcl.pictures.grey.shown_range`).

    Warns:
        ConstantImageWarning: all pixels have the same grey level.
        ImageWarning: hot or burnt-in pixels, or DICOM elements that contradict each other.
    """
    name = str(image) if isinstance(image, (str, Path)) else "image"
    try:
        if isinstance(image, (str, Path)):
            grey = read_grey(Path(os.path.expanduser(image)))
        else:
            grey = to_grey(_opened(image))
        if min(grey.size) < MIN_SIDE:
            raise UnusableImageError(
                f"image of {grey.width:,} x {grey.height:,} pixels; a radiograph has at least {MIN_SIDE} on each "
                "side: give the original"
            )
    except UnusableImageError as error:
        raise UnusableImageError(f"{name}: {error}") from error
    if problem := constant(grey):
        warnings.warn(f"{name}: {problem}", ConstantImageWarning, stacklevel=2)
    for note in notes_of(grey):
        warnings.warn(f"{name}: {note}", ImageWarning, stacklevel=2)
    return grey


def constant(grey: Image.Image) -> str:
    """A warning if all pixels of a grey image are equal, else an empty text."""
    low, high = grey.getextrema()
    if low != high:
        return ""
    return f"all pixels have grey level {low}, so that the scores say nothing about a patient"


def doubts(grey: Image.Image) -> str:
    """The warnings of `as_grey` about an image in one text; "" for none."""
    return "; ".join(filter(None, (constant(grey), *notes_of(grey))))


def _opened(image: Any) -> Image.Image:
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        if not _has_shape_of_image(image) or not image.size:
            raise UserError(f"image: expected an array of shape (H, W) or (H, W, 3), found {image.shape}")
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        kind = getattr(image, "dtype", type(image).__name__)
        raise TypeError(f"image: expected a path, a PIL image or a uint8 array of 0..255, found {kind}")
    return image


def _has_shape_of_image(array: np.ndarray) -> bool:
    return array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)


def each_image(images: Any) -> Iterator[ImageLike]:
    """Iterate over one image or several; an array that does not have the shape of one image is a stack of grey ones."""
    is_array = isinstance(images, np.ndarray)
    is_one_array = is_array and _has_shape_of_image(images)
    if is_array and images.ndim == 3 and images.shape[0] == 3 and not is_one_array:
        raise UserError(
            f"an array of shape {images.shape} may be a colour image or three grey ones: give "
            "array.transpose(1, 2, 0), of shape (H, W, 3), or list(array)"
        )
    if is_one_array or isinstance(images, (str, Path, Image.Image)) or not isinstance(images, Iterable):
        yield images
    else:
        yield from images


def network_input(grey: Image.Image, view: View) -> UInt8[np.ndarray, "side side"]:
    """The square that a network sees of a grey image, fitted like its training images."""
    if view.prepared is None:
        fitted = fit(grey, view.geometry, view.size, Image.Resampling.BICUBIC)
    else:
        # The same steps as in data preparation and the datamodule.
        fitted = fit(grey, view.geometry, view.prepared, Image.Resampling.BILINEAR)
    return centre_crop(np.asarray(scaled(fitted, view.size)), view.seen)
