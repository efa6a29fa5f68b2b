"""Image encoders of timm: what its own `forward_features` returns, in its places, from exact weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks import TimmRegions
from tests.model_folders import edited, with_weights

timm = pytest.importorskip("timm", reason="the extra models is not installed")

TOKENS = {"img_size": 24, "patch_size": 6, "embed_dim": 16, "depth": 2, "num_heads": 2}
WINDOWS = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 2}
SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": TOKENS,
    "vit_small_patch14_reg4_dinov2": TOKENS,
    "vit_base_patch16_siglip_224": TOKENS,
    "eva02_tiny_patch14_224": TOKENS,
    "deit_tiny_distilled_patch16_224": TOKENS,
    "beit_base_patch16_224": TOKENS,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 16)},
    "resnet18": {"channels": (8, 8, 8, 16)},
}
EIGHT_BITS = torch.ones(16, dtype=torch.uint8)
N_PREFIX = {
    "vit_small_patch14_reg4_dinov2": 5,
    "vit_base_patch16_siglip_224": 0,
    "deit_tiny_distilled_patch16_224": 2,
}
SLOW = (
    "vit_tiny_patch16_224",
    "vit_base_patch16_siglip_224",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "resnet18",
)


def saved(name: str, folder: Path) -> Any:
    """A small random model, saved by timm with a classifier."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **SMALL[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return model.eval()


def own_map(name: str, model: Any, images: Tensor, rows: int) -> Tensor:
    """Features (image, channel, row, column) by timm alone."""
    found = model.forward_features(images)
    if found.ndim == 3:
        found = found[:, N_PREFIX.get(name, 1) :]
        return found.transpose(1, 2).reshape(len(images), found.shape[2], rows, -1)
    return found.permute(0, 3, 1, 2) if name.startswith("swin") else found


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SMALL],
)
def family(request, tmp_path_factory) -> tuple[str, Any, TimmRegions]:
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    return request.param, model, TimmRegions(str(folder), dim=5)


def sides(encoder: TimmRegions, name: str) -> tuple[int, int]:
    return (24, 24) if name.startswith("beit") else (3 * encoder.stride, 5 * encoder.stride)


@torch.no_grad()
def test_regions_are_timms_own_features(family):
    name, model, encoder = family
    height, width = sides(encoder, name)
    images = torch.rand(2, 3, height, width)
    if name.startswith("swin"):
        model.patch_embed.strict_img_size = False
    if SMALL[name] is TOKENS and not name.startswith("beit"):  # timm's models for one size, at another
        flexible = timm.create_model(name, num_classes=3, dynamic_img_size=True, **TOKENS).eval()
        flexible.load_state_dict(model.state_dict())
        model = flexible
    expected = own_map(name, model, images, height // encoder.stride)
    torch.testing.assert_close(encoder.eval().features(images), expected, rtol=1e-5, atol=1e-5)
    kernel, bias = encoder.projection.weight[:, :, 0, 0], encoder.projection.bias
    projected = torch.einsum("dc,ncrq->ndrq", kernel, expected) + bias[:, None, None]
    torch.testing.assert_close(encoder(images), projected, rtol=1e-4, atol=1e-5)
    assert list(encoder.mean) == list(model.pretrained_cfg["mean"])
    assert list(encoder.std) == list(model.pretrained_cfg["std"])


@torch.no_grad()
def test_global_vectors_are_what_timm_pools(family):
    name, model, plain = family
    encoder = TimmRegions(**{**plain.config(), "global_vector": True}).eval()
    state = model.state_dict()
    encoder.backbone.model.load_state_dict({key: state[key] for key in encoder.backbone.model.state_dict()})
    images = torch.rand(2, 3, *([24, 24] if SMALL[name] is TOKENS else sides(encoder, name)))
    if name.startswith("swin"):
        model.patch_embed.strict_img_size = False
    expected = model.forward_head(model.forward_features(images), pre_logits=True)
    regions, vector = encoder.features_and_global(images)
    torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(regions, plain.eval().features(images), rtol=1e-5, atol=1e-5)
    with torch.device("meta"), torch.enable_grad():
        on_meta = TimmRegions(**encoder.config())
        on_meta.features_and_global(torch.empty(images.shape))[1].sum().backward()
    assert {name for name, p in on_meta.trunk.named_parameters() if p.grad is None} == set()


@torch.no_grad()
def test_a_square_changes_most_its_region(family):
    name, _, encoder = family
    side, (height, width) = encoder.stride, sides(encoder, name)
    images = 0.2 * torch.rand(1, 3, height, width)
    columns = width // side
    for row, column in ((0, columns - 1), (2, 1)):
        bright = images.clone()
        bright[..., row * side : (row + 1) * side, column * side : (column + 1) * side] += 2
        change = (encoder.eval().features(bright) - encoder.features(images)).norm(dim=1)[0]
        assert divmod(int(change.argmax()), columns) == (row, column)


def test_description_rebuilds_and_every_parameter_learns(family):
    name, _, encoder = family
    images = torch.rand(2, 3, *sides(encoder, name))
    config = json.loads(json.dumps(encoder.config()))
    again = TimmRegions(**config).eval()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(images), encoder.eval()(images)) and again.config() == config
    layers = encoder.feature_layers()
    names = {id(p): name for name, p in encoder.named_parameters()}
    listed = sorted(names[id(p)] for layer in layers for p in layer)
    assert listed == sorted(f"backbone.{name}" for name, _ in encoder.trunk.named_parameters())
    assert len(layers) >= 3 and any(
        part in names[id(layers[0][0])] for part in ("embed", "token", "stem", "conv1")
    )
    with torch.device("meta"):
        on_meta = TimmRegions(**config)
        on_meta(torch.empty(images.shape)).sum().backward()
    assert {name for name, p in on_meta.named_parameters() if p.grad is None} == set()


def test_other_sides_are_refused(family):
    name, _, encoder = family
    height, width = sides(encoder, name)
    with pytest.raises(
        UserError, match="width of the images: expected a multiple of the image encoder's patch"
    ):
        encoder(torch.rand(1, 3, height, width + 1))
    if name.startswith("beit"):
        with pytest.raises(UserError, match="width of the images: expected 24 pixels, the only size of beit"):
            encoder(torch.rand(1, 3, height, width + 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: edited(x, architecture=None), "expected architecture and pretrained_cfg of timm"),
        (lambda x: edited(x, architecture="vit_of_2031"), "timm, vit_of_2031: Unknown model .*; update timm"),
        (lambda x: edited(x, pretrained_cfg={}), "mean and std: .*config.json has none"),
        (lambda x: edited(x, model_args={"checkpoint_path": "a.pth"}), "timm, vit_tiny.*multiple values"),
        (lambda x: edited(x, model_args={**TOKENS, "in_chans": 1}), "in_chans: expected 3, found 1"),
        (lambda x: edited(x, pretrained_cfg={"mean": 0.5, "std": 0.2}), "expected 3 numbers each, found mean 0.5, std"),
        (lambda x: edited(x, model_args={**TOKENS, "depth": 3}), "vit_tiny.*Missing key"),
        (lambda x: edited(x, model_args={**TOKENS, "depth": 1}), "vit_tiny.*Unexpected key"),
        (lambda x: with_weights(x, lambda state: state.pop("norm.bias")), "vit_tiny.*Missing key.*norm.bias"),
        (lambda x: with_weights(x, lambda state: state["norm.bias"].fill_(torch.nan)), "NaN or infinite in"),
        (lambda x: with_weights(x, lambda state: state.update({"norm.weight": EIGHT_BITS})), "quantised .*norm.weight"),
    ],
)  # fmt: skip
def test_unsuitable_folders_are_refused(tmp_path, change, words):
    saved("vit_tiny_patch16_224", tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        TimmRegions(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"), [("levit_128", "64 x 64 .*16 of its 224"), ("volo_d1_224", "found 197 of")]
)
def test_models_without_a_right_size_are_refused(name, words):
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=f"{name}: expected a region for each .*{words}"),
    ):
        TimmRegions(architecture={"name": name})


def test_a_default_size_need_not_be_right():
    """EfficientNet-B1 is built for 240 pixels."""
    with torch.device("meta"):
        encoder = TimmRegions(architecture={"name": "efficientnet_b1"}, dim=5)
        assert encoder(torch.empty(1, 3, 224, 96)).shape == (1, 5, 7, 3)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    architecture = {"name": "vit_tiny_patch16_224", "model_args": {**TOKENS, "proj_drop_rate": 0.2}}
    for is_saving in (False, True):
        torch.manual_seed(3)
        encoder = TimmRegions(architecture=architecture, gradient_checkpointing=is_saving)
        encoder(torch.ones(2, 3, 12, 18)).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
