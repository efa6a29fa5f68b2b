"""Format versions of checkpoints, exported models and prepared sets, and the steps that upgrade old ones.

A format gets a new version when files of the old one can no longer be read unchanged. The change adds a step below,
from the old version to the new one, and a file of the old version in tests/models/checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from medclip_dcl.errors import UserError

VERSION_KEY = "format_version"


@dataclass(frozen=True)
class Format:
    """A file format and its history.

    Args:
        name: for errors.
        version: current version.
        steps: version -> function that upgrades content to the next version in place; a version without a step can no
            longer be read.
    """

    name: str
    version: int
    steps: Mapping[int, Callable[[dict[str, Any]], None]] = field(default_factory=dict)

    def upgrade(self, content: Any, source: str) -> None:
        """Upgrade content to the current version in place; without a version it has version 0.

        Raises:
            UserError: of a newer version, of one that can no longer be read, or of another program.
        """
        if not isinstance(content, dict):
            raise UserError(
                f"{source}: expected a {self.name} of medclip_dcl, found a {type(content).__name__}"
            )
        found = content.get(VERSION_KEY, 0)
        if not isinstance(found, int):
            raise UserError(
                f"{source}: {self.name} of unknown format version {found!r}, written by another program"
            )
        if found > self.version:
            raise UserError(
                f"{source}: {self.name} of format version {found}, this program reads up to version {self.version}; "
                "update medclip_dcl to the one that wrote it"
            )
        for version in range(found, self.version):
            if version not in self.steps:
                raise UserError(
                    f"{source}: {self.name} of format version {found}, which this program (version {self.version}) no "
                    "longer reads; use the medclip_dcl that wrote it"
                )
            self.steps[version](content)
            content[VERSION_KEY] = version + 1


def drop_hyper_parameters(checkpoint: dict[str, Any]) -> None:
    """Remove the constructor arguments that Lightning stores.

    They may be Python objects, which cannot be loaded safely; the models describe themselves in plain values.
    """
    for prefix in ("", "datamodule_"):
        for key in ("hyper_parameters", "hparams_name", "hparams_type"):
            checkpoint.pop(f"{prefix}{key}", None)


def _from_unversioned(checkpoint: dict[str, Any]) -> None:
    """Version 1 holds every argument of its model; arguments missing in version 0 had one possible value."""
    if "objective" in checkpoint:
        checkpoint["objective"] = {**_OPTIONS_OF_VERSION_0, **checkpoint["objective"]}
    if "language_model" in checkpoint:
        # Present if the command line had built the model.
        found = checkpoint.get("hyper_parameters", {})
        options = {key: value for key, value in found.items() if not key.startswith("_")}
        if not options:
            options = {"architecture": _architecture(json.loads(checkpoint["language_model"]["config"]))}
        checkpoint["language_model"] = {**checkpoint["language_model"], "options": options}
    drop_hyper_parameters(checkpoint)


_OPTIONS_OF_VERSION_0 = {
    "negative_weights": None,
    "same_text": "negative",
    "image_to_text": 0.0,
    "masked_language_weight": 0.0,
    "text_learning_rate": None,
    "beta2": 0.999,
}


def _architecture(bert: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `BertArchitecture` from a BertConfig that holds only differences from BERT-base."""
    return {
        "layers": bert.get("num_hidden_layers", 12),
        "hidden_size": bert.get("hidden_size", 768),
        "attention_heads": bert.get("num_attention_heads", 12),
        "intermediate_size": bert.get("intermediate_size", 3072),
        "max_positions": bert.get("max_position_embeddings", 512),
        "dropout": bert.get("hidden_dropout_prob", 0.1),
    }


CHECKPOINT = Format("checkpoint", 1, {0: _from_unversioned})
"""Checkpoints of `fit`, of all models."""

NETWORK = Format("network configuration", 1)
"""`ImageTextNetwork.config()`: config.json of an exported folder, and "network" of a checkpoint."""

PREPARED_SET = Format("prepared data set", 3)
"""dataset.json, for the tables of its set."""

CALIBRATION = Format("calibration", 1)
"""calibration.json of a run or an exported folder."""
