"""The numbers of results.json, computed from the rows of predictions/*.parquet.

Each section function takes the rows of one evaluation and weights (draw, row), and returns its section of results.json
with an array (draw,) in the place of each number; NaN where a draw has no case, or where a number rests on fewer than
``min_patients`` patients. Weights of 1 give a test's result, weights that count draws a bootstrap. Without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Shaped

KS = (1, 5, 10, 50, 100)
MEAN_KS = (10, 50, 100)
"""Of the mean recall, as in SSD's table 1."""
DIRECTIONS = ("image_to_text", "text_to_image")
GROUNDING = ("cnr", "cnr_signed", "miou")
LOCALISATION = ("hit", "area", "cnr_signed", "miou", "iou", "dice", "reader_iou", "reader_dice")
"""Numbers of a case of the localisation; area is the chance level of hit."""
LOCALISATION_OPTIONS = ("hit_within", "iou_normalised")
"""Numbers of a case that options of `Localisation` add."""
RHO_BANDS = {"rare": 0.1, "middle": 0.4, "common": math.inf}
"""Band of sentence classes -> the share of images of which they are true (rho) lies below this and not in the band
before."""
_LOWER = re.compile(r"(train|validate)/(\w+_)?(loss|perplexity|medr)")
_HIGHER = re.compile(
    r"validate/((auc|acc|average_precision)(_\w+)?|(\w+_)?(recall|accuracy|auc|precision_at_10))"
)
BINS = 10
"""Bins of a reliability curve and of the expected calibration error (choice)."""

Numbers = dict[str, Any]
"""Nested as in results.json; its leaves are arrays (draw,)."""
Weights = Float[np.ndarray, "draw row"]


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
    """AUC and accuracy of each finding and their averages; of logits the average precision, too.

    Scores are logits, or score(positive prompt) - score(negative prompt); a case is called positive above 0.

    Args:
        cases: predictions of a classification.
        weights: of the cases.
        min_cases: positive and negative cases, each, that a finding needs; others have no number and are left out of
            the averages. A draw without a case of either class has no number of this finding and no average.
        findings: default: those of the cases.
        min_patients: with a positive case, and with a negative one.
        dtype: precision of AUC and average precision.
    """
    cases = cases.reset_index(drop=True)
    has_logits = "logit" in cases
    names = ("auc", "average_precision", "acc") if has_logits else ("auc", "acc")
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
        of_finding = scores[rows.index].to_numpy(dtype="float64")
        of_rows = weights.take(rows.index, axis=1)
        found: Numbers = {"auc": weighted_auc(of_finding, positive, of_rows).astype(dtype)}
        if has_logits:
            precision = weighted_average_precision(of_finding, positive, of_rows)
            found["average_precision"] = precision.astype(dtype)
        found["acc"] = weighted_mean((of_finding > 0) == positive, of_rows)
        is_defined = np.isfinite(found["auc"])
        by_finding[finding] = {
            name: np.where(is_defined, x, np.nan).astype("float64") for name, x in found.items()
        }
    averages = {name: mean_of([by_finding[f][name] for f in counted], nothing) for name in names}
    return {**averages, "by_finding": by_finding}


def is_higher_better(metric: str) -> bool | None:
    """Direction of a logged metric of this package, such as validate/auc; None for any other."""
    return False if _LOWER.fullmatch(metric) else True if _HIGHER.fullmatch(metric) else None


def scores_of(cases: pd.DataFrame) -> pd.Series:
    """Score of each case of a classification: its logit, or score(positive prompt) - score(negative prompt)."""
    return cases["logit"] if "logit" in cases else cases["score_positive"] - cases["score_negative"]


def grounding(boxes: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Mean CNR and mIoU over boxes, over those of each category, and over image-phrase pairs (`pair_` columns)."""
    boxes = boxes.reset_index(drop=True)

    def means(rows: pd.DataFrame) -> Numbers:
        return box_means(rows, weights.take(rows.index, axis=1), min_patients=min_patients)

    found = means(boxes)
    found["by_category"] = {str(category): means(rows) for category, rows in boxes.groupby("category")}
    pairs = boxes.drop_duplicates(["dicom_id", "phrase"]).sort_values("dicom_id", kind="stable")
    of_pairs = {"cnr_signed": pairs["pair_cnr_signed"], "miou": pairs["pair_miou"]}
    found["by_pair"] = means(pairs.assign(cnr=pairs["pair_cnr_signed"].abs(), **of_pairs))
    return found


def box_means(boxes: pd.DataFrame, weights: Weights, *, min_patients: int = 1) -> Numbers:
    """Mean CNR, signed CNR and mIoU."""
    found = {}
    for name in GROUNDING:
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
    names = [*LOCALISATION, *(name for name in LOCALISATION_OPTIONS if name in cases)]
    counted: dict[str, list[Float[np.ndarray, "draw"]]] = {name: [] for name in names}
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

    Cases have subject_id, finding, label, before and after (probabilities), threshold (positive from there on).
    `min_patients` with a positive case, with a negative one, and in a bin.
    """
    cases = cases.reset_index(drop=True)
    by_finding: Numbers = {}
    for finding, rows in cases.groupby("finding", sort=False):
        of_rows, positive = weights.take(rows.index, axis=1), rows["label"].to_numpy() == 1
        found: Numbers = {}
        for name in ("before", "after"):
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
        for name, is_class, is_right in (
            ("sensitivity", positive, is_above),
            ("specificity", ~positive, ~is_above),
        ):
            share = weighted_mean(is_right[is_class].astype("float64"), of_rows.compress(is_class, axis=1))
            found[name] = _of_patients(rows[is_class], share, min_patients)
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
) -> Float[np.ndarray, "draw"]:
    """Expected calibration error (Naeini et al. 2015; Guo et al. 2017), biased upwards in a finite sample.

    The mean over the cases of the distance, in the case's bin, between the mean probability and the share of positives.
    """
    is_in_bin = bins_of(probabilities)[:, None] == np.arange(BINS)
    excess = (weights * (positive - probabilities)) @ is_in_bin
    with np.errstate(invalid="ignore"):
        return np.abs(excess).sum(axis=1) / weights.sum(axis=1)


def weighted_mean(values: Shaped[np.ndarray, "row"], weights: Weights) -> Float[np.ndarray, "draw"]:
    """Mean of the finite values; NaN for a draw without any."""
    is_finite = np.isfinite(values)
    if not is_finite.all():
        values, weights = values[is_finite], weights.compress(is_finite, axis=1)
    # Sums of counts are exact in any order; of other values a product would change the last digit.
    total = weights @ values.astype("float64") if values.dtype == bool else (weights * values).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / weights.sum(axis=1)


def weighted_auc(
    scores: Float[np.ndarray, "row"], positive: Bool[np.ndarray, "row"], weights: Weights
) -> Float[np.ndarray, "draw"]:
    """Area under the ROC curve: the chance that a positive case scores above a negative one; a tie counts half.

    A draw that lacks a class gives NaN.
    """
    order = np.argsort(scores, kind="stable")
    of_class = [order[positive[order] == is_positive] for is_positive in (False, True)]
    negative, own = scores[of_class[0]], weights.take(of_class[1], axis=1)
    below = np.zeros((len(weights), len(negative) + 1))
    weights.take(of_class[0], axis=1).cumsum(axis=1, out=below[:, 1:])
    ends = [np.searchsorted(negative, scores[of_class[1]], side) for side in ("left", "right")]
    wins = sum(np.einsum("dr,dr->d", own, below.take(end, axis=1)) for end in ends) / 2
    with np.errstate(invalid="ignore"):
        return wins / (own.sum(axis=1) * below[:, -1])


def weighted_average_precision(
    scores: Float[np.ndarray, "row"], positive: Bool[np.ndarray, "row"], weights: Weights
) -> Float[np.ndarray, "draw"]:
    """Sum over thresholds of (recall - recall before) * precision; tied cases are one threshold.

    Without skill it is the share of positive cases. A draw without a positive case gives NaN.
    """
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(-scores[order], prepend=-np.inf) > 0)
    cases = weights.take(order, axis=1).cumsum(axis=1)
    places = np.flatnonzero(positive[order])
    # Recall grows at thresholds with a positive case alone.
    grows, first = np.unique(np.searchsorted(starts, places, "right") - 1, return_index=True)
    positives = np.add.reduceat(weights.take(order[places], axis=1), first, axis=1)
    last = np.append(starts[1:], len(order))[grows] - 1
    gains = np.zeros((len(weights), len(starts)))
    # Thresholds above the first case that was drawn have neither recall nor precision.
    gains[:, grows] = positives * (positives.cumsum(axis=1) / np.maximum(cases.take(last, axis=1), 1))
    with np.errstate(invalid="ignore"):
        return gains.sum(axis=1) / positives.sum(axis=1)


def weighted_precision(
    scores: Float[np.ndarray, "row"], positive: Bool[np.ndarray, "row"], weights: Weights, k: int
) -> Float[np.ndarray, "draw"]:
    """Share of positive cases among the k with the highest scores; its expectation where cases tie at the end."""
    order = np.argsort(-scores, kind="stable")
    for last in (10 * k, len(order)):  # few draws need more than the first
        top = order[scores[order] >= scores[order[:last][-1]]]
        of_top = weights.take(top, axis=1)
        if of_top.sum(axis=1).min() >= k:
            break
    starts = np.flatnonzero(np.diff(-scores[top], prepend=-np.inf) > 0)
    cases = np.add.reduceat(of_top, starts, axis=1)
    positives = np.add.reduceat(of_top * positive[top], starts, axis=1)
    until = cases.cumsum(axis=1).clip(max=k)
    taken = np.diff(until, axis=1, prepend=0)
    with np.errstate(invalid="ignore"):
        return (taken * positives / np.maximum(cases, 1)).sum(axis=1) / until[:, -1]


def weighted_median(values: Float[np.ndarray, "row"], weights: Weights) -> Float[np.ndarray, "draw"]:
    """Median; of an even number of rows the mean of the middle two. NaN for a draw without any."""
    if not len(values):
        return np.full(len(weights), np.nan)
    order = np.argsort(values, kind="stable")
    ordered, below = values[order], weights.take(order, axis=1).cumsum(axis=1)
    total = below[:, -1]
    middle = np.stack([(total - 1) // 2, total // 2], axis=1)
    places = [np.searchsorted(*one, side="right") for one in zip(below, middle, strict=True)]
    lower, upper = ordered[np.array(places).clip(max=len(ordered) - 1)].T
    return np.where(total > 0, (lower + upper) / 2, np.nan)


def mean_of(
    numbers: list[Float[np.ndarray, "draw"]], otherwise: Float[np.ndarray, "draw"]
) -> Float[np.ndarray, "draw"]:
    """Mean of numbers in each draw; `otherwise` if there are none."""
    return sum(numbers[1:], numbers[0]) / len(numbers) if numbers else otherwise


def _of_patients(
    rows: pd.DataFrame, numbers: Float[np.ndarray, "draw"], min_patients: int
) -> Float[np.ndarray, "draw"]:
    """NaN where the rows are of too few patients."""
    is_enough = min_patients <= 1 or rows["subject_id"].nunique() >= min_patients
    return numbers if is_enough else np.full_like(numbers, np.nan)
