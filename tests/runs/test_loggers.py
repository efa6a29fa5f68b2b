"""Loggers chosen by configuration get the figures of metrics.csv; patients' images go to a network only when told."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from jsonargparse import Namespace
from pytorch_lightning.loggers import CSVLogger, Logger

from medclip_dcl.command.cli import main
from medclip_dcl.runs.loggers import MetricsFile, is_networked, place_loggers

pytestmark = pytest.mark.slow

# Without a version: CSVLogger makes a folder for each command, and deletes what it finds in a given one.
CSV = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": ".", "name": "csv"}}
BOARD = {
    "class_path": "pytorch_lightning.loggers.TensorBoardLogger",
    "init_args": {"save_dir": ".", "name": "tensorboard", "version": ""},
}
GROUNDING = '[{"class_path": "medclip_dcl.evaluation.Grounding", "init_args": {"examples": 1}}]'
IMPORT = ("--import", "remote_loggers")
SENTENCES = ("pneumothorax", "effusion", "edema", "cardiomegaly", "lungs")


class RemoteLogger(Logger):
    """Stands for W&B: keeps whatever it is given, as what has left the machine."""

    received: list[tuple[str, Any]] = []

    def __init__(self, log_model: bool = False) -> None:
        super().__init__()

    @property
    def name(self) -> str:
        return "remote"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.received.append(("metrics", (step, dict(metrics))))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.received.append(("hyperparameters", params))

    def log_image(self, key: str, images: list[Any], **kwargs: Any) -> None:
        self.received.append(("image", (key, images)))


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The remote logger as a configuration names it."""
    monkeypatch.setattr(RemoteLogger, "received", [])
    module = type(sys)("remote_loggers")
    module.RemoteLogger = RemoteLogger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "remote_loggers", module)
    monkeypatch.setattr(RemoteLogger, "__module__", "remote_loggers")
    return {"class_path": "remote_loggers.RemoteLogger", "init_args": {"log_model": False}}


@pytest.fixture
def patients(small_set: Path, tmp_path: Path) -> Path:
    """The small set, as if it were of patients."""
    folder = shutil.copytree(small_set, tmp_path / "patients")
    info = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**info, "phantom": False}))
    for file in ("classes.parquet", "image_classes.parquet"):
        (folder / file).unlink()
    return folder


@pytest.fixture
def fit_and_test(arguments, undrawn, tmp_path):
    """Fits and tests with the loggers, in the folder it returns."""

    def run(loggers: list[dict[str, Any]], *more: str) -> Path:
        (tmp_path / "loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
        first, second, *rest = arguments(tmp_path / "run", "--trainer.callbacks", GROUNDING, *more)
        main(["fit", *IMPORT, first, second, "--config", str(tmp_path / "loggers.yaml"), *rest])
        main(["test", *IMPORT, "--config", str(tmp_path / "run/config.yaml")])
        return tmp_path / "run"

    return run


def rows(run: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> figure of metrics.csv."""
    table = pd.read_csv(run / "metrics.csv").drop(columns="time").melt(id_vars="step").dropna()
    return {(int(step), name): value for step, name, value in table.itertuples(index=False)}


def assert_same_figures(found: dict[tuple[int, str], float], expected: dict[tuple[int, str], float]) -> None:
    assert found.keys() == expected.keys()
    names = {name for _, name in found}
    assert {
        "train/loss",
        "train/gamma2",
        "train/learning_rate",
        "train/images_per_second",
        "train/data_wait",
    } <= names
    assert {"validate/loss", "train/gradient_norm", "train/learning_rate_text", "epoch"} <= names
    for key, value in found.items():
        assert math.isclose(value, expected[key], rel_tol=1e-6), key


def test_every_logger_gets_metrics_and_phantom_pictures(fit_and_test, remote):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fit_and_test([CSV, BOARD, remote])
    expected = rows(run)
    table = pd.read_csv(run / "csv/version_0/metrics.csv").melt(id_vars="step").dropna()
    assert_same_figures({(int(s), n): v for s, n, v in table.itertuples(index=False)}, expected)
    sent = [content for kind, content in RemoteLogger.received if kind == "metrics"]
    of_fit = [(step, figures) for step, figures in sent if not any(n.startswith("test/") for n in figures)]
    figures = {(step, name): value for step, one in of_fit for name, value in one.items()}
    # Too few cases for an AUC of the small set: NaN, which pandas takes for an empty field.
    assert_same_figures({key: value for key, value in figures.items() if not math.isnan(value)}, expected)
    # The untrained network's test has the same names: its figures are in results_untrained.json alone.
    (tested,) = [figures for _, figures in sent if any(name.startswith("test/") for name in figures)]
    results = json.loads((run / "results.json").read_text())
    assert tested["test/miou"] == pytest.approx(results["metrics"]["grounding"]["miou"])
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()
    on_board = {
        (event.step, tag): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)
    }
    for key, value in expected.items():
        assert math.isclose(value, on_board[key], rel_tol=1e-5), key
    drawn = {f"test/{file.stem}" for file in (run / "figures").glob("*.png")}
    assert drawn and set(events.Tags()["images"]) == drawn
    assert {content[0] for kind, content in RemoteLogger.received if kind == "image"} == drawn


def test_pictures_of_patients_are_sent_only_when_told(fit_and_test, remote, patients, recwarn):
    more = ["--data.init_args.folder", str(patients), "--trainer.max_epochs", "1"]
    run = fit_and_test([remote, CSV], *more)
    files = {f"test/{file.stem}": [str(file)] for file in (run / "figures").glob("*.png")}
    for share in (False, True):
        if share:
            main(["test", *IMPORT, "--config", str(run / "config.yaml"), "--share_patient_data", "true"])
        pictures = {content[0]: content[1] for kind, content in RemoteLogger.received if kind == "image"}
        assert files and pictures == (files if share else {})
        told = [w for w in recwarn if "were not given to RemoteLogger" in str(w.message)]
        assert len(told) == 1
    # Texts are never sent: neither as figures' names nor as settings.
    everything = repr([content for kind, content in RemoteLogger.received if kind != "image"]).lower()
    assert not any(word in everything for word in SENTENCES)


def test_checkpoints_of_patients_are_uploaded_only_when_told(arguments, patients, tmp_path, remote, capsys):
    remote["init_args"]["log_model"] = True
    (tmp_path / "loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": [remote]}}))
    first, second, *rest = arguments(tmp_path / "run", "--data.init_args.folder", str(patients))
    with pytest.raises(SystemExit) as error:
        main(["fit", *IMPORT, first, second, "--config", str(tmp_path / "loggers.yaml"), *rest])
    assert error.value.code == 2
    assert "trainer.logger, log_model: expected false, found True" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["TensorBoardLogger", "CSVLogger"])
def test_a_logger_needs_its_name_alone(name, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *arguments(tmp_path / "run"), f"--trainer.logger={name}", "--print_config"])
    (logger,) = [yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]]
    assert logger["class_path"].endswith(name) and logger["init_args"]["save_dir"] == "."


def test_relative_logger_folders_lie_in_run_folder(tmp_path):
    def prepared(folder: str) -> str:
        logger = Namespace(class_path="a.CSVLogger", init_args=Namespace(save_dir=folder))
        place_loggers([logger, None, True], tmp_path)
        return logger.init_args.save_dir

    assert [prepared(x) for x in (".", "b/c", "/abs", "s3://bucket/x")] == [
        str(tmp_path), str(tmp_path / "b/c"), "/abs", "s3://bucket/x",
    ]  # fmt: skip


def test_only_writers_to_this_disk_are_local(tmp_path):
    assert not is_networked(MetricsFile(tmp_path)) and not is_networked(CSVLogger(tmp_path))
    assert is_networked(CSVLogger("memory://bucket")) and is_networked(RemoteLogger())
