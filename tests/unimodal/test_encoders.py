"""Encoders of small images against torchvision's ResNet and a plain computation."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.functional import batch_norm, conv2d

from medclip_dcl.unimodal.encoders import SmallConvNet, SmallImageResNet


@pytest.mark.parametrize(
    ("depth", "large_stem"), [(18, False), pytest.param(50, False, marks=pytest.mark.slow), (18, True)]
)
@torch.no_grad()
def test_width_64_is_torchvisions_resnet(depth, large_stem):
    theirs = getattr(torchvision.models, f"resnet{depth}")(weights=None)
    if not large_stem:
        theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.fc = nn.Identity()
    ours = SmallImageResNet(depth, 64, large_stem=large_stem)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ours.load_state_dict(theirs.state_dict())
    images = torch.rand(2, 3, 17, 12, dtype=torch.float64)
    torch.testing.assert_close(ours.double().eval()(images), theirs.double().eval()(images))
    assert ours.feature_dim == ours(images).shape[1]


@torch.no_grad()
def test_the_initial_kernels_are_spread_as_torchvisions():
    torch.manual_seed(1)
    theirs, ours = torchvision.models.resnet18(weights=None).state_dict(), SmallImageResNet().state_dict()
    for name, value in ours.items():
        if name.startswith("layer") and value.dim() == 4:
            torch.testing.assert_close(value.std(), theirs[name].std(), rtol=0.05, atol=0, msg=name)
            assert value.mean().abs() < 0.1 * value.std(), name
        elif name != "conv1.weight":
            assert torch.equal(value, theirs[name]), name


@torch.no_grad()
def test_small_network_is_convolutions_and_a_mean():
    torch.manual_seed(0)
    encoder = SmallConvNet(width=3, channels=2).eval()
    state = {
        name: value.uniform_(0.5, 1.5) if "running" in name else value
        for name, value in encoder.state_dict().items()
    }
    images = torch.rand(2, 2, 7, 9)
    found = images
    for place, stride in ((0, 1), (3, 2), (6, 1)):
        norm = f"layers.{place + 1}."
        found = conv2d(found, state[f"layers.{place}.weight"], stride=stride, padding=1)
        statistics = (state[f"{norm}running_mean"], state[f"{norm}running_var"])
        found = batch_norm(found, *statistics, state[f"{norm}weight"], state[f"{norm}bias"]).clamp(min=0)
    assert found.shape == (2, 12, 4, 5)
    torch.testing.assert_close(encoder(images), found.flatten(2).mean(2))
