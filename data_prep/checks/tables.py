"""Checks of the tables of a prepared set against the format, dataset.json and each other."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from medclip_dcl.data.prepared import TABLES, PreparedDataError, PreparedSet, case_table, labelled_findings
from medclip_dcl.data.table_checks import damage, lost, rows, some

ALWAYS = ("images", "sentences", "reports", "labels", "cases")
"""Tables that every set has."""

_CASE = ["dicom_id", "finding"]

Tables = Mapping[str, pd.DataFrame]


def read_tables(prepared: PreparedSet) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The readable tables of the right format, and the problems of the others."""
    found, problems = {}, []
    for name in TABLES:
        if prepared.has(name) or name in ALWAYS:
            try:
                found[name] = prepared.unchecked_table(name)
            except PreparedDataError as error:
                problems.append(str(error))
    return found, problems


def table_problems(prepared: PreparedSet, found: Tables) -> list[str]:
    """Problems of the tables of a set, all of them readable."""
    changed = ", ".join(prepared.content.tables)
    problems = [f"changed, added or removed after the set was made: {changed}"] if changed else []
    problems += [problem for name in found for problem in damage(name, found)]
    for name, key, shown in (
        ("reports", ["study_id", "position"], ["study_id", "position"]),
        ("images", ["path"], ["dicom_id"]),
        ("sentences", ["text"], ["sentence_id"]),  # sentences are patient data
    ):
        repeated = found[name][found[name].duplicated(key)]
        problems += some(f"{name}.parquet: duplicate {' and '.join(key)}", rows(repeated, shown))
    people = "studies" if "studies" in found else "images"
    for name, first, other in (
        ("reports", "reports", people),
        ("labels", "labels", people),
        ("labels", people, "labels"),
    ):
        problems += lost(name, first, "study_id", other, found)
    counted = found["reports"].groupby("sentence_id")["study_id"].nunique()
    is_wrong = found["sentences"]["sentence_id"].map(counted).fillna(0) != found["sentences"]["n_reports"]
    wrong = found["sentences"].loc[is_wrong, "sentence_id"]
    problems += some("sentences.parquet: n_reports differs from reports.parquet", wrong)
    return [*problems, *_uses(found), *_boxes(found), *_cases(prepared, found)]


def _uses(found: Tables) -> list[str]:
    """Uses separate patients; everything that is used has a report or a box."""
    problems: list[str] = []
    boxed = found["boxes"]["dicom_id"] if "boxes" in found else ()
    for name, key in (("images", "dicom_id"), ("studies", "study_id")):
        if name not in found:
            continue
        frame = found[name]
        used = frame[frame["use"] != "excluded"]
        # Patients may be in both test and grounding.
        uses = used["use"].replace("grounding", "test").groupby(used["subject_id"]).nunique()
        problems += some(f"{name}.parquet: patients with two uses", uses.index[uses > 1])
        patients = frame.groupby("study_id")["subject_id"].nunique()
        problems += some(f"{name}.parquet: studies of two patients", patients.index[patients > 1])
        is_silent = ~used["study_id"].isin(found["reports"]["study_id"]) & ~used[key].isin(boxed)
        what = "neither a sentence nor a box, but not excluded"
        problems += some(f"{name}.parquet: {what}", used.loc[is_silent, key])
    images = found["images"]
    elsewhere = images["dicom_id"].isin(boxed) & (images["use"] != "grounding")
    what = "images.parquet: images with a box whose use is not grounding"
    return problems + some(what, images.loc[elsewhere, "dicom_id"])


def _boxes(found: Tables) -> list[str]:
    if "boxes" not in found:
        return []
    boxes = found["boxes"].merge(found["images"][["dicom_id", "height", "width"]], on="dicom_id")
    # Comparisons with NaN are false. Clipping a corner may leave a rounding error.
    inside = (boxes[["x", "y"]] >= 0).all(axis=1) & (boxes[["w", "h"]] > 0).all(axis=1)
    inside &= boxes["x"] + boxes["w"] <= boxes["width"] + 1e-6
    inside &= boxes["y"] + boxes["h"] <= boxes["height"] + 1e-6
    nameless = (boxes[["phrase", "category"]].apply(lambda column: column.str.strip()) == "").any(axis=1)
    return [
        *some("boxes.parquet: boxes that are not inside their image", boxes["dicom_id"][~inside], len(boxes)),
        *some("boxes.parquet: boxes without phrase or category", boxes["dicom_id"][nameless], len(boxes)),
    ]


def _cases(prepared: PreparedSet, found: Tables) -> list[str]:
    """The cases follow from the labels; without the option "balanced" none is missing."""
    cases, labels = found["cases"], found["labels"]
    expected = case_table(found["images"].drop_duplicates("dicom_id"), labels.drop_duplicates("study_id"))
    both = cases.merge(expected, on=_CASE, how="left", suffixes=("", "_expected"))
    wrong = both[(both["label"] != both["label_expected"]) | (both["use"] != both["use_expected"])]
    unlabelled = sorted(set(cases["finding"]) - set(labelled_findings(labels)))
    what = "cases.parquet: cases that contradict labels.parquet and images.parquet"
    problems = some("cases.parquet: findings that labels.parquet does not label", unlabelled)
    problems += some(what, rows(wrong, _CASE), len(cases))
    if prepared.info["options"].get("cases", "all") == "all":
        both = expected.merge(cases[_CASE], on=_CASE, how="left", indicator=True)
        missing = both[both["_merge"] == "left_only"]
        problems += some(
            "cases.parquet: missing cases of labels.parquet", rows(missing, _CASE), len(expected)
        )
    return problems


def score_problems(prepared: PreparedSet) -> list[str]:
    """Scores and embeddings are readable and cover all sentences."""
    problems = []
    for kind in ("log_p", "text_embedding"):
        for name in prepared.models(kind):
            try:
                if kind == "text_embedding":
                    prepared.text_embedding(name)
                    continue
                scores = prepared.log_p(name)
            except PreparedDataError as error:
                problems.append(str(error))
                continue
            without = scores.loc[(scores["n_tokens"] > 0) & scores["log_p"].isna(), "sentence_id"]
            problems += some(f"{kind}/{name}.parquet: sentences with tokens whose log_p is NaN", without)
    return problems
