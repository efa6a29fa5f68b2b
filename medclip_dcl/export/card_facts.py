"""Facts of a model card: data, network, training and objective, from settings and descriptions in plain values."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from medclip_dcl.common.errors import MissingFileError
from medclip_dcl.common.findings import PromptEnsembles, read_prompts
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.runs.saved import read_json, setting

_TRAINING = {
    "initial weights of the network": "model.init_args.init_from",
    "initial weights of the image encoder": "model.init_args.image_encoder.init_args.weights",
    "initial weights of the text encoder": "model.init_args.text_encoder.init_args.pretrained",
    "images a step": "data.init_args.batch_size",
    "images contrasted a step": "data.init_args.contrastive_batch",
    "random crops, pixels": "data.init_args.crop_size",
    "sentences of a report a step": "data.init_args.sentences",
    "learning rate": "model.init_args.learning_rate",
    "learning rate of the text transformer": "model.init_args.text_learning_rate",
    "weight decay": "model.init_args.weight_decay",
    "exponential moving average, decay": "ema_decay",
    "seed": "seed_everything",
}
"""Name in the card -> setting of config.yaml; settings that are null are left out."""
_SIZES_OF_BERT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_TERMS = {
    "phantom": "No patient data: the images and reports are drawn and made up by `data_prep.phantom`, under the MIT"
    " license of the software. Weights that training started from keep their own terms.",
    "mimic-cxr": "The data have the layout of MIMIC-CXR. Where they are MIMIC-CXR, the [PhysioNet Credentialed Health"
    " Data License 1.5.0](https://physionet.org/content/mimic-cxr/view-license/2.0.0/) applies: weights and vocabulary"
    " derive from credentialed text, so share this model only as that license allows.",
    "": "The license of these data is not known to the software. Weights and vocabulary derive from their images and"
    " reports: share this model only as the owner of the data allows.",
}
"""Beginning of the data's source -> terms."""


def data_facts(dataset: Mapping[str, Any] | None) -> dict[str, str]:
    """Rows about the training data, from its dataset.json or, with less in it, from results.json."""
    if dataset is None:
        return {"trained on": "not known from the run folder"}
    counts = dataset.get("counts", {})
    uses = counts.get("images_by_use", {})
    options = dataset.get("options", {})
    found = {
        "trained on": f"{dataset.get('folder')} ({dataset.get('source')})",
        "fingerprint": dataset.get("fingerprint"),
        "patients of the set": counts.get("patients"),
        "images for training": uses.get("train"),
        "images for validation": uses.get("validate"),
        "distinct sentences": counts.get("sentences"),
        "views": ", ".join(options.get("views") or ()) or None,
        "sections of the reports": ", ".join(options.get("sections") or ()) or None,
        "labels": options.get("labels"),
        "options of the phantom": ", ".join(f"{k} {v:g}" for k, v in options.get("phantom", {}).items())
        or None,
    }
    return as_texts(found)


def terms_of(dataset: Mapping[str, Any] | None) -> str:
    """The license of the data, as far as their source tells it."""
    dataset = dataset or {}
    source = "phantom" if dataset.get("phantom") else str(dataset.get("source", ""))
    return next(text for start, text in _TERMS.items() if source.startswith(start))


def prompts_of(config: Mapping[str, Any]) -> PromptEnsembles:
    """The prompts of a run's ZeroShotClassification; empty for CheX5's, or where their file is not at hand."""
    callbacks = setting(config, "trainer.callbacks") or []
    own = [one for one in callbacks if one["class_path"].endswith(".ZeroShotClassification")]
    prompts = setting(own, "0.init_args.prompts")
    with suppress(MissingFileError):
        return read_prompts(prompts) if prompts else {}
    return {}


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Numbers with separators; without what is None."""
    shown = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in values.items()}
    return {name: text for name, text in shown.items() if values[name] is not None}


def model_facts(network: ImageTextNetwork) -> dict[str, str]:
    """Rows about the network, from its own description."""
    described = network.config()
    found = {
        part.replace("_", " "): _part(described[part])
        for part in ("image_encoder", "text_encoder", "similarity")
    }
    found["largest logit, gamma^2"] = f"{network.similarity.gamma2.item():.3g}"
    found["parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    size = network.image_size
    found["images"] = f"{size} x {size} pixels, geometry {network.geometry}" + (
        f", first fitted to {network.prepared_size}" if network.prepared_size else ""
    )
    return found


def _part(described: Mapping[str, Any]) -> str:
    """Class and settings of a part; of a BERT its sizes alone, without the tokenizer."""
    arguments = {name: value for name, value in described["init_args"].items() if name != "tokenizer"}
    if bert := arguments.get("bert"):
        arguments["bert"] = {name: bert[name] for name in _SIZES_OF_BERT if name in bert}
    name, settings = described["class_path"].rpartition(".")[2], _settings(arguments)
    return f"{name} ({settings})" if settings else name


def _settings(arguments: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {_settings(value)}" if isinstance(value, Mapping) else f"{name} {_value(value)}"
        for name, value in arguments.items()
        if value is not None
    )


def _value(value: Any) -> str:
    """A setting; of a path outside the working folder its name alone."""
    return str(publishable(value)) if isinstance(value, str) else f"{value}"


def training_facts(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Length and device of the training from fit.json, settings from config.yaml; empty if neither is there."""
    fit = read_json(run / "fit.json") if (run / "fit.json").is_file() else {}
    found = {name: fit.get(name) for name in ("epochs", "steps", "seconds", "device", "devices", "precision")}
    settings = {name: setting(config, key) for name, key in _TRAINING.items()}
    if config and settings["initial weights of the network"] is None:
        settings["initial weights of the image encoder"] = (
            settings["initial weights of the image encoder"] or "random"
        )
    if setting(config, "model.init_args.frozen"):
        settings["encoders"] = "frozen; projections and similarity were trained"
    return as_texts({**found, **{name: _value(x) for name, x in settings.items() if x is not None}})


def objective_lines(config: Mapping[str, Any]) -> list[str]:
    """The parts of the objective with their settings and what they are, from the docstrings of their classes."""
    model = setting(config, "model.init_args") or {}
    lines = []
    for name in ("loss", "class_probability", "negative_weights", "near_texts"):
        if part := model.get(name):
            described = _part({"init_args": {}, **part})
            lines.append(f"{name.replace('_', ' ')}: {described}. {explained(part['class_path'])}".rstrip())
    further = {
        "sentence scores (log_p)": setting(config, "data.init_args.log_p"),
        "weight of the loss with images as anchors (image_to_text)": model.get("image_to_text"),
        "other images of the batch that fit (same_text)": model.get("same_text"),
        "weight of masked-language modelling": model.get("masked_language_weight") or None,
    }
    lines += [f"{name}: {value}" for name, value in further.items() if value is not None]
    return lines


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
