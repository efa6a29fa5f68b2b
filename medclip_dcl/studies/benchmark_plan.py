"""What a benchmark tests: models, prepared sets, and the one protocol by which each model is tested on each set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.common.command_line import available_cores, digests_of_imports
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest_of_file, write_json, write_text
from medclip_dcl.common.find_model import CONFIG_FILE, FoundModel, find_model, is_exported
from medclip_dcl.common.findings import Ensemble, PromptEnsembles, ensemble_used
from medclip_dcl.common.weight_files import CLASSIFIER, IMAGE_TEXT, SavedModel, read_model
from medclip_dcl.data.lineage import START, Answer, Lineage
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.report.draws import Predictions, TestedRun
from medclip_dcl.runs.run_folder import ASKED_FILE
from medclip_dcl.runs.saved import RESULTS_FILE, TEST_CONFIG, SavedResultsError, read_config, read_json
from medclip_dcl.studies.one_run import Run

TESTS = "tests"
APART, KNOWN = "‡", "†"
"""Marks of a model that was trained on train patients of the tested set; on images of it, test images perhaps."""
_MAX_WORKERS = 8
_PARTS = ("image_encoder", "text_encoder", "similarity", "findings")


@dataclass(frozen=True)
class Model:
    """A model under its name in the tables: `saved` is a checkpoint, an exported folder, or one of an encoder alone."""

    name: str
    saved: SavedModel

    @property
    def is_classifier(self) -> bool:
        return self.saved.kind == CLASSIFIER

    @property
    def is_encoder(self) -> bool:
        """An image encoder alone, in the folder of a library."""
        return not self.saved.kind

    @property
    def probe(self) -> str:
        """Name of the probe of its image encoder."""
        return f"{self.name} (probe)"

    @property
    def findings(self) -> list[str]:
        """Those of a classifier; none for an image-text model, which takes prompts of any."""
        return list(self.saved.network.get("findings", ()))

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage.of(self.saved)

    def digest(self) -> str:
        """Changes with the weights or the description."""
        path = self.saved.path
        files = [path / "config.json", path / "model.safetensors"] if path.is_dir() else [path]
        if self.is_encoder:  # its weights may be several files
            files = sorted(x for end in ("*.json", "*.safetensors", "*.bin") for x in path.glob(end))
        return "".join(map(digest_of_file, files))


def read_models(paths: Sequence[Path], names: Sequence[str] | None, encoders: bool = False) -> list[Model]:
    """Models of run folders (the best checkpoint by validation, else the last), checkpoints and exported folders.

    With `encoders` also folders of transformers and timm, which are not read here.
    """
    found = []
    for path in paths:
        file = find_model(path).path
        is_encoder = encoders and (file / CONFIG_FILE).is_file() and not is_exported(file)
        found.append(SavedModel(file) if is_encoder else read_model(file))
        if not is_encoder:
            found[-1].require_network(IMAGE_TEXT, CLASSIFIER)
    return [Model(*one) for one in zip(_names("MODEL", paths, names), found, strict=True)]


def read_sets(folders: Sequence[Path]) -> dict[str, PreparedSet]:
    """Prepared sets by the names of their folders."""
    return dict(zip(_names("--sets", folders, None), map(PreparedSet, folders), strict=True))


def _names(option: str, paths: Sequence[Path], names: Sequence[str] | None) -> list[str]:
    """Names that are folders of the output: as given, or of the folder or of the run of a checkpoint."""
    if names is not None and len(names) != len(paths):
        raise UserError(f"--names: expected {len(paths)}, one for each MODEL, found {len(names)}")
    found = (
        [name.strip() for name in names] if names is not None else [_name(path.resolve()) for path in paths]
    )
    if wrong := [name for name in found if name in ("", ".", "..") or "/" in name or found.count(name) > 1]:
        raise UserError(
            f"{option}: expected names that differ and are names of folders, found {wrong[0]!r}; "
            f"{'give --names' if option == 'MODEL' else 'rename a folder'}"
        )
    return found


def _name(path: Path) -> str:
    if path.is_dir():
        return path.name
    run = path.parent.parent.name if path.parent.name == "checkpoints" else ""
    return "_".join(filter(None, [run, path.stem])) if path.stem != "best" else run or path.stem


class BenchmarkedRun(TestedRun):
    """A test of a model on a set; its classification has one name and the same numbers, by logits or by prompts."""

    def __init__(self, folder: Path, model: Model) -> None:
        super().__init__(folder, "", model.name)
        self.model = model

    @cached_property
    def predictions(self) -> Predictions:
        found = super().predictions
        tables = {section.removeprefix("finding_"): table for section, table in found.tables.items()}
        return replace(found, tables=tables)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Settings of the model's training and the checkpoint's name; None if they are not known."""
        file = self.model.saved.path
        folder = FoundModel(file).folder
        settings = read_config(folder) if folder else None
        # The untrained network of one seed is not a training beside the best of another, nor one on other data.
        trained_on = [self.model.lineage.fingerprint, self.model.lineage.record.get(START)]
        return settings and {**settings, "checkpoint_file": file.name, "trained_on": trained_on}


def marks(answer: Answer) -> str:
    """Marks of the numbers of a model on a set."""
    return APART * answer.train_images + KNOWN * bool(answer.elsewhere)


def test_of(
    model: Model,
    name: str,
    prepared: PreparedSet,
    prompts: PromptEnsembles,
    ensemble: Ensemble,
    imported: Sequence[str],
    output: Path,
    device: str = "auto",
    blank: str = "ignore",
) -> tuple[Run, Callable[[], None]]:
    """The run folder of a test and its arguments, and what to call while its lock is held.

    This forgets results of another model, set, prompts or code, and those that are damaged.
    """
    folder = output / TESTS / model.name / name
    used = {finding: [*map(list, pair)] for finding, pair in prompts.items()}
    asked = {
        **{"model": model.digest(), "set": prepared.fingerprint, "prompts": used},
        **{"ensemble": ensemble_used(prompts, ensemble), "imported": digests_of_imports(imported)},
    }
    settings = _config(model, prepared, used, ensemble)
    if blank != "ignore":
        asked["blank"] = blank
        if model.is_classifier:
            settings["trainer"]["callbacks"][0]["init_args"]["blank"] = blank
        else:
            settings["data"]["init_args"]["blank_cases"] = blank
    kind, _, number = device.partition(":")
    settings["trainer"] |= {"accelerator": kind, "devices": [int(number)] if number else 1}
    config = yaml.safe_dump(settings, sort_keys=False)

    def prepare() -> None:
        if asked_for(folder) != asked or not is_readable(folder):
            (folder / RESULTS_FILE).unlink(missing_ok=True)
            write_json(asked, folder / ASKED_FILE)
        write_text(config, folder / TEST_CONFIG)

    arguments, of_each = (f"--config={folder / TEST_CONFIG}",), tuple(f"--import={one}" for one in imported)
    return Run({"model": model.name, "set": name}, folder, arguments, of_each), prepare


def asked_for(folder: Path) -> dict[str, Any]:
    """Record of what a test was made of; empty for none and for a damaged one."""
    with suppress(OSError, SavedResultsError):
        return read_json(folder / ASKED_FILE)
    return {}


def is_readable(folder: Path) -> bool:
    """True without results, and for results that their predictions give."""
    try:
        return not (folder / RESULTS_FILE).is_file() or bool(TestedRun(folder).predictions)
    # Whatever is wrong with a damaged file: it is tested again.
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return False


def _config(
    model: Model, prepared: PreparedSet, prompts: Mapping[str, Any], ensemble: Ensemble
) -> dict[str, Any]:
    """Settings of a test: the network as it is described, at its own image size."""
    described = model.saved.network
    evaluations: list[tuple[str, dict[str, Any]]]
    if model.is_classifier:
        classes, evaluations = ("Classifier", "LabelledDataModule"), [("FindingClassification", {})]
    else:
        classes = ("ImageTextModel", "ImageTextDataModule")
        labelled = {finding: pair for finding, pair in prompts.items() if finding in prepared.findings}
        evaluations = [
            *([("ZeroShotClassification", {"prompts": labelled, "ensemble": ensemble})] if labelled else []),
            ("Localisation", {"prompts": dict(prompts), "examples": 0}),
            ("Grounding", {"examples": 0}),
            ("Retrieval", {}),
        ]
    workers = min(_MAX_WORKERS, available_cores() - 1)
    return {
        "seed_everything": 0,
        "untrained": False,
        "verbose": False,  # a table of numbers, which a notebook would show
        "ckpt_path": str(model.saved.path),
        "trainer": {
            "callbacks": [
                {"class_path": f"medclip_dcl.evaluation.{name}", "init_args": arguments}
                for name, arguments in evaluations
            ]
        },
        "model": {
            "class_path": f"medclip_dcl.models.{classes[0]}",
            "init_args": dict.fromkeys(part for part in _PARTS if part in described),
        },
        "data": {
            "class_path": f"medclip_dcl.data.{classes[1]}",
            "init_args": {"folder": str(prepared.folder), "image_size": None, "num_workers": workers},
        },
    }
