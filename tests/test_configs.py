"""The configuration that explains every key names every key that can be configured."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from medclip_dcl.command.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
# Options of a single command, and what checkpoints or the objective files set.
OF_COMMANDS = {"ckpt_path", "weights_only"}
SET_ELSEWHERE = {
    "TransformersSentences": {"architecture", "tokenizer", "pad_token_id"},
    "ImageTextModel": {"class_probability"},
    "UnimodalModel": {"objective"},
    "GruSentences": {"tokenizer", "trains_words"},
    "TransformersRegions": {"architecture"},
}
UNIMODAL = ("unimodal/digits", "unimodal/cifar10", "unimodal/stl10", "unimodal/cmc", "unimodal/sentences")


def classes(node: Any) -> Iterator[tuple[type, set[str]]]:
    """Every class of a configuration, with the names of the arguments that are given."""
    if isinstance(node, dict):
        if "class_path" in node:
            module, _, name = node["class_path"].rpartition(".")
            yield getattr(import_module(module), name), set(node.get("init_args", {}))
        for value in node.values():
            yield from classes(value)
    elif isinstance(node, list):
        for value in node:
            yield from classes(value)


def test_explaining_configurations_name_every_argument_of_their_classes():
    for name in ("mimic_cxr", "vision_transformer", "language_model", "text_encoder", *UNIMODAL):
        for kind, given in classes(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())):
            expected = set(inspect.signature(kind).parameters)
            assert given == expected - SET_ELSEWHERE.get(kind.__name__, set()), (name, kind)


def test_mimic_cxr_explains_every_key_and_line(capsys):
    file = CONFIGS / "mimic_cxr.yaml"
    configured = yaml.safe_load(file.read_text())
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(file), "--print_config"])
    assert set(configured) == set(yaml.safe_load(capsys.readouterr().out)) - OF_COMMANDS
    assert set(configured["checkpoint"]) == {"monitor", "mode"}
