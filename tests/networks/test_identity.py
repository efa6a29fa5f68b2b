"""The fingerprint of a network: whatever its forward pass uses, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.metrics.calibration import differences
from medclip_dcl.networks import TransformersRegions, TransformersSentences
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from tests.small import LinearPatches
from tests.text_models import write_text_model

VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 20, "image_size": 24, "patch_size": 6}
IMAGE, TEXT = ("image_encoder", "init_args"), ("text_encoder", "init_args")


@pytest.fixture(scope="module")
def described(small_bert, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Descriptions of a network of this project's parts, and of one of transformers'."""
    own = ResNetRegions(dim=8, stride=16, width=4), BertSentences(str(small_bert), dim=8), LSENonLocal(dim=8)
    folder = write_text_model("roberta", tmp_path_factory.mktemp("texts") / "roberta")
    theirs = TransformersRegions(architecture=dict(VIT), dim=8), TransformersSentences(str(folder), dim=8)
    networks = {
        "own": ImageTextNetwork(*own, image_size=64, crop_size=48),
        "theirs": ImageTextNetwork(*theirs, GlobalCosine(), image_size=24),
    }
    return {name: network.config() for name, network in networks.items()}


def identity(described: dict[str, Any], *keys: str, value: Any) -> dict[str, Any]:
    """The fingerprint, without the weights, of a network whose description has another value."""
    changed = copy.deepcopy(described)
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return {**ImageTextNetwork.from_config(changed).fingerprint(), "weights": ""}


@pytest.mark.parametrize(
    ("network", "keys", "value", "differing"),
    [
        ("own", ("mean",), [0.5] * 3, "image_encoder settings"),
        ("own", ("std",), [0.5] * 3, "image_encoder settings"),
        ("own", ("geometry",), "pad", "geometry"),
        ("own", ("image_size",), 80, "image_size"),
        ("own", ("prepared_size",), 96, "prepared_size"),
        ("own", (*IMAGE, "centred"), True, "image_encoder settings"),
        ("own", (*TEXT, "final_period"), False, "text_encoder settings"),
        ("own", (*TEXT, "pooling"), "mean", "text_encoder settings"),
        ("own", (*TEXT, "max_tokens"), 20, "text_encoder settings"),
        ("own", (*TEXT, "architecture", "hidden_act"), "relu", "text_encoder settings"),
        ("own", (*TEXT, "architecture", "layer_norm_eps"), 1e-5, "text_encoder settings"),
        ("own", (*TEXT, "architecture", "num_attention_heads"), 4, "text_encoder settings"),
        ("own", ("similarity", "init_args", "sharpness"), 2.0, "similarity settings"),
        ("own", ("similarity", "init_args", "attention"), "mean", "similarity settings"),
        ("own", ("similarity", "class_path"), "medclip_dcl.networks.LSE", "similarity settings"),
        ("theirs", (*IMAGE, "architecture", "layer_norm_eps"), 1e-3, "image_encoder settings"),
        ("theirs", (*IMAGE, "architecture", "hidden_act"), "relu", "image_encoder settings"),
        ("theirs", (*IMAGE, "architecture", "num_attention_heads"), 4, "image_encoder settings"),
        ("theirs", (*IMAGE, "global_vector"), True, "image_encoder settings"),
        ("theirs", (*TEXT, "pooling"), "mean", "text_encoder settings"),
        ("theirs", (*TEXT, "pad_token_id"), 0, "text_encoder settings"),
        ("own", ("crop_size",), 32, ""),
        ("own", ("similarity", "init_args", "gamma2"), 9.0, ""),
        ("own", ("similarity", "init_args", "learn_gamma"), False, ""),
        ("own", (*TEXT, "architecture", "hidden_dropout_prob"), 0.4, ""),
        ("own", (*TEXT, "architecture", "a setting of a later version"), 7, ""),
        ("theirs", (*IMAGE, "architecture", "hidden_dropout_prob"), 0.4, ""),
        ("theirs", (*IMAGE, "architecture", "initializer_range"), 0.4, ""),
        ("theirs", (*IMAGE, "architecture", "a setting of a later version"), 7, ""),
    ],
)  # fmt: skip
def test_what_the_forward_pass_uses_is_in_it(described, network, keys, value, differing):
    config = copy.deepcopy(described[network])
    if value == "medclip_dcl.networks.LSE":
        config["similarity"]["init_args"] = {"sharpness": 5.0}
    before = identity(described[network], "image_size", value=described[network]["image_size"])
    after = identity(config, *keys, value=value)
    assert differences(before, after) == differences(after, before) == [differing] * bool(differing)


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [("lowercase", False, True), ("strip_accents", False, True), ("of_a_later_version", None, False)],
)
def test_the_tokenizer_is_in_it(described, name, value, changes):
    tokenizer = json.loads(described["own"]["text_encoder"]["init_args"]["tokenizer"])
    assert tokenizer["normalizer"]["lowercase"]
    # strip_accents null means as lowercase does.
    tokenizer["normalizer"] |= {"strip_accents": True} if name == "strip_accents" else {}
    before = identity(described["own"], *TEXT, "tokenizer", value=json.dumps(tokenizer))
    tokenizer["normalizer"][name] = value
    if value is not None:
        after = identity(described["own"], *TEXT, "tokenizer", value=json.dumps(tokenizer))
        assert differences(before, after) == ["text_encoder settings"] * changes
    else:
        assert before == identity(described["own"], *TEXT, "tokenizer", value=json.dumps(tokenizer))


class Shifted(LinearPatches):
    """A part of a user: all that `config` says is in the fingerprint."""

    def __init__(self, dim: int = 8, shift: float = 0.0) -> None:
        super().__init__(dim)
        self.shift = shift

    def forward(self, images: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return super().forward(images + self.shift)

    def config(self) -> dict[str, Any]:
        return {"dim": self.dim, "shift": self.shift}


def test_parts_of_a_user_are_in_it(small_bert):
    text = BertSentences(str(small_bert), dim=8)
    found = [
        ImageTextNetwork(Shifted(shift=shift), text, GlobalCosine(), image_size=16).settings_fingerprint()
        for shift in (0.0, 0.0, 1.0)
    ]
    assert found[0] == found[1] and found[0]["image_encoder"] != found[2]["image_encoder"]


def test_a_checkpoint_and_its_export_have_one(described, tmp_path):
    for name, config in described.items():
        network = ImageTextNetwork.from_config(config)
        network.save_pretrained(tmp_path / name)
        assert ImageTextNetwork.from_pretrained(tmp_path / name).fingerprint() == network.fingerprint()
