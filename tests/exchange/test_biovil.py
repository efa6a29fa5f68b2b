"""BioViL's key names: a small model saved under them, loaded exactly, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch.nn.functional import batch_norm, conv2d, gelu, layer_norm, linear
from transformers import AutoTokenizer, BertModel

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.biovil import from_biovil
from medclip_dcl.networks.image_text import ImageTextNetwork
from tests.program import verb

main = verb("convert")

DIM = 8
HEAD = "cls_projection_head."


def image_state(depth: int = 18, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the published names; a torchvision ResNet with its unused fc, and the projector."""
    torch.manual_seed(seed)
    resnet = getattr(torchvision.models, f"resnet{depth}")(weights=None, num_classes=3)
    channels = resnet.fc.in_features
    state = {f"encoder.encoder.{name}": value for name, value in resnet.state_dict().items()}
    state["projector.model.0.weight"] = torch.randn(DIM, channels, 1, 1) / channels**0.5
    for name in ("weight", "bias", "running_mean"):
        state[f"projector.model.1.{name}"] = torch.randn(DIM)
    state["projector.model.1.running_var"] = torch.rand(DIM) + 0.5
    state["projector.model.1.num_batches_tracked"] = torch.tensor(7)
    state["projector.model.3.weight"] = torch.randn(DIM, DIM, 1, 1)
    state["projector.model.3.bias"] = torch.randn(DIM)
    return state


def write_text_folder(small_bert: Path, folder: Path) -> Path:
    """The small BERT as CXR-BERT-specialized: with its projection head."""
    shutil.copytree(small_bert, folder)
    state = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    state[f"{HEAD}dense_to_hidden.weight"] = torch.randn(DIM, 32)
    state[f"{HEAD}dense_to_output.weight"] = torch.randn(DIM, DIM)
    for name in ("dense_to_hidden.bias", "LayerNorm.weight", "LayerNorm.bias", "dense_to_output.bias"):
        state[f"{HEAD}{name}"] = torch.randn(DIM)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def text_folder(small_bert, tmp_path_factory) -> Path:
    return write_text_folder(small_bert, tmp_path_factory.mktemp("cxr_bert") / "specialized")


def converted(state: dict[str, torch.Tensor], text_folder: Path) -> ImageTextNetwork:
    return from_biovil(state, Path("image.pt"), text_folder)[0]


def projected(hidden: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The projector behind its first layer."""
    weight, bias, mean, variance = (
        state[f"projector.model.1.{x}"] for x in ("weight", "bias", "running_mean", "running_var")
    )
    hidden = batch_norm(hidden, mean, variance, weight, bias).relu()
    return conv2d(hidden, state["projector.model.3.weight"], state["projector.model.3.bias"])


@torch.no_grad()
def test_regions_are_torchvisions_and_the_projectors_layers(text_folder):
    network, state = converted(image_state(), text_folder), image_state()
    resnet = torchvision.models.resnet18(weights=None, num_classes=3).eval()
    resnet.load_state_dict(
        {name.removeprefix("encoder.encoder."): v for name, v in state.items() if "projector" not in name}
    )
    images = torch.rand(2, 3, 64, 96)  # in [0, 1]: no further normalisation
    features = torch.nn.Sequential(*list(resnet.children())[:-2])(images)
    expected = projected(conv2d(features, state["projector.model.0.weight"]), state)
    torch.testing.assert_close(network.feature_map(images), expected, rtol=1e-4, atol=1e-4)
    assert not network.training and expected.shape == (2, DIM, 2, 3)


@torch.no_grad()
def test_biovil_t_is_equal_without_priors(text_folder, tmp_path):
    """hi-ml-multimodal's forward: a constant stands beside the features where there is no prior image."""
    state = image_state()
    width, no_prior = 6, "encoder.missing_previous_emb"
    state["encoder.backbone_to_vit.weight"] = torch.randn(width, 512, 1, 1) / 512**0.5
    state[no_prior] = torch.randn(1, width, 1, 1)
    state["encoder.vit_pooler.norm_post.weight"] = torch.randn(2 * width)
    state["projector.model.0.weight"] = torch.randn(DIM, 2 * width, 1, 1)
    torch.save(state, tmp_path / "image.pt")
    options = ["--text_encoder", str(text_folder), "--output", str(tmp_path / "output")]
    main([str(tmp_path / "image.pt"), *options])
    network: Any = load(tmp_path / "output").network
    images = torch.rand(2, 3, 64, 96)
    features = conv2d(network.image_encoder.features(images), state["encoder.backbone_to_vit.weight"])
    constant = state[no_prior].expand(2, -1, 2, 3)
    hidden = conv2d(torch.cat([features, constant], dim=1), state["projector.model.0.weight"])
    expected = projected(hidden, state)
    torch.testing.assert_close(network.feature_map(images), expected, rtol=1e-5, atol=1e-5)
    assert "prior images are left out" in (tmp_path / "output/README.md").read_text()


@torch.no_grad()
def test_sentences_are_the_projected_cls(text_folder):
    network = converted(image_state(), text_folder)
    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    bert = BertModel.from_pretrained(text_folder).eval()
    state = load_file(text_folder / "model.safetensors")
    head = {name.removeprefix(HEAD): value for name, value in state.items() if HEAD in name}
    text = "no pneumothorax"
    cls = bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0]
    hidden = gelu(linear(cls, head["dense_to_hidden.weight"], head["dense_to_hidden.bias"]))
    hidden = layer_norm(hidden, (DIM,), head["LayerNorm.weight"], head["LayerNorm.bias"], eps=1e-12)
    expected = linear(hidden, head["dense_to_output.weight"], head["dense_to_output.bias"])
    for given in (text, "no pneumothorax.", "no pneumothorax?!"):  # hi-ml-multimodal strips "!?."
        torch.testing.assert_close(network.embed_texts([given])[0], expected, rtol=1e-4, atol=1e-4)


def test_the_fifty_layers_of_the_published_model_fit(text_folder):
    state = image_state(50)
    network = converted(state, text_folder)
    encoder: Any = network.image_encoder
    assert (encoder.depth, encoder.stride) == (50, 32)
    expected = state["encoder.encoder.layer4.2.conv3.weight"]
    assert torch.equal(encoder.backbone[7][2].conv3.weight, expected)
    assert network.image_size == 512 and network.mean.flatten().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.encoder.layer1.0.conv1.weight": None}, r"missing \['backbone.4.0.conv1.weight'\]"),
        ({"classifier.weight": torch.zeros(1)}, r"unexpected \['classifier.weight'\]"),
        (
            {"projector.model.0.weight": torch.zeros(9, 512, 1, 1)},
            r"projection.0.weight \(9, 512, 1, 1\) inst",
        ),
        ({"projector.model.3.weight": None}, "expected BioViL's image weights"),
        ({f"encoder.encoder.layer3.{i}.x": torch.zeros(1) for i in range(2, 23)}, ".*ResNet-18, -34 or -50"),
    ],
)
def test_weights_that_do_not_fit_are_named(text_folder, change, message):
    state = {name: value for name, value in {**image_state(), **change}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        converted(state, text_folder)


def test_a_text_encoder_without_projection_head_is_named(small_bert):
    with pytest.raises(UserError, match=r"cls_projection_head.\*: .* missing \['LayerNorm.bias'"):
        converted(image_state(), small_bert)
