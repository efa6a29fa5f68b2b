"""A grid runs through the command line, keeps what is done, and goes on where it was stopped."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from medclip_dcl.common.command_line import in_words
from medclip_dcl.common.errors import UserError
from medclip_dcl.studies import grid_workers as workers
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import claim_folder, results_table, write_table
from medclip_dcl.studies.one_run import Run, error_of, run_one
from tests.processes import FRESH
from tests.studies.grids import MODULE, SETTINGS, main, write_grid

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"noise": {"set": "data.init_args.noise", "values": [0.1]}}
RATE = {"rate": {"levels": {"slow": None, "fast": {"configs": ["configs/fast.yaml"]}}}}
SEED = {"seed": {"set": ["seed_everything", "data.init_args.seed"], "values": 2}}
NO_FIGURES = {"plots": None, "outcomes": {"error": "tiny/error"}}


@pytest.fixture(autouse=True)
def _quick_workers(monkeypatch):
    """Workers are forked from a process that has imported Lightning."""
    monkeypatch.setattr(workers, "CONTEXT", FRESH)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the experiment file of a finished grid of four runs; test_report.py draws the plots."""
    folder = tmp_path_factory.mktemp("finished")
    file = write_grid(folder, axes=SMALL | RATE | SEED, plots=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "CONTEXT", FRESH)
        main([str(file), "--workers", "2"])
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """A copy of the finished grid under the same path as seen from its file."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    file = folder / "grid.yaml"
    file.write_text(file.read_text().replace(str(finished), str(folder)))
    return folder


def refused(capsys, *arguments: str) -> str:
    """Standard error of the command, which ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(x): (x.stat().st_ino, x.stat().st_mtime_ns) for x in folder.glob("runs/*/*.json")}


def test_a_row_for_each_cell_and_outcome(finished):
    table = pd.read_parquet(finished / "grid/results.parquet")
    assert len(table) == 4 * 2 and table["noise"].dtype == "float64" and table["seed"].dtype == "int64"
    records: list[dict[str, Any]] = table.to_dict("records")  # type: ignore[assignment]
    for row in records:
        run = finished / "grid/runs" / row["run"]
        metrics = json.loads((run / "results.json").read_text())["metrics"]
        values = {"error": metrics["tiny"]["error"], "slope": metrics["slope"]["1.0"]["value"]}
        assert row["value"] == values[row["outcome"]]
        assert row["config"] == (run / "config.yaml").read_text()
        config = yaml.safe_load(row["config"])
        assert config["model"]["init_args"]["learning_rate"] == {"slow": 0.05, "fast": 0.2}[row["rate"]]
        assert config["seed_everything"] == config["data"]["init_args"]["seed"] == row["seed"]
        facts = {"epochs": 2, "steps": 6, "dataset": "points", "precision": "32-true"}
        assert facts.items() <= row.items()
    assert table["weights"].nunique() == 4


def test_paired_cells_start_from_the_same_weights(finished, tmp_path):
    """In a process of its own a run gives the same numbers as in a worker after others."""
    run = read_experiment(finished / "grid.yaml").runs()[-1]
    alone = Run(run.levels, tmp_path / "alone", run.arguments, (f"--import={MODULE}",))
    assert run_one(alone, ["fit", "test"]).state == "done"
    results = [json.loads((x.folder / "results.json").read_text()) for x in (run, alone)]
    assert results[0]["metrics"] == results[1]["metrics"]


def test_levels_are_added_to_a_finished_grid(copy, capsys):
    before = contents(copy / "grid")
    assert len(before) == 12
    more = SMALL | RATE | {"seed": SEED["seed"] | {"values": 3}}
    file = write_grid(copy, axes=more, plots=None)
    # The second run of the first seed is done, the third seed's too.
    main([str(file), "--task", "1", "--tasks", "5"])
    assert contents(copy / "grid") == before and "2 runs, 1 of them done" not in capsys.readouterr().out
    main([str(file), "--task", "5", "--tasks", "6"])
    after = contents(copy / "grid")
    assert before.items() < after.items() and len(after) == 15
    assert (copy / "grid/runs/noise=0.1,rate=fast,seed=2/results.json").is_file()
    # With fewer seeds again, those that are there are left out, and nothing is lost.
    main([str(write_grid(copy, axes=SMALL | RATE | SEED, plots=None)), "--report_only"])
    assert contents(copy / "grid") == after
    assert sorted(pd.read_parquet(copy / "grid/results.parquet")["seed"].unique()) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": SETTINGS | {"trainer.max_epochs": 3}}, "trainer.max_epochs;"),
        ({"axes": SMALL | RATE | {"order": SEED["seed"]}, "pairs": "order"}, "axes (noise, rate, seed);"),
        ({"axes": RATE | SMALL | SEED}, "axes (noise, rate, seed);"),
        ({"commands": ["fit", "validate", "test"]}, "commands;"),
    ],
)
def test_a_folder_of_another_grid_is_refused(changes, words, copy, capsys):
    before = contents(copy / "grid")
    file = write_grid(copy, **{"axes": SMALL | RATE | SEED, **changes, **NO_FIGURES})
    for more in ([], ["--report_only"]):
        said = refused(capsys, str(file), *more)
        assert f"holds runs of another grid: experiment.json differs in {words}" in said
    assert contents(copy / "grid") == before


def test_another_experiments_results_are_not_overwritten(tmp_path):
    experiment = read_experiment(write_grid(tmp_path))
    experiment.folder.mkdir()
    table = experiment.folder / "results.parquet"
    table.write_bytes(b"of another")
    with pytest.raises(UserError, match="results.parquet is not a readable Parquet file"):
        claim_folder(experiment)
    pd.DataFrame({"of": ["another"]}).to_parquet(table)
    with pytest.raises(UserError, match="results.parquet holds results whose runs are not beside it"):
        claim_folder(experiment)
    table.unlink()
    main([str(experiment.file), "--report_only"])  # an empty table, before the grid is run
    claim_folder(experiment)


def test_callbacks_under_changed_arguments_count(tmp_path):
    evaluation = "medclip_dcl.unimodal.UnimodalEvaluation"
    own = [{"class_path": evaluation, "init_args": {"embedding_map": True}}]
    file = write_grid(tmp_path, settings=SETTINGS | {"trainer.callbacks": own}, **NO_FIGURES)
    base = tmp_path / "configs/base.yaml"
    whole = yaml.safe_load(base.read_text())

    def write_base(k: int) -> None:
        callback = {"class_path": evaluation, "init_args": {"k": k, "embedding_map": False}}
        base.write_text(yaml.safe_dump(whole | {"trainer": {"callbacks": [callback]}}))

    write_base(7)
    claim_folder(read_experiment(file))
    write_base(8)
    with pytest.raises(UserError, match=r"differs in trainer.callbacks.0.init_args.k;"):
        claim_folder(read_experiment(file))


@pytest.mark.slow
def test_a_file_edited_meanwhile_stops_the_grid(tmp_path, monkeypatch, capsys):
    """Runs that start after the edit would have other settings than those before."""
    file, fast = write_grid(tmp_path, axes=SMALL | RATE | SEED, **NO_FIGURES), tmp_path / "configs/fast.yaml"

    def edit(experiment):
        table = write_table(experiment)
        if len(table):
            fast.write_text("model: {init_args: {learning_rate: 0.3}}")
        return table

    monkeypatch.setattr("medclip_dcl.studies.study.write_table", edit)
    assert "differs in rate=fast: model.init_args.learning_rate; restore" in refused(capsys, str(file))
    assert len(results_table(read_experiment(file))) == 1


def test_one_run_of_unknown_settings_are_refused(copy):
    (copy / "grid/experiment.json").unlink()
    with pytest.raises(UserError, match=r"unknown settings, such as noise=0.1,rate=fast,seed=0, but no exp"):
        claim_folder(read_experiment(copy / "grid.yaml"))


def test_a_missing_outcome_is_named(copy, capsys):
    file = write_grid(copy, axes=SMALL | RATE | SEED, outcomes={"error": "tiny/eror"}, plots=None)
    known = "slope/1.0/value, tiny/error, tiny/undefined"
    assert f"has no metric tiny/eror; it has {known}" in refused(capsys, str(file), "--report_only")
    # One that is undefined is no mistake.
    file = write_grid(copy, axes=SMALL | RATE | SEED, outcomes={"none": "tiny/undefined"}, plots=None)
    table = results_table(read_experiment(file))
    assert len(table) == 4 and table["value"].isna().all()


@pytest.mark.slow
def test_failed_cells_are_named_and_others_continue(tmp_path, capsys):
    ends: dict[str, Any] = {
        name: {"settings": {"model.init_args.ends_by": name}} for name in ("raising", "dying", "itself")
    }
    grid = {"pairs": None, "compare": None, **NO_FIGURES}
    file = write_grid(tmp_path, axes={"end": {"levels": ends}}, **grid)
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 1
    output = capsys.readouterr().out
    assert "end=raising FAILED: RuntimeError: the slope" in output
    assert "end=dying FAILED: its process ended with signal 9; out of memory?" in output
    assert "end=itself done" in output
    runs = {run.levels["end"]: run for run in read_experiment(file).runs()}
    assert "is too steep" in (runs["raising"].folder / "log.txt").read_text()
    page = (tmp_path / "grid/report.html").read_text()
    assert "1 of 3" in page and "RuntimeError: the slope" in page
    # Its error is forgotten when it is begun again.
    assert run_one(runs["raising"], ["fit", "test"]).state == "failed" and error_of(runs["raising"])


@pytest.mark.slow
def test_a_device_is_for_runs_without_one(copy, capsys, monkeypatch):
    """A run on another device is the same run: its name and identity stay, and what is finished is kept."""
    before = contents(copy / "grid")
    main([str(copy / "grid.yaml"), "--device", "cpu"])
    said = capsys.readouterr().out
    assert "--device cpu is not used where trainer.accelerator is set: cpu by trainer.accelerator=cpu" in said
    file = copy / "grid.yaml"
    file.write_text(file.read_text().replace("trainer.accelerator: cpu", "trainer.accelerator: auto"))
    (copy / "grid/experiment.json").write_text(
        (copy / "grid/experiment.json").read_text().replace('"accelerator": "cpu"', '"accelerator": "auto"')
    )
    one = copy / "grid/runs/noise=0.1,rate=slow,seed=0"
    (one / "results.json").unlink()
    main([str(file), "--device", "cpu"])
    said = capsys.readouterr().out
    assert "is not used" not in said and "4 runs, 3 of them done" in said
    words = [line for line in (one / "log.txt").read_text().splitlines() if line.startswith("medclip-dcl")]
    assert "--trainer.accelerator=cpu --trainer.devices=1" in words[-1] and " test " in words[-1]
    assert contents(copy / "grid").keys() == before.keys()
    monkeypatch.setattr("torch.empty", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no driver")))
    assert "device cuda:7 cannot be used (no driver)" in refused(capsys, str(file), "--device", "cuda:7")


def test_a_cell_that_another_command_runs_is_skipped(copy, capsys):
    (copy / "grid/runs/noise=0.1,rate=slow,seed=0/results.json").unlink()
    with (copy / "grid/runs/noise=0.1,rate=slow,seed=0/.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        main([str(copy / "grid.yaml")])
    output = capsys.readouterr().out
    assert "noise=0.1,rate=slow,seed=0 is trained by another command; 3 of 4 done" in output
    assert "1 runs are missing" in (copy / "grid/report.html").read_text()


def test_checkpoints_are_deleted_when_asked(copy):
    runs = read_experiment(copy / "grid.yaml").runs()
    assert all((run.folder / "checkpoints/last.ckpt").is_file() for run in runs)
    (copy / "grid.yaml").write_text((copy / "grid.yaml").read_text() + "checkpoints: delete\n")
    main([str(copy / "grid.yaml")])
    assert not any((run.folder / "checkpoints").exists() for run in runs)
    assert len(results_table(read_experiment(copy / "grid.yaml"))) == 8


@pytest.mark.parametrize("shares", [False, True])
def test_a_study_shares_what_its_runs_were_told_to(shares, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(f"share_patient_data: {shares}")
    given: list[list[str]] = []
    monkeypatch.setattr("medclip_dcl.command.cli.main", lambda words, are_typed: given.append(words))
    run_one(Run({}, tmp_path, ("--config=own.yaml",)), ["fit", "test"])
    assert ["--share_patient_data=true" in words for words in given] == [False, shares]


def test_a_duration_in_words():
    assert [in_words(x) for x in (7.4, 150.0, 7500.0, 200000.0)] == ["7 s", "2 min", "2 h 05 min", "2 d 7 h"]
