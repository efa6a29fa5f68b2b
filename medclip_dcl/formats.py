"""Versions of what is kept for long - checkpoints, exported models, prepared sets - and the steps that update old ones.

A format gets a new version when files of the old one can no longer be read as they are. The change then comes with a
step below, from the old version to the new one, and with a file of the old version in tests/models/checkpoints.
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
    """One kind of content and its history.

    Args:
        name: what an error calls it.
        version: that this program writes.
        steps: version -> what turns content of it into the next version, in place; a version without a step can no
            longer be read.
    """

    name: str
    version: int
    steps: Mapping[int, Callable[[dict[str, Any]], None]] = field(default_factory=dict)

    def stamp(self, content: dict[str, Any]) -> None:
        """Write the version into the content."""
        content[VERSION_KEY] = self.version

    def upgrade(self, content: Any, source: str) -> None:
        """Bring content up to this program's version, in place; without a version it is of version 0.

        Raises:
            ValueError: of a newer version, of one that can no longer be read, or of another program.
        """
        if not isinstance(content, dict):
            raise UserError(f"{source}: no {self.name} of this program but a {type(content).__name__}")
        found = content.get(VERSION_KEY, 0)
        if not isinstance(found, int):
            raise UserError(f"{source}: {self.name} of unknown format version {found!r}: of another program")
        if found > self.version:
            raise UserError(
                f"{source}: {self.name} of format version {found}, this program reads up to version {self.version}; "
                "update medclip_dcl to the one that wrote it"
            )
        for version in range(found, self.version):
            if version not in self.steps:
                raise UserError(
                    f"{source}: {self.name} of format version {found}, which this program, of version {self.version}, "
                    "no longer reads; use the medclip_dcl that wrote it"
                )
            self.steps[version](content)
            content[VERSION_KEY] = version + 1


def drop_hyper_parameters(checkpoint: dict[str, Any]) -> None:
    """Take out what Lightning keeps of constructors' arguments: nothing reads it.

    They may be objects, which nobody loads safely; the models describe themselves in plain values.
    """
    for prefix in ("", "datamodule_"):
        for key in ("hyper_parameters", "hparams_name", "hparams_type"):
            checkpoint.pop(f"{prefix}{key}", None)


def _from_unversioned(checkpoint: dict[str, Any]) -> None:
    """Version 1 says every argument of its model; what was not said before had one value."""
    if "objective" in checkpoint:
        checkpoint["objective"] = {**_OPTIONS_OF_VERSION_0, **checkpoint["objective"]}
    if "language_model" in checkpoint:
        # Known where the command line had built the model.
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
    """Arguments of `BertArchitecture` from a BertConfig that says only what differs from BERT-base."""
    return {
        "layers": bert.get("num_hidden_layers", 12),
        "hidden_size": bert.get("hidden_size", 768),
        "attention_heads": bert.get("num_attention_heads", 12),
        "intermediate_size": bert.get("intermediate_size", 3072),
        "max_positions": bert.get("max_position_embeddings", 512),
        "dropout": bert.get("hidden_dropout_prob", 0.1),
    }


def _from_chex5(info: dict[str, Any]) -> None:
    """Version 2 holds the cases of every finding, version 1 those of CheX5; the others follow from its labels."""
    options = info.get("options", {})
    if isinstance(options, dict) and "chex5" in options:
        options["cases"] = options.pop("chex5")


CHECKPOINT = Format("checkpoint", 1, {0: _from_unversioned})
"""What `fit` writes, of every model here."""

NETWORK = Format("network configuration", 1)
"""`ImageTextNetwork.config()`: config.json of an exported folder, and "network" of a checkpoint."""

PREPARED_SET = Format("prepared data set", 2, {1: _from_chex5})
"""dataset.json, for the tables of its set."""
