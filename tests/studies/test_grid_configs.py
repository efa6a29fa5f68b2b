"""Experiment files of configs/ are read, and their cells are configurations that the command takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from medclip_dcl.studies.grid import merged
from medclip_dcl.studies.grid_plan import check_cells, read_experiment
from medclip_dcl.unimodal.data import UnimodalDataModule
from medclip_dcl.use.model import load
from tests.program import shell, verb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["curves", "digits_maps", "learning_curve"])
def test_the_cells_of_an_experiment_are_configurations(name, tmp_path, monkeypatch):
    """Few cells: of an image-text model, a unimodal one, a classifier. test_experiment_files.py reads all files."""
    monkeypatch.chdir(tmp_path)
    check_cells(read_experiment(Path(name)))


def test_digits_are_the_grid_of_the_study():
    experiment = read_experiment(ROOT / "configs/experiments/digits.yaml")
    assert {name: len(levels) for name, levels in experiment.axes.items()} == {
        "r": 6,
        "objective": 4,
        "seed": 20,
    }
    first = [run.levels["objective"] for run in experiment.runs()[:4]]
    assert first == ["CL", "DCL-low", "DCL-high", "DCL-true"]


def test_curl_on_cifar100_evaluates_what_it_reports():
    arguments = read_experiment(ROOT / "configs/experiments/curl_cifar100.yaml").arguments
    (evaluation,) = merged(arguments)["trainer"]["callbacks"]
    assert evaluation["init_args"]["mean_labels"] == 5


@pytest.mark.parametrize(
    ("name", "axis", "least", "most"),
    [("false_negatives", "share", 360, 360), ("digits_n", "N", 400, 444), ("digits_tau", "N", 198, 222)],
)
def test_levels_train_as_many_steps(name, axis, least, most):
    experiment = read_experiment(ROOT / f"configs/experiments/{name}.yaml")
    for level in experiment.axes[axis]:
        settings = merged((*experiment.arguments, *level.arguments))
        options = {k: v for k, v in settings["data"]["init_args"].items() if k != "augmentation"}
        data = UnimodalDataModule(**options)
        data.load("test")
        steps = len(data.chosen.train) // data.batch_size * settings["trainer"]["max_epochs"]
        assert least <= steps <= most, level.name


def small_settings(folder: Path, bert: Path) -> dict[str, Any]:
    """Six steps of smaller encoders on another set, of which three are kept."""
    image, text = (
        f"model.init_args.{name}" for name in ("image_encoder", "text_encoder.init_args.pretrained")
    )
    return {
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.max_steps": 6,
        "trainer.log_every_n_steps": 1,
        "trainer.callbacks": [
            {"class_path": "medclip_dcl.evaluation.ZeroShotClassification", "init_args": {"min_cases": 1}},
            {"class_path": "medclip_dcl.evaluation.Grounding", "init_args": {"examples": 0}},
            {"class_path": "medclip_dcl.evaluation.Retrieval"},
        ],
        "kept_steps": [2, 4, 6],
        image: {"class_path": "tests.small.PatchRegions", "init_args": {"dim": 128}},
        text: str(bert),
        "data.init_args.folder": str(folder),
        "data.init_args.image_size": 48,
        "data.init_args.crop_size": 32,
        "data.init_args.batch_size": 8,
        "data.init_args.num_workers": 0,
    }


@pytest.mark.slow
def test_corrections_on_mimic_cxr_run_small(embedded_set, small_bert, tmp_path, monkeypatch):
    """The experiment file itself, with another set, smaller encoders, three kept steps and a seed."""
    monkeypatch.chdir(tmp_path)
    small = small_settings(embedded_set, small_bert)
    seed = {"set": ["seed_everything", "data.init_args.seed"], "values": 1}
    experiment = {"base": "mimic_cxr_corrections_3000", "folder": "small", "settings": small}
    Path("small.yaml").write_text(yaml.safe_dump({**experiment, "axes": {"objective": "base", "seed": seed}}))
    shell("study")(["small.yaml", "--workers", "1", "--import", "tests.small"])
    table = pd.read_parquet("small/results.parquet")
    assert table["value"].notna().all()
    of_arms = table.groupby("objective")
    assert len(of_arms) == 5 and (of_arms["outcome"].nunique() == 8).all()
    curve = table[table["outcome"] == "AUC"]
    assert [*curve.groupby("objective")["step"].agg(list)] == 5 * [[2, 4, 6]]
    assert (curve.groupby("objective")["chosen"].sum() == 1).all()
    assert "ranked against a constant share" in Path("small/report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_labels_on_real_x_rays_run_small(real_data, small_bert, tmp_path, monkeypatch):
    """The experiment file itself on 214 real X-rays, whose labels and cases are too few for an AUC."""
    monkeypatch.chdir(tmp_path)
    source, folder = real_data / "real_cxr", tmp_path / "set"
    boxes = str(source / "MS_CXR_Local_Alignment_v1.0.0.json")
    options = ["--ms_cxr", boxes, "--size", "64", "--workers", "1"]
    verb("prepare mimic-cxr")(["--source", str(source), "--output", str(folder), *options])
    verb("score")([str(folder), "--model", str(small_bert)])
    verb("rank")([str(folder), "--posterior"])
    arms = ["infonce", "dcl_lm", "infonce_labels", "posterior_labels"]
    small = small_settings(folder, small_bert) | {"checkpoint.monitor": "validate/retrieval_recall"}
    best = {"validate": "validate/retrieval_recall", "step": "best"}
    outcomes = {
        "signed CNR": {"path": "grounding/cnr_signed", **best},
        "Recall": {"path": "retrieval/recall", **best},
    }
    seed = {"set": ["seed_everything", "data.init_args.seed"], "values": 1}
    changed = {"settings": small, "outcomes": outcomes, "hypotheses": {}, "plots": []}
    experiment = {"base": "mimic_cxr_labels", "folder": "small", "axes": {"objective": arms, "seed": seed}}
    Path("small.yaml").write_text(yaml.safe_dump(experiment | changed))
    shell("study")(["small.yaml", "--workers", "1", "--import", "tests.small"])
    table = pd.read_parquet("small/results.parquet").query("chosen != False")
    values = table.pivot(index="objective", columns="outcome", values="value")
    assert [*values.index] == sorted(arms) and values.notna().all(axis=None)
    for arm in arms:
        run = Path(f"small/runs/objective={arm},seed=0")
        is_labelled = arm.endswith("labels")
        assert ("train/label_loss" in pd.read_csv(run / "metrics.csv")) == is_labelled
        # Two of fourteen columns have both values, on 10 of 119 studies.
        assert load(run).image_text.label_findings == ("Pneumonia", "No Finding") * is_labelled
