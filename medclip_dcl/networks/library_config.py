"""Configurations of transformers' models: read without remote code, kept as plain values, and what they limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medclip_dcl.networks.bert_folder import NOT_SETTINGS, ModelFolderError


def library_config(
    raw: Mapping[str, Any], source: str, tower: Literal["vision_config", "text_config"] | None = None
) -> Any:
    """transformers' configuration from the content of a config.json; None for a family that it does not know.

    Args:
        raw: whose entries that name code are left out.
        source: names it in errors.
        tower: that of a model of two towers, which is returned instead.
    """
    family = raw.get("model_type")
    if family not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[family].from_dict({k: x for k, x in raw.items() if k not in NOT_SETTINGS})
    except Exception as error:  # transformers checks each family's settings in its own way
        reason = " ".join(str(error).split())[:300]
        raise ModelFolderError(f"{source}: {reason}; correct the setting") from error
    config._attn_implementation = None  # in that of a tower, too
    found = config if tower is None else getattr(config, tower, config)
    if found is not config and hasattr(config, "projection_dim"):
        found.projection_dim = config.projection_dim  # of the weights that both towers share a file with
    return found


def plain_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration's settings as JSON, without names of code, classes, labels and versions."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_SETTINGS}
    return json.loads(json.dumps(settings))


def longest_sentence(model: PreTrainedModel) -> int:
    """Tokens that a model takes, special tokens included: its positions, in RoBERTa without those of padding."""
    # Some have no positions, and no limit.
    positions = int(getattr(model.config, "max_position_embeddings", None) or 2**31)
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            positions -= part.padding_idx + 1
    return positions
