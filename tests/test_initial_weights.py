"""Weights to start from: read from whatever has them, taken over by name, refused with a reason."""

from __future__ import annotations

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from medclip_dcl.encoders.image import ResNetRegions
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.initial_weights import image_encoder_weights, take_over_image_encoder
from medclip_dcl.network import ImageTextNetwork, part_config
from medclip_dcl.similarity import LSENonLocal


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(3)
    text = BertSentences(str(small_bert), dim=6)
    image = ResNetRegions(dim=6, stride=16)
    return ImageTextNetwork(image, text, LSENonLocal(dim=6), 48, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def checkpoint(network, prefix="network.") -> dict:
    state = {f"{prefix}{name}": value for name, value in network.state_dict().items()}
    return {"network": network.config(), "state_dict": state, "objective": {}}


def classifier(network, prefix) -> dict:
    """As a classifier's checkpoint: the image encoder and a head."""
    state = {f"{prefix}image_encoder.{k}": x for k, x in network.image_encoder.state_dict().items()}
    state["head.weight"] = torch.zeros(3, 6)
    return {"network": {"image_encoder": part_config(network.image_encoder)}, "state_dict": state}


@pytest.mark.parametrize("kind", ["checkpoint", "exported", "classifier", "bare classifier"])
def test_an_encoder_is_found_in_everything_that_has_one(network, kind, tmp_path):
    if kind == "exported":
        network.save_pretrained(tmp_path / "source")
    else:
        content = checkpoint(network)
        if "classifier" in kind:
            content = classifier(network, "" if "bare" in kind else "network.")
        torch.save(content, tmp_path / "source")
    found = image_encoder_weights(tmp_path / "source")
    assert found.config == part_config(network.image_encoder) and found.source == str(tmp_path / "source")
    assert same(found.state, network.image_encoder.state_dict())
    has_normalisation = "classifier" not in kind
    assert (found.mean == pytest.approx((0.1, 0.2, 0.3))) == has_normalisation
    assert (found.std == pytest.approx((1.0, 2.0, 3.0))) == has_normalisation
    other = ResNetRegions(dim=6, stride=16)
    assert take_over_image_encoder(other, found) == []
    assert same(other.state_dict(), network.image_encoder.state_dict())


@pytest.mark.parametrize("suffix, depth, stride", [("pth", 18, 16), ("safetensors", 50, 32)])
def test_torchvisions_weights_leave_the_projection(suffix, depth, stride, tmp_path):
    state = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).state_dict()
    file = tmp_path / f"resnet.{suffix}"
    torch.save(state, file) if suffix == "pth" else save_file(state, file)
    found = image_encoder_weights(file)
    assert found.config is None and found.left_out == ("fc.weight", "fc.bias")
    encoder = ResNetRegions(depth=depth, stride=stride, dim=6, projection="mlp")
    before = {name: value.clone() for name, value in encoder.projection.state_dict().items()}
    kept = take_over_image_encoder(encoder, found)
    assert kept == [f"projection.{name}" for name in before]
    assert same(encoder.projection.state_dict(), before)
    by_option = ResNetRegions(depth=depth, stride=stride, dim=6, weights=str(file))
    assert same(encoder.backbone.state_dict(), by_option.backbone.state_dict())


def test_an_encoder_that_differs_is_refused_by_names(network, tmp_path):
    torch.save(checkpoint(network), tmp_path / "a.ckpt")
    weights = image_encoder_weights(tmp_path / "a.ckpt")
    before = ResNetRegions(stride=16, dim=6, projection="mlp")
    state = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(ValueError, match="a.ckpt: its image encoder does not fit") as error:
        take_over_image_encoder(before, weights)
    message = str(error.value)
    assert "missing ['projection.0.weight', 'projection.1.bias'" in message
    assert "unexpected ['projection.bias', 'projection.weight']" in message
    assert "set image_encoder to {'class_path': 'medclip_dcl.encoders.image.ResNetRegions'" in message
    assert same(before.state_dict(), state)
    with pytest.raises(
        ValueError, match=r"of another shape \['projection.weight \(6, 256, 1, 1\) instead of \(8,"
    ):
        take_over_image_encoder(ResNetRegions(stride=16, dim=8), weights)
    with pytest.raises(ValueError, match=r"missing \['backbone.7.0.bn1.bias'"):
        take_over_image_encoder(ResNetRegions(dim=6), weights)


class Code:
    """Runs when it is unpickled as Python does."""

    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.ckpt", {"state_dict": {"w": torch.zeros(1)}}, "no description of its network"),
        ("a.ckpt", {"network": {"x": 1}, "state_dict": {"w": torch.zeros(1)}}, "describes no image encoder"),
        ("a.ckpt", {"network": {"image_encoder": {}}}, "is no state dict"),
        (
            "a.ckpt",
            {"network": {"image_encoder": {}}, "state_dict": {"head": torch.zeros(1)}},
            r"has no tensor of one \(image_encoder",
        ),
        (
            "a.pth",
            {"epoch": 3, "model": {}},
            r"no state dict \(names and tensors\): it holds \['epoch', 'model'\]",
        ),
        ("a.pth", [1], "it holds list"),
        (
            "a.pth",
            {"conv1.weight": torch.zeros(1)},
            r"not a torchvision ResNet-18, -34 or -50 .* missing \['bn1",
        ),
        ("a.pth", Code(), "copy the file again, or give one of tensors"),
        (
            "a.ckpt",
            {"network": {}, "state_dict": {"w": torch.zeros(1)}, "x": Code()},
            "Python objects are not",
        ),
    ],
)
def test_foreign_files_are_refused(name, content, message, tmp_path, capsys):
    torch.save(content, tmp_path / name)
    with pytest.raises(ValueError, match=message):
        image_encoder_weights(tmp_path / name)
    assert "code of the file ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.pth", "old.pth", "a.safetensors"])
def test_truncated_files_are_refused(name, tmp_path):
    state = torchvision.models.resnet18().state_dict()
    if name == "a.safetensors":
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=name != "old.pth")
    whole = (tmp_path / name).read_bytes()
    generator = torch.Generator().manual_seed(0)
    lengths = [
        *range(0, 40),
        *torch.randint(40, len(whole) - 1, (20,), generator=generator).tolist(),
        len(whole) - 1,
    ]
    for length in lengths:
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            image_encoder_weights(tmp_path / name)


def test_bytes_of_anything_else_are_refused(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for i in range(200):
        noise = bytes(torch.randint(0, 256, (50,), generator=generator, dtype=torch.uint8).tolist())
        (tmp_path / "a.ckpt").write_bytes((b"", b"\x80\x02", b"PK\x03\x04", b"(dp0\n")[i % 4] + noise)
        with pytest.raises(ValueError, match="truncated"):
            image_encoder_weights(tmp_path / "a.ckpt")


def test_nothing_there(network, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*nowhere"):
        image_encoder_weights(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.safetensors"):
        image_encoder_weights(tmp_path / "nowhere.safetensors")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        image_encoder_weights(tmp_path)
    network.save_pretrained(tmp_path / "export")
    (tmp_path / "export/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        image_encoder_weights(tmp_path / "export")
