"""Old content is brought up to date step by step; newer and foreign content is refused by version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import BertConfig

from medclip_dcl.formats import CHECKPOINT, Format, drop_hyper_parameters


def renamed(content):
    content["width"] = content.pop("size")


def doubled(content):
    content["width"] *= 2


THIRD = Format("thing", 3, {1: renamed, 2: doubled})


def test_every_step_from_the_contents_version_is_made_once():
    first: dict[str, Any] = {"format_version": 1, "size": 7}
    second: dict[str, Any] = {"format_version": 2, "width": 7}
    third: dict[str, Any] = {"format_version": 3}
    for content, expected in ((first, 14), (second, 14), (third, None)):
        THIRD.upgrade(content, "x")
        THIRD.upgrade(content, "x")
        assert content.get("width") == expected and content["format_version"] == 3


@pytest.mark.parametrize(
    "version, message",
    [
        (4, "x: thing of format version 4, this program reads up to version 3; update medclip_dcl"),
        (None, "x: thing of format version 0, which this program \\(version 3\\) no longer reads"),
        ("3.1", "x: thing of unknown format version '3.1'"),
    ],
)
def test_what_is_refused(version, message):
    content = {} if version is None else {"format_version": version}
    with pytest.raises(ValueError, match=message):
        THIRD.upgrade(content, "x")


def test_other_content_is_no_checkpoint():
    with pytest.raises(ValueError, match="x: expected a checkpoint of medclip_dcl, found a list"):
        CHECKPOINT.upgrade([1], "x")


def test_a_checkpoint_without_a_version_gets_the_options_that_it_did_not_say():
    said = {"learning_rate": 0.3, "beta2": 0.9, "same_text": "ignore"}
    checkpoint = {"objective": said, "hyper_parameters": {"x": object()}, "hparams_name": "kwargs"}
    CHECKPOINT.upgrade(checkpoint, "x")
    assert checkpoint["format_version"] == CHECKPOINT.version
    assert checkpoint["objective"] == {
        **said,
        "negative_weights": None,
        "image_to_text": 0.0,
        "masked_language_weight": 0.0,
        "text_learning_rate": None,
    }
    assert not {"hyper_parameters", "hparams_name"} & checkpoint.keys()


def test_a_language_model_of_before_gets_its_options_or_its_architecture():
    """From what the command line had kept; else from the size of the BERT, where that differs from BERT-base's."""
    config = json.dumps(
        BertConfig(hidden_size=48, num_attention_heads=3, hidden_dropout_prob=0.2).to_diff_dict()
    )
    kept: dict[str, Any] = {
        "pretrained": "somewhere",
        "architecture": None,
        "_instantiator": "x",
        "_class_path": "y",
    }
    described = []
    for more in ({"hyper_parameters": kept}, {}):
        checkpoint: dict[str, Any] = {"language_model": {"config": config, "tokenizer": "{}"}, **more}
        CHECKPOINT.upgrade(checkpoint, "x")
        assert checkpoint["language_model"].keys() == {"config", "tokenizer", "options"}
        described.append(checkpoint["language_model"]["options"])
    assert described[0] == {"pretrained": "somewhere", "architecture": None}
    assert described[1]["architecture"] == {
        "layers": 12,
        "hidden_size": 48,
        "attention_heads": 3,
        "intermediate_size": 3072,
        "max_positions": 512,
        "dropout": 0.2,
    }


def test_hyper_parameters_of_model_and_data_are_dropped():
    checkpoint = {"datamodule_hyper_parameters": {}, "hparams_type": int, "epoch": 3}
    drop_hyper_parameters(checkpoint)
    assert checkpoint == {"epoch": 3}
