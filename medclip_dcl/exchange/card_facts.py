"""Facts of a model card: data, network, training and objective, from settings and descriptions in plain values."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.common.errors import MissingFileError
from medclip_dcl.common.findings import PromptEnsembles, read_prompts
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.runs.saved import setting, settings_of_callback

_CARD = yaml.safe_load(Path(__file__).with_name("card.yaml").read_text(encoding="utf-8"))
FACTS: dict[str, dict[str, str]] = _CARD["facts"]
"""Part of the card -> name in it -> entry of dataset.json, fit.json or config.yaml."""


def facts(part: str, source: Mapping[str, Any]) -> dict[str, str]:
    """Facts of a part of the card that are known, as text."""
    values = {name: setting(source, entry) for name, entry in FACTS[part].items()}
    return {name: as_text(value) for name, value in values.items() if value not in (None, [], {})}


def as_text(value: Any) -> str:
    """Whole numbers with separators, entries of lists and mappings by commas; of a path elsewhere its name alone."""
    if isinstance(value, Mapping):
        entries = ((name, x) for name, x in value.items() if x is not None)
        return ", ".join(f"{name}{':' * isinstance(x, Mapping)} {as_text(x)}" for name, x in entries)
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    if isinstance(value, str):
        return str(publishable(value))
    return f"{value:,}" if type(value) is int else str(value)


def data_facts(dataset: Mapping[str, Any]) -> dict[str, str]:
    """Rows about the training data, from its dataset.json or, with less in it, from results.json."""
    if not dataset:
        return {"trained on": "not known from the run folder"}
    return {"trained on": f"{dataset.get('folder')} ({dataset.get('source')})"} | facts("data", dataset)


def terms_of(dataset: Mapping[str, Any]) -> str:
    """The license of the data, as far as their source tells it."""
    source = "phantom" if dataset.get("phantom") else str(dataset.get("source", ""))
    return next(text for start, text in _CARD["terms"].items() if source.startswith(start))


def prompts_of(config: Mapping[str, Any]) -> PromptEnsembles:
    """The prompts of a run, or of its ZeroShotClassification; empty for CheX5's, or where their file is not at hand."""
    prompts = config.get("prompts") or settings_of_callback(config, "ZeroShotClassification").get("prompts")
    with suppress(MissingFileError):
        return read_prompts(prompts) if prompts else {}
    return {}


def model_facts(network: ImageTextNetwork | FindingNetwork) -> dict[str, str]:
    """Rows about the network, from its own description."""
    described, size = network.config(), network.image_size
    if isinstance(network, FindingNetwork):
        own = {"findings": ", ".join(network.findings)}
    else:
        own = {"largest logit, gamma^2": f"{network.scale:.3g}"}
    first = f", first fitted to {network.prepared_size}" if network.prepared_size else ""
    return {
        **{part.replace("_", " "): _part(described[part]) for part in network.parts},
        **own,
        "parameters": f"{sum(p.numel() for p in network.parameters()):,}",
        "images": f"{size} x {size} pixels, geometry {network.geometry}{first}",
    }


def _part(described: Mapping[str, Any]) -> str:
    """Class and settings of a part; of a library's model family and sizes alone, without the tokenizer."""
    arguments = {name: value for name, value in described["init_args"].items() if name != "tokenizer"}
    for key in ("bert", "architecture"):
        if settings := arguments.get(key):
            arguments[key] = {name: settings[name] for name in _CARD["sizes"] if name in settings}
    name, listed = described["class_path"].rpartition(".")[2], as_text(arguments)
    return f"{name} ({listed})" if listed else name


def training_facts(fit: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Length and device of the training from fit.json, settings from config.yaml; empty if neither is there."""
    settings = facts("training", config)
    network, image_encoder, *_ = FACTS["training"]
    if config and network not in settings:
        of_library = setting(config, "model.init_args.image_encoder.init_args.pretrained")
        settings = {image_encoder: settings.get(image_encoder, as_text(of_library or "random"))} | settings
    if setting(config, "model.init_args.frozen"):
        settings["encoders"] = "frozen; only the layers behind them were trained"
    if lora := setting(config, "model.init_args.lora"):
        settings["encoders"] = f"trained by adapters (LoRA) of rank {lora['rank']}, which are merged"
    return facts("fit", fit) | settings


def objective_lines(config: Mapping[str, Any]) -> list[str]:
    """The parts of the objective with their settings and what they are, from the docstrings of their classes."""
    lines = []
    for name in ("loss", "class_probability", "negative_weights", "near_texts"):
        if part := setting(config, f"model.init_args.{name}"):
            described = _part({"init_args": {}, **part})
            lines.append(f"{name.replace('_', ' ')}: {described}. {explained(part['class_path'])}".rstrip())
    return lines + [f"{name}: {value}" for name, value in facts("objective", config).items()]


def explained(class_path: str) -> str:
    """First line of the docstring of one of the package's own classes; "" for any other."""
    module, _, name = class_path.rpartition(".")
    if not module.startswith("medclip_dcl."):
        return ""
    kind = getattr(importlib.import_module(module), name)
    return (inspect.getdoc(kind) or "").splitlines()[0].replace("::", ".").replace("`", "")


def publishable(path: str | Path) -> Path:
    """A path as it may be published: of an absolute one the name alone."""
    path = Path(path)
    return Path(path.name) if path.is_absolute() or ".." in path.parts else path
