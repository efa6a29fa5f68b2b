"""Check a configuration against the sources before Lightning is imported, which takes seconds.

Finds unknown keys, values of a wrong type, missing files and data sets, a run folder of another run. Names only what is
certainly wrong and leaves everything else to the parser (`config_errors`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.command.class_sources import PACKAGE, parameters
from medclip_dcl.common.command_line import yaml_value
from medclip_dcl.common.errors import MissingFileError, UserError

TOP = {
    "checkpoint": "", "checkpoint_minutes": "float", "ckpt_path": "", "config": "", "data": "",
    "ema_decay": "float | None", "help": "", "model": "", "prediction_format": "Literal['parquet', 'csv']",
    "print_config": "", "prompts": "", "return_predictions": "bool", "run_folder": "",
    "seed_everything": "bool | int", "share_patient_data": "bool", "trainer": "", "untrained": "bool",
    "verbose": "bool", "weights_only": "bool | None",
}  # fmt: skip
"""Top-level keys of all commands and their types, where these are plain."""
_COMMANDS = ("fit", "validate", "test", "predict")
_LIGHTNING = {
    "trainer": "pytorch_lightning.trainer.trainer.Trainer",
    "checkpoint": "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
}
_PRECISION = "Literal['16', '16-mixed', '32', '32-true', 'bf16', 'bf16-mixed'] | None"
"""Weights are always in float32: in bfloat16 or float16 most steps of AdamW would round to nothing."""
_LARGEST_SEED = 2**32 - 1
_IMAGES_ALONE = "ImageOnlyDataModule"
"""The datamodule whose folder is not a prepared set."""
_COUNT, _POSITIVE, _TIME = r"\d+", r"[1-9]\d*", r"\d+:\d\d:\d\d:\d\d"
_FORMS = {
    "trainer.accelerator": ("auto|cpu|cuda|gpu|hpu|mps|tpu", "auto, cpu, cuda, gpu, mps or tpu"),
    "trainer.strategy": (
        r"(auto|ddp|deepspeed|fsdp|hpu|single|xla)(_\w+)?",
        "auto, ddp, deepspeed, fsdp or one of their variants",
    ),
    "trainer.devices": (
        rf"auto|-1|{_POSITIVE}|\d+( *, *\d+)* *,|\[?\d+( *, *\d+)+\]?|\[\d+\]",
        "at least 1, -1 for all, auto, or numbers such as 0,1",
    ),
    "trainer.num_nodes": (_POSITIVE, "at least 1"),
    "trainer.fast_dev_run": (f"true|false|{_COUNT}", "true, false or a number of batches"),
    "trainer.max_epochs": (f"-1|{_COUNT}|null", "a number of epochs, or -1 for no limit"),
    "trainer.max_steps": (f"-1|{_COUNT}", "a number of steps, or -1 for no limit"),
    "trainer.max_time": (f"{_TIME}|null", "days:hours:minutes:seconds, such as 00:12:00:00"),
    "trainer.gradient_clip_algorithm": ("norm|value|null", "norm or value"),
    "trainer.reload_dataloaders_every_n_epochs": (_COUNT, "at least 0"),
    "trainer.logger": (r"true|false|null|\[.*\]", "true, false, a class or a list of them"),
    "trainer.profiler": ("advanced|pytorch|simple|xla|null", "advanced, pytorch or simple"),
    "checkpoint.monitor": (r"(train|validate)/[\w/@.-]+|null", "a logged metric such as validate/loss"),
    "checkpoint.mode": ("min|max|null", "min or max"),
    "checkpoint.save_top_k": (f"-1|{_COUNT}", "a number of checkpoints, or -1 for all"),
    "checkpoint.every_n_epochs": (f"{_COUNT}|null", "a number of epochs"),
    "checkpoint.every_n_train_steps": (f"{_COUNT}|null", "a number of steps"),
    "seed_everything": (rf"true|false|{_COUNT}", f"an integer from 0 to {_LARGEST_SEED}, true or false"),
}
"""Accepted values of Lightning's settings by a pattern, and in words; a class may be given instead."""
_SHARES = ("trainer.val_check_interval",) + tuple(
    f"trainer.{part}_batches"
    for part in ("limit_train", "limit_val", "limit_test", "limit_predict", "overfit")
)
_NUMBER = re.compile(
    r"[-+]?[\d._]*\d[\d._]*(e[-+]?\d+)?|0[xob][\da-f_]+|[-+]?\.?(inf|nan)|null|none|~", re.IGNORECASE
)


def check_arguments(arguments: Sequence[str]) -> None:
    """Check the arguments of the command line.

    Raises:
        UserError: names the first thing that is certainly wrong.
    """
    if len(arguments) > 2 and arguments[0] in ("--config", "-c") and not _has_command(arguments[1]):
        raise UserError(f"{arguments[0]}: give the command first, {' | '.join(_COMMANDS)}, then its options")
    if not arguments or arguments[0] not in _COMMANDS:
        return
    given = _Given()
    words = [part for word in arguments[1:] for part in re.split(r"(?<=^--config)=|(?<=^-c)=", word)]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in ("--config", "-c"):
            given.add_file(following)
        elif word.startswith("--"):
            name, _, value = word[2:].partition("=")
            given.add_option(name, value or following)
    if not any(word in ("-h", "--help") or word.startswith("--print_config") for word in words):
        given.check_together(arguments[0])


class _Given:
    """The settings that files and options give, each checked when it is added.

    Attributes:
        values: by dotted names, the last one of each; a class is not among them, its arguments are.
        classes: class path of each setting that is a class; None where it is unknown.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.classes: dict[str, str | None] = {}

    def add_file(self, name: str) -> None:
        file = Path(name)
        if file.suffix in (".yaml", ".yml") and "://" not in name and not file.exists():
            raise UserError(f"config: File does not exist: {str(file.absolute())!r}")
        content = _content(name) or {}
        if any(key in _COMMANDS for key in content):
            return
        for key, value in content.items():
            if key in ("trainer", "checkpoint") and isinstance(value, dict):
                for inner, setting in value.items():
                    self._add(f"{key}.{inner}", setting)
            else:
                self._add(str(key), value)

    def add_option(self, name: str, text: str) -> None:
        name, value = self._full_name(name), yaml_value(text)
        if name == "trainer.max_time" and isinstance(value, int):
            value = text  # YAML takes 1:00:00:00 for a number to the base of 60, the parser does not
        part = name.split(".")[0]
        if text.startswith("--"):  # an option without a value: true, or a mistake that the parser names
            value = ...
        if part in ("model", "data") and not re.fullmatch(r"\w+(\.init_args\.\w+)*(\.class_path)?", name):
            self._forget(part)  # a short way of writing that the parser completes
        else:
            self._add(name.removesuffix(".class_path"), value)

    def _full_name(self, name: str) -> str:
        """data.image_size -> data.init_args.image_size, where the class is known and has this setting."""
        path, *keys = name.split(".")
        for key in keys:
            is_short = key in (parameters(self.classes.get(path) or "") or {})
            path = f"{path}.init_args.{key}" if is_short else f"{path}.{key}"
        return path

    def _add(self, name: str, value: Any) -> None:
        """Add one setting, and those within it."""
        self._check_key(name, value)
        is_class = isinstance(value, dict) and bool(value.keys() & {"class_path", "init_args"})
        is_part = name.split(".")[0] in ("model", "data")
        if name.rstrip("+") == "trainer.callbacks":
            for one in value if isinstance(value, list) else [value]:
                callback = _Given()  # each by itself: there may be several of one class
                callback._add_class(name.rstrip("+"), one if isinstance(one, dict) else {"class_path": one})
        elif is_part and (is_class or str(value).startswith(f"{PACKAGE.name}.")):
            if not is_class:
                self._forget(name)
            self._add_class(name, value if is_class else {"class_path": value})
        else:
            self._forget(name)  # perhaps the short name of a class, or a file that describes it
            self.values[name] = value

    def _add_class(self, path: str, value: Mapping[str, Any]) -> None:
        class_path = value.get("class_path", self.classes.get(path))
        self.classes[path] = class_path if isinstance(class_path, str) else None
        settings = value.get("init_args")
        for key, setting in settings.items() if isinstance(settings, dict) else ():
            self._add(f"{path}.init_args.{key}", setting)

    def _forget(self, name: str) -> None:
        for path in [path for path in self.classes if f"{path}.".startswith(f"{name}.")]:
            self.classes[path] = None

    def _check_key(self, name: str, value: Any) -> None:
        path, _, key = name.rstrip("+").rpartition(".init_args.")
        if path:
            class_path = self.classes.get(path) or ""
            known = parameters(class_path)
            if known is not None and key not in known:
                of = class_path.rpartition(".")[2]
                raise UserError(f"{path}.init_args.{message(key, known)} (a setting of {of})")
            _check_value(name, value, (known or {}).get(key, ""))
            return
        top, _, key = name.rstrip("+").partition(".")
        if top not in TOP:
            raise UserError(message(name, TOP))
        known = parameters(_LIGHTNING[top]) if top in _LIGHTNING else None
        if key and known is not None:
            if key.split(".")[0] not in known:
                raise UserError(message(name, [f"{top}.{one}" for one in known]))
            _check_value(name, value, _PRECISION if key == "precision" else known.get(key, ""))
        elif not key:
            _check_value(name, value, TOP[top])
        _check_form(name.rstrip("+"), value)

    def check_together(self, command: str) -> None:
        """Check what several settings say together."""
        if command != "fit":
            self._forget("model")  # the network comes from a checkpoint
        _check_devices(self.values.get("trainer.accelerator"), self.values.get("trainer.devices"))
        if command == "fit" and self.values.get("trainer.fast_dev_run", False) in (False, 0):
            self._check_run_folder()
        data, folder = str(self.classes.get("data")), self.values.get("data.init_args.folder")
        if data.rpartition(".")[2] == _IMAGES_ALONE:
            _check_image_files(folder)
        elif data.startswith(f"{PACKAGE.name}."):
            _check_files(folder, self.values.get("prompts"), command != "predict")
        if command == "fit" and not Path(str(self.values.get("run_folder")), "config.yaml").is_file():
            self._check_sources()

    def _check_run_folder(self) -> None:
        """Refuse a folder whose run has other values of these settings; the rest is compared when all is known."""
        folder = self.values.get("run_folder")
        if not isinstance(folder, str) or not Path(folder, "config.yaml").is_file():
            return
        from medclip_dcl.runs.run_folder import LENGTH, RunFolder
        from medclip_dcl.runs.saved import differing_settings, setting

        run = RunFolder(folder)
        saved = run.saved_config()
        differing: set[str] = set()
        plain = (int, float, str)
        for name, value in self.values.items():
            before = setting(saved, name)
            now = _as_number(value) if isinstance(before, float) else value
            is_comparable = isinstance(before, str) == isinstance(now, str)
            if isinstance(before, plain) and isinstance(now, plain) and is_comparable:
                differing |= differing_settings(before, now, name).keys()
        if differing - {LENGTH}:
            raise run.other_run(differing, saved)

    def _check_sources(self) -> None:
        """Refuse missing files from which a new run starts; a Hugging Face repository has one slash in its name."""
        for name, value in self.values.items():
            is_source = name.endswith((".pretrained", ".init_from")) and isinstance(value, str)
            if (
                is_source
                and (value.count("/") > 1 or value.startswith((".", "/")))
                and not Path(value).exists()
            ):
                raise UserError(f"{name}: no file or folder {value} (looked at {Path(value).absolute()})")


def _has_command(name: str) -> bool:
    """A file may hold the settings of several commands, each under its name."""
    content = _content(name)
    return content is None or any(key in _COMMANDS for key in content)


def _content(name: str) -> dict[str, Any] | None:
    """A configuration file; None where it cannot be read as one."""
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def _check_files(folder: Any, prompts: Any, needs_labels: bool) -> None:
    """A prepared set that is not there; prompts that cannot be read, or of findings that the set does not label."""
    from medclip_dcl.common.findings import read_prompts, require_labelled

    pairs = read_prompts(prompts) if isinstance(prompts, str) else {}
    if isinstance(folder, str) and (pairs or not (Path(folder) / "dataset.json").is_file()):
        from medclip_dcl.data.prepared import PreparedSet

        labelled = PreparedSet(folder).findings
        if labelled and needs_labels:
            require_labelled(pairs, labelled, "ZeroShotClassification: prompts")


def _check_image_files(folder: Any) -> None:
    """A folder of images alone that is not there."""
    if isinstance(folder, str) and not Path(folder).is_dir():
        raise MissingFileError(f"data.folder: no folder {folder} (looked at {Path(folder).absolute()})")


def message(key: str, known: Iterable[str]) -> str:
    """The line about an unknown key."""
    return f"{key}: there is no such key{nearest(key, known)}"


def one_of(kinds: Iterable[str]) -> str:
    """Types or words that a setting may have, in words."""
    kinds = set(kinds)
    named = sorted(kinds - {"None", "NoneType"}) + ["null"] * bool(kinds & {"None", "NoneType"})
    return " or ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def alternatives(kind: str) -> list[str]:
    """int | Literal['a', 'b'] | None -> int, a, b, None."""
    words = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(",", "|"), kind).split("|")
    return [word.strip(" '\"") for word in words if word.strip()]


def nearest(name: str, known: Iterable[str]) -> str:
    """Closest known name, as a question."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _check_value(path: str, value: Any, kind: str) -> None:
    """A value of a setting that takes certain words, or numbers, true and false alone."""
    kinds = alternatives(kind)
    is_choice = re.fullmatch(r"Literal\[[^\]]*\]( \| None)?", kind) is not None
    if value is ... or not kinds or not (is_choice or set(kinds) <= {"int", "float", "bool", "None"}):
        return
    if value is None:
        is_right = "None" in kinds
    elif is_choice:
        is_right = str(value) in kinds
    elif isinstance(value, bool):
        is_right = "bool" in kinds
    elif isinstance(value, int | float):
        is_right = "float" in kinds or ("int" in kinds and math.isfinite(value) and int(value) == value)
    else:
        # Numbers have many spellings.
        is_right = isinstance(value, str) and set(kinds) != {"bool"} and _NUMBER.fullmatch(value) is not None
    if not is_right:
        found = "null" if value is None else value
        raise UserError(f"{path}: expected {one_of(kinds)}, found {found}")


def _check_form(name: str, value: Any) -> None:
    """A setting of this command line or of Lightning whose accepted values are known."""
    number = _as_number(value)
    is_number = isinstance(number, float)
    if name == "ema_decay" and is_number and not 0 < number < 1:
        raise UserError(
            f"ema_decay: expected a number above 0 and below 1, e.g. 0.999, or null; found {value}"
        )
    if name == "checkpoint_minutes" and is_number and not number >= 0:
        raise UserError(f"checkpoint_minutes: expected a number of at least 0, found {value}")
    if name in _SHARES and is_number and (number < 0 or (number > 1 and number % 1)):
        raise UserError(f"{name}: expected a share from 0.0 to 1.0 or a number of batches, found {value}")
    if is_number and number % 1 == 0:
        value = int(number)
    pattern, expected = _FORMS.get(name, (".*", ""))
    if name == "trainer.val_check_interval" and isinstance(number, str):
        pattern, expected = _TIME, "a share, a number of batches or days:hours:minutes:seconds"
    if isinstance(value, dict) or value is ...:
        return  # a class, or an option without a value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_class = re.fullmatch(r"([a-zA-Z_][\w.]*\.)?[A-Z]\w+", text)
    is_too_large = name == "seed_everything" and is_number and number > _LARGEST_SEED
    if is_too_large or not (is_class or re.fullmatch(pattern, text, re.DOTALL)):
        near = nearest(text, re.findall("[a-z]{2,}", pattern))
        raise UserError(f"{name}: expected {expected}, found {text}{near}")


def _check_devices(accelerator: Any, devices: Any) -> None:
    """Refuse an accelerator that PyTorch does not see, and more devices than there are."""
    if accelerator == "cpu" and (devices == -1 or (isinstance(devices, str) and "," in devices)):
        raise UserError(f"trainer.devices: expected a number of processes for the CPU, found {devices}")
    if accelerator not in ("gpu", "cuda", "mps"):
        return
    import torch

    n = torch.cuda.device_count() if accelerator != "mps" else 0
    n = n or int(accelerator != "cuda" and torch.backends.mps.is_available())
    if n == 0:
        raise UserError(
            f"trainer.accelerator: PyTorch {torch.__version__} sees no {accelerator} device on this machine; install a "
            "PyTorch built for it, or give --trainer.accelerator cpu (or auto)"
        )
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > n:
        raise UserError(f"trainer.devices: PyTorch sees {n} on this machine, found {devices}")


def _as_number(value: Any) -> Any:
    """A number as the parser reads it: YAML takes 1e-3 for a word."""
    try:
        return value if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value
