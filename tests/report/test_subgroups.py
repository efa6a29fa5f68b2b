"""Metrics by group against a loop over subsets, and how often gaps are found that are there, or are not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from medclip_dcl.metrics import summaries
from medclip_dcl.report import charts, subgroups
from medclip_dcl.report.contrasts import ALPHA
from medclip_dcl.report.draws import Predictions, TestedRun, patient_draws
from medclip_dcl.report.report import render
from medclip_dcl.report.subgroups import compared_groups, describe, groups_of_run, subgroup_table
from medclip_dcl.runs.saved import SavedResultsError

pytestmark = pytest.mark.usefixtures("few_draws")
N_IMAGES = 240


def images_of(n: int = N_IMAGES, seed: int = 0) -> pd.DataFrame:
    """Two images of each patient, in studies of their own; every attribute drawn for the patient, but for the view."""
    random = np.random.default_rng(seed)
    patient = np.arange(n) // 2
    of_patients = n // 2 + 1
    return pd.DataFrame(
        {
            "dicom_id": [f"i{i}" for i in range(n)],
            "study_id": 5000 + np.arange(n),
            "subject_id": 100 + patient,
            "view": random.choice(["AP", "pa"], n),
            "sex": random.choice(["F", "M", "unknown"], of_patients, p=[0.5, 0.4, 0.1])[patient],
            "age": random.choice([25.0, 50.0, 70.0, 85.0, np.nan], of_patients)[patient],
        }
    )


def predictions_of(images: pd.DataFrame, seed: int = 0, worse: float = 0.0) -> Predictions:
    """Scores, boxes and ranks of each image; scores and boxes of women are worse by so much."""
    random = np.random.default_rng([seed, 1])
    n = len(images)
    worse_by = worse * (images["sex"] == "F").to_numpy()
    of_patient = random.normal(size=images["subject_id"].max() + 1)[images["subject_id"]]
    ids = images[["dicom_id", "subject_id"]]
    cases = []
    for finding, share in (("Edema", 0.5), ("Cardiomegaly", 0.4), ("Pneumonia", 0.03)):
        label = (random.random(n) < share).astype(int)
        score = 1.8 * (label - 0.5) * (1 - worse_by) + random.normal(size=n)
        cases.append(
            ids.assign(finding=finding, label=label, score_positive=score / 2, score_negative=-score / 2)
        )
    cnr = 1.2 + 0.3 * of_patient + 0.5 * random.normal(size=n) - worse_by
    boxes = ids.assign(
        category="Edema", phrase="p", box=range(n), cnr=np.abs(cnr), cnr_signed=cnr, miou=random.random(n)
    )
    ranks = [
        pd.DataFrame(
            {
                "direction": d,
                "rank": random.integers(1, n, n),
                "query": queries,
                "subject_id": ids["subject_id"],
            }
        )
        for d, queries in zip(
            summaries.DIRECTIONS, (ids["dicom_id"], images["study_id"].astype(str)), strict=True
        )
    ]
    reports = pd.concat(ranks, ignore_index=True).assign(task="image_report")
    sentences = reports.assign(task="image_sentence", query="17")
    tables = {
        "classification": pd.concat(cases, ignore_index=True),
        "grounding": boxes,
        "retrieval": pd.concat(
            [ids.assign(direction=r["direction"], rank=r["rank"]) for r in ranks], ignore_index=True
        ),
        "report_retrieval": pd.concat([sentences, reports], ignore_index=True),
    }
    return Predictions(tables)


def table_of_groups(*args, **options) -> pd.DataFrame:
    groups = compared_groups(*args, **options)
    assert groups is not None
    return groups.table


def at(table: pd.DataFrame, attribute: str, group: str, metric: str) -> Any:
    is_it = (table["attribute"] == attribute) & (table["group"] == group) & (table["metric"] == metric)
    (row,) = table[is_it].to_dict("records")
    return row


def test_a_gap_of_localisation_is_over_findings_of_both_sides():
    """All have finding A, 0.8 of it hit; men also have B, 0.2 of it hit, and two women."""
    images = images_of().assign(view="AP", age=np.nan)
    images["sex"] = np.where(images["subject_id"] < 160, "F", "M")
    is_first = images["dicom_id"].str.removeprefix("i").astype(int) % 2 == 0
    has_b = (images["sex"] == "M") | (images["subject_id"] < 102)
    rows = images.loc[is_first | has_b, ["dicom_id", "subject_id"]]
    rows = rows.assign(category=np.where(is_first[rows.index], "A", "B"))
    values = np.where(rows["category"] == "A", 0.8, 0.2)
    rows = rows.assign(**dict.fromkeys(summaries.SECTIONS["localisation"].names, values)).reset_index(
        drop=True
    )
    table = table_of_groups(Predictions({"localisation": rows}), images, n_draws=40)
    for group in "FM":
        row = at(table, "sex", group, "localisation/hit")
        assert row["value"] == pytest.approx(0.8)
    assert at(table, "sex", "F", "localisation/hit")["gap"] == pytest.approx(0)


@pytest.fixture(scope="module")
def images() -> pd.DataFrame:
    return images_of()


@pytest.fixture(scope="module")
def predictions(images) -> Predictions:
    return predictions_of(images)


@pytest.fixture(scope="module")
def table(images, predictions) -> pd.DataFrame:
    return table_of_groups(predictions, images, n_draws=40, seed=3)


def test_values_gaps_and_intervals_are_a_loops(images, predictions, table):
    cases = predictions.tables["classification"].query("finding == 'Edema'")
    cases = cases.merge(images[["dicom_id", "sex", "age"]], on="dicom_id")
    boxes = predictions.tables["grounding"].merge(images[["dicom_id", "age"]], on="dicom_id")
    patients = np.unique(images["subject_id"])
    women, gaps, of_boxes = [], [], []
    for counts in patient_draws(len(patients), 40, seed=3):
        times = dict(zip(patients, counts.astype(int), strict=True))

        def auc(rows, times=times):
            rows = rows.loc[rows.index.repeat(rows["subject_id"].map(times))]
            return roc_auc_score(rows["label"], rows["score_positive"] - rows["score_negative"])

        women.append(auc(cases[cases["sex"] == "F"]))
        gaps.append(women[-1] - auc(cases[cases["sex"] == "M"]))
        drawn = boxes.loc[boxes.index.repeat(boxes["subject_id"].map(times))]
        is_old = drawn["age"] == 85
        rest = drawn[~is_old & drawn["age"].notna()]
        of_boxes.append(drawn.loc[is_old, "miou"].mean() - rest["miou"].mean())
    found = at(table, "sex", "F", "classification/by_finding/Edema/auc")
    assert (found["value"], found["gap"]) == pytest.approx((women[0], gaps[0]))
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.quantile(women[1:], [0.025, 0.975])))
    assert (found["gap_low"], found["gap_high"]) == pytest.approx(
        tuple(np.quantile(gaps[1:], [0.025, 0.975]))
    )
    found = at(table, "age", "80 and over", "grounding/miou")
    assert found["gap"] == pytest.approx(of_boxes[0])
    assert (found["gap_low"], found["gap_high"]) == pytest.approx(
        tuple(np.quantile(of_boxes[1:], [0.025, 0.975]))
    )


def test_two_groups_have_one_gap_several_each(table):
    with_gap = table[table["gap"].notna()].groupby("attribute")["group"].unique()
    assert {name: list(groups) for name, groups in with_gap.items()} == {
        "view": ["AP"],
        "sex": ["F"],
        "age": ["under 40", "40 to 59", "60 to 79", "80 and over"],
    }
    of_sex = table[table["attribute"] == "sex"].pivot(index="metric", columns="group", values="value")
    gaps = table[(table["attribute"] == "sex") & (table["group"] == "F")].set_index("metric")["gap"]
    pd.testing.assert_series_equal(of_sex["F"] - of_sex["M"], gaps.sort_index(), check_names=False)


def test_unknown_attributes_are_counted_in_no_group(images, table):
    for attribute, is_unknown in (("sex", images["sex"] == "unknown"), ("age", images["age"].isna())):
        rows = table[(table["attribute"] == attribute) & (table["group"] == "unknown")]
        assert set(rows["images"]) == {is_unknown.sum()}
        assert set(rows["patients"]) == {images.loc[is_unknown, "subject_id"].nunique()}
        assert rows[["value", "gap", "p"]].isna().all(axis=None)
    assert set(table.loc[table["attribute"] == "view", "group"]) == {"AP", "PA"}
    sums = table.drop_duplicates(["attribute", "group"]).groupby("attribute")["images"].sum()
    assert set(sums) == {len(images)}


def test_few_patients_are_left_out_of_the_average(images, predictions, table):
    for group in ("F", "M"):
        assert np.isnan(at(table, "sex", group, "classification/by_finding/Pneumonia/auc")["value"])
        known = [
            at(table, "sex", group, f"classification/by_finding/{f}/auc")["value"]
            for f in ("Edema", "Cardiomegaly")
        ]
        assert at(table, "sex", group, "classification/auc")["value"] == pytest.approx(np.mean(known))
    few = images.assign(sex=np.where(images["subject_id"] < 100 + subgroups.MIN_PATIENTS - 1, "F", "M"))
    found = table_of_groups(predictions, few, n_draws=50).query("attribute == 'sex'")
    assert found["gap"].isna().all()
    assert found.loc[found["group"] == "F", "value"].isna().all()
    enough = images.assign(sex=np.where(images["subject_id"] < 100 + subgroups.MIN_PATIENTS, "F", "M"))
    found = table_of_groups(predictions, enough, n_draws=50)
    assert np.isfinite(at(found, "sex", "F", "grounding/miou")["gap"])


def test_a_classifiers_findings_are_compared_by_logits(images, predictions):
    cases = predictions.tables["classification"]
    logits = cases.assign(logit=cases["score_positive"] - cases["score_negative"])
    tables = {"finding_classification": logits.drop(columns=["score_positive", "score_negative"])}
    found = table_of_groups(Predictions(tables), images, n_draws=100, seed=3)
    alone = table_of_groups(Predictions({"classification": cases}), images, n_draws=100, seed=3)
    for name in ("auc", "acc", "by_finding/Edema/auc"):
        one, other = (
            at(table, "sex", "F", f"{prefix}classification/{name}")
            for table, prefix in ((found, "finding_"), (alone, ""))
        )
        assert one["gap"] == other["gap"] and one["gap_low"] == other["gap_low"], name
    assert np.isfinite(at(found, "sex", "F", "finding_classification/average_precision")["gap"])


def test_ages_belong_to_the_reached_group():
    ages = pd.Series([0.5, 39.9, 40, 59, 60, 79.99, 80, 120, np.nan])
    expected = ["under 40"] * 2 + ["40 to 59"] * 2 + ["60 to 79"] * 2 + ["80 and over"] * 2 + ["unknown"]
    assert subgroups.age_groups(ages).tolist() == expected


def test_a_report_follows_all_its_images(images, predictions):
    one_study = images.assign(study_id=5000 + images.index // 2 * 2)
    tables = dict(predictions.tables)
    reports = tables["report_retrieval"]
    is_report = (reports["direction"] == "text_to_image") & (reports["task"] == "image_report")
    second = is_report & (reports["query"].astype(str).str[-1].isin(list("13579")))
    tables["report_retrieval"] = reports[~second]
    found = table_of_groups(Predictions(tables), one_study, n_draws=50)
    is_whole = one_study.groupby("study_id")["view"].nunique() == 1
    view = one_study.groupby("study_id")["view"].first().str.upper().where(is_whole)
    ranks = tables["report_retrieval"]
    ranks = ranks[ranks["task"] == "image_report"]
    asked = ranks[ranks["direction"] == "text_to_image"]
    of_reports = asked.loc[asked["query"].astype(int).map(view).to_numpy() == "AP", "rank"].median()
    of_image = dict(zip(images["dicom_id"], images["view"], strict=True))
    asked = ranks[ranks["direction"] == "image_to_text"]
    of_images = asked.loc[asked["query"].map(of_image) == "AP", "rank"].median()
    metric = "report_retrieval/image_report/medr"
    assert at(found, "view", "AP", metric)["value"] == pytest.approx((of_images + of_reports) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("worse", [False, True])
def test_planted_gaps_are_found_and_others_are_not(worse):
    n_found = 0
    for seed in range(20):
        images = images_of(300, seed)
        # Women's signed CNR is lower by 0.8, about 1.4 of its standard deviations, and their scores are weaker by 80%.
        predictions = predictions_of(images, seed, 0.8 if worse else 0.0)
        tables = {name: predictions.tables[name] for name in ("classification", "grounding")}
        found = table_of_groups(Predictions(tables), images.assign(view="PA"), n_draws=100, seed=seed)
        marked = found[found["p"] <= ALPHA]
        n_found += bool(len(marked[marked["attribute"] == "sex"] if worse else marked))
    assert n_found >= 19 if worse else n_found <= 1, n_found


def without_charts(monkeypatch) -> None:
    monkeypatch.setattr(charts, "chart", lambda *_: None)
    monkeypatch.setattr(charts, "ranks", lambda *_: [])


def write_tested_run(make_tested_run, folder, **columns: Any):
    run = make_tested_run(folder)
    cases, boxes = (
        pd.read_parquet(run / f"predictions/{name}.parquet") for name in ("classification", "grounding")
    )
    ids = pd.concat([cases, boxes])[["dicom_id", "subject_id"]].drop_duplicates("dicom_id")
    queries = pd.read_parquet(run / "predictions/report_retrieval.parquet")
    queries["query"] = np.where(queries["direction"] == "image_to_text", "i1_0", "1")
    queries.to_parquet(run / "predictions/report_retrieval.parquet")
    images = ids.assign(study_id=1, view="PA", **columns)
    images.to_parquet(run / "predictions/images.parquet")
    return run, images


def test_the_page_marks_gaps_and_names_the_method(make_tested_run, tmp_path, monkeypatch):
    monkeypatch.setattr(subgroups, "MIN_PATIENTS", 3)
    run, images = write_tested_run(make_tested_run, tmp_path / "run")
    assert subgroup_table(run).empty and describe(groups_of_run(TestedRun(run))) is None
    without_charts(monkeypatch)
    sex = np.where(images["subject_id"] % 2 == 0, "F", "M")
    sex = np.where(images["subject_id"] > 125, "unknown", sex)
    images.assign(sex=sex).to_parquet(run / "predictions/images.parquet")
    boxes = pd.read_parquet(run / "predictions/grounding.parquet")
    assert (boxes["subject_id"] % 2 == 0).all()
    found = subgroup_table(run, n_draws=100)
    assert set(found["attribute"]) == {"sex"}
    assert found.loc[found["metric"] == "grounding/cnr", "gap"].isna().all(), "men have no boxes"
    html = render(run)
    text = re.sub(r"<[^>]+>", " ", html)
    assert "F − M" in text and "In no group, because unknown:" in text and "(max-t, with" in text
    n_gaps = subgroup_table(run)["p"].notna().sum()
    assert re.search(rf"(None|\d) of {n_gaps} gaps between groups", text)
    content = describe(compared_groups(predictions_of(images_of(), worse=0.9), images_of(), 200))
    assert content is not None
    (line,) = [line for line in content["found"] if "signed CNR" in line and line.startswith("Sex, F − M")]
    assert re.search(r"signed CNR ↑ −\d\.\d\d \[−\d\.\d\d, −\d\.\d\d\] \(p = 0\.005\)", line)
    row = {row.label: [str(cell) for cell in row.cells] for row in content["tables"][1].rows}
    assert row["AUC ↑"][0].split(" [")[0].endswith("(2 of 3)")
    assert "AUC ↑, Pneumonia" not in row
    assert [cell.split(" [")[0] for cell in row["signed CNR ↑"]][-1].endswith(" *")


def test_a_gap_that_no_draw_changes_is_unmarked():
    """Of men every label is ranked right, of women wrong."""
    images = images_of().assign(view="AP", age=np.nan)
    predictions = predictions_of(images)
    cases = predictions.tables["classification"]
    sign = np.where(cases["dicom_id"].map(images.set_index("dicom_id")["sex"]) == "F", -1, 1)
    cases["score_positive"], cases["score_negative"] = sign * (cases["label"] - 0.5), 0.0
    groups = compared_groups(predictions, images, 100)
    assert groups is not None
    row = at(groups.table, "sex", "F", "classification/by_finding/Edema/auc")
    assert row["gap"] == -1 and row["p"] == 1 / 101 and np.isnan([row["low"], row["gap_low"]]).all()
    content = describe(groups)
    assert content is not None and not [line for line in content["found"] if "AUC" in line]
    cells = {one.label: [*map(str, one.cells)] for one in content["tables"][0].rows}["AUC ↑, Edema"]
    n = [images.loc[images["sex"] == sex, "subject_id"].nunique() for sex in "FM"]
    assert cells == [f"0.000 (n = {n[0]})", f"1.000 (n = {n[1]})", f"−1.000 (n = {n[0]})"]


def test_what_is_missing_or_broken_is_named(make_tested_run, tmp_path, monkeypatch):
    run, images = write_tested_run(make_tested_run, tmp_path / "run", sex="F")
    file = run / "predictions/images.parquet"
    without_charts(monkeypatch)
    images.assign(view=["AP", *["PA"] * (len(images) - 1)]).to_parquet(file)
    assert "The groups are too small to be compared" in render(run)
    images.assign(sex=["M", *["F"] * (len(images) - 1)])[1:].assign(
        view=["AP", *["PA"] * (len(images) - 2)]
    ).to_parquet(file)
    with pytest.raises(
        SavedResultsError, match=r"images.parquet lacks \d+ tested images or reports; test the run"
    ):
        subgroup_table(run, n_draws=50)
    file.write_text("x")
    with pytest.raises(SavedResultsError, match="images.parquet is not a readable Parquet file"):
        subgroup_table(run)
    html = render(run)
    assert "no tables by view, sex and age" in html and 'id="subgroups"' not in html
    file.unlink()
    assert subgroup_table(run).empty
