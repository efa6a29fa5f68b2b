"""The region encoder: grid, weights, and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import jsonargparse
import pytest
import torch
import torchvision

from medclip_dcl.command.config_files import allow_imports, with_nulls
from medclip_dcl.common.errors import UserError
from medclip_dcl.networks import image_encoder as image
from medclip_dcl.networks.image_encoder import ResNetRegions


@torch.no_grad()
def test_features_are_torchvisions(tmp_path):
    resnet = torchvision.models.resnet18(weights=None).eval()
    state = {name: x for name, x in resnet.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, file := tmp_path / "resnet18.pth")  # as official files of earlier years
    encoder = ResNetRegions(weights=str(file), dim=8).eval()
    images = torch.rand(1, 3, 64, 64)
    features = torch.nn.Sequential(*list(resnet.children())[:-2])(images)
    projection: Any = encoder.projection
    expected = torch.nn.functional.conv2d(features, projection.weight, projection.bias)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-4, atol=1e-5)
    torch.save(state | {"bn1.weight": torch.full((64,), math.nan)}, file)
    with pytest.raises(UserError, match=r"resnet18.pth: weights are NaN or infinite in .*bn1.weight"):
        ResNetRegions(weights=str(file))


@torch.no_grad()
def test_mlp_is_biovils_two_layers():
    encoder = ResNetRegions(stride=16, dim=3, projection="mlp").eval()
    projection: Any = encoder.projection
    state = {name: value for name, value in encoder.state_dict().items() if name.startswith("projection")}
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "projection.0.weight": (3, 256, 1, 1),
        **{f"projection.1.{name}": (3,) for name in ("weight", "bias", "running_mean", "running_var")},
        "projection.1.num_batches_tracked": (),
        "projection.3.weight": (3, 3, 1, 1),
        "projection.3.bias": (3,),
    }
    for name in ("weight", "bias", "running_mean"):
        torch.nn.init.normal_(getattr(projection[1], name))
    projection[1].running_var.copy_(torch.tensor([0.5, 2.0, 3.0]))
    images = torch.rand(2, 3, 32, 48)
    found, features = encoder(images), encoder.backbone(images)
    first, norm, _, last = projection
    for row, column in ((0, 0), (1, 2)):
        hidden = features[1, :, row, column] @ first.weight[:, :, 0, 0].T
        hidden = (hidden - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias
        expected = last.weight[:, :, 0, 0] @ hidden.clamp(min=0) + last.bias
        torch.testing.assert_close(found[1, :, row, column], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("depth, stride, row", [(18, 32, 3), pytest.param(50, 16, 7, marks=pytest.mark.slow)])
def test_receptive_field_is_centred_or_at_cell_start(depth, stride, row, centred):
    centres = []
    for seed in range(2):
        torch.manual_seed(seed)
        encoder = ResNetRegions(depth=depth, stride=stride, dim=8, centred=centred).eval()
        images = torch.randn(1, 3, 224, 224, requires_grad=True)
        encoder(images)[0, :, row, row].square().sum().backward()
        assert images.grad is not None
        weight = images.grad[0].square().sum(0)
        pixel = torch.arange(224.0)
        centres += [float(weight.sum(1 - axis) @ pixel / weight.sum()) for axis in (0, 1)]
    found = sum(centres) / len(centres)
    assert found == pytest.approx((row + 0.5 * centred) * stride, abs=0.15 * stride)


@torch.no_grad()
@pytest.mark.parametrize("depth, stride, width", [(18, 16, 64), (18, 32, 8)])
def test_centred_encoder_treats_both_sides_alike(depth, stride, width):
    """Of mirrored maps, by mirrored kernels, come mirrored features, without what the encoder leaves out."""
    plain, centred = (
        ResNetRegions(depth=depth, stride=stride, dim=8, width=width, centred=centred).eval()
        for centred in (False, True)
    )
    centred.load_state_dict(plain.state_dict())
    images = torch.rand(2, 3, 96, 128)
    *stages, mirrored = copy.deepcopy(plain.backbone)
    maps = torch.nn.Sequential(*stages)(images)
    for layer in mirrored.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.copy_(layer.weight.flip(2, 3))
    expected = mirrored(maps[..., 1:, 1:].flip(2, 3)).flip(2, 3)
    evenly = mirrored(maps.flip(2, 3)).flip(2, 3)
    found = centred.features(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.max()))
    assert found.shape == plain.features(images).shape
    assert not torch.allclose(plain.features(images), evenly, rtol=0, atol=0.1 * float(evenly.max()))
    assert centred.config()["centred"] and centred.trunk_settings() != plain.trunk_settings()
    again = ResNetRegions(**centred.config()).eval()
    again.load_state_dict(centred.state_dict())
    assert torch.equal(again.features(images), found)


@torch.no_grad()
def test_own_layers_of_width_64_equal_torchvision(monkeypatch):
    """The narrow network's layers, built with 64 channels, hold torchvision's weights and give its features."""
    for depth in (18, 50):
        theirs = ResNetRegions(depth=depth, dim=8).eval()
        with monkeypatch.context() as other:
            other.setattr(image, "TORCHVISION_WIDTH", 0)
            ours = ResNetRegions(depth=depth, dim=8).eval()
        ours.load_state_dict(theirs.state_dict())
        images = torch.rand(1, 3, 64, 64)
        assert torch.equal(ours(images), theirs(images))


def test_a_narrow_resnet_starts_as_torchvisions_do():
    encoder = ResNetRegions(stride=16, dim=8, width=12)
    assert encoder.feature_dim == 48 and encoder(torch.rand(2, 3, 48, 64)).shape == (2, 8, 3, 4)
    ResNetRegions(**encoder.config()).load_state_dict(encoder.state_dict())
    kernel = encoder.get_parameter("backbone.6.1.conv2.weight")
    assert float(kernel.detach().std()) == pytest.approx((2 / (48 * 9)) ** 0.5, rel=0.05)


class Holder:
    def __init__(self, encoder: ResNetRegions | None = None) -> None:
        self.encoder = encoder


def test_null_on_the_command_line_means_random_weights():
    """As classes of the configuration are nested: a class of the module's. jsonargparse reads "None" there."""
    allow_imports([__name__])  # a command run before in this process allows only its own
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(Holder, "model")
    encoder = ["--model.init_args.encoder", f"{ResNetRegions.__module__}.ResNetRegions"]
    options = [*encoder, "--model.init_args.encoder.init_args.weights", "null"]
    arguments = parser.parse_args(with_nulls(["--model", f"{__name__}.Holder", *options]))
    assert parser.instantiate_classes(arguments).model.encoder.depth == 18
    path = ["--model.init_args.encoder.init_args.weights=null_weights/a.pth"]
    assert with_nulls(path) == path
