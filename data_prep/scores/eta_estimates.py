"""Estimates of (a, k) in eta(x) = a * p_LM(x)^k, and of rho(x), the class probability that eta should equal.

SSD's (0.2, 0.35) belong to CXR-BERT's scale of log p; another language model may need its own. The paper searches a
grid; these estimates are choices, not from the paper: starting points for such a search. The fits take arrays of a
value for each sentence: log_p (natural logarithm, at most 0), rho (in [0, 1]) and weights (at least 0).

rho(x) is the share of images of which sentence x is true, mentioned in their reports or not. Sources of it:

- "truth": the phantom's own;
- "labels": the share of training studies whose CheXpert label matches the finding that the sentence names; a study
  without a label of this finding counts as negative. Sentences that name no finding, or several, are left out, and so
  are those whose finding has no label in any training study;
- "reports": the share of training reports that contain the sentence. It estimates a LOWER BOUND: it misses other
  wordings of the same statement, and images of which it is true but not mentioned. It is a little high for the rarest
  sentences, each of which was found at least once; `binomial_fit` counts in other reports and is free of that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear, minimize

from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

MAX_ETA = 0.3
LARGEST_A = 0.999
LARGEST_K = 10.0
# Searches end a little before a bound.
_AT_BOUND = 1e-4

SOURCES = {
    "truth": "rho is the phantom's truth: the share of images of which the sentence is true",
    "labels": "rho is the share of training studies whose CheXpert label matches the finding that the sentence names",
    "reports": "rho is the share of training reports that contain the sentence, which estimates a LOWER BOUND",
}

# Words that name each CheXpert finding.
_FINDINGS = {
    "Atelectasis": r"atelecta\w*",
    "Cardiomegaly": r"cardiomegaly|heart(?! failure)|cardiac (?:silhouette|enlargement|size|contour)",
    "Consolidation": r"consolidat\w*",
    "Edema": r"(?:o?edema)|(?:vascular|venous) congestion|heart failure",
    "Enlarged Cardiomediastinum": r"mediastin\w*|cardiomediastin\w*",
    "Fracture": r"fractures?",
    "Lung Lesion": r"nodules?|nodular|mass(?:es)?|lesions?",
    "Lung Opacity": r"opacit\w*|opacif\w*|infiltrat\w*|airspace",
    "Pleural Effusion": r"(?<!pericardial )effusions?|pleural fluid",
    "Pleural Other": r"pleural (?:thickening|scarring|plaques?)",
    "Pneumonia": r"pneumonia|infecti\w*",
    "Pneumothorax": r"pneumothora\w*",
    "Support Devices": r"tubes?|catheters?|lines?|pacemakers?|pacer|port|devices?|wires?|clips?",
}
# States that a finding is still there.
_UNCHANGED = re.compile(r"\b(?:no|not|without)(?: \w+)? changed?\b", re.IGNORECASE)
_ABSENT = re.compile(
    r"\b(?:no|not|without|free of|negative for|absence of|clear of|normal|unremarkable|resolved|nor)\b",
    re.IGNORECASE,
)


class LogLinearFit(NamedTuple):
    """eta = a * exp(k * log p); `at_bound` names the parameters that are at a bound of their range."""

    a: float
    k: float
    at_bound: tuple[str, ...] = ()

    def eta(self, log_p: np.ndarray) -> np.ndarray:
        """Class probabilities of sentences with these log probabilities."""
        return self.a * np.exp(self.k * log_p)


def binomial_fit(log_p: np.ndarray, successes: np.ndarray, trials: int, weights: np.ndarray) -> LogLinearFit:
    """Maximum-likelihood (a, k) of successes ~ Binomial(trials, a * exp(k * log_p)), 0 <= a < 1, k >= 0.

    The negative log-likelihood is convex in (log a, k), since -log(1 - exp(z)) is convex in z. `successes` counts the
    reports among `trials` that contain the sentence; at least one sentence of positive weight has some.
    """
    share = weights / weights.sum()
    # log p spans tens of units, log a a few: on one scale the search takes a handful of steps.
    scale = max(float(np.abs(log_p).max()), 1.0)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        z = parameters[0] + parameters[1] * (log_p / scale)
        complement = -np.expm1(z)
        value = -(share * (successes * z + (trials - successes) * np.log(complement))).sum() / trials
        slope = -share * (successes - (trials - successes) * np.exp(z) / complement) / trials
        return value, np.array([slope.sum(), (slope * log_p / scale).sum()])

    mean = float((share * successes).sum() / trials)
    limits = [(-50.0, float(np.log(LARGEST_A))), (0.0, LARGEST_K * scale)]
    start = np.array([min(np.log(mean), limits[0][1]), 0.0])
    found = minimize(
        loss, start, jac=True, bounds=limits, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-12}
    )
    return _fit(float(np.exp(found.x[0])), float(found.x[1] / scale), log_p)


def least_squares_fit(log_p: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> LogLinearFit:
    """Weighted least squares of log rho on log p, 0 <= a < 1, k >= 0; sentences with rho 0 are left out."""
    used = (rho > 0) & (weights > 0)
    root = np.sqrt(weights[used])
    matrix = np.stack([root, root * log_p[used]], axis=1)
    found = lsq_linear(
        matrix, root * np.log(rho[used]), bounds=([-50.0, 0.0], [np.log(LARGEST_A), LARGEST_K])
    )
    return _fit(float(np.exp(found.x[0])), float(found.x[1]), log_p)


def bound_fit(log_p: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> LogLinearFit:
    """(a, k) with the least `bound_term`, 0 <= a < 1, k >= 0: a grid, then a simplex search from its best points."""

    def loss(parameters: np.ndarray) -> float:
        log_a, k = parameters
        if not (log_a <= np.log(LARGEST_A) and 0 <= k <= LARGEST_K):
            return float("inf")
        return bound_term(np.exp(log_a + k * log_p), rho, weights)

    grid = [
        np.array([log_a, k])
        for log_a in np.log([0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, LARGEST_A])
        for k in (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.6, 1.0, 3.0)
    ]
    best = sorted(grid, key=loss)[:5]
    searched = [minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-6}) for start in best]
    found = min(searched, key=lambda result: result.fun)
    return _fit(float(np.exp(found.x[0])), float(found.x[1]), log_p)


def _fit(a: float, k: float, log_p: np.ndarray) -> LogLinearFit:
    """The fit with its parameters at a bound: k is at 0 where it changes no eta, as its unit is that of 1 / log p."""
    distances = {
        f"a is at its bound {LARGEST_A:g}": LARGEST_A - a,
        "k is at its bound 0": k * max(1.0, float(np.ptp(log_p))),
        f"k is at its bound {LARGEST_K:g}": (LARGEST_K - k) / LARGEST_K,
    }
    return LogLinearFit(a, k, tuple(name for name, distance in distances.items() if distance <= _AT_BOUND))


def bound_term(eta: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> float:
    """Weighted mean of |1/(1 - eta) - 1/(1 - rho)|, which a wrong eta adds to SSD's error bound (proposition 2.1)."""
    return float((weights * np.abs(1 / (1 - eta) - 1 / (1 - rho))).sum() / weights.sum())


def best_constant(rho: np.ndarray, weights: np.ndarray) -> float:
    """The constant eta with the least `bound_term`: 1/(1 - eta) is the weighted median of 1/(1 - rho)."""
    order = np.argsort(rho)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(rho[order][np.searchsorted(share, 0.5)])


def count_sentences(prepared: PreparedSet) -> tuple[pd.DataFrame, dict[str, int]]:
    """Sentences of the training reports, and the numbers of "train" and "validate" reports.

    Returns:
        columns sentence_id, train_reports (at least 1), validate_reports; and the numbers by use.

    Raises:
        PreparedDataError: no validate report, or no training report.
    """
    reports = prepared.table("reports")
    reports = reports[["study_id", "sentence_id"]].drop_duplicates()
    holding = {}
    for use in ("train", "validate"):
        holding[use] = reports[reports["study_id"].isin(prepared.studies(use))]
        if holding[use].empty:
            raise PreparedDataError(
                f"{prepared.folder} has no {use} reports; both train and validate are needed"
            )
    counts = holding["train"]["sentence_id"].value_counts().rename("train_reports").rename_axis("sentence_id")
    table = counts.sort_index().reset_index()
    validate = holding["validate"]["sentence_id"].value_counts()
    table["validate_reports"] = table["sentence_id"].map(validate).fillna(0).astype("int64")
    return table, {use: int(held["study_id"].nunique()) for use, held in holding.items()}


def named_finding(text: str) -> tuple[str, bool] | None:
    """The one CheXpert finding that a sentence names, and whether it is present; None for none or several.

    By key words and words of negation: good enough for a share over many sentences, not for a diagnosis.
    """
    names = [name for name, words in _FINDINGS.items() if re.search(rf"\b(?:{words})\b", text, re.IGNORECASE)]
    if len(names) != 1:
        return None
    return names[0], not _ABSENT.search(_UNCHANGED.sub("", text))


def findings_without_labels(labels: pd.DataFrame) -> list[str]:
    """Names of the CheXpert columns without any label: NaN there says nothing about the finding."""
    return labels.columns[labels.isna().all()].tolist()


def rho_by_labels(texts: pd.Series, labels: pd.DataFrame) -> pd.Series:
    """For each sentence the share of training studies whose CheXpert label matches it.

    NaN where the sentence names no finding or several, or one of `findings_without_labels`. Uncertain labels (-1) are
    left out of the share; a missing one counts as negative.
    """
    share_positive = dict.fromkeys(_FINDINGS, float("nan"))
    for name in share_positive.keys() - set(findings_without_labels(labels)):
        known = labels[name][labels[name] != -1]
        if len(known):
            share_positive[name] = float((known == 1).mean())

    def rho(text: str) -> float:
        found = named_finding(text)
        if found is None:
            return float("nan")
        name, is_there = found
        return share_positive[name] if is_there else 1 - share_positive[name]

    return texts.map(rho).astype("float64")


class Source(NamedTuple):
    """Sentences with one kind of rho, as arrays of equal length."""

    log_p: np.ndarray
    rho: np.ndarray
    weights: np.ndarray


class Estimates(NamedTuple):
    """Estimates of rho and (a, k) on the sentences of the training reports.

    Attributes:
        table: training sentences: sentence_id, text, n_tokens, train_reports, validate_reports, log_p, label_frequency
            and rho_NAME for each source.
        reports: numbers of "train" and "validate" reports.
        fits: by name: reports (binomial), and SOURCE_least_squares, SOURCE_bound for each source of rho.
        without_labels: CheXpert columns of the set that hold no label for any training study.
    """

    table: pd.DataFrame
    reports: dict[str, int]
    fits: dict[str, LogLinearFit]
    without_labels: list[str]

    def source(self, name: str) -> Source:
        """The sentences for which this rho is known."""
        known = self.table[self.table[f"rho_{name}"].notna()]
        columns = (known["log_p"], known[f"rho_{name}"], known["train_reports"].astype("float64"))
        return Source(*(column.to_numpy() for column in columns))

    @property
    def sources(self) -> list[str]:
        """Names of the kinds of rho that are known here, and below 1 for some sentence."""
        return [n for n in SOURCES if f"rho_{n}" in self.table and (self.table[f"rho_{n}"] < 1).any()]

    def bounded(self, name: str) -> Source:
        """The sentences whose rho is known and below 1, where SSD's error bound is finite."""
        source = self.source(name)
        return Source(*(column[source.rho < 1] for column in source))

    def distance(self, name: str, eta: np.ndarray, capped: bool = True) -> float:
        """`bound_term` of eta, one for each sentence of `bounded`, capped as in training if asked for."""
        source = self.bounded(name)
        return bound_term(np.minimum(eta, MAX_ETA) if capped else eta, source.rho, source.weights)

    def anchors(self, fit: LogLinearFit) -> np.ndarray:
        """Capped eta of every anchor: each sentence as often as training reports contain it."""
        eta = fit.eta(self.table["log_p"].to_numpy())
        return np.minimum(np.repeat(eta, self.table["train_reports"]), MAX_ETA)


def estimate(prepared: PreparedSet, log_p: str | None = None) -> Estimates:
    """Estimates of rho and (a, k) from a prepared set with scores.

    Raises:
        PreparedDataError: no scores; training sentences without a score; no sentence in common between training and
            validate reports.
    """
    name = prepared.log_p_file(log_p).stem
    table, reports = count_sentences(prepared)
    table = table.merge(prepared.log_p(name), on="sentence_id", how="left")
    missing = table.loc[table["log_p"].isna(), "sentence_id"]
    if len(missing):
        raise PreparedDataError(
            f"log_p/{name}.parquet: {len(missing)} of {len(table)} training sentences have NaN log_p (first: "
            f"sentence_id {missing.iloc[0]}), which training refuses; score the sentences again, or prepare the set "
            "again if they have no tokens"
        )
    if not table["validate_reports"].any():
        raise PreparedDataError(
            f"{prepared.folder}: none of the {len(table):,} training sentences occurs in one of the "
            f"{reports['validate']:,} validate reports, too few to estimate eta; use ConstantClassProbability"
        )
    table["text"] = table["sentence_id"].map(prepared.table("sentences").set_index("sentence_id")["text"])
    table["rho_reports"] = table["train_reports"] / reports["train"]
    without_labels: list[str] = []
    if prepared.has("labels"):
        labels = prepared.table("labels").drop_duplicates("study_id").set_index("study_id")[list(CHEXPERT)]
        labels = labels[labels.index.isin(prepared.studies("train"))]
        without_labels = findings_without_labels(labels)
        rho = rho_by_labels(table["text"], labels)
        if rho.notna().any():
            table["rho_labels"] = rho
        table["label_frequency"] = table["sentence_id"].map(_label_frequency(prepared, labels))
    if prepared.has("classes"):
        classes = prepared.table("classes").set_index("sentence_id")
        table["rho_truth"] = table["sentence_id"].map(classes["rho"])
    found = Estimates(table, reports, {}, without_labels)
    log_ps, counts, weights = (table[c].to_numpy() for c in ("log_p", "validate_reports", "train_reports"))
    found.fits["reports"] = binomial_fit(log_ps, counts, reports["validate"], weights)
    for source in found.sources:
        if found.source(source).rho.any():
            found.fits[f"{source}_least_squares"] = least_squares_fit(*found.source(source))
            found.fits[f"{source}_bound"] = bound_fit(*found.bounded(source))
    return found


def _label_frequency(prepared: PreparedSet, labels: pd.DataFrame) -> pd.Series:
    """By sentence_id: the mean, over its training reports, of the frequency of the report's positive labels."""
    positive = labels == 1
    by_study = (positive * positive.mean()).sum(axis=1) / positive.sum(axis=1).replace(0, np.nan)
    reports = prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
    return reports.assign(value=reports["study_id"].map(by_study)).groupby("sentence_id")["value"].mean()
