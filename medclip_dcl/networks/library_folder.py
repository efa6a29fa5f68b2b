"""Models of transformers of any family: configuration, tokenizer and weights of a folder, without remote code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.bert_folder import NOT_SETTINGS, ModelFolderError

OF_TRAINING = re.compile("drop|initializer|vision_use_head")
"""In names of settings on which nothing depends in evaluation, or that the tensors show."""
BERT_FAMILIES = ("bert", "cxr-bert")
"""Values of `model_type` in config.json that are read as a BERT."""


def check_source(part: str, pretrained: str | None, described: Mapping[str, Any]) -> None:
    """Refuse a part of which neither, or both, of `pretrained` and its description are given."""
    if (pretrained is None) == (None in described.values()):
        raise UserError(
            f"{part}: give either pretrained (a folder or repository id), or {' and '.join(described)}"
        )


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
    if family in BERT_FAMILIES:
        if (positions := raw.get("position_embedding_type", "absolute")) != "absolute":
            raise ModelFolderError(
                f"{source}: position_embedding_type: expected 'absolute', found {positions!r}; give another BERT"
            )
        family = "bert"
        raw = {**{name: x for name, x in raw.items() if name != "projection_size"}, "model_type": family}
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


def unknown_family(raw: Mapping[str, Any], source: str, expected: str, remedy: str) -> ModelFolderError:
    """An error for a config.json of a model that is not among those expected."""
    files = sorted({f"{x}.py" for x in re.findall(r'(\w+)\.\w+"', json.dumps(raw.get("auto_map")))})
    code = f" with code of its own, {', '.join(files)}, which is never run" if files else ""
    return ModelFolderError(
        f"{source}: model_type: expected {expected}, found {raw.get('model_type')!r}{code}; {remedy}"
    )


def plain_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration's settings as JSON, without names of code, classes, labels and versions."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_SETTINGS}
    return json.loads(json.dumps(settings))


def forward_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings on which hidden states depend in evaluation and that are not the class's default.

    Without those that the class does not know: versions of transformers have more or fewer of both.
    """
    settings, defaults = config.to_dict(), type(config)().to_dict()
    return {
        name: settings[name]
        for name, default in defaults.items()
        if name not in NOT_SETTINGS and not OF_TRAINING.search(name) and settings.get(name) != default
    }


def pretrained_size(part: str, config: Any, sizes: Mapping[str, str], how: str, dim: int) -> None:
    """Refuse a pretrained projection of a family that is not in `sizes` (its setting), or of another size."""
    own = sizes.get(config.model_type)
    if own is None:
        raise UserError(
            f"{part}.projection: expected linear for a {config.model_type} with {how}, found pretrained; only CLIP and "
            "SigLIP have their own, behind their global vector or pooler"
        )
    if (size := getattr(config, own)) != dim:
        raise UserError(f"{part}.dim: expected {size}, the size of the pretrained projection, found {dim}")


def longest_sentence(model: PreTrainedModel) -> int:
    """Tokens that a model takes, special tokens included: its positions, in RoBERTa without those of padding."""
    # Some have no positions, and no limit.
    positions = int(getattr(model.config, "max_position_embeddings", None) or 2**31)
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            positions -= part.padding_idx + 1
    return positions
