"""Initialise a network from the weights of another training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.parts import differing_arguments, part_config
from medclip_dcl.common.weight_files import (
    CLASSIFIER,
    IMAGE_TEXT,
    SavedModel,
    compare_state_dicts,
    read_model,
)
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_encoder import IMAGENET_MEAN, IMAGENET_STD
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.library_folder import OF_TRAINING

PARTS = ("image_encoder", "text_encoder", "similarity")
WITHOUT_PROJECTION = {"image_encoder.backbone": "image_encoder", "text_encoder.transformer": "text_encoder"}
"""Name of an encoder's part before its projection -> the encoder."""

_Fit: TypeAlias = tuple[dict[str, Tensor], list[str]]
"""Tensors that a part takes, and settings that differ without changing a tensor."""

_HEAD = "masked_language_head."
_PROJECTION = "projection."
_LIBRARY, _TOKENIZER = "init_args.architecture.", "init_args.tokenizer"


@dataclass(frozen=True)
class TakenOver:
    """Weights that a network took over from another training, and weights that it did not.

    Attributes:
        source: path of the weights.
        taken: the network's tensors that have the source's values.
        kept: the network's tensors that start as configured: random, or from `pretrained`.
        left_out: the source's tensors that are not used.
        settings: differences between the two configurations that change no tensor.
        image_size: side in pixels of the source's images, if known.
    """

    source: str
    taken: list[str]
    kept: list[str]
    left_out: list[str]
    settings: list[str]
    image_size: int | None = None

    @classmethod
    def of_checkpoint(cls, checkpoint: Mapping[str, Any]) -> TakenOver | None:
        """What a checkpoint says (`asdict` of it); None if its training took nothing over."""
        record = checkpoint.get("initial_weights")
        return None if record is None else cls(**record)

    def __str__(self) -> str:
        lines = [f"initial weights: {len(self.taken)} tensors taken over from {self.source}"]
        for part in PARTS:
            kept, taken = (
                [name for name in names if name.startswith(f"{part}.")] for names in (self.kept, self.taken)
            )
            if kept:
                lines.append(f"  {part}: {len(taken) or 'none'}; as configured start {_in_groups(kept)}")
            elif taken:
                lines.append(f"  {part}: all {len(taken)}")
        if self.left_out:
            lines.append(f"  of the source, not used: {_in_groups(self.left_out)}")
        if self.settings:
            lines.append(f"  settings that differ: {'; '.join(self.settings)}")
        return "\n".join(lines)


def take_over(
    network: ImageTextNetwork | FindingNetwork, source: str | Path, parts: Sequence[str] | None = None
) -> TakenOver:
    """Initialise a network with the weights of another training.

    Weights that the source cannot have start as configured: text encoder and similarity of a classifier, a
    masked-language-model head that it was trained without, and a similarity of another class. Everything else fits
    exactly or is refused, and then nothing is changed.

    Args:
        network: gets the weights.
        source: an image-text model or a classifier, see `medclip_dcl.common.find_model`.
        parts: those of "image_encoder", "text_encoder" and "similarity" to take, or of an encoder all but its
            projection: "image_encoder.backbone", "text_encoder.transformer"; None for all that the source has. For a
            classifier, "image_encoder" alone.
    """
    saved = read_model(find_model(source).path)
    described = saved.require_network(IMAGE_TEXT, CLASSIFIER)
    there = [part for part in PARTS if part in saved.network]
    wanted = _wanted(parts, there, saved.path)
    fits: dict[str, _Fit] = {}
    problems: dict[str, str] = {}
    for part, has_projection in wanted.items():
        try:
            fits[part] = _fit(getattr(network, part), part, saved, has_projection)
        except UserError as error:
            problems[part] = str(error)
    if problems:
        instead = f"; or take what fits, with model.init_args.init_parts: [{', '.join(fits)}]" if fits else ""
        raise UserError(
            f"{saved.path}: training cannot start from it: {'; '.join(problems.values())}{instead}"
        )
    before = network.state_dict()
    new = {f"{part}.{name}": value for part, (state, _) in fits.items() for name, value in state.items()}
    network.load_state_dict({**before, **new})
    if "image_encoder" in wanted:
        network.set_normalisation(described.get("mean", IMAGENET_MEAN), described.get("std", IMAGENET_STD))
    of_parts = [f"{part}.{name}" for part in there for name in saved.tensors(part)]
    others = sorted(saved.state.keys() - {f"{saved.prefix}{name}" for name in of_parts})
    return TakenOver(
        source=str(saved.path),
        taken=[name for name in before if name in new],
        kept=[name for name in before if name not in new],
        left_out=[*(name for name in of_parts if name not in new), *others],
        settings=[line for _, settings in fits.values() for line in settings],
        image_size=described.get("image_size") if "image_encoder" in wanted else None,
    )


def _wanted(names: Sequence[str] | None, there: list[str], source: Path) -> dict[str, bool]:
    """Parts to take over of those that are there, and whether with their projections."""
    if names is None:
        return dict.fromkeys(there, True)
    known = [*there, *(name for name, part in WITHOUT_PROJECTION.items() if part in there)]
    if not names or (others := sorted(set(names) - set(known))):
        raise UserError(
            f"init_parts: expected some of {', '.join(known)} (of {source}), found {others if names else 'none'}"
        )
    parts = [WITHOUT_PROJECTION.get(name, name) for name in names]
    return {part: part in names for part in PARTS if part in parts}


def _fit(module: nn.Module, part: str, saved: SavedModel, has_projection: bool) -> _Fit:
    """Match a part of the source with the network's, or all of it but its projection."""
    state, expected = saved.tensors(part), module.state_dict()
    if not has_projection:
        state, expected = (
            {name: x for name, x in tensors.items() if not name.startswith(_PROJECTION)}
            for tensors in (state, expected)
        )
    if (gamma := getattr(module, "log_gamma2", None)) is not None and not gamma.requires_grad:
        # A fixed gamma^2 is that of the configuration.
        state, expected = (
            {name: x for name, x in tensors.items() if name != "log_gamma2"} for tensors in (state, expected)
        )
    there, here = saved.network[part], part_config(module)
    differing = differing_arguments(there, here)
    lines = {
        name: f"{part}.{name}: {a} (configured: {b})"
        for name, (a, b) in differing.items()
        if name != "init_args.gamma2" or "log_gamma2" in state
    }
    is_other_tokenizer = lines.pop(_TOKENIZER, None) is not None
    settings = [*lines.values()]
    if there["class_path"] != here["class_path"]:
        if part == "similarity":
            return {}, settings
        raise UserError(f"{part} is of another class; set {settings[0]}")
    # Settings of a library's model that its tensors do not show.
    others = [x for name, x in lines.items() if name.startswith(_LIBRARY) and not OF_TRAINING.search(name)]
    if is_other_tokenizer:
        others.append("another tokenizer, so that its weights belong to other tokens")
    if others:
        raise UserError(
            f"{part}: another model, with {', '.join(others)}; set {part}.init_args.pretrained to the one that the "
            f"source was trained with, or {part}: null to take the source's"
        )
    if not any(name.startswith(_HEAD) for name in state):  # keep that of the configured BERT, if any
        expected = {name: x for name, x in expected.items() if not name.startswith(_HEAD)}
    if problems := compare_state_dicts(expected, state):
        raise UserError(f"{part}: {problems}; set what differs: {', '.join(settings)}")
    return state, settings


def _in_groups(names: Sequence[str]) -> str:
    if len(names) <= 8:
        return ", ".join(names)
    groups = [".".join(name.split(".")[:2]) for name in names]
    return ", ".join(f"{group}.* ({groups.count(group)})" for group in dict.fromkeys(groups))
