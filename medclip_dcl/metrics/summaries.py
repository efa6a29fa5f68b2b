"""The numbers of results.json, computed from the rows of predictions/*.parquet.

Each section function takes the rows of one evaluation and weights (draw, row), and returns its section of results.json
with an array (draw,) in the place of each number; NaN where a draw has no case, or where a number rests on fewer than
``min_patients`` patients. Weights of 1 give a test's result, weights that count draws a bootstrap. Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from medclip_dcl.metrics.table import BANDS, CALIBRATION, DIRECTIONS, KS, MEAN_KS, RHO_BANDS, SECTIONS
from medclip_dcl.metrics.weighted import (
    Draws,
    Weights,
    mean_of,
    weighted_auc,
    weighted_mean,
    weighted_median,
    weighted_precision,
)

BINS = 10
"""Bins of a reliability curve and of the expected calibration error (choice)."""

Numbers = dict[str, Any]
"""Nested as in results.json; its leaves are arrays (draw,)."""


def once(rows: pd.DataFrame) -> Weights:
    """Weights of 1: each row counts once."""
    return np.ones((1, len(rows)))


def values_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the first draw, as results.json holds them: None for NaN."""
    return {
        name: values_of(found)
        if isinstance(found, Mapping)
        else (float(found[0]) if np.isfinite(found[0]) else None)
        for name, found in numbers.items()
    }


def by_path(numbers: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, number) of each number, such as an array of draws; a path joins the keys by "/"."""
    for name, found in numbers.items():
        if isinstance(found, Mapping):
            yield from by_path(found, f"{prefix}/{name}")
        else:
            yield f"{prefix}/{name}", found


def classification(
    cases: pd.DataFrame,
    weights: Weights,
    min_cases: int = 5,
    *,
    findings: Iterable[str] | None = None,
    min_patients: int = 1,
    dtype: type = np.float64,
) -> Numbers:
    """The numbers of a classification of each finding, and their averages: of all, and by the column `band`, if any.

    Scores are logits, or score(positive prompt) - score(negative prompt); a case is called positive above 0.

    Args:
        cases: predictions of a classification.
        weights: of the cases.
        min_cases: positive and negative cases, each, that a finding needs; others have no number and are left out of
            the averages. A draw without a case of either class has no number of this finding and no average.
        findings: default: those of the cases.
        min_patients: with a positive case, and with a negative one.
        dtype: precision of the numbers that results.json rounds.
    """
    cases = cases.reset_index(drop=True)
    by_prompts = "score_negative" in cases
    numbers = [x for x in SECTIONS["classification"].numbers if x.compute and (by_prompts or not x.scores)]
    names = [number.name for number in numbers] + ["gain"] * by_prompts
    scores = scores_of(cases)
    if scores.isna().any():
        raise ValueError(f"scores: {scores.isna().sum()} of {len(cases)} are NaN; an embedding is NaN")
    nothing = np.full(len(weights), np.nan)
    by_finding: Numbers = {}
    counted = []
    for finding in cases["finding"].unique() if findings is None else findings:
        by_finding[finding] = dict.fromkeys(names, nothing)
        rows = cases[cases["finding"] == finding]
        positive = rows["label"].to_numpy() == 1
        if min(positive.sum(), (~positive).sum()) < min_cases:
            continue
        counted.append(finding)
        n_patients = (rows.loc[is_class, "subject_id"].nunique() for is_class in (positive, ~positive))
        if min(n_patients) < min_patients:
            continue
        of_finding = {"": scores[rows.index], **rows.filter(like="score_")}
        of_rows = weights.take(rows.index, axis=1)
        found: Numbers = {}
        for number in numbers:
            its = of_finding[number.scores].to_numpy(dtype="float64")
            value = number.compute(its, positive, of_rows)  # type: ignore[misc]
            found[number.name] = value.astype(dtype) if number.is_rounded else value
        if by_prompts:
            found["gain"] = found["auc"] - found["pos"]
        is_defined = np.isfinite(found["auc"])
        by_finding[finding] = {
            name: np.where(is_defined, x, np.nan).astype("float64") for name, x in found.items()
        }
    averages: Numbers = {name: mean_of([by_finding[f][name] for f in counted], nothing) for name in names}
    bands = finding_bands(cases)
    for band in BANDS if bands else ():
        of_band = [by_finding[f] for f in counted if bands[f] == band]
        banded = [x for x in names if f"{band}/{x}" in SECTIONS["classification"].names]
        averages[band] = {x: mean_of([one[x] for one in of_band], nothing) for x in banded}
    return {**averages, "by_finding": by_finding}


def finding_bands(cases: pd.DataFrame) -> dict[str, str]:
    """Finding -> its band of `table.BANDS`; empty where the cases state none."""
    return dict(zip(cases["finding"], cases["band"], strict=True)) if "band" in cases else {}


def prompts(cases: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """AUC for absence of each negative wording of a finding, and the lowest and the median of them."""
    cases, by_finding = cases.reset_index(drop=True), {}
    for finding, rows in cases[cases["side"] == "negative"].groupby("finding", sort=False):
        wordings = {}
        for text, its in rows.groupby("prompt", sort=False):
            scores, positive = its["score"].to_numpy("float64"), its["label"].to_numpy() == 1
            wordings[str(text)] = weighted_auc(scores, ~positive, weights.take(its.index, axis=1))
        every = [*wordings.values()]
        found = {"neg_lowest": np.min(every, axis=0), "neg_median": np.median(every, axis=0)}
        by_finding[str(finding)] = {**found, "wordings": wordings}
    return {"by_finding": by_finding}


def scores_of(cases: pd.DataFrame) -> pd.Series:
    """Score of each case of a classification: its logit, or score(positive prompt) - score(negative prompt)."""
    return cases["logit"] if "logit" in cases else cases["score_positive"] - cases["score_negative"]


def grounding(boxes: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Means over boxes, over those of each category, and over image-phrase pairs (`pair_` columns).

    With readers, a pair is the mean of those who drew it, whose own means are `by_reader`.
    """
    boxes = boxes.reset_index(drop=True)

    def means(rows: pd.DataFrame) -> Numbers:
        return box_means(rows, weights.take(rows.index, axis=1), min_patients=min_patients)

    each = boxes.drop(columns=["reader_iou", "reader_dice"], errors="ignore")
    found = means(each)
    found["by_category"] = {str(category): means(rows) for category, rows in each.groupby("category")}
    pair = ["dicom_id", "phrase"]
    of_readers = boxes.drop_duplicates([*pair, *boxes.columns.intersection(["reader"])])
    unions = of_readers.filter(regex="^pair_").rename(columns=lambda name: name.removeprefix("pair_"))
    of_readers = of_readers.assign(cnr=unions["cnr_signed"].abs(), **unions)
    pairs = of_readers.drop_duplicates(pair).sort_values("dicom_id", kind="stable")
    of_pairs = of_readers.groupby(pair)[["cnr", *unions]].transform("mean")
    found["by_pair"] = means(pairs.assign(**of_pairs.loc[pairs.index]))
    if "reader" in boxes:
        found["by_reader"] = {str(reader): means(rows) for reader, rows in of_readers.groupby("reader")}
    return found


def box_means(boxes: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Mean of each number of grounding that the boxes have."""
    found = {}
    for name in (x.name for x in SECTIONS["grounding"].numbers if not x.is_optional or x.name in boxes):
        values = boxes[name].to_numpy(dtype="float64")
        mean = weighted_mean(values, weights)
        found[name] = _of_patients(boxes[np.isfinite(values)], mean, min_patients)
    return found


def localisation(cases: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Means over the cases of each finding (`by_category`), and means of these over the findings that have them.

    A draw without a case of one of these findings has no mean over the findings.
    """
    cases = cases.reset_index(drop=True)
    by_category: Numbers = {}
    numbers = SECTIONS["localisation"].numbers
    names = [number.name for number in numbers if not number.is_optional or number.name in cases]
    counted: dict[str, list[Draws]] = {name: [] for name in names}
    for category, rows in cases.groupby("category"):
        of_rows, found = weights.take(rows.index, axis=1), {}
        for name in names:
            values = rows[name].to_numpy(dtype="float64")
            measured = rows[np.isfinite(values)]
            found[name] = _of_patients(measured, weighted_mean(values, of_rows), min_patients)
            if len(measured):
                counted[name].append(found[name])
        by_category[str(category)] = found
    nothing = np.full(len(weights), np.nan)
    means = {name: mean_of(numbers, nothing) for name, numbers in counted.items()}
    return {**means, "by_category": by_category}


def retrieval(queries: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Numbers of :func:`recalls` by the ranks, and "tolerant" of duplicates."""
    return {
        **recalls(queries, weights, min_patients=min_patients),
        "tolerant": recalls(queries, weights, "rank_tolerant", min_patients=min_patients),
    }


def report_retrieval(queries: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Retrieval between images and reports, of which several may say the same, and between images and sentences."""
    queries = queries.reset_index(drop=True)
    found = {}
    for task, rows in queries.groupby("task"):
        summarise = retrieval if task == "image_report" else recalls
        found[str(task)] = summarise(rows, weights.take(rows.index, axis=1), min_patients=min_patients)
    return found


def recalls(
    queries: pd.DataFrame, weights: Weights, column: str = "rank", *, min_patients: int = 1
) -> Numbers:
    """R@K and MedR of both directions, the mean of their recalls at `MEAN_KS` and that of the two medians."""
    queries = queries.reset_index(drop=True)
    found = {}
    for direction in DIRECTIONS:
        rows = queries[queries["direction"] == direction]
        ranks, of_rows = rows[column].to_numpy(dtype="float64"), weights.take(rows.index, axis=1)
        numbers = {
            **{f"R@{k}": weighted_mean(ranks <= k, of_rows) for k in KS},
            "MedR": weighted_median(ranks, of_rows),
        }
        found[direction] = {name: _of_patients(rows, x, min_patients) for name, x in numbers.items()}
    nothing = np.full(len(weights), np.nan)
    return {
        "recall": mean_of([found[direction][f"R@{k}"] for direction in DIRECTIONS for k in MEAN_KS], nothing),
        "medr": mean_of([found[direction]["MedR"] for direction in DIRECTIONS], nothing),
        **found,
    }


def calibration(cases: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Calibration of each finding before and after it was fitted, and its sensitivity and specificity.

    Cases have subject_id, finding, label, before and after (probabilities), threshold (positive from there on);
    without `before`, the numbers at the threshold alone. `min_patients` in a bin.
    """
    cases = cases.reset_index(drop=True)
    by_finding: Numbers = {}
    for finding, rows in cases.groupby("finding", sort=False):
        of_rows, positive = weights.take(rows.index, axis=1), rows["label"].to_numpy() == 1
        found: Numbers = {}
        for name in ("before", "after") if "before" in rows else ():
            p = rows[name].to_numpy()
            found[name] = {
                "ece": calibration_error(p, positive, of_rows),
                "brier": weighted_mean((p - positive) ** 2, of_rows),
                "bins": {},
            }
            for place, in_bin in rows.groupby(bins_of(p)):
                of_bin = weights.take(in_bin.index, axis=1)
                observed = weighted_mean(in_bin["label"].to_numpy(dtype="float64"), of_bin)
                found[name]["bins"][str(place)] = _of_patients(in_bin, observed, min_patients)
        is_above = rows["after"].to_numpy() >= rows["threshold"].to_numpy()
        for number in CALIBRATION.numbers:
            if number.compute is not None:
                value = number.compute(is_above, positive, of_rows)
                found[number.name] = _of_patients(
                    rows[positive == (number.name != "specificity")], value, min_patients
                )
        by_finding[str(finding)] = found
    return {"by_finding": by_finding}


def sentences(cases: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """AUC and precision at 10 of sentences as queries of images: means over classes, of all and by band of rho.

    A class counts with the mean over its wordings, its sentences, which have the same images in the same order. Cases
    have sentence_id, class, rho of the class (NaN: in no band), subject_id, label (1: true of the image) and score.
    `min_patients` of a mean.
    """
    cases = cases.reset_index(drop=True)
    scores, positive = cases["score"].to_numpy("float64"), cases["label"].to_numpy() == 1
    by_class: dict[Any, Numbers] = {}
    for name, rows in cases.groupby("class", sort=False).indices.items():
        first = rows[: (cases["sentence_id"].to_numpy()[rows] == cases["sentence_id"][rows[0]]).sum()]
        wordings = scores[rows].reshape(-1, len(first))
        is_true, of_rows = positive[first], weights.take(first, axis=1)
        aucs = [weighted_auc(wording, is_true, of_rows) for wording in wordings]
        precisions = [weighted_precision(wording, is_true, of_rows, 10) for wording in wordings]
        by_class[name] = {"auc": np.mean(aucs, axis=0), "precision_at_10": np.mean(precisions, axis=0)}
    nothing = np.full(len(weights), np.nan)
    band_of = bands_of(cases)

    def means(names: Iterable[Any]) -> Numbers:
        of_each = {x: [by_class[name][x] for name in names] for x in ("auc", "precision_at_10")}
        return {x: _of_patients(cases, mean_of(of, nothing), min_patients) for x, of in of_each.items()}

    return {**means(list(by_class)), **{band: means(band_of.index[band_of == band]) for band in RHO_BANDS}}


def bands_of(cases: pd.DataFrame) -> pd.Series:
    """Class of sentences -> its band of rho; NaN without a rho."""
    rho = cases.drop_duplicates("class").set_index("class")["rho"].astype("float64")
    return pd.cut(rho, [-math.inf, *RHO_BANDS.values()], right=False, labels=list(RHO_BANDS))


def bins_of(probabilities: Float[np.ndarray, "row"]) -> Shaped[np.ndarray, "row"]:
    """Number of each probability's bin; `BINS` bins of equal width, closed below, the last one also above."""
    return np.minimum((probabilities * BINS).astype(int), BINS - 1)


def calibration_error(
    probabilities: Float[np.ndarray, "row"], positive: Shaped[np.ndarray, "*draw row"], weights: Weights
) -> Draws:
    """Expected calibration error (Naeini et al. 2015; Guo et al. 2017), biased upwards in a finite sample.

    The mean over the cases of the distance, in the case's bin, between the mean probability and the share of positives.
    """
    is_in_bin = bins_of(probabilities)[:, None] == np.arange(BINS)
    excess = (weights * (positive - probabilities)) @ is_in_bin
    with np.errstate(invalid="ignore"):
        return np.abs(excess).sum(axis=1) / weights.sum(axis=1)


def _of_patients(rows: pd.DataFrame, numbers: Draws, min_patients: int) -> Draws:
    """NaN where the rows are of too few patients."""
    is_enough = min_patients <= 1 or rows["subject_id"].nunique() >= min_patients
    return numbers if is_enough else np.full_like(numbers, np.nan)
