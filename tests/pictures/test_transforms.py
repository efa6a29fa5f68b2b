"""Loading and augmentation, against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from medclip_dcl.pictures.transforms import augment, centre_crop, load_grey, to_input


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


def test_input_is_three_equal_channels_in_zero_one():
    image = to_input(np.array([[0, 255], [51, 102]], np.uint8))
    assert torch.equal(image[0], image[2])
    torch.testing.assert_close(image[1], torch.tensor([[0.0, 1.0], [0.2, 0.4]]))


def test_augmentation_without_variation_is_a_crop():
    grey = np.arange(49, dtype=np.uint8).reshape(7, 7)
    generator = np.random.default_rng(3)
    expected = np.random.default_rng(3)
    top, left = int(expected.integers(3)), int(expected.integers(3))
    crop = augment(grey, 5, 0.0, 0.0, generator)
    torch.testing.assert_close(crop, to_input(grey[top : top + 5, left : left + 5]))


def test_augmentation_varies_within_bounds_and_repeats():
    grey = np.full((9, 9), 100, np.uint8)
    values = []
    for i in range(200):
        crop = augment(grey, 7, 0.2, 0.2, np.random.default_rng([0, 1, i]))
        assert torch.equal(crop, augment(grey, 7, 0.2, 0.2, np.random.default_rng([0, 1, i])))
        values.append(crop.mean().item() * 255)
    # A constant image has no contrast: only brightness moves it, by at most 20%.
    assert min(values) == pytest.approx(80, abs=2) and max(values) == pytest.approx(120, abs=2)


def test_contrast_keeps_the_mean():
    grey = np.array([[100, 150], [150, 100]], np.uint8)
    crop = augment(grey, 2, 0.0, 0.2, np.random.default_rng(1))
    assert crop.mean().item() * 255 == pytest.approx(125, abs=0.01)
    assert crop.std().item() != pytest.approx(to_input(grey).std().item(), rel=1e-3)


def test_the_middle_of_an_image():
    grey = np.arange(6 * 7, dtype=np.uint8).reshape(6, 7)
    assert (centre_crop(grey, 4) == grey[1:5, 1:5]).all()  # one pixel above, one below; one left, two right
    assert (centre_crop(grey, 6) == grey[:, :6]).all()
