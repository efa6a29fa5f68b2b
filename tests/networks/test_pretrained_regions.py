"""Image encoders of transformers: every family's own patch tokens, in their places, from exact weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks import TransformersRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.pretrained_regions import FINAL_NORM
from medclip_dcl.networks.text_encoder import BertSentences
from tests.model_folders import edited, with_weights

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}
SMALL |= {"image_size": 24, "patch_size": 6}
STAGES = {"hidden_sizes": [8, 8, 8, 12], "depths": [1, 1, 1, 1], "image_size": 64}
WINDOWS = {"embed_dim": 6, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "image_size": 16}
WINDOWS |= {"patch_size": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **(STAGES if "convnext" in name else WINDOWS if "swin" in name else SMALL)}
    for name in FINAL_NORM
}
ARCHITECTURES["dinov3_vit"]["num_register_tokens"] = 3
EIGHT_BITS = torch.ones(16, dtype=torch.uint8)
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
TEXT = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TEXT |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}


def randomised(model: torch.nn.Module) -> Any:
    """As initialised, some models' blocks, positions and class tokens do almost nothing."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def processor(folder: Path, **settings: Any) -> None:
    content = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))


def saved(name: str, folder: Path) -> Any:
    """A small random model, saved by transformers; of CLIP and SigLIP both towers."""
    architecture = ARCHITECTURES[name]
    if name in ("clip_vision_model", "siglip_vision_model"):
        kind, config = {"c": (CLIPModel, CLIPConfig), "s": (SiglipModel, SiglipConfig)}[name[0]]
        both = randomised(kind(config(vision_config=architecture, text_config=TEXT)))
        both.save_pretrained(folder)
        model = both.vision_model
    else:
        config = transformers.AutoConfig.for_model(**architecture)
        model = randomised(AutoModel.from_config(config))
        model.save_pretrained(folder)
    processor(folder)
    return model.eval()


def patch_tokens(name: str, model: Any, images: Tensor, count: int) -> Tensor:
    """Tokens (image, region, channel) by the library alone."""
    options = {"interpolate_pos_encoding": True} if hasattr(model, "embeddings") else {}
    if name in ("dinov2", "dinov2_with_registers", "dinov3_vit", "convnext", "convnextv2"):
        options = {}
    found = model(pixel_values=images, **options).last_hidden_state
    if name == "clip_vision_model":
        return model.post_layernorm(found[:, 1:])
    if name in ("convnext", "convnextv2"):
        return model.layernorm(found.permute(0, 2, 3, 1)).flatten(1, 2)
    first = {"vit": 1, "deit": 2, "vit_msn": 1, "dinov2": 1, "dinov2_with_registers": 5, "dinov3_vit": 4}
    tokens = found[:, {**first, "dinov3_convnext": 1}.get(name, 0) :]
    assert tokens.shape[1] == count
    return tokens


ALIKE = ("deit", "dinov3_vit", "vit_msn", "ijepa", "dinov2", "dinov3_convnext", "swinv2", "convnextv2")
"""Families that share their kind of tokens with another one."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=[pytest.mark.slow] * (x in ALIKE)) for x in FINAL_NORM],
)
def family(request, tmp_path_factory) -> tuple[str, Any, TransformersRegions, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    return request.param, model, TransformersRegions(str(folder), dim=5), folder


@torch.no_grad()
def test_regions_are_the_librarys_patch_tokens(family):
    name, model, encoder, _ = family
    assert encoder.training and (encoder.mean, encoder.std) == (MEAN, STD)
    for rows, columns in ((3, 5), (4, 4)):
        images = torch.rand(2, 3, rows * encoder.stride, columns * encoder.stride)
        tokens = patch_tokens(name, model, images, rows * columns)
        kernel, bias = encoder.projection.weight[:, :, 0, 0], encoder.projection.bias
        expected = (tokens @ kernel.T + bias).transpose(1, 2).reshape(2, 5, rows, columns)
        torch.testing.assert_close(encoder.eval()(images), expected, rtol=1e-5, atol=1e-5)
        assert encoder.features(images).shape == (2, encoder.feature_dim, rows, columns)


@torch.no_grad()
def test_global_vectors_are_the_librarys(family):
    name, model, plain, folder = family
    if name in ("ijepa", "swin", "swinv2", "convnext", "convnextv2"):
        with pytest.raises(UserError, match=f"global_vector: a {name} has no class token and no attention"):
            TransformersRegions(str(folder), global_vector=True)
        return
    encoder = TransformersRegions(str(folder), dim=5, global_vector=True).eval()
    images = torch.rand(2, 3, 3 * encoder.stride, 5 * encoder.stride)
    options = {"interpolate_pos_encoding": True} if len(encoder._options) else {}
    output = model(pixel_values=images, **options)
    is_token = name in ("vit", "deit", "vit_msn")
    expected = output.last_hidden_state[:, 0] if is_token else output.pooler_output
    regions, vector = encoder.features_and_global(images)
    torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-5)
    alone = plain.eval().features(images)
    if name == "siglip_vision_model":  # in the space of the pooled vector
        alone = torch.stack([model.head(x[:, None]) for x in alone.flatten(2).permute(2, 0, 1)], 2).view_as(
            alone
        )
    torch.testing.assert_close(regions, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(encoder.features(images), regions)
    on_meta = TransformersRegions(**encoder.config()).to("meta").train()
    with torch.enable_grad():
        on_meta.projection(
            on_meta.features_and_global(images.to("meta"))[1][:, :, None, None]
        ).sum().backward()
    assert {name for name, p in on_meta.named_parameters() if p.grad is None} == set()
    TransformersRegions(**encoder.config()).load_state_dict(encoder.state_dict())


@torch.no_grad()
def test_a_square_changes_most_its_region(family):
    _, _, encoder, _ = family
    side = encoder.stride
    images = 0.2 * torch.rand(1, 3, 5 * side, 7 * side)
    for row, column in ((0, 6), (3, 2), (4, 0)):
        bright = images.clone()
        bright[..., row * side : (row + 1) * side, column * side : (column + 1) * side] += 2
        change = (encoder.eval().features(bright) - encoder.features(images)).norm(dim=1)[0]
        assert divmod(int(change.argmax()), 7) == (row, column)


@torch.no_grad()
def test_description_rebuilds_without_the_folder(family, tmp_path):
    _, _, encoder, _ = family
    images = torch.rand(1, 3, 3 * encoder.stride, 4 * encoder.stride)
    config = json.loads(json.dumps(encoder.config()))
    again = TransformersRegions(**config).eval()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(images), encoder.eval()(images)) and again.config() == config
    with torch.device("meta"):
        assert TransformersRegions(**config).config() == config


def test_every_parameter_has_a_gradient(family):
    _, _, encoder, _ = family
    layers = encoder.feature_layers()
    names = {id(p): name for name, p in encoder.named_parameters()}
    listed = [names[id(p)] for layer in layers for p in layer]
    trunk = [f"backbone.{name}" for name, _ in encoder.trunk.named_parameters()]
    assert sorted(listed) == sorted(trunk)
    assert any(part in listed[0] for part in ("embeddings", "stages.0"))
    blocks = 4 if isinstance(ARCHITECTURES[family[0]].get("hidden_sizes"), list) else 2
    assert len(layers) - blocks in (0, 1)
    assert [f".{block}." in names[id(layer[0])] for block, layer in enumerate(layers[-blocks:])] == [
        True
    ] * blocks
    # On the meta device reading a value is an error.
    on_meta = TransformersRegions(**encoder.config()).to("meta").train()
    images = torch.empty(2, 3, 3 * encoder.stride, 4 * encoder.stride, device="meta")
    on_meta(images).sum().backward()
    assert {name for name, p in on_meta.named_parameters() if p.grad is None} == set()


@torch.no_grad()
def test_a_patch_may_have_two_equal_sides():
    square, pair = ({**ARCHITECTURES["vit"], "patch_size": size} for size in (6, [6, 6]))
    encoders = [TransformersRegions(architecture=x, mean=MEAN, std=STD).eval() for x in (square, pair)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    images = torch.rand(1, 3, 18, 12)
    assert torch.equal(encoders[0](images), encoders[1](images)) and encoders[1].mean == MEAN


@torch.no_grad()
def test_swin_forgets_sizes_seen_before():
    swin, fresh = (TransformersRegions(architecture=ARCHITECTURES["swin"], dim=5).eval() for _ in range(2))
    randomised(swin)
    fresh.load_state_dict(swin.state_dict())
    images = torch.rand(1, 3, 32, 32)
    swin(images[..., :16, :16])  # one window
    assert torch.equal(swin(images), fresh(images))
    with pytest.raises(UserError, match="data.crop_size: expected at least 16 pixels, a window .*, found 8"):
        swin.check_sides({"data.crop_size": 8})


def test_other_sides_are_refused(family):
    _, _, encoder, _ = family
    words = f"width of the images: expected a multiple of the image encoder's patch, {encoder.stride} pixels"
    with pytest.raises(UserError, match=words):
        encoder(torch.rand(1, 3, encoder.stride, 2 * encoder.stride + 1))


@pytest.fixture
def vit(tmp_path) -> Path:
    saved("vit", tmp_path)
    return tmp_path


@torch.no_grad()
def test_files_of_other_forms_load_alike(vit, tmp_path):
    images = torch.rand(1, 3, 18, 12)
    expected = TransformersRegions(str(vit)).eval().features(images)
    model = transformers.ViTForImageClassification.from_pretrained(vit)
    pooled = transformers.ViTModel.from_pretrained(vit)
    for number, (whole, options) in enumerate(((model, {}), (pooled, {"max_shard_size": "5KB"}))):
        whole.save_pretrained(tmp_path / str(number), **options)
        again = TransformersRegions(str(tmp_path / str(number)), mean=MEAN, std=STD).eval()
        assert torch.equal(again.features(images), expected) and again.mean == MEAN
    assert len(list((tmp_path / "1").glob("*.safetensors"))) > 2
    half = tmp_path / "half"
    pooled.half().save_pretrained(half, safe_serialization=False)
    torch.save(pooled.state_dict(), half / "pytorch_model.bin")
    (half / "model.safetensors").unlink(missing_ok=True)
    found = TransformersRegions(str(half), mean=MEAN, std=STD).eval().features(images)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_network_keeps_the_folders_normalisation(vit, small_bert, tmp_path):
    encoder, text = TransformersRegions(str(vit), dim=8), BertSentences(str(small_bert), dim=8)
    network = ImageTextNetwork(encoder, text, image_size=24).eval()
    network.save_pretrained(tmp_path / "exported")
    images = torch.rand(2, 3, 24, 24)
    tokens = patch_tokens("vit", encoder.backbone, (images - 0.2) / 0.5, 16)
    shutil.rmtree(vit / "model.safetensors", ignore_errors=True)
    (vit / "config.json").unlink()
    again = ImageTextNetwork.from_pretrained(tmp_path / "exported")
    assert again.mean.flatten().tolist() == pytest.approx(MEAN)
    assert again.std.flatten().tolist() == pytest.approx(STD)
    assert torch.equal(again.feature_map(images), network.feature_map(images))
    same = torch.tensor([0.2, 0.2, 0.2]).view(3, 1, 1)
    assert not torch.allclose(again.image_features(images).flatten(2).transpose(1, 2), tokens)
    again.set_normalisation(same.flatten().tolist(), [0.5] * 3)
    torch.testing.assert_close(again.image_features(images).flatten(2).transpose(1, 2), tokens)
    assert network.encoders_fingerprint()["image_encoder"] != again.encoders_fingerprint()["image_encoder"]


@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({"do_normalize": False}, [0, 0, 0], [1, 1, 1]),
        ({"do_normalize": False, "rescale_factor": 1 / 127.5}, [0, 0, 0], [0.5] * 3),
        ({"rescale_factor": 1 / 127.5}, [0.05, 0.1, 0.15], [0.2, 0.25, 0.3]),
        ({"do_rescale": False, "image_mean": [51] * 3, "image_std": [255] * 3}, [0.2] * 3, [1] * 3),
    ],
)
def test_normalisation_is_of_images_to_one(vit, settings, mean, std):
    processor(vit, **settings)
    encoder = TransformersRegions(str(vit))
    assert encoder.mean == pytest.approx(mean) and encoder.std == pytest.approx(std)
    nested = {"image_processor": json.loads((vit / "preprocessor_config.json").read_text())}
    (vit / "processor_config.json").write_text(json.dumps(nested))
    (vit / "preprocessor_config.json").unlink()
    assert TransformersRegions(str(vit)).mean == pytest.approx(mean)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: (x / "preprocessor_config.json").unlink(), "mean and std: .*preprocessor_config.json"),
        (lambda x: edited(x, model_type="mine", auto_map={"AutoModel": "a.B"}), "'mine' with code of its own, a.py"),
        (lambda x: edited(x, model_type="bert"), "config.json: model_type: expected one of vit, .*found 'bert'"),
        (lambda x: edited(x, hidden_size="many"), "config.json: .*hidden_size"),
        (lambda x: edited(x, num_hidden_layers=3), "missing .*2.*; give the folder of a vit"),
        (lambda x: edited(x, num_hidden_layers=1), "do not fit config.json: unexpected"),
        (lambda x: with_weights(x, lambda state: state.pop("layernorm.bias")), r"missing \['layernorm.bias'\]"),
        (lambda x: with_weights(x, lambda state: state["layernorm.bias"].fill_(torch.nan)), "NaN or infinite in"),
        (lambda x: with_weights(x, lambda state: state.update({"layernorm.weight": EIGHT_BITS})), "quantised"),
        (lambda x: with_weights(x, lambda state: state["layernorm.bias"].fill_(torch.inf)), "NaN or infinite in"),
        (lambda x: processor(x, rescale_offset=True), "json changes grey levels by rescale_offset True, too"),
        (lambda x: processor(x, do_flip_channel_order=1, offset=None), "levels by do_flip_channel_order 1, too"),
    ],
)  # fmt: skip
def test_unsuitable_folders_are_refused(vit, change, words):
    change(vit)
    with pytest.raises(UserError, match=words):
        TransformersRegions(str(vit))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give either pretrained"),
        ({"pretrained": "a", "architecture": {}}, "give either pretrained"),
        (
            {"architecture": {"model_type": "vit", "image_size": [64, 32]}},
            r"image_size: expected equal .*\[64, 32\]",
        ),
        (
            {"architecture": {"model_type": "vit", "num_channels": 1}},
            "num_channels: expected 3, found 1",
        ),
        ({"architecture": {"model_type": "vit"}, "dim": 0}, "dim: expected at least 1"),
        ({"architecture": {"model_type": "vit"}, "mean": MEAN}, "expected 3 numbers each, .* std None"),
        (
            {"architecture": ARCHITECTURES["vit"], "mean": [0.5], "std": STD},
            r"3 numbers each, found mean \[0.5\]",
        ),
        ({"architecture": {"model_type": "gpt2"}}, "image_encoder.architecture: model_type"),
    ],
)
def test_settings_of_the_encoder_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        TransformersRegions(**options)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for is_saving in (False, True):
        torch.manual_seed(3)
        encoder = TransformersRegions(
            architecture={**ARCHITECTURES["vit"], "hidden_dropout_prob": 0.2},
            gradient_checkpointing=is_saving,
        )
        encoder(torch.ones(2, 3, 12, 18)).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
