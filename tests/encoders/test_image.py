"""The region encoder: grid, weights, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torchvision

from medclip_dcl.encoders.image import ResNetRegions


@pytest.mark.parametrize(
    "depth, stride, side, grid", [(18, 32, 96, 3), (18, 16, 96, 6), (50, 16, 64, 4), (34, 32, 64, 2)]
)
@torch.no_grad()
def test_grid_is_the_image_over_the_stride(depth, stride, side, grid):
    encoder = ResNetRegions(depth=depth, stride=stride, dim=8).eval()
    assert encoder(torch.rand(2, 3, side, side)).shape == (2, 8, grid, grid)


@torch.no_grad()
def test_features_are_torchvisions(tmp_path):
    resnet = torchvision.models.resnet18(weights=None).eval()
    torch.save(resnet.state_dict(), tmp_path / "resnet18.pth")
    encoder = ResNetRegions(weights=str(tmp_path / "resnet18.pth"), dim=8).eval()
    images = torch.rand(1, 3, 64, 64)
    features = torch.nn.Sequential(*list(resnet.children())[:-2])(images)
    expected = torch.nn.functional.conv2d(features, encoder.projection.weight, encoder.projection.bias)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-4, atol=1e-5)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="depth must be 18, 34 or 50, got 19"):
        ResNetRegions(depth=19)
    with pytest.raises(ValueError, match="stride must be 16 or 32, got 8"):
        ResNetRegions(stride=8)
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.pth"):
        ResNetRegions(weights=str(tmp_path / "nowhere.pth"))
    state = torchvision.models.resnet18(weights=None).state_dict()
    del state["fc.bias"]
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"missing \['fc.bias'\], unexpected \['extra'\]"):
        ResNetRegions(weights=str(tmp_path / "other.pth"))
