"""Reading of a run folder, without Lightning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, parse_json, read_yaml
from medclip_dcl.common.find_model import RUN_FILE

RESULTS_FORMAT_VERSION = 2
CONFIG_FILE = RUN_FILE
TEST_CONFIG = "test.yaml"
"""In place of `CONFIG_FILE` in the folder of a benchmark's test."""
RESULTS_FILE = "results.json"
STEPS = "steps"
"""Folder in the folder of results for those of the weights that were kept at chosen steps, each in one named N."""
NOT_COMPARED = (
    "checkpoint.dirpath",
    "checkpoint_minutes",
    *("counts.classification.bands", "counts.finding_classification.bands"),  # earlier tests have none
    *(f"protocol.localisation.{name}" for name in ("thresholds", "thresholds_normalised")),  # of the network
    "counts.grounding.boxes_without_cnr",
    *("images.shown.prepared_size", "images.trained.prepared_size"),  # earlier tests have none
    "ckpt_path",
    "config",
    "prediction_format",
    "run_folder",
    "share_patient_data",
    "trainer.default_root_dir",
    "weights_only",
    "data.init_args.num_workers",
    "data.init_args.predict_use",
    "data.init_args.test_reports",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.enable_progress_bar",
    "trainer.logger",
    "trainer.num_nodes",
    "trainer.strategy",
    "untrained",
)
"""Settings of the place, the hardware and the tests of a run, which may change when it continues."""


class SavedResultsError(UserError):
    """A run folder cannot be read or compared."""


class SavedRun:
    """A run folder and the test of one of its networks; each file is read once, when it is first needed.

    Args:
        folder: of the run.
        suffix: "" for the test of the trained network, "_untrained" for that of the untrained one.
        name: label of the run in tables.
    """

    def __init__(self, folder: Path, suffix: str = "", name: str = "") -> None:
        self.folder, self.suffix, self.name = folder, suffix, name
        self.file = folder / f"results{suffix}.json"
        self.command = command_of_test(folder)
        self._tables: dict[str, pd.DataFrame | None] = {}

    @cached_property
    def results(self) -> dict[str, Any] | None:
        """Content of results.json; None without a test."""
        return read_results(self.folder, self.suffix)

    @property
    def tested(self) -> dict[str, Any]:
        """Content of results.json, which must be there."""
        if not self.folder.is_dir():
            raise SavedResultsError(f"no run folder {self.folder}")
        if self.results is None:
            needs = "; it needs checkpoints/untrained.ckpt" if self.suffix else ""
            raise SavedResultsError(f"{self.file} is missing; create it with: {self.command}{needs}")
        return self.results

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Settings of the run; None if they are not known."""
        return read_config(self.folder)

    def file_of(self, table: str) -> Path:
        """File of a table in predictions/."""
        return self.folder / f"predictions{self.suffix}" / f"{table}.parquet"

    def table(self, name: str) -> pd.DataFrame | None:
        """A table in predictions/; None if the file is missing."""
        if name not in self._tables:
            file = self.file_of(name)
            self._tables[name] = read_parquet(file) if file.is_file() else None
        return self._tables[name]

    def require_prepared_set(self) -> None:
        """Refuse a test whose data are not a prepared set, which reports and tables of radiographs need."""
        if self.results is not None and "phantom" not in self.results["dataset"]:
            raise SavedResultsError(
                f"{self.file}: expected a test on a prepared set, found one on {self.results['dataset']['source']}; "
                f"{', '.join(self.results['metrics'])}: its numbers are in this file, those of each image in "
                f"predictions{self.suffix}/"
            )


def measured_alike(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> bool:
    """True if the contents of two results.json were measured in the same way on the same data."""
    keys = ("format_version", "protocol", "dataset", "images", "counts", "precision", "limited")
    return (
        a is not None and b is not None and not any(differing_settings(a.get(x), b.get(x), x) for x in keys)
    )


def protocol_digest(results: Mapping[str, Any]) -> str:
    """Identity of how a results.json was measured, but for the data."""
    limited = " of some batches" if results.get("limited") else ""
    shown = results.get("images", {}).get("shown", {})
    measured = {name: results.get(name) for name in ("protocol", "precision")}
    measured["images"] = {name: shown.get(name) for name in ("image_size", "geometry")}
    text = json.dumps(
        {**dict(_compared(measured, "")), "sections": sorted(results.get("metrics", {}))}, sort_keys=True
    )
    return f"{digest(text.encode())}{limited}"


def _compared(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each entry but `NOT_COMPARED`."""
    if name in NOT_COMPARED:
        return
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _compared(one, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def read_results(run: Path, suffix: str = "") -> dict[str, Any] | None:
    """Read results<suffix>.json of a run folder; None if there is none."""
    file = run / f"results{suffix}.json"
    if not file.is_file():
        return None
    found = read_json(file)
    version = found.get("format_version") if isinstance(found.get("metrics"), dict) else "no metrics"
    if version != RESULTS_FORMAT_VERSION:
        raise SavedResultsError(
            f"{file}: expected format version {RESULTS_FORMAT_VERSION}, found {version}; test the run again"
        )
    return found


def value_at(metrics: Any, path: str, otherwise: Any = None) -> Any:
    """A number in the metrics of results.json by its path, keys joined by "/"; `otherwise` if there is none."""
    if not isinstance(metrics, Mapping):
        return otherwise
    if path in metrics:
        return metrics[path]
    # A category may itself hold a "/".
    keys = (key for key in metrics if path.startswith(f"{key}/"))
    inner = (value_at(metrics[key], path[len(key) + 1 :], otherwise) for key in keys)
    return next((value for value in inner if value is not otherwise), otherwise)


def read_json(file: Path, remedy: str = "delete it and run the command that wrote it") -> dict[str, Any]:
    """Read a JSON file of a run folder."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SavedResultsError(f"{file} is not readable JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise SavedResultsError(f"{file}: expected a mapping, found {type(found).__name__}; {remedy}")
    return found


def read_parquet(file: Path) -> pd.DataFrame:
    """Read a table of a run folder."""
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise SavedResultsError(
            f"{file} is not a readable Parquet file ({error}); delete it and run the command that wrote it"
        ) from error


def read_config(run: Path) -> dict[str, Any] | None:
    """Read config.yaml of a run folder; None if there is none, as in the test of an exported model."""
    file = run / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        return read_yaml(file)
    except UserError as error:
        raise SavedResultsError(f"{error}; restore it, or choose another --run_folder") from error


def differing_settings(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name of each entry that differs, except `NOT_COMPARED` -> its old and its new value.

    Numbers stand for places in lists of equal length.
    """
    if name in NOT_COMPARED or old == new:
        return {}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = (dict(enumerate(values)) for values in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return {name: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in old.keys() | new.keys():
        found |= differing_settings(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    return found


def setting(config: Any, name: str) -> Any:
    """A setting by its dotted name; None if there is none."""
    for key in name.split("."):
        if isinstance(config, list):
            config = dict(zip(map(str, range(len(config))), config, strict=True))
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def settings_of_callback(config: Any, name: str) -> dict[str, Any]:
    """Settings of a run's callback by the name of its class; empty if it has none."""
    callbacks = setting(config, "trainer.callbacks") or []
    own = [one for one in callbacks if one["class_path"].endswith(f".{name}")]
    return dict(own[0].get("init_args") or {}) if own else {}


def describe_image_size(results: Mapping[str, Any]) -> str:
    """Size of the tested images, with sizes and geometry of the training if they differ."""
    shown, trained = results["images"]["shown"], results["images"]["trained"]
    others = {
        "trained at": trained.get("image_size"),
        "started from weights of": trained.get("image_size_before"),
    }
    words = [f"{k} {x}" for k, x in others.items() if x not in (None, shown["image_size"])]
    if other_geometry(results):
        words.append(f"fitted by {shown.get('geometry')}, in training by {trained['geometry']}")
    return ", ".join([f"{shown['image_size']} pixels", *words])


def other_geometry(results: Mapping[str, Any]) -> str:
    """A warning that the tested images were fitted to a square in another way than those of the training; or ""."""
    shown, trained = (results["images"][name].get("geometry") for name in ("shown", "trained"))
    if trained in (None, shown):
        return ""
    return (
        f"images were fitted by {shown}, in training by {trained}: its numbers may be lower; prepare the set with "
        f"--geometry {trained}"
    )


def notes_of_test(results: Mapping[str, Any]) -> list[str]:
    """Notes of the evaluations that measured something, each once."""
    of_sections = results["notes"].items()
    return list(
        dict.fromkeys(x for section, notes in of_sections if results["metrics"].get(section) for x in notes)
    )


def other_pictures(results: Mapping[str, Any]) -> list[str]:
    """Warnings that the tested images were prepared in another way than those of the training."""
    return [*filter(None, (other_geometry(results), other_preparation(**results["images"])))]


def other_preparation(shown: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """A warning that images were prepared at another size than those of the training, or at less than is shown; or "".

    Both are an entry of results.json's `images`.
    """
    size, before, side = shown.get("prepared_size"), trained.get("prepared_size"), shown.get("image_size")
    if size is None or side is None or size == before or (before is None and size >= side):
        return ""
    found = f"images were prepared at {size} pixels"
    found += f" and enlarged to {side}" if before is None else f", those of the training at {before}"
    return f"{found}: scores differ; prepare the set with --size {before or side}"


def describe_checkpoint(checkpoint: Mapping[str, Any]) -> str | None:
    """File, epoch and steps of the entry `checkpoint` of results.json, as far as known."""
    file, epoch = checkpoint["file"], checkpoint.get("epoch")
    return file if epoch is None else f"{file}, epoch {epoch} ({checkpoint['step']} steps)"


def step_checkpoint(step: int | str) -> str:
    """File in checkpoints/ of the weights kept at an optimiser step."""
    return f"step_{step}.ckpt"


def command_of_test(run: Path) -> str:
    """The command that writes the results of a run, or of one of its kept steps."""
    if run.parent.name == STEPS:
        run, step = run.parents[1], run.name
        return f"{command_of_test(run)} --ckpt_path {run / 'checkpoints' / step_checkpoint(step)}"
    name = TEST_CONFIG if (run / TEST_CONFIG).is_file() else CONFIG_FILE
    return f"medclip-dcl test --config {run / name} --run_folder {run}"
