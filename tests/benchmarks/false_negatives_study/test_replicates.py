"""Patients of a replicate, and its arms as an experiment that the program reads."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml
from reading import PLAN, plan_hash, read_plan, read_rows
from replicates import OUTCOMES, arms_of, chosen_levels, experiment, filled, split_patients, tuned_levels

from data_prep.phantom.options import Options
from data_prep.phantom.release import write_phantom
from medclip_dcl.studies.grid_plan import check_cells, read_experiment

FACTS = {
    "mean_eta": 0.08,
    "mean_rho": 0.4,
    "seed": 7,
    "log_p": "lm",
    "ranking": "both",
    "rest_alone": "rest",
    "folder": ".",
}


@pytest.mark.slow
def test_patients_train_either_the_heads_or_the_encoder(tmp_path):
    write_phantom(tmp_path / "raw", Options(120, 3, 64))
    split_patients(tmp_path, 20)
    whole, pairs = (
        pd.read_csv(tmp_path / name / "mimic-cxr-2.0.0-split.csv.gz", dtype=str)
        for name in ("raw", "pairs_raw")
    )
    views = pd.read_csv(tmp_path / "raw/mimic-cxr-2.0.0-metadata.csv.gz").set_index("dicom_id")[
        "ViewPosition"
    ]
    frontal = whole[whole["dicom_id"].map(views).isin(["PA", "AP"])]
    mine = frontal[frontal["dicom_id"].isin(pairs["dicom_id"])]
    assert (mine["split"] == "train").sum() == 20
    for use in ("validate", "test"):
        assert set(whole.loc[whole["split"] == use, "dicom_id"]) <= set(pairs["dicom_id"])
    drawn = pd.read_csv(tmp_path / "drawn.csv", dtype={"patient": str})
    others = set(frontal.loc[frontal["split"] == "train", "subject_id"]) - set(mine["subject_id"])
    assert set(drawn.loc[drawn["split"] == "train", "patient"]) == others
    assert set(drawn["split"]) == {"train", "validate"}
    true = (
        pd.read_csv(tmp_path / "raw/phantom_truth/image_classes.csv")
        .groupby("dicom_id")["class_id"]
        .apply(set)
    )
    names = pd.read_csv(tmp_path / "raw/phantom_truth/classes.csv").set_index("class_id")["name"]
    for row in drawn.to_dict("records"):
        file = tmp_path / "raw/files" / str(row["image"])
        assert file.is_file()
        found = {name for name in drawn.columns[4:] if row[name]}
        expected = {f"class_{names[one]}" for one in true.get(file.stem, set())}
        assert found == expected & set(drawn.columns[4:])


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["lse_nl", "pooled"])
@pytest.mark.parametrize("is_tuned", [False, True])
def test_arms_are_an_experiment(similarity, is_tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = read_plan()
    if is_tuned:
        plan["chosen"] = {similarity: dict.fromkeys(plan["arms"], "g4_fast")}
        levels = chosen_levels(plan, FACTS, similarity, more=True)
    else:
        levels = tuned_levels(plan, FACTS, similarity)
    content = experiment(FACTS, levels, plan["kept_steps"], ["fit", "test"] if is_tuned else ["fit"])
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump({**content, "folder": "arms"}))
    read = read_experiment(tmp_path / "arms.yaml")
    check_cells(read)
    assert set(read.outcomes) == set(OUTCOMES) - (set() if is_tuned else {"recall"})
    assert len(read.runs()) == len(levels) > 10


@pytest.mark.parametrize("described", [None, "pairs_1500", "scratch"])
def test_rows_are_of_the_plan(described):
    here = Path(__file__).parent
    files = [*PLAN, here / f"{described}.yaml"] if described else PLAN
    plan = read_plan(files)
    rows = read_rows(
        sorted((here / (f"rows_{described}" if described else "rows")).glob("*.csv")), plan_hash(files)
    )
    assert (rows["replicate"].min(), rows["replicate"].max()) == tuple(plan["tested"])
    assert set(rows["pairs"]) == {plan["pairs"]} and set(rows["start"]) == {plan["read"]["start"]}
    for similarity, arms in rows.groupby("similarity")["arm"].unique().items():
        assert set(arms_of(plan, str(similarity), more=False)) <= set(arms)
    common = rows[(rows["outcome"] == "common") & rows["step"].isin(plan["kept_steps"])]
    assert set(common.groupby(["replicate", "similarity", "arm", "split"]).size()) == {
        len(plan["kept_steps"])
    }


def test_numbers_of_the_replicate_keep_their_type():
    assert filled({"eta": "{mean_rho}", "file": "{folder}/x", "n": 3}, FACTS) == {
        "eta": 0.4,
        "file": "./x",
        "n": 3,
    }
