"""A search over a grid: the ranking of combinations and the configuration of the best."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from medclip_dcl.studies.grid_choice import ranking
from medclip_dcl.studies.grid_page import write_report
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.studies.grid_results import results_table
from tests.program import shell
from tests.studies.grids import write_grid
from tests.studies.test_grid_page import text_of

main = shell("study")

OUTCOMES = {"AUC": {"path": "validate/auc", "higher_is_better": True}}
BEST = "noise 1, rate fast"


@pytest.fixture
def search(tmp_path):
    """A search by the last validation of training: noise 1 with the fast rate is best, with seeds far apart."""
    file = write_grid(tmp_path, commands=["fit"], outcomes=OUTCOMES, plots=None, compare=None, choose="AUC")
    write_search(file)
    return file


def write_search(file):
    """Finished runs of a search."""
    for run in read_experiment(file).runs():
        auc = 0.1 * int(run.levels["seed"]) + 0.5 + 0.02 * (run.levels["noise"] == "1")
        auc += 0.01 * (run.levels["rate"] == "fast")
        run.folder.mkdir(parents=True)
        (run.folder / "fit.json").write_text(json.dumps({"epochs": 2, "steps": 6, "seconds": 1.0}))
        rows = f"step,train/loss,validate/auc\n1,0.3,\n2,,{auc - 0.2}\n3,0.2,\n4,,{auc}\n5,0.1,\n"
        (run.folder / "metrics.csv").write_text(rows)


def test_the_best_last_validation_is_chosen(search, capsys):
    main([str(search), "--report_only"])
    said = capsys.readouterr().out
    assert f"{BEST}: AUC 0.630, the best mean of 4 combinations" in said
    text = (search.parent / "grid/chosen.yaml").read_text()
    assert BEST in text.splitlines()[0]
    assert yaml.safe_load(text) == {
        "data": {"init_args": {"noise": 1}},
        "model": {"init_args": {"learning_rate": 0.2}},
    }


def test_the_best_at_each_level_is_chosen(search, capsys):
    given = yaml.safe_load(search.read_text())
    search.write_text(
        yaml.safe_dump(given | {"choose": {"outcome": "AUC", "for_each": "noise"}}, sort_keys=False)
    )
    experiment = read_experiment(search)
    worse = next(x for x in experiment.runs() if x.name == "noise=0.1,rate=fast,seed=0")
    (worse.folder / "metrics.csv").write_text("step,validate/auc\n4,0.1\n")
    main([str(search), "--report_only"])
    assert "the best mean of 2 combinations" in capsys.readouterr().out
    # The slow rate is the base's, which its level does not set.
    assert yaml.safe_load((experiment.folder / "chosen_0.1.yaml").read_text()) == {}
    fast = yaml.safe_load((experiment.folder / "chosen_1.yaml").read_text())
    assert fast == {"model": {"init_args": {"learning_rate": 0.2}}}
    page = text_of(experiment.folder / "report.html")
    assert "Choice by AUC ↑ at noise 0.1 mean minus the first rate slow" in page
    assert "Choice by AUC ↑ at noise 1 mean minus the first rate fast 0.630" in page
    (worse.folder / "fit.json").unlink()
    main([str(search), "--report_only"])
    assert "1 are missing" in capsys.readouterr().out
    assert [x.name for x in experiment.folder.glob("chosen*")] == ["chosen_1.yaml"]
    shutil.copy(experiment.folder / "chosen_1.yaml", experiment.folder / "chosen_first.yaml")
    search.write_text(yaml.safe_dump(given, sort_keys=False))
    main([str(search), "--report_only"])
    # Chosen at other levels; a copy is the user's.
    assert [x.name for x in experiment.folder.glob("chosen*")] == ["chosen_first.yaml"]


def test_the_choice_names_its_level(tmp_path):
    for noise in ("0.1", "1"):
        (tmp_path / f"rate_{noise}.yaml").write_text(f"model: {{init_args: {{learning_rate: {noise}}}}}")
    levels = {
        "slow": {"configs": ["rate_{noise}.yaml"], "settings": {"data.init_args.folder": "sets/{noise}"}},
    }
    axes = {
        "noise": {"levels": {"0.1": {}, "1": {}}},
        "rate": {"levels": levels},
        "seed": {"set": "seed_everything", "values": 1},
    }
    grid = write_grid(
        tmp_path,
        axes=axes,
        **{"commands": ["fit"], "outcomes": OUTCOMES, "plots": None, "compare": None},
        choose={"outcome": "AUC", "for_each": "noise"},
    )
    write_search(grid)
    main([str(grid), "--report_only"])
    for noise in ("0.1", "1"):
        assert yaml.safe_load((tmp_path / f"grid/chosen_{noise}.yaml").read_text()) == {
            "model": {"init_args": {"learning_rate": float(noise)}},
            "data": {"init_args": {"folder": f"sets/{noise}"}},
        }


def test_differences_from_the_best_are_paired(search):
    experiment = read_experiment(search)
    table = results_table(experiment)
    found = ranking(experiment, table)
    assert found["levels"].tolist()[0] == BEST
    assert found["mean_difference"].tolist()[1:] == pytest.approx([-0.01, -0.02, -0.03])
    page = text_of(write_report(experiment, table))
    assert f"Choice by AUC ↑ mean minus the first {BEST} 0.630" in page and "too good" in page


def test_nothing_is_chosen_of_an_unfinished_search(search, capsys):
    main([str(search), "--report_only"])
    experiment = read_experiment(search)
    missing = next(x for x in experiment.runs() if x.levels["noise"] == "0.1" and x.levels["seed"] == "1")
    (missing.folder / "fit.json").unlink()
    main([str(search), "--report_only"])
    assert "1 are missing" in capsys.readouterr().out
    assert not (experiment.folder / "chosen.yaml").exists(), "a choice of before would pass for that of all"
    found = ranking(experiment, results_table(experiment))["n_difference"]
    assert sorted(found.dropna()) == [2, 3, 3]
    assert text_of(experiment.folder / "report.html").count("n = 2") >= 2


def test_a_search_without_numbers_chooses_nothing(search, capsys):
    for run in read_experiment(search).runs():
        # The last validation counts, not the last number.
        (run.folder / "metrics.csv").write_text("step,validate/auc,validate/loss\n2,0.7,1.0\n4,nan,1.0\n")
    main([str(search), "--report_only"])
    said = capsys.readouterr().out
    assert "0 are missing, 12 have no AUC" in said and "report: " in said
    assert not (search.parent / "grid/chosen.yaml").exists()
