"""Views of small images: torchvision's transforms, image by image, with the numbers of each image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from medclip_dcl.unimodal.augmentation import (
    NUMBERS,
    Augmentation,
    Drawn,
    uniform_numbers,
)

EVERYTHING = Augmentation(jitter_probability=0.7, grey=0.3, blur=0.5)
NOTHING = Augmentation(crop_scale=1.0, flip=0.0, jitter_probability=0.0, grey=0.0)


def some_images(count: int, channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(count, channels, side, side, generator=generator)
    images[0] = 0.4  # without chroma or contrast
    images[1, :, 2:5] = 1.0
    return images


def numbers(count: int, seed: int = 3) -> Tensor:
    return uniform_numbers(count, 1, seed, 0)[:, 0]


def view_by_torchvision(image: Tensor, drawn: Drawn, number: int, size: int) -> Tensor:
    """One view by torchvision's own functions."""
    top, left, height, width = drawn.boxes[number].tolist()
    view = tv.resized_crop(image, top, left, height, width, [size, size], antialias=True)
    if drawn.is_flipped[number]:
        view = tv.horizontal_flip(view)
    view = tv.adjust_brightness(view, float(drawn.brightness[number]))
    view = tv.adjust_contrast(view, float(drawn.contrast[number]))
    view = tv.adjust_saturation(view, float(drawn.saturation[number]))
    view = tv.adjust_hue(view, float(drawn.hue[number]))
    if drawn.is_grey[number]:
        view = tv.rgb_to_grayscale(view, num_output_channels=len(image))
    if sigma := float(drawn.sigma[number]):
        view = tv.gaussian_blur(view, [3, 3], [sigma, sigma])
    return view


@pytest.mark.parametrize(("side", "size"), [(13, 9), (9, 13), (32, 32), (11, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_torchvisions_with_the_same_numbers(channels, side, size):
    images, of_views = some_images(40, channels, side), numbers(40)
    drawn = EVERYTHING.drawn(of_views, side)
    assert all(0 < x.float().mean() < 1 for x in (drawn.is_flipped, drawn.is_grey, drawn.sigma > 0))
    if channels == 1:
        # torchvision leaves grey images as they are, too.
        drawn = replace(drawn, is_grey=torch.zeros(40, dtype=torch.bool))
    expected = [view_by_torchvision(image, drawn, i, size) for i, image in enumerate(images)]
    found = EVERYTHING(images, of_views, size)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=2e-6)
    assert found.min() >= 0 and found.max() <= 1


def test_boxes_are_distributed_as_those_of_torchvision():
    """Also where most attempts do not fit and where none does."""
    for crop_scale, side in ((0.08, 32), (0.4, 8), (0.95, 96)):
        transform = v2.RandomResizedCrop(side, scale=(crop_scale, 1.0))
        theirs = [transform.make_params([torch.empty(1, side, side)]) for _ in range(2000)]
        ours = Augmentation(crop_scale=crop_scale).drawn(numbers(20_000), side).boxes
        for number, name in enumerate(("top", "left", "height", "width")):
            their = [params[name] for params in theirs]
            assert ks_2samp(ours[:, number].numpy(), their).pvalue > 0.01, (name, crop_scale)
        top, left, height, width = ours.T
        assert (ours >= 0).all() and (top + height <= side).all() and (left + width <= side).all()


def test_jitter_is_distributed_as_that_of_torchvision():
    strong = Augmentation(jitter=[0.4, 1.5, 0.2, 0.1], jitter_probability=1.0)
    drawn = strong.drawn(numbers(20_000), 8)
    transform = v2.ColorJitter(0.4, 1.5, 0.2, 0.1)
    theirs = [transform.make_params([]) for _ in range(2000)]
    for name in ("brightness", "contrast", "saturation", "hue"):
        their = [params[f"{name}_factor"] for params in theirs]
        assert ks_2samp(getattr(drawn, name).numpy(), their).pvalue > 0.01, name


def test_probabilities_are_kept():
    drawn = Augmentation(flip=0.3, jitter_probability=0.8, grey=0.2, blur=0.6).drawn(numbers(20_000), 8)
    shares = [x.float().mean() for x in (drawn.is_flipped, drawn.hue != 0, drawn.is_grey, drawn.sigma > 0)]
    assert shares == pytest.approx([0.3, 0.8, 0.2, 0.6], abs=0.01)
    blurred = drawn.sigma[drawn.sigma > 0]
    assert (
        blurred.min() >= 0.1 and blurred.max() <= 2 and float(blurred.mean()) == pytest.approx(1.05, abs=0.02)
    )
    # Independent of one another.
    assert float((drawn.is_flipped & drawn.is_grey).float().mean()) == pytest.approx(0.06, abs=0.01)


def test_numbers_depend_on_seed_epoch_view_image():
    table = uniform_numbers(11, 3, seed=4, epoch=2)
    assert table.shape == (11, 3, NUMBERS) and table.min() >= 0 and table.max() < 1
    assert torch.equal(uniform_numbers(11, 2, 4, 2), table[:, :2]), "more views leave the first ones"
    others = [uniform_numbers(11, 3, seed, epoch) for seed, epoch in ((4, 3), (5, 2), (2, 4))]
    flat = torch.cat([x.flatten() for x in (table, *others)])
    assert len(flat.unique()) > 0.999 * len(flat), "no two tables, views or images share numbers"
    # The training order draws from (seed, epoch).
    of_order = np.random.default_rng([4, 2]).random(NUMBERS, dtype=np.float32)
    assert not np.isclose(table[0].numpy(), of_order).all(1).any()
