"""Experiment files of configs/ are read, and their cells are configurations that the command takes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from safetensors.torch import load_file, save_file

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedSet, write_table
from medclip_dcl.studies.grid import merged
from medclip_dcl.studies.grid_plan import check_cells, read_experiment
from medclip_dcl.unimodal.data import UnimodalDataModule
from medclip_dcl.use.model import load
from tests.program import shell, verb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name", ["curves", *(pytest.param(x, marks=pytest.mark.slow) for x in ("digits_maps", "learning_curve"))]
)
def test_the_cells_of_an_experiment_are_configurations(name, tmp_path, monkeypatch):
    """Few cells: of an image-text model, a unimodal one, a classifier. test_experiment_files.py reads all files."""
    monkeypatch.chdir(tmp_path)
    check_cells(read_experiment(Path(name)))


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


SEED = {"set": ["seed_everything", "data.init_args.seed"], "values": 1}
TASKS = [
    {"class_path": "medclip_dcl.evaluation.ZeroShotClassification", "init_args": {"min_cases": 1}},
    {"class_path": "medclip_dcl.evaluation.Grounding", "init_args": {"examples": 0}},
    {"class_path": "medclip_dcl.evaluation.Retrieval"},
]
IMAGE, TEXT = "model.init_args.image_encoder", "model.init_args.text_encoder.init_args.pretrained"


def write_small(base: str, prepared: Path, bert: Path, axes: object = None, **settings: object) -> str:
    """A file over a packaged one: another set, small images, a seed; `settings` are of the whole file."""
    small = {
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.log_every_n_steps": 1,
        "trainer.callbacks": TASKS,
        TEXT: str(bert),
        "data.init_args.folder": str(prepared),
        "data.init_args.image_size": 64,
        "data.init_args.crop_size": 32,
        "data.init_args.batch_size": 8,
        "data.init_args.num_workers": 0,
        **settings,
    }
    axes = axes or {"objective": "base", "seed": SEED}
    content = {"base": base, "folder": "small", "settings": small, "axes": axes}
    Path("small.yaml").write_text(yaml.safe_dump(content))
    return "small.yaml"


@pytest.mark.slow
def test_corrections_on_mimic_cxr_run_small(embedded_set, small_bert, tmp_path, monkeypatch):
    """The experiment file itself, with another set, smaller encoders, three kept steps and a seed."""
    monkeypatch.chdir(tmp_path)
    patches = {"class_path": "tests.small.PatchRegions", "init_args": {"dim": 128}}
    steps = {"trainer.max_steps": 6, "kept_steps": [2, 4, 6], IMAGE: patches}
    file = write_small("mimic_cxr_corrections_3000", embedded_set, small_bert, **steps)
    shell("study")([file, "--workers", "1", "--import", "tests.small"])
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
    patches = {"class_path": "tests.small.PatchRegions", "init_args": {"dim": 128}}
    steps = {"trainer.max_steps": 6, "kept_steps": [2, 4, 6], IMAGE: patches, "data.init_args.image_size": 48}
    axes = {"objective": arms, "seed": SEED}
    best = {"validate": "validate/retrieval_recall", "step": "best"}
    outcomes = {
        "signed CNR": {"path": "grounding/cnr_signed", **best},
        "Recall": {"path": "retrieval/recall", **best},
    }
    steps |= {"checkpoint.monitor": "validate/retrieval_recall"}
    file = Path(write_small("mimic_cxr_labels", folder, small_bert, axes, **steps))
    changed = {"outcomes": outcomes, "hypotheses": {}, "plots": []}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changed))
    shell("study")([str(file), "--workers", "1", "--import", "tests.small"])
    table = pd.read_parquet("small/results.parquet").query("chosen != False")
    values = table.pivot(index="objective", columns="outcome", values="value")
    assert [*values.index] == sorted(arms) and values.notna().all(axis=None)
    for arm in arms:
        run = Path(f"small/runs/objective={arm},seed=0")
        is_labelled = arm.endswith("labels")
        assert ("train/label_loss" in pd.read_csv(run / "metrics.csv")) == is_labelled
        # Two of fourteen columns have both values, on 10 of 119 studies.
        assert load(run).image_text.label_findings == ("Pneumonia", "No Finding") * is_labelled


RESNET = {f"{IMAGE}.init_args.width": 8, f"{IMAGE}.init_args.weights": None}


@pytest.mark.slow
def test_table_1_runs_small(embedded_set, small_bert, tmp_path, monkeypatch):
    """Nine rows, by the jobs of an array; one row has the value of a search."""
    monkeypatch.chdir(tmp_path)
    chosen = Path("runs/search_text/chosen_remove_text.yaml")
    chosen.parent.mkdir(parents=True)
    chosen.write_text("model: {init_args: {negative_weights: {init_args: {threshold: 0.3}}}}")
    few = {"trainer.max_epochs": 1, "untrained": False}
    file = write_small("mimic_cxr_table1", embedded_set, small_bert, **RESNET, **few)
    for task in "01":
        shell("study")([file, "--task", task, "--tasks", "2"])
    table = pd.read_parquet("small/results.parquet")
    assert table["value"].notna().all() and len(table) == 9 * 7
    models = {
        row.objective: yaml.safe_load(str(row.config))["model"]["init_args"]
        for row in table.drop_duplicates("objective").itertuples()
    }
    for name, threshold in (("remove_text", 0.3), ("reweight_text", 0.0)):
        assert models[name]["negative_weights"]["init_args"] == {"threshold": threshold}
    assert {one["schedule"] for one in models.values()} == {"cosine"}
    shell("compare")(["small", "--baseline", "infonce 0"])
    rows = json.loads(Path("runs/comparison/comparison.json").read_text(encoding="utf-8"))["rows"]
    assert {*rows} == {f"{name} 0" for name in OBJECTIVES}


OBJECTIVES = ["biovil", "infonce", "remove_chex5", "resample_text", "remove_text", "reweight_text"]
OBJECTIVES += ["dcl_005", "dcl_010", "dcl_lm"]
LACKS = {
    "biovil": "weights do not fit config.json: missing ['cls.predictions.bias'",
    "infonce, dcl_005, dcl_010": "prompts: the data set does not label 'Gout'",
    "remove_chex5": "has no CheXpert label for any of 24 images",
    "resample_text, remove_text, reweight_text": "create embeddings with: medclip-dcl embed SET",
    "dcl_lm": "create scores with: medclip-dcl score SET",
}


@pytest.mark.slow
def test_what_rows_lack_is_named_before_any_trains(embedded_set, small_bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepared, bert = (shutil.copytree(one, Path(one.name)) for one in (embedded_set, small_bert))
    for name in ("log_p", "text_embedding"):
        shutil.rmtree(prepared / name)
    labels = PreparedSet(prepared).table("labels")
    labels.iloc[:, 1:] = float("nan")
    write_table(labels, prepared / "labels.parquet", "labels")
    weights = load_file(bert / "model.safetensors")
    save_file({name: x for name, x in weights.items() if "cls." not in name}, bert / "model.safetensors")
    file = write_small("mimic_cxr_table1", prepared, bert, prompts={"Gout": ["No gout.", "Gout."]}, **RESNET)
    with pytest.raises(SystemExit) as end:
        shell("study")([file])
    assert end.value.code == 2 and not Path("small").exists()
    lines = capsys.readouterr().err.split(" | ")
    assert [", ".join(re.findall(r"objective=(\w+)", line)) for line in lines] == [*LACKS]
    assert all(words in line for words, line in zip(LACKS.values(), lines, strict=True))


@pytest.mark.parametrize("outcome", ["AUC", pytest.param("Recall", marks=pytest.mark.slow)])
def test_a_search_without_validate_images_is_refused(outcome, small_set, small_bert, tmp_path, monkeypatch):
    """The AUC needs labelled ones, the recall any."""
    monkeypatch.chdir(tmp_path)
    prepared = PreparedSet(shutil.copytree(small_set, Path("set")))
    frames = {name: prepared.table(name) for name in ("images", "cases")}
    cases = frames["cases"]
    changed = {
        "AUC": ("cases", cases[(cases["use"] == "test") | (cases["label"] == 1)]),
        "Recall": ("images", frames["images"].replace({"use": {"validate": "train"}})),
    }
    name, frame = changed[outcome]
    axes = {"k": {"set": "model.init_args.class_probability.init_args.k", "values": [0.1]}, "seed": SEED}
    heads = {"data.init_args.features": None, "data.init_args.crop_size": 64}
    heads |= {"model.init_args.init_from": None, "model.init_args.frozen": False, **RESNET}
    file = Path(write_small("search_eta", prepared.folder, small_bert, axes, **heads))
    file.write_text(f"{file.read_text()}choose: {outcome}\n")
    check_cells(read_experiment(file), needs_sources=True)
    write_table(frame.reset_index(drop=True), prepared.folder / f"{name}.parquet", name)
    words = (
        "with and without a finding, set has none"
        if outcome == "AUC"
        else "needs validate images, set has none"
    )
    with pytest.raises(UserError, match=f"choose: validate/.* {words}"):
        check_cells(read_experiment(file), needs_sources=True)
