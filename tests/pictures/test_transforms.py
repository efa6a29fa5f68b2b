"""Loading and augmentation, against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.transforms import GreyCrop, augment, batch_of, centre_crop, load_grey, to_input


def shown(*crops: GreyCrop) -> torch.Tensor:
    """The images that an encoder sees."""
    batch = batch_of(crops)
    return to_input(batch["images"], batch["image_scale"])


def in_floats(
    grey: np.ndarray, size: int, brightness: float, contrast: float, generator: np.random.Generator
) -> np.ndarray:
    """Reference: the random crop in floating point, as numpy computes it."""
    top = int(generator.integers(grey.shape[0] - size + 1))
    left = int(generator.integers(grey.shape[1] - size + 1))
    image = grey[top : top + size, left : left + size].astype(np.float32) / 255
    image = image * np.float32(generator.uniform(1 - brightness, 1 + brightness))
    factor = np.float32(generator.uniform(1 - contrast, 1 + contrast))
    return np.clip(factor * image + (1 - factor) * image.mean(), 0, 1)


def test_load_grey_scales_and_turns_grey(tmp_path):
    colour = np.zeros((64, 64, 3), np.uint8)
    colour[:, 32:] = 200
    Image.fromarray(colour).save(tmp_path / "a.png")
    grey = load_grey((tmp_path / "a.png").read_bytes(), 16)
    assert grey.shape == (16, 16) and grey.dtype == np.uint8
    assert grey[8, 1] == 0 and grey[8, 14] == 200


def test_an_image_of_odd_size_is_not_shifted(tmp_path):
    rows = np.linspace(0, 250, 165)[:, None].repeat(129, axis=1).round().astype(np.uint8)
    Image.fromarray(rows).save(tmp_path / "a.jpg", quality=100)
    grey = load_grey((tmp_path / "a.jpg").read_bytes(), 64).astype(float)
    assert grey.shape == (82, 64)
    expected = np.linspace(0, 250, 165)[[0, 82, 164]]
    np.testing.assert_allclose(grey[[0, 41, 81], 30], expected, atol=2.5)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("images", "scale", "words"),
    [
        (torch.full((2, 1, 3, 5), 90, dtype=torch.int16), None, "found torch.int16"),
        (torch.ones(2, 1, 3, 5, dtype=torch.bool), None, "found torch.bool"),
        (torch.full((2, 3, 3, 5), 90.0), None, r"in \[0, 1\], found .*divide by 255"),
        (torch.full((2, 3, 3, 5), -0.51, dtype=torch.float16), None, "do not normalise"),
        (torch.full((2, 3, 3, 5), torch.nan), None, "found NaN"),
        (torch.ones(2, 1, 3, 5, dtype=torch.uint8), torch.tensor([[1.0, 1, 0]]), r"image_scale: .*\(2, 3\).*\(1, 3\)"),
        (torch.ones(2, 1, 3, 5, dtype=torch.uint8), torch.ones(2, 2), r"image_scale: .*\(2, 3\).*\(2, 2\)"),
    ],
)  # fmt: skip
def test_other_units_of_images_are_refused(images, scale, words):
    with pytest.raises(UserError, match=words):
        to_input(images, scale)


def test_images_a_little_beyond_their_range_stay():
    images = torch.tensor([-0.5, 1.5, 1.0]).expand(2, 3, 5, 3)
    assert torch.equal(to_input(images), images)


def test_the_middle_of_an_image():
    grey = np.arange(6 * 7, dtype=np.uint8).reshape(6, 7)
    assert (centre_crop(grey, 4) == grey[1:5, 1:5]).all()  # one pixel above, one below; one left, two right
    assert (centre_crop(grey, 6) == grey[:, :6]).all()


VARIATIONS = [(0.0, 0.0), (0.2, 0.2), (0.0, 0.3), (0.9, 0.0), (0.99, 0.99)]


def assert_equals_floats(
    greys: list[np.ndarray], size: int, brightness: float, contrast: float, seed: int = 0
) -> None:
    """Random crops of `size` and middle crops of 8 pixels less are bit for bit those computed in floating point."""
    draws = [[np.random.default_rng([seed, i]) for i in range(len(greys))] for _ in range(2)]
    crops = [
        augment(grey, size, brightness, contrast, draw) for grey, draw in zip(greys, draws[0], strict=True)
    ]
    expected = [
        in_floats(grey, size, brightness, contrast, draw) for grey, draw in zip(greys, draws[1], strict=True)
    ]
    found = shown(*crops)
    assert found.dtype == torch.float32 and (found.numpy() == np.stack(expected)[:, None]).all()
    middle = [GreyCrop(centre_crop(grey, size - 8)) for grey in greys]
    in_unit = np.stack([crop.grey for crop in middle]).astype(np.float32) / 255
    assert (shown(*middle).numpy() == in_unit[:, None]).all()


@pytest.mark.parametrize("brightness, contrast", VARIATIONS)
def test_images_equal_those_computed_in_floats(brightness, contrast):
    generator = np.random.default_rng(5)
    levels = [np.arange(256 * 257, dtype=np.uint16).astype(np.uint8).reshape(256, 257)]
    greys = [*levels, *(generator.integers(0, top, (224, 259)).astype(np.uint8) for top in (2, 90, 256))]
    assert_equals_floats(greys, 211, brightness, contrast)


@pytest.mark.slow
@pytest.mark.parametrize("folder, count", [("real_cxr", 214), ("nih", 1860)])
def test_real_images_equal_those_computed_in_floats(real_data, folder, count):
    files = sorted((real_data / folder).rglob("*.jpg"))
    assert len(files) == count
    for place, file in enumerate(files):
        assert_equals_floats(
            [load_grey(file.read_bytes(), 512)], 480, *VARIATIONS[place % len(VARIATIONS)], seed=place
        )
