"""Checks of the tables of a prepared set against the format, dataset.json and each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from data_prep.sources import tables
from medclip_dcl.data.prepared import TABLES, PreparedDataError, PreparedSet, case_table, labelled_findings
from medclip_dcl.data.table_checks import damage, lost, rows, some

ALWAYS = ("images", "sentences", "reports", "labels", "cases")
"""Tables that every set has."""

_CASE = ["dicom_id", "finding"]

Tables = Mapping[str, pd.DataFrame]


def check_tables(prepared: PreparedSet) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The readable tables, and all problems of tables, scores and embeddings."""
    found, problems = _read_tables(prepared)
    if all(name in found for name in ALWAYS):
        problems += _description(prepared, found)
    for check in (_damage, _references, _uses, _boxes, _cases):
        problems += check(found)
    return found, problems + _missing_cases(prepared, found) + _scores_and_embeddings(prepared, found)


def _read_tables(prepared: PreparedSet) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The readable tables of the right format, and the problems of the others."""
    found, problems = {}, []
    for name in TABLES:
        if prepared.has(name) or name in ALWAYS:
            try:
                found[name] = prepared.unchecked_table(name)
            except PreparedDataError as error:
                problems.append(str(error))
    return found, problems


def _description(prepared: PreparedSet, found: Tables) -> list[str]:
    """Digests and counts of dataset.json against the tables and rejects.csv."""
    changed = ", ".join(prepared.content.tables)
    problems = [f"changed, added or removed after the set was made: {changed}"] if changed else []
    said, there = prepared.info["counts"], tables.count(found)
    wrong = [name for name, number in there.items() if said.get(name, number) != number]
    problems += some("dataset.json: counts that differ from the tables", wrong)
    try:
        rejects = read_rejects(prepared.folder / "rejects.csv")
    except (OSError, ValueError, KeyError) as error:
        return [*problems, f"rejects.csv cannot be read ({error})"]
    # Boxes of images that are not in the set are another matter.
    left_out = rejects[(rejects["kind"] == "box") & ~rejects["reason"].str.startswith(tables.OF_ITS_IMAGE)]
    if len(left_out) > max(1, kept := len(found.get("boxes", ()))):
        problems.append(
            f"boxes.parquet: most boxes were left out: {len(left_out):,} of {len(left_out) + kept:,} (first: "
            f"{left_out['id'].iloc[0]}, {left_out['reason'].iloc[0]}); prepare the set again with boxes "
            "of these images (resized copies: --resized)"
        )
    kinds = {kind: int((rejects["kind"] == kind).sum()) for kind in ("image", "report", "box")}
    if said.get("rejects", kinds) != kinds:
        problems.append(
            f"rejects.csv: expected the rows that dataset.json counts ({said['rejects']}), found {kinds}"
        )
    return problems


def read_rejects(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype=str, keep_default_na=False)[["kind", "id", "reason"]]


def _damage(found: Tables) -> list[str]:
    """Problems that training and evaluation refuse, and duplicates that they do not."""
    problems = [problem for name in found for problem in damage(name, found)]
    for name, key, shown in (
        ("reports", ["study_id", "position"], ["study_id", "position"]),
        ("images", ["path"], ["dicom_id"]),
        ("sentences", ["text"], ["sentence_id"]),  # sentences are patient data
    ):
        if name in found:
            repeated = found[name][found[name].duplicated(key)]
            problems += some(f"{name}.parquet: duplicate {' and '.join(key)}", rows(repeated, shown))
    return problems


def _references(found: Tables) -> list[str]:
    """Studies that other tables lack, wrong numbers of reports."""
    people = "studies" if "studies" in found else "images"
    problems = []
    for name, first, other in (
        ("reports", "reports", people),
        ("labels", "labels", people),
        ("labels", people, "labels"),
    ):
        problems += lost(name, first, "study_id", other, found)
    if "sentences" in found and "reports" in found:
        counted = found["reports"].groupby("sentence_id")["study_id"].nunique()
        sentences = found["sentences"]
        wrong = sentences[sentences["sentence_id"].map(counted).fillna(0) != sentences["n_reports"]]
        problems += some("sentences.parquet: n_reports differs from reports.parquet", wrong["sentence_id"])
    return problems


def _uses(found: Tables) -> list[str]:
    """Uses separate patients; everything that is used has a report or a box."""
    problems: list[str] = []
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
        if "reports" in found:
            silent = used[~used["study_id"].isin(found["reports"]["study_id"])]
            if name == "images" and "boxes" in found:
                silent = silent[~silent["dicom_id"].isin(found["boxes"]["dicom_id"])]
            problems += some(f"{name}.parquet: neither a sentence nor a box, but not excluded", silent[key])
        if name == "images" and "boxes" in found:
            boxed = frame[frame["dicom_id"].isin(found["boxes"]["dicom_id"]) & (frame["use"] != "grounding")]
            problems += some("images.parquet: images with a box whose use is not grounding", boxed[key])
    return problems


def _boxes(found: Tables) -> list[str]:
    if "boxes" not in found or "images" not in found:
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


def _cases(found: Tables) -> list[str]:
    """The cases follow from the labels."""
    if any(name not in found for name in ("cases", "images", "labels")):
        return []
    cases, labels = found["cases"], found["labels"]
    expected = _expected_cases(found)
    both = cases.merge(expected, on=_CASE, how="left", suffixes=("", "_expected"))
    wrong = both[(both["label"] != both["label_expected"]) | (both["use"] != both["use_expected"])]
    return [
        *some(
            "cases.parquet: findings that labels.parquet does not label",
            sorted(set(cases["finding"]) - set(labelled_findings(labels))),
        ),
        *some(
            "cases.parquet: cases that contradict labels.parquet and images.parquet",
            rows(wrong, _CASE),
            len(cases),
        ),
    ]


def _missing_cases(prepared: PreparedSet, found: Tables) -> list[str]:
    """Without the option "balanced" every case that the labels give is there."""
    chosen = prepared.info["options"].get("cases", "all")
    if chosen != "all" or any(name not in found for name in ("cases", "images", "labels")):
        return []
    expected = _expected_cases(found)
    both = expected.merge(found["cases"][_CASE], on=_CASE, how="left", indicator=True)
    missing = both[both["_merge"] == "left_only"]
    return some("cases.parquet: missing cases of labels.parquet", rows(missing, _CASE), len(expected))


def _expected_cases(found: Tables) -> pd.DataFrame:
    return case_table(
        found["images"].drop_duplicates("dicom_id"), found["labels"].drop_duplicates("study_id")
    )


def _scores_and_embeddings(prepared: PreparedSet, found: Tables) -> list[str]:
    """Scores and embeddings are readable and cover all sentences."""
    if "sentences" not in found:
        return []
    problems = []
    for kind in ("log_p", "text_embedding"):
        for name in prepared.models(kind):
            try:
                if kind == "log_p":
                    scores = prepared.log_p(name)
                    ids = scores["sentence_id"]
                    without = scores[(scores["n_tokens"] > 0) & scores["log_p"].isna()]
                    problems += some(
                        f"{kind}/{name}.parquet: sentences with tokens whose log_p is NaN",
                        without["sentence_id"],
                    )
                else:
                    ids = pd.Series(prepared.text_embedding(name).sentence_id)
            except PreparedDataError as error:
                problems.append(str(error))
                continue
            extra = ids[~ids.isin(found["sentences"]["sentence_id"])]
            problems += some(f"{kind}/{name}.parquet: rows of unknown sentences", extra)
    return problems
