"""The grid of an experiment file, and one line for each mistake in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from medclip_dcl.common.errors import UserError
from medclip_dcl.studies.grid import merged
from medclip_dcl.studies.grid_plan import check_cells, read_experiment
from medclip_dcl.studies.grid_results import claim_folder
from tests.program import shell
from tests.studies.grids import MODULE, SETTINGS, write_grid

main = shell("study")

SEED = {"set": "seed_everything", "values": 2}
LINES = {"kind": "lines", "name": "a", "x": "noise", "y": "error"}


def test_the_grid_is_the_product_of_its_axes(tmp_path):
    experiment = read_experiment(write_grid(tmp_path))
    runs = experiment.runs()
    assert [run.name for run in runs[:5]] == [
        "noise=0.1,rate=slow,seed=0",
        "noise=0.1,rate=fast,seed=0",
        "noise=1,rate=slow,seed=0",
        "noise=1,rate=fast,seed=0",
        "noise=0.1,rate=slow,seed=1",
    ]
    assert len(runs) == len({run.folder for run in runs}) == 12
    assert runs[5].folder == tmp_path / "grid/runs/noise=0.1,rate=fast,seed=1"
    assert runs[5].arguments == (
        f"--config={tmp_path}/configs/base.yaml",
        *(f"--{key}={str(value).lower() if value is False else value}" for key, value in SETTINGS.items()),
        "--data.init_args.noise=0.1",
        f"--config={tmp_path}/configs/fast.yaml",
        "--seed_everything=1",
        "--data.init_args.seed=1",
    )
    covering = experiment.covering_runs()
    assert len(covering) == 3
    for axis, levels in experiment.axes.items():
        assert {run.levels[axis] for run in covering} == {level.name for level in levels}


def axes(**changes):
    """The axes of a grid, some of them changed."""
    plain = {
        "noise": {"set": "data.init_args.noise", "values": [1]},
        "rate": {"levels": {"slow": {}}},
        "seed": SEED,
    }
    return {"axes": {name: axis for name, axis in (plain | changes).items() if axis is not None}}


NO_GRID = {"compare": None, "plots": None, "commands": ["fit"]}
VALIDATED = {"outcomes": {"error": {"path": "validate/error", "higher_is_better": False}}}
ON_X = LINES | {"where": {"noise": 1}}
RISING = {"error": {"path": "tiny/error", "higher_is_better": True}}
MISTAKES = [
    # Keys and types.
    ({"plot": []}, "plot: there is no such key; did you mean plots?"),
    ({"axes": None}, "axes is missing"),
    ({"commands": ["fit", "tets"]}, "commands.1: expected fit, validate, test, predict, found tets; did"),
    ({"pairs": ["seed"]}, "pairs: expected str, found ['seed']"),
    ({"patients": "yes"}, "patients: expected bool, found 'yes'"),
    ({"outcomes": {"error": {"path": "a", "unit": "%"}}}, "outcomes.error.unit: there is no such key"),
    ({"tables": [{"title": "a"}]}, "tables.0.outcomes is missing"),
    ({"choose": {"for_each": "noise"}}, "choose.outcome is missing"),
    # Axes.
    (axes(rate={"levels": {1: {}, "1": {}}}), "two keys are the same text: 1, '1'"),
    (axes(seed=SEED | {"values": []}), "axes.seed: expected set and values, or levels"),
    (axes(seed=SEED | {"values": [1, 1.0]}), "axes.seed: '1' cannot name a folder of its own"),
    (axes(seed=SEED | {"values": ["a/b"]}), "axes.seed: 'a/b' cannot name a folder"),
    (axes(order=SEED), "the axes seed and order both set seed_everything"),
    (axes(epochs={"set": "trainer.max_epochs", "values": 2}), "axes.epochs: this is a column of results.parquet"),
    ({"settings": {"trainer.default_root_dir": "a/{noize}"}}, "there is no axis noize; did you mean noise?"),
    ({"pairs": "seeds"}, "pairs: there is no axis seeds; did you mean seed?"),
    ({"compare": {"axis": "seed", "reference": 0}}, "compare.axis: there is no axis seed (there are: noise, rate)"),
    ({"compare": {"axis": "rate", "reference": "CL"}}, "compare.reference: there is no level CL (there are: slow"),
    # Outcomes, choices and tables.
    ({"commands": ["fit"]}, "outcomes are read from results.json"),
    ({"outcomes": {"error": "clasification/by_finding/Edema/auc"}}, "did you mean classification/by_finding/*/auc?"),
    ({"outcomes": {"error": "validate/acu"}}, "did you mean validate/auc?"),
    ({"outcomes": {"error": {"path": ["tiny/error", "validate/loss"]}}}, "error.path: expected paths of the test"),
    ({**NO_GRID, **VALIDATED, "patients": True}, "patients: expected an outcome of the test"),
    ({"choose": "eror"}, "choose: there is no outcome eror; did you mean error?"),
    ({"choose": "error", "outcomes": {"error": "validate/error"}}, "choose: expected an outcome of the validation"),
    (
        {"choose": "error", "outcomes": {"error": {"path": "train/loss", "higher_is_better": False}}},
        "choose: expected an outcome of the validation",
    ),
    ({**NO_GRID, **VALIDATED, "choose": {"outcome": "error", "for_each": "rat"}}, "for_each: there is no axis rat"),
    (
        axes(rate={"levels": {"slow": {"settings": {"data.init_args.folder": "{seed}"}}}})
        | {**NO_GRID, **VALIDATED, "choose": "error"},
        "choose: the settings of rate slow name seed, over which is averaged",
    ),
    (
        {**NO_GRID, **VALIDATED, "axes": {"seed": SEED}, "choose": "error"},
        "choose: there is no axis to choose on beside seed",
    ),
    ({"learning_curve": {"axis": "noise", "outcome": "error"}}, "learning_curve.outcome: expected one of the test"),
    (
        {"learning_curve": {"axis": "noise", "outcome": "error"}, "outcomes": RISING, "pairs": None, "plots": None},
        "learning_curve: expected pairs",
    ),
    (
        {"learning_curve": {"axis": "noise", "outcome": "error"}, "outcomes": RISING, "plots": None},
        "learning_curve.axis: expected values of label_fraction, the last twice another, found 0.1, 1",
    ),
    ({"tables": [{"title": "a", "outcomes": ["error"]}]}, "tables.0.where: choose a level of noise"),
    # Plots.
    ({"plots": [LINES | {"kind": "line"}]}, "plots.0.kind: expected lines, differences, map, found line; did you"),
    ({"plots": [LINES | {"x": "nois"}]}, "plots.0.x: there is no axis nois; did you mean noise?"),
    ({"plots": [ON_X | {"x": {"label": "x", "levels": {"slow": 0}}, "log": True}]}, "above 0 on x, found 0"),
    ({"plots": [LINES | {"y": []}]}, "plots.0.y is missing"),
    ({"plots": [LINES | {"where": {"noise": 3}}]}, "where.noise: there is no level 3"),
    ({"plots": [LINES | {"x": {"label": "x", "outcomes": {"error": 1}}}]}, "plots.0.where: choose a level"),
    ({"plots": [LINES | {"x": {"label": "x", "levels": {"slw": 1}}}]}, "no compared level slw; did you mean slow?"),
    ({"plots": [LINES | {"across": ["fast"]}]}, "plots.0: expected across with levels as x"),
    ({"plots": [LINES | {"kind": "differences", "x": {"label": "x", "levels": {"slow": 1}}}]}, "differences need"),
    ({"plots": [LINES | {"kind": "map"}]}, "plots.0: expected name, title and where alone for a map"),
    ({"plots": [ON_X | {"name": "../a"}]}, "plots.0.name: '../a' cannot name a file"),
    ({"plots": [LINES, LINES]}, "plots: two have the same name"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_named_in_one_line(changes, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(write_grid(tmp_path, **changes))])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("medclip-dcl study: error: ")
    assert words in line and "grid.yaml" in line


def test_a_grid_takes_keys_of_its_base(tmp_path):
    base = read_experiment(write_grid(tmp_path))
    file = tmp_path / "other.yaml"
    given = {"base": "grid.yaml", "folder": str(tmp_path / "other"), "settings": {"trainer.max_epochs": 5}}
    axes = {"size": {"set": "data.init_args.size", "values": [2]}, "rate": ["slow"], "seed": "base"}
    file.write_text(yaml.safe_dump(given | {"axes": axes, "plots": []}, sort_keys=False))
    found = read_experiment(file)
    assert list(found.axes) == ["size", "rate", "seed"] and found.axes["seed"] == base.axes["seed"]
    assert found.axes["rate"] == base.axes["rate"][:1]
    assert found.arguments == tuple(
        argument.replace("max_epochs=2", "max_epochs=5") for argument in base.arguments
    )
    assert (found.folder, found.pairs, found.outcomes) == (tmp_path / "other", "seed", base.outcomes)
    assert [one.name for one in found.files] == ["other.yaml", "grid.yaml"] and not found.plots


def test_bases_have_bases_and_levels_may_change(tmp_path):
    base = read_experiment(write_grid(tmp_path))
    levels = {"slow": {"settings": {"data.init_args.size": 2}}, "own": {}}
    third = {"base": "other.yaml", "axes": {"rate": {"base": True, "levels": levels}}, "plots": []}
    other = {"base": "grid.yaml", "folder": str(tmp_path / "other"), "pairs": None}
    for name, given in {"other.yaml": other, "third.yaml": third}.items():
        (tmp_path / name).write_text(yaml.safe_dump(given))
    found = read_experiment(tmp_path / "third.yaml")
    assert (found.folder, found.pairs) == (tmp_path / "other", None)
    slow, fast, own = found.axes["rate"]
    assert slow.arguments == ("--data.init_args.size=2",) and own.arguments == ()
    assert fast == base.axes["rate"][1]
    assert [one.name for one in found.files] == ["third.yaml", "other.yaml", "grid.yaml"]


ELSEWHERE = "base: expected the name of another file in the same folder"
BASE_MISTAKES = [
    ({"base": "../grid.yaml"}, ELSEWHERE),
    ({"base": "circle.yaml"}, f"circle.yaml: {ELSEWHERE}"),
    ({"base": "absent.yaml"}, "base: expected a file or"),
    ({"bas": "grid.yaml"}, "other.yaml: bas: there is no such key; did you mean base?"),
    ({"base": "wrong.yaml"}, "wrong.yaml: foldr: there is no such key"),
    ({"axes": {"size": "base"}}, "other.yaml: axes: there is no axis of the base size (there are: noise"),
    ({"axes": {"rate": ["slw"]}}, "axes.rate: there is no level of the base slw; did you mean slow?"),
    (
        {"axes": {"rate": {"base": True, "levels": {}, "values": [1]}}},
        "axes.rate: expected set and values, or levels",
    ),
    ({"axes": {"rate": {"base": "slow"}}}, "axes.rate.base: there is no such key"),
]


@pytest.mark.parametrize(("changes", "words"), BASE_MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_in_a_grid_over_another(changes, words, tmp_path):
    write_grid(tmp_path)
    (tmp_path / "circle.yaml").write_text("base: other.yaml")
    (tmp_path / "wrong.yaml").write_text("foldr: a")
    base = {} if "bas" in changes else {"base": "grid.yaml"}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(base | changes))
    with pytest.raises(UserError, match=re.escape(words)):
        read_experiment(tmp_path / "other.yaml")


def write_rates(folder, rates):
    """A configuration file for each level of noise."""
    for name, rate in rates.items():
        (folder / f"rate_{name}.yaml").write_text(f"model: {{init_args: {{learning_rate: {rate}}}}}")


def grid_of_rates(folder, *noise, **own):
    """A grid in which a level depends on the axis noise."""
    changed = axes(noise={"levels": {name: {} for name in noise}}, rate={"levels": {"slow": {}, "own": own}})
    return write_grid(folder, plots=None, **changed)


def test_another_axis_may_be_part_of_a_setting(tmp_path):
    write_rates(tmp_path, {"0.1": 0.3, "1": 0.4})
    own = {"configs": ["rate_{noise}.yaml"], "settings": {"data.init_args.folder": "{noise}/set"}}
    experiment = read_experiment(grid_of_rates(tmp_path, "0.1", "1", **own))
    found = [run.arguments[-3:-1] for run in experiment.runs() if run.name.startswith("noise=1,rate=own")]
    assert found == [(f"--config={tmp_path}/rate_1.yaml", "--data.init_args.folder=1/set")] * 2
    # Each file counts by its content.
    assert {
        name: settings["model"]["init_args"]["learning_rate"]
        for name, settings in experiment.identity()["axes"]["rate"].items()
        if name != "slow"
    } == {"own at noise=0.1": 0.3, "own at noise=1": 0.4}
    write_rates(tmp_path, {"own": 0.5})
    experiment = read_experiment(grid_of_rates(tmp_path, "1", configs=["rate_{rate}.yaml"]))
    assert experiment.identity()["axes"]["rate"]["own"] == {"model": {"init_args": {"learning_rate": 0.5}}}
    (tmp_path / "rate_own.yaml").unlink()
    with pytest.raises(UserError, match=r"configs: expected a file .*rate_own\.yaml"):
        read_experiment(tmp_path / "grid.yaml").identity()


def test_files_by_level_identify_a_folder(tmp_path):
    write_rates(tmp_path, {"0.1": 0.3, "1": 0.3, "2": 0.3})
    own = {"configs": ["rate_{noise}.yaml"]}
    claim_folder(read_experiment(grid_of_rates(tmp_path, "0.1", "1", **own)))
    claim_folder(read_experiment(grid_of_rates(tmp_path, "0.1", "1", "2", **own)))
    for changed in ({"configs": ["rate_1.yaml"]}, {"configs": ["rate_{seed}.yaml"]}):
        write_rates(tmp_path, {"0": 0.3})
        with pytest.raises(UserError, match=r"differs in .*rate=own: configs"):
            claim_folder(read_experiment(grid_of_rates(tmp_path, "0.1", "1", **changed)))
    write_rates(tmp_path, {"1": 0.5})
    with pytest.raises(UserError, match="rate=own at noise=1: model.init_args.learning_rate"):
        claim_folder(read_experiment(grid_of_rates(tmp_path, "0.1", "1", **own)))


def test_an_axis_of_numbers_and_null_has_names(tmp_path):
    noise = {"set": "data.init_args.noise", "values": [0.5, None]}
    file = write_grid(tmp_path, axes={"noise": noise}, pairs=None, compare=None, plots=None)
    assert [level.value for level in read_experiment(file).axes["noise"]] == ["0.5", "null"]


def test_null_of_a_class_within_a_class_is_checked_as_it_is_run(tmp_path):
    weights = "model.init_args.negative_weights.init_args."
    content = {
        "folder": "x",
        "configs": ["demo", "objective/ranked_by_text"],
        "settings": {f"{weights}mean_share": None, f"{weights}c": 1.0},
        "axes": {"seed": {"set": "seed_everything", "values": 1}},
        "outcomes": {"auc": "classification/auc"},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    check_cells(read_experiment(tmp_path / "x.yaml"))


def test_an_optional_configuration_is_taken_where_it_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    level = {"optional_configs": "found/chosen.yaml", "settings": {"model.init_args.ends_by": "itself"}}
    file = write_grid(tmp_path, **axes(rate={"levels": {"slow": {}, "fast": level}}), plots=None)
    claim_folder(read_experiment(file))
    without = read_experiment(file)
    assert not any("chosen" in one for one in without.runs()[1].arguments)
    assert without.optional == ("rate fast: found/chosen.yaml does not exist: its other settings stay",)
    (tmp_path / "found").mkdir()
    Path("found/chosen.yaml").write_text("model: {init_args: {learning_rate: 0.3}}")
    taken = read_experiment(file)
    assert taken.optional == ("rate fast: found/chosen.yaml",)
    assert merged(taken.runs()[1].arguments)["model"]["init_args"]["learning_rate"] == 0.3
    # A level of the search and one of the objective's own file are not mixed.
    with pytest.raises(UserError, match="differs in rate=fast: model.init_args.learning_rate;"):
        claim_folder(taken)


def test_arguments_of_the_command(tmp_path, capsys):
    file = str(write_grid(tmp_path))
    (tmp_path / "a.yaml").write_text("a: [")
    for arguments, words in [
        ([str(tmp_path / "absent.yaml")], "FILE: expected a file or"),
        ([str(tmp_path / "a.yaml")], "is not readable YAML"),
        (
            [file, "--task", "3", "--tasks", "3"],
            "--task counts from 0: expected less than --tasks 3, found 3",
        ),
        ([file, "--workers", "0"], "--workers: '0': expected a whole number of at least 1"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_wrong_setting_is_found_before_anything_runs(tmp_path):
    fast = {"settings": {"model.init_args.learning_rat": 3}}
    misspelled = axes(rate={"levels": {"slow": {}, "fast": fast}}) | {"plots": None}
    for changes, words in (
        ({"settings": {"trainer.max_epoch": 3}}, r"noise=0.1,rate=slow,seed=0: trainer.max_epoch: .* mean"),
        (misspelled, r"rate=fast,seed=1: model.init_args.learning_rat: .* did you mean learning_rate"),
        ({"configs": ["absent.yaml"]}, r"seed=0: --config: expected a file .*absent.yaml"),
    ):
        with pytest.raises(UserError, match=words):
            check_cells(read_experiment(write_grid(tmp_path, **changes)), [MODULE])
    assert not (tmp_path / "grid").exists()
