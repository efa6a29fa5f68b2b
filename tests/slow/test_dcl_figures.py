"""DCL's figure 4 in small: a subset of CIFAR-10, and binary files in STL10's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from medclip_dcl.runs.saved import read_json, read_results
from medclip_dcl.studies import grid_workers as workers
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import results_table
from tests.processes import FRESH
from tests.studies.grids import main
from tests.unimodal.test_arrays import write_stl10

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def write_small(folder: Path, base: str, files: Path, axes: dict[str, Any], settings: dict[str, Any]) -> Path:
    """The experiment with ResNet-50 of width 2 and one epoch, for one seed."""
    evaluation = {"label_fractions": [1.0], "label_draws": 1, "probe_epochs": 5, "average_k": [1]}
    small = {
        "trainer.max_epochs": 1,
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.log_every_n_steps": 1,
        "trainer.callbacks": [
            {"class_path": "medclip_dcl.unimodal.UnimodalEvaluation", "init_args": evaluation}
        ],
        "model.init_args.image_encoder.init_args.width": 2,
        "data.init_args.files": str(files),
    }
    seed = {"set": ["seed_everything", "data.init_args.seed", "data.init_args.subset_seed"], "values": 1}
    outcomes = {"accuracy": "unimodal/linear_probe/1.0/accuracy", "at the floor": "train/at_floor"}
    grid = {
        "base": base,
        "folder": str(folder / "grid"),
        "settings": small | settings,
        "axes": {**axes, "seed": seed},
        "outcomes": outcomes,
        "plots": [],
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(grid))
    return folder / "small.yaml"


def run(file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """results.parquet, by objective and outcome."""
    monkeypatch.setattr(workers, "CONTEXT", FRESH)
    main([str(file), "--workers", "1"])
    table = results_table(read_experiment(file))
    return table.set_index(["objective", "outcome"])["value"]


def test_figure_4a_on_a_subset_of_cifar10(real_data, tmp_path, monkeypatch):
    """The first 24 training and 12 test images of three classes."""
    for use, count in (("train", 24), ("test", 12)):
        (file,) = (real_data / "cifar10/plain_text").glob(f"{use}-*.parquet")
        table = pd.read_parquet(file)
        table[table["label"].isin([3, 5, 9])].groupby("label").head(count).to_parquet(tmp_path / file.name)
    axes = {"N": ["30"], "objective": ["biased", "unbiased"]}
    settings = {"data.init_args.classes": ["cat", "dog", "truck"]}
    values = run(write_small(tmp_path, "dcl_cifar10", tmp_path, axes, settings), monkeypatch)
    assert values[:, "accuracy"].between(0.2, 0.9).all()  # chance is a third
    assert values["biased", "at the floor"] == 0


def test_figure_4c_on_files_in_the_layout_of_stl10(tmp_path, monkeypatch):
    files = write_stl10(tmp_path / "stl10")[0]
    axes = {"objective": ["biased", "M_8"]}
    settings = {"data.init_args.batch_size": 8, "data.init_args.monitor_images": 8}
    values = run(write_small(tmp_path, "dcl_stl10_m", files, axes, settings), monkeypatch)
    assert values[:, "accuracy"].between(0, 1).all()
    folder = tmp_path / "grid/runs"
    steps = {one.name.split(",")[0]: read_json(one / "fit.json")["steps"] for one in folder.iterdir()}
    assert set(steps.values()) == {3}, steps
    results = read_results(folder / "objective=M_8,seed=0")
    assert results is not None
    dataset = results["dataset"]
    assert (dataset["view_size"], dataset["image_size"]) == (32, 96)
    assert dataset["train_images"]["unlabelled"] == 5
