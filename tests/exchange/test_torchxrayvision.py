"""Converted classifiers against torchxrayvision's DenseNet, and torchvision's ResNet-50 of one channel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import torchxrayvision as xrv
from safetensors.torch import save_file
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.torchxrayvision import HOW_TO_SAVE
from medclip_dcl.networks.classifier import FindingNetwork
from tests.program import verb

main = verb("convert")

TARGETS = list(xrv.models.DenseNet.targets)
COMMON = {"Effusion": "Pleural Effusion", "Pleural_Thickening": "Pleural Thickening"}


def seen(model: Any) -> Any:
    """A model whose BatchNorms have seen images of the library's grey levels, and whose logits have biases."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_(std=0.3)
        for _ in range(3):
            model.train()(2048 * torch.rand(4, 1, 64, 64) - 1024)
        list(model.modules())[-1].bias.normal_()
    return model.eval()


@pytest.fixture(scope="module")
def dense() -> Any:
    torch.manual_seed(3)
    return seen(xrv.models.DenseNet(growth_rate=8, block_config=(2, 3, 1, 2), num_init_features=16))


def converted(content: Any, folder: Path, *more: Any) -> FindingNetwork:
    torch.save(content, folder / "classifier.pt")
    main([str(folder / "classifier.pt"), "--output", str(folder / "output"), *map(str, more)])
    return FindingNetwork.from_pretrained(folder / "output")


def pixels(grey: Tensor) -> Tensor:
    """The library's input from grey levels."""
    return torch.from_numpy(xrv.datasets.normalize(grey.numpy(), 255))


@torch.no_grad()
def assert_logits(network: FindingNetwork, model: Any, kept: list[int], shift: Any = 0.0) -> None:
    grey = torch.randint(0, 256, (3, 1, 64, 96), dtype=torch.uint8)
    expected = model(pixels(grey))[:, kept] - shift
    assert expected.std() > 0.01
    torch.testing.assert_close(network(grey), expected, atol=1e-4, rtol=0)


def test_a_densenets_logits_are_the_librarys(dense, tmp_path, capsys) -> None:
    network = converted({"state": dense.state_dict(), "findings": TARGETS}, tmp_path, "--image_size", 64)
    assert_logits(network, dense, list(range(18)))
    assert network.findings == tuple(COMMON.get(name, name) for name in TARGETS)
    assert (network.image_size, network.geometry) == (64, "shortest")
    said = capsys.readouterr().out
    assert "without an operating point, logits are as trained: Atelectasis, Consol" in said
    assert "Effusion is Pleural Effusion" in said
    assert "without a name" not in said


def test_thresholds_become_zero_and_empty_names_go(dense, tmp_path, capsys) -> None:
    names = ["" if place in (1, 17) else name for place, name in enumerate(TARGETS)]
    thresholds = torch.linspace(0.02, 0.6, 18)
    thresholds[[0, 1, 17]] = torch.nan
    state = {**dense.state_dict(), "op_threshs": thresholds}
    kept = [place for place, name in enumerate(names) if name]
    network = converted({"state": state, "findings": names}, tmp_path)
    shift = torch.log(thresholds / (1 - thresholds))[kept].nan_to_num(0.0)
    assert_logits(network, dense, kept, shift)
    assert network.image_size == 224 and len(network.findings) == 16
    said = capsys.readouterr().out
    assert "2 of 18 logits without a name" in said and "logits are as trained: Atelectasis\n" in said
    # The library's own operating point, 0.5 behind its op_norm, is logit 0.
    with torch.no_grad():
        grey = torch.randint(0, 256, (3, 1, 64, 64), dtype=torch.uint8)
        dense.op_threshs = thresholds
        theirs = dense(pixels(grey))[:, kept[1:]]
        dense.op_threshs = None
    assert ((network(grey)[:, 1:] > 0) == (theirs > 0.5)).all() and len(
        {*(theirs > 0.5).flatten().tolist()}
    ) == 2


@pytest.mark.parametrize(
    ("depth", "prefix"),
    [(18, "model."), *(pytest.param(50, prefix, marks=pytest.mark.slow) for prefix in ("", "model."))],
)
def test_a_resnets_logits_are_torchvisions(depth: int, prefix: str, tmp_path) -> None:
    torch.manual_seed(4)
    resnet = getattr(torchvision.models, f"resnet{depth}")(weights=None, num_classes=3)
    resnet.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    seen(resnet)
    state = {f"{prefix}{name}": x for name, x in resnet.state_dict().items()}
    network = converted({"state": state, "findings": ["Mass", "", "Hernia"]}, tmp_path)
    assert network.image_size == 512
    assert_logits(network, resnet, [0, 2])


def test_safetensors_has_findings_in_its_metadata(dense, tmp_path) -> None:
    file, state = tmp_path / "classifier.safetensors", dense.state_dict()
    save_file(state, file, metadata={"findings": json.dumps(TARGETS)})
    for output in ("one", "two"):
        main([str(file), "--output", str(tmp_path / output)])
    one, two = (FindingNetwork.from_pretrained(tmp_path / x) for x in ("one", "two"))
    assert_logits(one, dense, list(range(18)))
    assert one.fingerprint() == two.fingerprint()


def bad_files(dense: Any) -> list[tuple[Any, str]]:
    """Contents of files, and a part of the line about each."""
    state = dense.state_dict()
    grey = {
        "conv1.weight": torch.ones(64, 1, 7, 7),
        "fc.weight": torch.ones(18, 9),
        "fc.bias": torch.ones(18),
    }
    deep = {**grey, **{f"layer3.{place}.conv3.weight": torch.ones(1) for place in range(23)}}
    int8 = {name: x.to(torch.int8) for name, x in state.items()}
    return [
        (dense, r"it is a pickled module.*torch.save\(\{\"state\": m.state_dict\(\)"),
        (state, r"a name for each of 18 logits and 18 thresholds, found None; save"),
        (
            {"state": state, "findings": TARGETS[:17]},
            r"findings: expected a name for each of 18 .*, found 17; save",
        ),
        ({"state": state, "findings": {"Mass": 0}}, r"findings: expected a name .*, found \{'Mass': 0\}"),
        (
            {"state": {**state, "op_threshs": torch.ones(3)}, "findings": TARGETS},
            r"18 logits and 3 thresholds, found 18",
        ),
        ({"state": state, "findings": ["Mass"] * 18}, r"expected distinct names"),
        ({"state": int8, "findings": TARGETS}, r"do not fit the network; quantised"),
        (
            {"state": {"w": torch.ones(1)}, "findings": ["Mass"]},
            r"expected a DenseNet, or a ResNet.* kernel of None and \['w'\]; save",
        ),
        (
            {"state": {**grey, "conv1.weight": torch.ones(64, 3, 7, 7)}, "findings": TARGETS},
            r"found a first kernel of \[64, 3, 7, 7\]",
        ),
        ({"state": deep, "findings": TARGETS}, r"expected .* a ResNet-18, -34 or -50, of one"),
        ({"state": {**state, "features.extra": torch.ones(1)}, "findings": TARGETS}, r"unexpected .*extra"),
        (
            {"state": dict(list(state.items())[1:]), "findings": TARGETS},
            r"expected a DenseNet, or a ResNet",
        ),
    ]


def test_bad_files_are_one_line(dense, tmp_path) -> None:
    for content, message in bad_files(dense):
        with pytest.raises(UserError, match=message):
            converted(content, tmp_path)
    good = {"state": dense.state_dict(), "findings": TARGETS}
    for words, message in (
        (["--mean", 0, 0, 0], "--mean: no part in the conversion"),
        (["--image_size", 100], "image_size: expected a multiple of the image encoder's patch, 32"),
    ):
        with pytest.raises(UserError, match=message):
            converted(good, tmp_path, *words)
    assert not (tmp_path / "output").exists()


PAGE = Path(__file__).resolve().parents[2] / "docs/published_models.md"


@pytest.mark.parametrize(
    "lines",
    [HOW_TO_SAVE.partition("trust its file: ")[2], PAGE.read_text("utf-8").partition("```text\n")[2]],
    ids=["error", "page"],
)
def test_the_three_lines_make_a_file_that_is_read(lines: str, dense, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(xrv.models, "get_model", lambda weights: dense)
    monkeypatch.chdir(tmp_path)
    exec(lines.partition("```")[0], {})
    main([str(tmp_path / "classifier.pt"), "--output", str(tmp_path / "output")])
    assert FindingNetwork.from_pretrained(tmp_path / "output").head.weight.equal(dense.classifier.weight)
