"""Configure a model by the network that a checkpoint describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import register_type
from torch import nn

from medclip_dcl.command.config_errors import imported
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.parts import part_class
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.text_encoder import TokenizerText

_OF_TRAINING = ("gradient_checkpointing",)
"""Arguments of a part on which no number depends, and which its description leaves out."""

_TOKENIZER = "that of the checkpoint"
"""What a configuration says in place of a checkpoint's tokenizer."""


def _no_text(value: Any) -> TokenizerText:
    raise ValueError(f"tokenizer: expected the content of a tokenizer.json, found {type(value).__name__}")


register_type(TokenizerText, lambda value: _TOKENIZER, _no_text)

_INSTEAD = "; to train a classifier that starts from an image-text model, give it as model.init_args.init_from to fit"


def take_network_from(source: SavedModel, model: Namespace) -> None:
    """Let encoders and similarity be built as the checkpoint describes them, not from where they first came from.

    The language model's folder may be gone or hold another model by now; the checkpoint has all of it.
    """
    described = source.network
    if not described:
        if hasattr(imported(model.class_path), "kind"):
            source.require_network(_kind(model))
        return
    there, here = source.kind, _kind(model)
    if there != here:
        instead = _INSTEAD if {there, here} == {ImageTextModel.kind, Classifier.kind} else ""
        raise UserError(
            f"{source.path}: expected kind {here}, as of model {model.class_path}, found {there}{instead}"
        )
    for part in getattr(imported(model.class_path), "parts", ImageTextModel.parts):
        _take_part_from(described, part, model)
    forget_initial_weights(model)


def take_missing_encoder_from(source: SavedModel, model: Namespace) -> None:
    """A classifier that is configured without an encoder takes the checkpoint's."""
    if _kind(model) == Classifier.kind and model.init_args.get("image_encoder") is None:
        _take_part_from(source.network, "image_encoder", model)


def forget_initial_weights(model: Namespace) -> None:
    """Do not look for the weights that a run started from: they come from its checkpoint."""
    for name in ("init_from", "init_parts"):
        if name in model.init_args:
            model.init_args[name] = None


def _take_part_from(described: Mapping[str, Any], part: str, model: Namespace) -> None:
    if part in described and not isinstance(described[part], Mapping):
        model.init_args[part] = described[part]
    elif part in described:
        part_class(described[part]["class_path"], nn.Module)
        class_path, init_args = (described[part][key] for key in ("class_path", "init_args"))
        # A user's own class takes a string.
        if part == "text_encoder" and class_path.startswith("medclip_dcl.") and "tokenizer" in init_args:
            init_args = init_args | {"tokenizer": TokenizerText(init_args["tokenizer"])}
        configured = model.init_args.get(part)
        if (
            configured is not None
            and configured.class_path.rpartition(".")[2] == class_path.rpartition(".")[2]
        ):
            own = configured.get("init_args") or {}
            init_args = init_args | {name: own[name] for name in _OF_TRAINING if name in own}
        model.init_args[part] = Namespace(class_path=class_path, init_args=Namespace(**init_args))


def _kind(model: Namespace) -> str:
    return getattr(imported(model.class_path), "kind", ImageTextModel.kind)
