"""Reading what a test left in a run folder; without Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.errors import UserError

RESULTS_FORMAT_VERSION = 1
CONFIG_FILE = "config.yaml"
NOT_COMPARED = (
    "checkpoint.dirpath",
    "checkpoint_minutes",
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
)
"""Settings that say where and how a run is computed and not what: it may continue in another place."""
_PARTS = ("metrics", "protocol", "counts", "notes", "checkpoint", "dataset", "precision", "versions")


class SavedResultsError(UserError):
    """What a run folder holds cannot be read or compared; the message says why and what to do."""


def read_results(run: Path, suffix: str = "") -> dict[str, Any] | None:
    """results<suffix>.json of a run folder; None where there is none.

    Raises:
        SavedResultsError: not readable, of another format version, or incomplete.
    """
    file = run / f"results{suffix}.json"
    if not file.is_file():
        return None
    found = read_json(file)
    if found.get("format_version") != RESULTS_FORMAT_VERSION:
        raise SavedResultsError(
            f"{file}: format version {found.get('format_version')}, this program reads version"
            f" {RESULTS_FORMAT_VERSION}; test the run again"
        )
    missing = [part for part in _PARTS if part not in found]
    if missing:
        raise SavedResultsError(f"{file} has no {missing[0]!r}; test the run again")
    return found


def value_at(metrics: Any, path: str) -> Any:
    """A number of results.json's metrics by its path, keys joined by "/"; None where it is not there."""
    if not isinstance(metrics, Mapping):
        return None
    if path in metrics:
        return metrics[path]
    # A category may itself hold a "/".
    inner = (value_at(metrics[key], path[len(key) + 1 :]) for key in metrics if path.startswith(f"{key}/"))
    return next((value for value in inner if value is not None), None)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a run folder.

    Raises:
        SavedResultsError: it is not readable.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SavedResultsError(
            f"{file} is not readable JSON ({error}); delete it and run the command that wrote it"
        ) from error


def read_config(run: Path) -> dict[str, Any] | None:
    """config.yaml of a run folder; None where there is none, as where another's model was tested.

    Raises:
        SavedResultsError: it is not readable.
    """
    file = run / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SavedResultsError(f"{file} is not readable YAML ({error})") from error


def differing_settings(old: Any, new: Any, name: str = "") -> set[str]:
    """Dotted names of the settings that differ, apart from `NOT_COMPARED`; numbers stand for places in a list."""
    if name in NOT_COMPARED or old == new:
        return set()
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = (dict(enumerate(values)) for values in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return {name}
    keys = set(old) | set(new)
    return set().union(
        *(differing_settings(old.get(k), new.get(k), f"{name}.{k}" if name else str(k)) for k in keys)
    )


def setting(config: Any, name: str) -> Any:
    """A setting by its dotted name; None where it is not there."""
    for key in name.split("."):
        if isinstance(config, list):
            config = dict(zip(map(str, range(len(config))), config, strict=True))
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def images_in_words(results: Mapping[str, Any]) -> str | None:
    """Size of the images that a test showed, and those of the training where they were others; None where unknown."""
    images = results.get("images", {})
    shown, trained = images.get("shown", {}).get("image_size"), images.get("trained", {})
    if shown is None:
        return None
    others = {
        "trained at": trained.get("image_size"),
        "started from weights of": trained.get("image_size_before"),
    }
    return ", ".join([f"{shown} pixels", *(f"{k} {x}" for k, x in others.items() if x not in (None, shown))])


def command_of_test(run: Path) -> str:
    """The command that writes the results of a run."""
    return f"python -m medclip_dcl test --config {run / 'config.yaml'} --run_folder {run}"
