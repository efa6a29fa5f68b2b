"""Settings of encoders, similarities and networks that are refused in one line, by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks import (
    LSE,
    BertSentences,
    FindingNetwork,
    GlobalCosine,
    ImageTextNetwork,
    LSENonLocal,
)
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.initial_weights import take_over
from tests.model_folders import with_weights


def network(
    bert: Path, image_dim: int = 8, similarity: LSENonLocal | None = None, **options
) -> ImageTextNetwork:
    image = ResNetRegions(dim=image_dim, width=8)
    return ImageTextNetwork(image, BertSentences(str(bert), dim=8), similarity, **options)


def rebuilt(bert: Path, **changes: object) -> ImageTextNetwork:
    return ImageTextNetwork.from_config({**network(bert).config(), **changes})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda bert: ResNetRegions(width=0), "image_encoder.width: expected at least 1, found 0"),
        (lambda bert: ResNetRegions(width=12, weights="imagenet"), "of width 64, not of 12; leave width out"),
        (lambda bert: ResNetRegions(weights=str(bert / "nowhere.pth")), "no file .*nowhere.pth"),
        (lambda bert: BertSentences(), "give either pretrained"),
        (lambda bert: BertSentences(str(bert), max_tokens=200), r"max_tokens: expected .* \[3, 128\] .* found 200"),
        (lambda bert: BertSentences(str(bert), dropout=1.0), r"dropout: expected a number in \[0, 1\), found 1.0"),
        (lambda bert: LSE(sharpness=0.0), r"^sharpness: expected a number in \(0, inf\), found 0.0"),
        (lambda bert: GlobalCosine(gamma2=0.0), "gamma2: expected a number in"),
        (lambda bert: network(bert, 16), "expected equal .*, found {'image_encoder': 16, 'text_encoder': 8"),
        (lambda bert: network(bert, similarity=LSENonLocal(dim=128)), "'similarity': 128"),
        (lambda bert: network(bert, image_size=0), "image_size: expected a whole number of pixels"),
        (lambda bert: network(bert, std=(1.0, -0.2, 1.0)), "std above 0, found"),
        (lambda bert: rebuilt(bert, format_version=7), "format version 3, found version 7"),
        (lambda bert: rebuilt(bert, geometry="crop"), "geometry: expected one of"),
        (lambda bert: rebuilt(bert, kind="classifier"), "expected kind image-text, found classifier"),
        (lambda bert: FindingNetwork.from_config(network(bert).config()), "expected kind classifier, found image-text"),
        (lambda bert: FindingNetwork.from_config({"findings": ["Edema"]}), "this model: .*, found version none"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(
    small_bert: Path, build: Callable[[Path], object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(small_bert)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    state = torchvision.models.resnet18(weights=None).state_dict()
    del state["fc.bias"]
    torch.save({**state, "extra": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"missing \['fc.bias'\], unexpected \['extra'\]"):
        ResNetRegions(weights=str(tmp_path / "other.pth"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused(exported: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder, name = shutil.copytree(exported, tmp_path / "model"), "text_encoder.projection.weight"
    with_weights(folder, lambda state: state.update({name: (100 * state[name]).to(dtype)}))
    mine = ImageTextNetwork.from_pretrained(exported)
    for load in (ImageTextNetwork.from_pretrained, lambda x: take_over(mine, x, ["text_encoder"])):
        with pytest.raises(UserError, match=rf"quantised .*projection.weight {dtype}"):
            load(folder)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("regions", "sentences"), [((2, 0, 8), (3, 8)), ((2, 4, 8), (8,)), ((2, 4, 8), (1, 3, 8))]
)
def test_other_shapes_have_no_logits(regions, sentences):
    with pytest.raises(ValueError, match="GlobalCosine: expected regions .image, region, dim"):
        GlobalCosine()(torch.ones(regions), torch.ones(sentences))
