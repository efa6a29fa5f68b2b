"""Weights that training starts from, whichever program or command left them: read, checked, and taken over by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medclip_dcl.encoders.image import (
    BACKBONE,
    CLASSIFIER,
    RegionEncoder,
    as_torchvision_resnet,
    from_torchvision_names,
)
from medclip_dcl.encoders.text import BERT_BASE, SentenceEncoder
from medclip_dcl.errors import UserError
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_text import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageTextNetwork,
    part_config,
)
from medclip_dcl.similarity import Similarity
from medclip_dcl.weight_files import (
    WEIGHTS_FILE,
    as_state_dict,
    read_checkpoint,
    read_exported_config,
    read_state_dict,
    read_torch_file,
)

PARTS = ("image_encoder", "text_encoder", "similarity")

_HEAD = "masked_language_head."
# Settings of a BERT that change what it computes and none of its tensors.
_FUNCTION_OF_BERT = ("num_attention_heads", "hidden_act", "layer_norm_eps", "position_embedding_type")
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor")


@dataclass(frozen=True)
class EncoderWeights:
    """An image encoder's weights.

    Attributes:
        config: class_path and init_args of the encoder that they are of; None for a torchvision state dict, which
            is of a backbone and has no projection.
        state: tensors under the encoder's own names.
        source: where they were read.
        mean: of the three channels, by which the encoder's images are normalised.
        std: of the three channels.
        left_out: names of the source that belong to no image encoder (torchvision's classifier).
    """

    config: dict[str, Any] | None
    state: dict[str, Tensor]
    source: str
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    left_out: tuple[str, ...] = ()


def image_encoder_weights(source: str | Path) -> EncoderWeights:
    """The image encoder of whatever has one.

    Args:
        source: a checkpoint of this program (image-text model, or any other whose description names an image
            encoder), a folder of `save_pretrained`, or a state dict of torchvision's ResNet (.pth or .safetensors).

    Raises:
        FileNotFoundError: nothing there, or an exported folder with a file missing.
        ValueError: truncated, Python objects, or of another program.
    """
    return _read(source).image_encoder


def take_over_image_encoder(encoder: RegionEncoder, weights: EncoderWeights) -> list[str]:
    """Put the weights into the encoder; normalising images by `weights.mean` and `.std` is the caller's.

    Returns:
        Names of the encoder's tensors that keep the values they have, which the source cannot have: the projection's
        where that is torchvision's. Empty otherwise.

    Raises:
        ValueError: weights of another encoder; names every tensor that is missing, left over or of another shape,
            and the settings that fit.
    """
    plan = _plan_image_encoder(encoder, weights)
    if plan.problem:
        raise UserError(f"{weights.source}: {plan.problem}")
    before = encoder.state_dict()
    encoder.load_state_dict({**before, **plan.state})
    return [name for name in before if name not in plan.state]


@dataclass(frozen=True)
class TakenOver:
    """What a network took over, and what not.

    Attributes:
        source: where the weights were read.
        taken: the network's tensors that have the source's values.
        kept: the network's tensors that have what they were configured with: random values, or those of `pretrained`.
        left_out: the source's tensors that are not used.
        settings: what differs between the two and changes no tensor.
        image_size: side in pixels of the images that the source was trained on, where it says so.
    """

    source: str
    taken: list[str]
    kept: list[str]
    left_out: list[str]
    settings: list[str]
    image_size: int | None = None

    def record(self) -> dict[str, Any]:
        """Plain values, from which it is made again."""
        return asdict(self)

    @classmethod
    def of_checkpoint(cls, checkpoint: Mapping[str, Any]) -> TakenOver | None:
        """What the training of a checkpoint had started from; None: from what the encoders' options said."""
        record = checkpoint.get("initial_weights")
        return None if record is None else cls(**record)

    def __str__(self) -> str:
        lines = [f"initial weights: {len(self.taken)} tensors taken over from {self.source}"]
        for part in PARTS:
            kept, n_taken = _of_part(part, self.kept), len(_of_part(part, self.taken))
            if not kept and not n_taken:
                continue  # a classifier has no text encoder
            if not kept:
                lines.append(f"  {part}: all {n_taken}")
            elif not n_taken:
                lines.append(f"  {part}: none, it starts as configured: {_in_groups(kept)}")
            else:
                lines.append(f"  {part}: {n_taken}; these start as configured: {', '.join(kept)}")
        if self.left_out:
            lines.append(f"  of the source, not used: {_in_groups(self.left_out)}")
        if self.settings:
            lines.append(f"  settings that differ: {'; '.join(self.settings)}")
        return "\n".join(lines)


def take_over(
    network: ImageTextNetwork | FindingNetwork, source: str | Path, parts: Sequence[str] | None = None
) -> TakenOver:
    """Start a network from the weights of another training.

    What the source cannot have starts as it was configured: text encoder and similarity where it is of images alone,
    the projection, too, where it is torchvision's, the masked-language-model head where it was trained without, and a
    similarity of another class. All else fits exactly or is refused, and then nothing is changed. The image encoder
    brings the mean and deviation by which its images are normalised.

    Args:
        network: gets the weights.
        source: see `image_encoder_weights`.
        parts: those of "image_encoder", "text_encoder" and "similarity" to take; None for all that the source has. Of a
            classifier, "image_encoder" alone.

    Raises:
        FileNotFoundError: nothing at `source`, or an exported folder with a file missing.
        ValueError: unreadable; another architecture, vocabulary or way of splitting text; a tensor that has no place;
            a wanted part that is not there. The message names the tensors and what to set.
    """
    found = _read(source)
    wanted = _wanted(parts, found)
    plans = {part: _plan(getattr(network, part), part, found) for part in wanted}
    if problems := {part: plan.problem for part, plan in plans.items() if plan.problem}:
        others = [part for part in wanted if part not in problems]
        instead = (
            f"; or take what fits, with model.init_args.init_parts: [{', '.join(others)}]" if others else ""
        )
        raise UserError(
            f"{found.source}: training cannot start from it: {'; '.join(problems.values())}{instead}"
        )
    before = network.state_dict()
    new = {f"{part}.{name}": value for part, plan in plans.items() for name, value in plan.state.items()}
    network.load_state_dict({**before, **new})
    if "image_encoder" in wanted:
        network.mean.copy_(torch.tensor(found.image_encoder.mean).view(3, 1, 1))
        network.std.copy_(torch.tensor(found.image_encoder.std).view(3, 1, 1))
    return TakenOver(
        source=found.source,
        taken=[name for name in before if name in new],
        kept=[name for name in before if name not in new],
        left_out=[*_left_out(found, plans), *found.others],
        settings=[line for plan in plans.values() for line in plan.settings],
        image_size=found.config.get("image_size") if "image_encoder" in wanted else None,
    )


@dataclass(frozen=True)
class _Source:
    """What was read: the parts' tensors under their own names, and the names of all others."""

    source: str
    config: dict[str, Any]
    parts: dict[str, dict[str, Tensor]]
    others: list[str] = field(default_factory=list)

    @property
    def image_encoder(self) -> EncoderWeights:
        config = self.config.get("image_encoder")
        mean, std = self.config.get("mean", IMAGENET_MEAN), self.config.get("std", IMAGENET_STD)
        left_out = () if config is not None else tuple(self.others)
        return EncoderWeights(
            config, self.parts["image_encoder"], self.source, tuple(mean), tuple(std), left_out
        )


@dataclass(frozen=True)
class _Plan:
    """What a part takes, by its own names, and what differs without changing a tensor; or why it cannot."""

    state: dict[str, Tensor]
    settings: list[str] = field(default_factory=list)
    problem: str = ""


def _read(source: str | Path) -> _Source:
    path = Path(source).expanduser()
    if path.is_dir():
        config = read_exported_config(path)
        return _of_description(config, read_state_dict(path / WEIGHTS_FILE), "", str(path))
    if path.suffix != ".safetensors":
        content = read_torch_file(path)
        if isinstance(content, dict) and {"state_dict", "network"} & content.keys():
            checkpoint = read_checkpoint(path)
            state = as_state_dict(checkpoint.get("state_dict"), path)
            return _of_description(checkpoint["network"], state, "network.", str(path))
    state = as_torchvision_resnet(read_state_dict(path), path)
    return _Source(str(path), {}, {"image_encoder": from_torchvision_names(state)}, list(CLASSIFIER))


def _of_description(config: Any, state: dict[str, Tensor], prefix: str, source: str) -> _Source:
    """Parts of a checkpoint or an exported folder of this program."""
    if not isinstance(config, dict) or "image_encoder" not in config:
        raise UserError(
            f"{source} describes no image encoder; give a checkpoint of an image-text model or of a classifier"
        )
    if not any(name.startswith(f"{prefix}image_encoder.") for name in state):
        prefix = ""
    parts = {
        part: {name.removeprefix(start): x for name, x in state.items() if name.startswith(start)}
        for part in PARTS
        if part in config
        for start in [f"{prefix}{part}."]
    }
    if not parts["image_encoder"]:
        raise UserError(f"{source} describes an image encoder but has no tensor of one (image_encoder.*)")
    known = {f"{prefix}{part}.{name}" for part, tensors in parts.items() for name in tensors}
    others = sorted(set(state) - known)
    if others and len(parts) == len(PARTS):
        raise UserError(
            f"{source}: tensors that no image-text network has: {others}; give a folder of the network alone: "
            "medclip_dcl.load(PATH).save_pretrained(FOLDER)"
        )
    return _Source(source, config, parts, others)


def _wanted(parts: Sequence[str] | None, found: _Source) -> list[str]:
    """Parts to take over, in the network's order."""
    if parts is None:
        return [part for part in PARTS if part in found.parts]
    if not parts or (unknown := sorted(set(parts) - set(PARTS))):
        raise UserError(f"init_parts must name some of {PARTS}, got {unknown if parts else 'none'}")
    if missing := sorted(set(parts) - set(found.parts)):
        raise UserError(
            f"{found.source} has no {' and no '.join(missing)}: take it out of init_parts; there is "
            f"{', '.join(found.parts)}"
        )
    return [part for part in PARTS if part in parts]


def _left_out(found: _Source, plans: Mapping[str, _Plan]) -> list[str]:
    """Tensors of the source's parts that are not taken."""
    return [
        f"{part}.{name}"
        for part, tensors in found.parts.items()
        for name in tensors
        if part not in plans or name not in plans[part].state
    ]


def _plan(module: nn.Module, part: str, found: _Source) -> _Plan:
    if isinstance(module, RegionEncoder):
        return _plan_image_encoder(module, found.image_encoder)
    if isinstance(module, SentenceEncoder):
        return _plan_text_encoder(module, found.config[part], found.parts[part])
    assert isinstance(module, Similarity)
    return _plan_similarity(module, found.config[part], found.parts[part])


def _plan_image_encoder(encoder: RegionEncoder, weights: EncoderWeights) -> _Plan:
    expected = encoder.state_dict()
    if weights.config is not None:
        return _exactly("image_encoder", encoder, expected, weights.config, weights.state)
    state = dict(weights.state)
    # The last stage is no part of an encoder that stops before it.
    last = f"backbone.{BACKBONE['layer4']}."
    if not any(name.startswith(last) for name in expected):
        state = {name: value for name, value in state.items() if not name.startswith(last)}
    of_backbone = {name: x for name, x in expected.items() if not name.startswith("projection.")}
    if problems := _misfits(of_backbone, state):
        return _Plan(
            {}, problem=f"image_encoder: {problems}; set image_encoder.init_args.depth to the file's depth"
        )
    return _Plan(state)


def _plan_text_encoder(encoder: SentenceEncoder, there: dict[str, Any], state: dict[str, Tensor]) -> _Plan:
    here = part_config(encoder)
    if reason := _other_words(there["init_args"].get("tokenizer"), here["init_args"].get("tokenizer")):
        return _Plan(
            {},
            problem=f"text_encoder: {reason}, so that its weights know other words; set "
            "text_encoder.init_args.pretrained to the BERT that the source was trained with",
        )
    expected = encoder.state_dict()
    if any(name.startswith(_HEAD) for name in state) and not encoder.has_masked_language_head:
        return _Plan(
            {},
            problem=f"text_encoder: unexpected {sorted(name for name in state if name.startswith(_HEAD))}; set "
            "text_encoder.init_args.masked_language_head: true (it stays idle without masked_language_weight)",
        )
    if not any(name.startswith(_HEAD) for name in state):
        # Trained without: the one of the configured BERT, if any.
        expected = {name: x for name, x in expected.items() if not name.startswith(_HEAD)}
    berts = [{**BERT_BASE, **(config["init_args"].get("bert") or {})} for config in (there, here)]
    if others := [name for name in _FUNCTION_OF_BERT if berts[0].get(name) != berts[1].get(name)]:
        differing = [f"{name} {berts[0].get(name)} (configured: {berts[1].get(name)})" for name in others]
        return _Plan(
            {},
            problem=f"text_encoder: another BERT, with {', '.join(differing)}; set text_encoder.init_args.pretrained "
            "to the BERT that the source was trained with",
        )
    return _exactly("text_encoder", encoder, expected, there, state)


def _plan_similarity(similarity: Similarity, there: dict[str, Any], state: dict[str, Tensor]) -> _Plan:
    here = part_config(similarity)
    if there["class_path"] != here["class_path"]:
        return _Plan({}, _differences("similarity", similarity, there))
    return _exactly("similarity", similarity, similarity.state_dict(), there, state)


def _exactly(
    part: str,
    module: RegionEncoder | SentenceEncoder | Similarity,
    expected: Mapping[str, Tensor],
    there: dict[str, Any],
    state: dict[str, Tensor],
) -> _Plan:
    """All tensors, or what keeps them from fitting and the settings with which they would."""
    settings = _differences(part, module, there)
    if there["class_path"] != part_config(module)["class_path"]:
        return _Plan({}, problem=f"{part} is of another class; set {settings[0]}")
    if problems := _misfits(expected, state):
        remedy = (
            f"set what differs: {', '.join(settings)}"
            if settings
            else "the settings agree, the code does not"
        )
        return _Plan({}, problem=f"{part}: {problems}; {remedy}")
    return _Plan(state, settings)


def _misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Names of all tensors that are missing, unexpected or of another shape; empty if there are none."""
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    named = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return ", ".join(f"{what} {names}" for what, names in named.items() if names)


def _differences(
    part: str, module: RegionEncoder | SentenceEncoder | Similarity, there: dict[str, Any]
) -> list[str]:
    """Settings of the source's part, and what the configured one has instead; the tokenizer is compared elsewhere."""
    here = part_config(module)
    if there["class_path"] != here["class_path"]:
        return [f"{part}.class_path: {there['class_path']} (configured: {here['class_path']})"]
    arguments = inspect.signature(type(module).__init__).parameters
    defaults = {name: x.default for name, x in arguments.items() if x.default is not inspect.Parameter.empty}
    a, b = (_flat(config["init_args"]) for config in (there, here))
    lines = []
    for name in sorted(set(a) | set(b)):
        values = [settings.get(name, defaults.get(name)) for settings in (a, b)]
        if values[0] != values[1] and name != "tokenizer":
            lines.append(f"{part}.init_args.{name}: {values[0]} (configured: {values[1]})")
    return lines


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        found.update(inner)
    return found


def _other_words(there: str | None, here: str | None) -> str:
    """In which way two tokenizers differ in what they make of a text; empty if they do not. Names no word."""
    if there == here or there is None or here is None:
        return "" if there == here else "its tokenizer is of another kind"
    a, b = json.loads(there), json.loads(here)
    pieces = [_vocabulary(tokenizer) for tokenizer in (a, b)]
    if pieces[0] != pieces[1]:
        moved = sum(pieces[1].get(piece) != number for piece, number in pieces[0].items())
        return (
            f"its vocabulary has {len(pieces[0])} word pieces, the configured one {len(pieces[1])}, and {moved} of the "
            "source's are not there or have another number"
        )
    if others := [name for name in _TOKENIZER_PARTS if a.get(name) != b.get(name)]:
        return f"its tokenizer splits text in another way ({', '.join(others)})"
    return ""


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Word piece -> number."""
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return {**tokenizer["model"]["vocab"], **added}


def _of_part(part: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{part}.")]


def _in_groups(names: Sequence[str], most: int = 8) -> str:
    """The names, or, where they are many, the first two components of each with a count."""
    if len(names) <= most:
        return ", ".join(names)
    counts: dict[str, int] = {}
    for name in names:
        group = ".".join(name.split(".")[:2])
        counts[group] = counts.get(group, 0) + 1
    return ", ".join(f"{group}.* ({n})" for group, n in counts.items())
