"""Augmented views of small images, in batches: crop, flip, colour jitter, grey, blur, with numbers of each image's own.

torchvision's transforms, whose functions are the oracle of the tests, draw one set of numbers for a whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from medclip_dcl.common.errors import UserError

_ATTEMPTS = 10
_NAMES = (
    "top", "left", "flip", "jitter", "brightness", "contrast", "saturation", "hue", "grey", "blur", "sigma"
)  # fmt: skip
NUMBERS = 2 * _ATTEMPTS + len(_NAMES)
"""Uniform numbers of a view."""
_RATIO = 4 / 3
_SIGMA = (0.1, 2.0)
_GREY = (0.2989, 0.587, 0.114)


def uniform_numbers(
    images: int, views: int, seed: int, epoch: int
) -> Float[Tensor, "{images} {views} number"]:
    """Numbers in [0, 1) for the views of all images in an epoch.

    A function of (seed, epoch, view, image): more views leave the first ones as they are.
    """
    table = np.empty((images, views, NUMBERS), dtype=np.float32)
    for view in range(views):
        # Not (seed, epoch, 0), which is the stream of (seed, epoch): that of the training order.
        generator = np.random.default_rng([seed, epoch, view + 1])
        table[:, view] = generator.random((images, NUMBERS), dtype=np.float32)
    return torch.from_numpy(table)


@dataclass(frozen=True)
class Drawn:
    """Parameters of the views: boxes in pixels (top, left, height, width); factor 1, shift 0 and sigma 0: no change."""

    boxes: Int[Tensor, "image 4"]
    is_flipped: Bool[Tensor, " image"]
    brightness: Float[Tensor, " image"]
    contrast: Float[Tensor, " image"]
    saturation: Float[Tensor, " image"]
    hue: Float[Tensor, " image"]
    is_grey: Bool[Tensor, " image"]
    sigma: Float[Tensor, " image"]


@dataclass(frozen=True)
class Augmentation:
    """Random resized crop, flip, colour jitter, grey and blur, in this order.

    Images of one channel have no saturation, hue or grey to change.

    Args:
        crop_scale: least share of the image's area that a view shows, in (0, 1]; sides are in a ratio of 3:4 to 4:3.
        flip: probability of a horizontal flip.
        jitter: strengths of brightness, contrast, saturation (each a factor in 1 +- strength, at least 0) and hue (a
            shift in +- strength of the circle, at most .5). They are applied in this order; torchvision's transform
            draws an order for each call (choice).
        jitter_probability: probability that a view has the jitter.
        grey: probability that a view loses its colours.
        blur: probability of a Gaussian blur of 3 x 3 pixels, sigma in [.1, 2].
    """

    crop_scale: float = 0.08
    flip: float = 0.5
    jitter: list[float] = field(default_factory=lambda: [0.4, 0.4, 0.4, 0.1])
    jitter_probability: float = 0.8
    grey: float = 0.2
    blur: float = 0.0

    def __post_init__(self) -> None:
        probabilities = (self.flip, self.jitter_probability, self.grey, self.blur)
        are_shares = 0 < self.crop_scale <= 1 and all(0 <= x <= 1 for x in probabilities)
        if not (are_shares and len(self.jitter) == 4 and min(self.jitter) >= 0 and self.jitter[3] <= 0.5):
            raise UserError(
                "data.augmentation: expected crop_scale in (0, 1], probabilities in [0, 1], and jitter of four "
                f"strengths of at least 0, the last of at most 0.5; found {self}"
            )

    def drawn(self, numbers: Float[Tensor, "image number"], side: int) -> Drawn:
        """Parameters of views of square images, from uniform numbers."""
        of = dict(zip(_NAMES, numbers[:, 2 * _ATTEMPTS :].unbind(1), strict=True))
        has_jitter = of["jitter"] < self.jitter_probability
        brightness, contrast, saturation = (
            torch.where(has_jitter, low + of[name] * (1 + strength - low), 1.0)
            for name, strength in zip(("brightness", "contrast", "saturation"), self.jitter, strict=False)
            for low in [max(0.0, 1 - strength)]
        )
        low, high = _SIGMA
        return Drawn(
            boxes=self._boxes(numbers, of["top"], of["left"], side),
            is_flipped=of["flip"] < self.flip,
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=torch.where(has_jitter, (2 * of["hue"] - 1) * self.jitter[3], 0.0),
            is_grey=of["grey"] < self.grey,
            sigma=torch.where(of["blur"] < self.blur, low + of["sigma"] * (high - low), 0.0),
        )

    def _boxes(self, numbers: Tensor, top: Tensor, left: Tensor, side: int) -> Int[Tensor, "image 4"]:
        """The first of ten attempts that lies within the image, else the whole image, as torchvision draws them."""
        share = self.crop_scale + numbers[:, :_ATTEMPTS] * (1 - self.crop_scale)
        ratio = ((2 * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS] - 1) * math.log(_RATIO)).exp()
        widths, heights = (side * (share * ratio).sqrt()).round(), (side * (share / ratio).sqrt()).round()
        fits = (widths.clamp(max=heights) >= 1) & (widths.clamp(min=heights) <= side)
        first, any_fits = fits.byte().argmax(1, keepdim=True), fits.any(1)
        height, width = (
            torch.where(any_fits, sides.gather(1, first)[:, 0], float(side)) for sides in (heights, widths)
        )
        places = [
            (number * (side - length + 1)).floor().minimum(side - length)
            for number, length in ((top, height), (left, width))
        ]
        return torch.stack([*places, height, width], 1).long()

    def __call__(
        self,
        images: Float[Tensor, "image channel side side"],
        numbers: Float[Tensor, "image number"],
        size: int,
    ) -> Float[Tensor, "image channel {size} {size}"]:
        """A view of each image.

        Args:
            images: in [0, 1].
            numbers: uniform numbers of each image's view.
            size: side of the views in pixels.
        """
        drawn = self.drawn(numbers, images.shape[-1])
        views = resized_crops(images, drawn.boxes, size, drawn.is_flipped)
        has_colours = images.shape[1] == 3
        if self.jitter_probability and any(self.jitter):
            views = _scaled(views, drawn.brightness)
            grey = _grey(views).mean((2, 3), keepdim=True)
            views = _scaled(views, drawn.contrast, grey)
            if has_colours:
                views = _scaled(views, drawn.saturation, _grey(views))
                views = shift_hue(views, drawn.hue)
        if self.grey and has_colours:
            views = torch.where(_column(drawn.is_grey), _grey(views), views)
        return blurred(views, drawn.sigma) if self.blur else views


def resized_crops(
    images: Float[Tensor, "image channel side side"],
    boxes: Int[Tensor, "image 4"],
    size: int,
    is_flipped: Bool[Tensor, " image"] | None = None,
) -> Float[Tensor, "image channel {size} {size}"]:
    """Boxes (top, left, height, width) of images, resized bilinearly with antialiasing, by two matrix products."""
    side = images.shape[-1]
    top, left, height, width = boxes.to(images.dtype).unbind(1)
    rows, columns = (_resizing(start, length, side, size) for start, length in ((top, height), (left, width)))
    if is_flipped is not None:
        columns = torch.where(is_flipped[:, None, None], columns.flip(1), columns)
    wide = images.flatten(1, 2) @ columns.mT
    return rows[:, None] @ wide.unflatten(1, (-1, side))


def _resizing(
    start: Float[Tensor, " image"], length: Float[Tensor, " image"], side: int, size: int
) -> Float[Tensor, "image {size} {side}"]:
    """Weight of each pixel of a row in each pixel of the resized part of it: a triangle as wide as both pixels."""
    pixels = torch.arange(side, device=start.device) + 0.5
    scale = (length / size)[:, None]
    centres = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale
    distance = (pixels - centres[..., None]).abs() / scale.clamp(min=1)[..., None]
    is_inside = (pixels > start[:, None]) & (pixels < (start + length)[:, None])
    weights = (1 - distance).clamp(min=0) * is_inside[:, None]
    return weights / weights.sum(2, keepdim=True)


def shift_hue(
    images: Float[Tensor, "image 3 row column"], shift: Float[Tensor, " image"]
) -> Float[Tensor, "image 3 row column"]:
    """Turn the hue by a share of the circle; saturation and value (of HSV) stay."""
    red, green, blue = images.unbind(1)
    greatest = images.amax(1)
    chroma = greatest - images.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    sixth = torch.where(
        greatest == red,
        (green - blue) / divisor,
        torch.where(greatest == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    sixth = sixth + 6 * shift[:, None, None]
    channels = []
    for offset in (5, 3, 1):
        place = (sixth + offset).remainder(6)
        channels.append(greatest - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1)


def blurred(
    images: Float[Tensor, "image channel row column"], sigma: Float[Tensor, " image"]
) -> Float[Tensor, "image channel row column"]:
    """Gaussian blur of 3 x 3 pixels, mirrored at the border; sigma 0 leaves an image as it is."""
    beside = torch.where(sigma > 0, (-0.5 / sigma.clamp(min=_SIGMA[0]) ** 2).exp(), 0.0)
    outer, inner = _column(beside / (1 + 2 * beside)), _column(1 / (1 + 2 * beside))
    wide = pad(images, (1, 1, 1, 1), mode="reflect")
    wide = inner * wide[:, :, 1:-1] + outer * (wide[:, :, :-2] + wide[:, :, 2:])
    return inner * wide[..., 1:-1] + outer * (wide[..., :-2] + wide[..., 2:])


def _scaled(images: Tensor, factors: Tensor, fixed: Tensor | float = 0.0) -> Tensor:
    """Distances from `fixed` times a factor of each image, in [0, 1]."""
    factor = _column(factors)
    return (images * factor + fixed * (1 - factor)).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Luminance (image, 1, row, column)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, 1)
    return _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue


def _column(values: Tensor) -> Tensor:
    return values[:, None, None, None]
