"""Numbers of a benchmark: intervals by patient, paired differences from one model, and Holm's adjustment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Shaped
from scipy import stats

from medclip_dcl.statistics.contrasts import holm
from medclip_dcl.statistics.draws import (
    CLASSIFICATIONS,
    Numbers,
    Predictions,
    TestedRun,
    bootstrap_numbers,
    percentiles,
    require_same_cases,
    without_few,
)

CLASSIFICATION = "classification"
"""Section of zero-shot classification and of classifiers alike; the others are those of results.json."""
PLACE = ["set", "model", "minus", "section", "finding", "metric"]
"""Columns that say which number; minus: the model that is subtracted, "" for none; finding: "" for the mean."""
COLUMNS = [*PLACE, "value", "low", "high", "p", "p_holm", "patients"]
"""patients, of a number of one finding or category: with a case, of the rarer class; fewer than 20 have no interval."""
_CASES = "finding_classification"
_CASE = ["finding", "dicom_id", "subject_id", "label", "logit"]
_GROUPS = ("by_finding/", "by_category/")


class SetNumbers(NamedTuple):
    """Bootstrap numbers by model, the findings over which means are taken, those of all models, and the cases.

    `cases` has a row for each finding that any model classifies: positives and negatives. `patients`: of each
    model's numbers of one finding or category, by path.
    """

    by_model: Mapping[str, Numbers]
    findings: list[str]
    cases: pd.DataFrame
    patients: Mapping[str, Mapping[str, int]]


def numbers_of_set(
    runs: Mapping[str, TestedRun], patients: Shaped[np.ndarray, "patient"] | None = None
) -> SetNumbers:
    """Numbers of the models on one set; each draw takes the same patients for all findings, tables and models.

    The mean of a classification is over the findings that all models which classify anything have.

    Args:
        runs: tested on the same cases.
        patients: subject_id of all that a model may be tested on, so that no draw depends on which models there are.
    """
    scored = {name: _scores(run.predictions) for name, run in runs.items()}
    of_all = pd.concat(scored.values())
    known = [set(one["finding"]) for one in scored.values() if len(one)]
    findings = [name for name in of_all["finding"].unique() if all(name in of_model for of_model in known)]
    tested = [table["subject_id"] for run in runs.values() for table in run.predictions.tables.values()]
    drawn = np.unique(np.concatenate(tested if patients is None else [*tested, patients]))
    by_model, by_patients = {}, {}
    for name, run in runs.items():
        min_cases, title = run.predictions.min_cases, run.predictions.name
        tables = {key: one for key, one in run.predictions.tables.items() if key not in CLASSIFICATIONS}
        is_shared = scored[name]["finding"].isin(findings)
        classified = {_CASES: scored[name][is_shared]} if is_shared.any() else {}
        shared = Predictions(classified | tables, min_cases, title)
        others = Predictions({_CASES: scored[name][~is_shared]}, min_cases, title)
        of_others = bootstrap_numbers(others, patients=drawn)
        own = {path: draws for path, draws in of_others.items() if f"/{_GROUPS[0]}" in path}
        by_patients[name] = shared.patients | others.patients
        by_model[name] = without_few(bootstrap_numbers(shared, patients=drawn) | own, by_patients[name])
    cases = of_all.drop_duplicates(["finding", "dicom_id"])
    counts = pd.crosstab(cases["finding"], cases["label"])
    counts = counts.reindex(index=cases["finding"].unique(), columns=[0, 1], fill_value=0)
    return SetNumbers(by_model, findings, counts.set_axis(["negatives", "positives"], axis=1), by_patients)


def require_paired(run: TestedRun, other: TestedRun) -> None:
    """Refuse tests of other cases; of a classification, among the findings that both have."""
    tables = [{_CASES: _scores(one.predictions), **one.predictions.tables} for one in (run, other)]
    both = {*tables[0][_CASES]["finding"]} & {*tables[1][_CASES]["finding"]}
    for found in tables:
        found[_CASES] = found[_CASES][found[_CASES]["finding"].isin(both)]
        found.pop("classification", None)
    a, b = (
        Predictions(found, name=x.predictions.name) for found, x in zip(tables, (run, other), strict=True)
    )
    require_same_cases(a, b)


def _scores(predictions: Predictions) -> pd.DataFrame:
    """Cases of a classification by prompts or by logits, with the number that ranks them as `logit`."""
    for section in CLASSIFICATIONS:
        if (table := predictions.tables.get(section)) is not None:
            if "logit" not in table:
                table = table.assign(logit=table["score_positive"] - table["score_negative"])
            return table[_CASE]
    return pd.DataFrame(columns=_CASE)


def table_of(sets: Mapping[str, SetNumbers], baseline: str) -> pd.DataFrame:
    """Rows of `COLUMNS`: each number with its interval, and its difference from the baseline where both have it.

    p is two-sided, of the difference over the standard deviation of its draws (a draw's share of signs has no p below
    1 / draws, too coarse for many differences); p_holm adjusts it for all differences of the same metric.
    """
    rows = []
    for name, of_set in sets.items():
        reference = of_set.by_model.get(baseline, {})
        for model, numbers in of_set.by_model.items():
            for path, draws in numbers.items():
                n = of_set.patients[model].get(path)
                rows.append(
                    {
                        "set": name,
                        "model": model,
                        "minus": "",
                        **_place(path),
                        **_summary(draws),
                        "patients": n,
                    }
                )
                if model != baseline and path in reference:
                    difference = draws - reference[path]
                    n_both = n and min(n, of_set.patients[baseline].get(path, n))
                    found = {**_summary(difference), "p": _p(difference), "patients": n_both}
                    rows.append({"set": name, "model": model, "minus": baseline, **_place(path), **found})
    table = pd.DataFrame(rows, columns=COLUMNS)
    table["p_holm"] = table.groupby(["section", "metric"])["p"].transform(
        lambda p: holm(p.to_numpy("float64"))
    )
    return table


def _place(path: str) -> dict[str, str]:
    """Section, finding and metric of a path; a finding may itself hold a "/"."""
    section, rest = path.split("/", maxsplit=1)
    section = section.replace(_CASES, CLASSIFICATION)
    for group in _GROUPS:
        if rest.startswith(group):
            finding, _, metric = rest.removeprefix(group).rpartition("/")
            return {"section": section, "finding": finding, "metric": metric}
    return {"section": section, "finding": "", "metric": rest}


def _summary(draws: np.ndarray) -> dict[str, Any]:
    low, high, _ = percentiles(draws[1:])
    return {"value": float(draws[0]), "low": low, "high": high}


def _p(differences: np.ndarray) -> float:
    """NaN without an interval, and where no draw differs."""
    draws = differences[1:][np.isfinite(differences[1:])]
    deviation = draws.std(ddof=1) if len(draws) > 1 else 0.0
    return float(2 * stats.norm.sf(abs(differences[0]) / deviation)) if deviation > 0 else float("nan")
