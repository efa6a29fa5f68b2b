"""Packaged configurations: names are looked up where no file is, a run keeps the texts of its prompts, `configs`."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from medclip_dcl.__main__ import main
from medclip_dcl.common import packaged
from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.packaged import CONFIGS, find_configuration, packaged_files
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import claim_folder
from tests.command.small_runs import CLASSIFICATION, refused, small

CHEXPERT14 = yaml.safe_load((CONFIGS / "prompts/chexpert14.yaml").read_text())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_file_wins_over_a_name_and_a_folder_does_not(tmp_path, capsys):
    (tmp_path / "objective/dcl_lm").mkdir(parents=True)
    found = find_configuration("objective/dcl_lm", "", "--config")
    assert found.path == CONFIGS / "objective/dcl_lm.yaml"
    assert found.origin == f"objective/dcl_lm: packaged with medclip_dcl {version('medclip_dcl')}"
    Path("demo").write_text("trainer: {max_epochs: 1}")
    assert find_configuration("demo", "", "--config") == (Path("demo"), "")
    (tmp_path / "objective/config.yaml").touch()
    with pytest.raises(MissingFileError, match="such as objective/config.yaml,"):
        find_configuration("objective", "", "--config")


@pytest.mark.parametrize(
    ("given", "kind", "near"),
    [
        ("dcl_lm", "", "objective/dcl_lm"),
        ("configs/mimic_cxr.yaml", "", "did you mean mimic_cxr?"),
        ("tabel1", "experiments", "table1"),
        ("digits", "prompts", "found digits$"),
        ("Public", "prompts", "did you mean public?"),
        ("../objective/dcl_lm", "prompts", "found ../objective/dcl_lm$"),
    ],
)
def test_an_unknown_name_lists_near_ones(given, kind, near):
    with pytest.raises(MissingFileError, match=near.replace("?", r"\?")):
        find_configuration(given, kind, "--config")


@pytest.mark.slow
def test_a_run_keeps_the_texts_of_its_prompts(small_set, small_bert, undrawn, tmp_path, monkeypatch, capsys):
    words = small(tmp_path / "run", small_set, small_bert, *CLASSIFICATION, "--trainer.max_epochs", "1")
    main(["fit", *words, "--prompts", "chexpert14"])
    file = tmp_path / "run/config.yaml"
    lines = [f"# {name}: packaged with medclip_dcl {version('medclip_dcl')}" for name in
             ("demo", "objective/dcl_lm", "chexpert14")]  # fmt: skip
    assert file.read_text().splitlines()[:3] == lines
    assert yaml.safe_load(file.read_text())["prompts"] == CHEXPERT14
    # As in a later version.
    shutil.copytree(CONFIGS, tmp_path / "later")
    later = CHEXPERT14 | {"Edema": ["Dry", "Wet"]}
    (tmp_path / "later/prompts/chexpert14.yaml").write_text(yaml.safe_dump(later))
    monkeypatch.setattr(packaged, "CONFIGS", tmp_path / "later")
    main(["test", "--config", str(file), "--untrained", "false"])
    results = json.loads((tmp_path / "run/results.json").read_text())
    found = results["protocol"]["classification"]["prompts"]["Edema"]
    assert [found["negative"], found["positive"]] == CHEXPERT14["Edema"]
    assert "differs in prompts.Edema" in refused(capsys, ["fit", *words, "--prompts", "chexpert14"])
    main(["fit", "--config", str(file), "--trainer.max_epochs", "2"])
    assert file.read_text().splitlines()[:3] == lines


def test_a_copied_experiment_names_packaged_files(capsys):
    main(["configs", "experiments/table1_settings", "--output", "mine.yaml"])
    capsys.readouterr()
    mine, own = read_experiment(Path("mine.yaml")), read_experiment(Path("table1_settings"))
    assert [run.arguments for run in mine.runs()[:3]] == [run.arguments for run in own.runs()[:3]]
    assert "--config=objective/infonce" in mine.runs()[0].arguments
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["table1", "table1_settings", "table1"]


def test_each_packaged_file_is_listed_and_copied(capsys):
    main(["configs"])
    listed = {line.split()[0]: line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines()
              if line.startswith("  ")}  # fmt: skip
    assert listed.keys() == packaged_files().keys() and len(listed) > 60
    main(["configs", "prompts/public"])
    assert capsys.readouterr().out == (CONFIGS / "prompts/public.yaml").read_text()
    main(["configs", "slurm/train.sbatch", "--output", "train.sbatch"])
    assert subprocess.run(["bash", "-n", "train.sbatch"], check=True).returncode == 0
    for words in (["slurm/train.sbatch", "--output", "train.sbatch"], ["--output", "new"], ["mimic"]):
        with pytest.raises(SystemExit):
            main(["configs", *words])
    said = capsys.readouterr().err
    assert "train.sbatch exists" in said and "expected a NAME" in said and "mimic_cxr" in said


def test_a_grid_keeps_the_texts_of_its_prompts(tmp_path, monkeypatch):
    callback = {"class_path": "medclip_dcl.evaluation.Localisation", "init_args": {"prompts": "chexpert14"}}
    grid = {"folder": "runs/grid", "configs": ["demo"], "settings": {"trainer.callbacks": [callback]},
            "axes": {"seed": {"set": "seed_everything", "values": 2}}}  # fmt: skip
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    claim_folder(experiment := read_experiment(Path("grid.yaml")))
    saved = json.loads(Path("runs/grid/experiment.json").read_text())
    assert saved["settings"]["trainer"]["callbacks"][0]["init_args"]["prompts"] == CHEXPERT14
    claim_folder(experiment)
    shutil.copytree(CONFIGS, tmp_path / "later")
    later = CHEXPERT14 | {"Edema": ["Dry", "Wet"]}
    (tmp_path / "later/prompts/chexpert14.yaml").write_text(yaml.safe_dump(later))
    monkeypatch.setattr(packaged, "CONFIGS", tmp_path / "later")
    with pytest.raises(UserError, match="differs in trainer.callbacks.0.init_args.prompts.Edema"):
        claim_folder(experiment)


def test_a_packaged_grid_is_changed_in_a_copy():
    Path("runs/digits_r/runs/a").mkdir(parents=True)
    Path("runs/digits_r/runs/a/config.yaml").touch()
    with pytest.raises(UserError, match="configs experiments/digits --output FILE"):
        claim_folder(read_experiment(Path("digits")))
