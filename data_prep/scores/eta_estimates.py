"""Estimates of (a, k) in eta(x) = a * p_LM(x)^k, and of rho(x), what eta should be.

SSD's (0.2, 0.35) belong to CXR-BERT's scale of log p; another language model needs its own. The paper searches a grid;
these estimates are choices, not from the paper: starting points for such a search.

rho(x) is the share of images that fit sentence x, mentioned in their reports or not. What stands in for it:

- "truth": the phantom's own;
- "labels": the share of training studies whose CheXpert label matches the finding that the sentence names; a study
  without a label of this finding counts as one without the finding. Sentences that name no finding, or several, are
  left out, and so are those whose finding has no label in any training study: nobody looked for it;
- "reports": the share of training reports that hold the very sentence. It estimates a LOWER BOUND, since other wordings
  of the same statement, and images of which it is true but not said, are missed; and it is a little high for the rarest
  sentences, each of which was found at least once. `binomial_fit` counts in other reports and is free of that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear, minimize

from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

LARGEST_A = 0.999
LARGEST_K = 10.0
# Searches end a little before a bound.
_AT_BOUND = 1e-4

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
"""Words that name each CheXpert finding."""
_UNCHANGED = r"(?:no|not|without)(?: \w+)? changed?"
"""Says that something is still there."""
_ABSENT = r"no|not|without|free of|negative for|absence of|clear of|normal|unremarkable|resolved|nor"
_FINDING_PATTERNS = {
    name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in _FINDINGS.items()
}
_UNCHANGED_PATTERN = re.compile(rf"\b{_UNCHANGED}\b", re.IGNORECASE)
_ABSENT_PATTERN = re.compile(rf"\b(?:{_ABSENT})\b", re.IGNORECASE)


class LogLinearFit(NamedTuple):
    """eta = a * exp(k * log p), and which of the two stand at a bound of what is allowed."""

    a: float
    k: float
    at_bound: tuple[str, ...] = ()

    def eta(self, log_p: np.ndarray) -> np.ndarray:
        """Class probabilities of sentences with these log probabilities."""
        return self.a * np.exp(self.k * log_p)

    def log_eta(self, log_p: np.ndarray) -> np.ndarray:
        """Their logarithms, also where eta is too small for a number; a must be above 0."""
        return np.log(self.a) + self.k * log_p


def binomial_fit(log_p: np.ndarray, successes: np.ndarray, trials: int, weights: np.ndarray) -> LogLinearFit:
    """Maximum-likelihood (a, k) of successes ~ Binomial(trials, a * exp(k * log_p)), 0 <= a < 1, k >= 0.

    The negative log-likelihood is convex in (log a, k), since -log(1 - exp(z)) is convex in z.

    Args:
        log_p: of each sentence, natural logarithm, at most 0.
        successes: reports among `trials` that hold the sentence.
        trials: number of reports.
        weights: of each sentence, at least 0.

    Raises:
        ValueError: no success of positive weight: a would be 0.
    """
    if not (weights * successes).sum() > 0:
        raise ValueError("no success of positive weight: a would be 0")
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
    """Weighted least squares of log rho on log p, 0 <= a < 1, k >= 0; sentences with rho 0 say nothing here.

    Sentences that are true of every image (rho 1, log rho 0) take part.

    Args:
        log_p: of each sentence, natural logarithm.
        rho: of each sentence, in [0, 1].
        weights: of each sentence, at least 0.

    Raises:
        ValueError: no sentence with rho > 0 and positive weight.
    """
    used = (rho > 0) & (weights > 0)
    if not used.any():
        raise ValueError("no sentence with rho > 0 and positive weight")
    root = np.sqrt(weights[used])
    matrix = np.stack([root, root * log_p[used]], axis=1)
    found = lsq_linear(
        matrix, root * np.log(rho[used]), bounds=([-50.0, 0.0], [np.log(LARGEST_A), LARGEST_K])
    )
    return _fit(float(np.exp(found.x[0])), float(found.x[1]), log_p)


class StraightLine(NamedTuple):
    """log rho = log_a + k * log p, whatever (a, k): it may be one that no class probability may have."""

    log_a: float
    k: float

    def at(self, log_p: np.ndarray) -> np.ndarray:
        """log rho on the line."""
        return self.log_a + self.k * log_p

    @property
    def beyond(self) -> str:
        """Why no allowed (a, k) is this line; empty if one is."""
        reasons = []
        if self.log_a > np.log(LARGEST_A) + _AT_BOUND:
            reasons.append(f"eta would be exp({self.log_a:.3g}) at log p = 0, more than {LARGEST_A}")
        if self.k < 0:
            reasons.append("rho falls where log p rises, k would be below 0")
        if self.k > LARGEST_K:
            reasons.append(f"k would be above {LARGEST_K:g}")
        return ", and ".join(reasons)


def straight_line(log_p: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> StraightLine:
    """Weighted least squares of log rho on log p without any bound.

    Adding a constant to log p changes log_a alone, not what the line explains.

    Args:
        log_p: of each sentence, natural logarithm; at least two different ones.
        rho: of each sentence, in (0, 1].
        weights: of each sentence, above 0.
    """
    log_rho = np.log(rho)
    middle, level = np.average(log_p, weights=weights), np.average(log_rho, weights=weights)
    k = (weights * (log_p - middle) * (log_rho - level)).sum() / (weights * (log_p - middle) ** 2).sum()
    return StraightLine(float(level - k * middle), float(k))


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
    """The fit, with what stands at a bound: k at 0 where it changes no eta, since its unit is that of 1 / log p."""
    distances = {
        f"a is at its bound {LARGEST_A:g}": LARGEST_A - a,
        "k is at its bound 0": k * max(1.0, float(np.ptp(log_p))),
        f"k is at its bound {LARGEST_K:g}": (LARGEST_K - k) / LARGEST_K,
    }
    return LogLinearFit(a, k, tuple(name for name, distance in distances.items() if distance <= _AT_BOUND))


def bound_term(eta: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> float:
    """Weighted mean of |1/(1 - eta) - 1/(1 - rho)|: what a wrong eta adds to SSD's error bound (proposition 2.1).

    Args:
        eta: of each sentence, in [0, 1).
        rho: of each sentence, in [0, 1).
        weights: of each sentence, at least 0.
    """
    return float((weights * np.abs(1 / (1 - eta) - 1 / (1 - rho))).sum() / weights.sum())


def best_constant(rho: np.ndarray, weights: np.ndarray) -> float:
    """The constant eta with the least `bound_term`: 1/(1 - eta) is the weighted median of 1/(1 - rho)."""
    order = np.argsort(rho)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(rho[order][np.searchsorted(share, 0.5)])


def effective_number(weights: np.ndarray) -> float:
    """How many equally weighted points carry as much information (Kish)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def adjusted_r_squared(
    predicted: np.ndarray, observed: np.ndarray, weights: np.ndarray, parameters: int
) -> float:
    """Weighted share of the observed values' variance that a prediction explains, adjusted for its free parameters.

    1 - (1 - R^2) (n - 1) / (n - parameters) with the effective number n of points, so that more parameters alone do
    not look like a better explanation. NaN if the values do not vary or the points are too few.
    """
    n = effective_number(weights)
    if not (np.ptp(observed) > 0 and n > parameters):
        return float("nan")
    mean = (weights * observed).sum() / weights.sum()
    variance = (weights * (observed - mean) ** 2).sum()
    unexplained = (weights * (observed - predicted) ** 2).sum() / variance
    return float(1 - unexplained * (n - 1) / (n - parameters))


def binned_means(x: np.ndarray, y: np.ndarray, weights: np.ndarray, bins: int) -> tuple[np.ndarray, int]:
    """For each point the weighted mean of y in its bin of x (any shape of relation), and how many bins hold a point.

    Bins hold about equal weight, but points of equal x are never parted: where x says nothing, bins say nothing.
    """
    values, which = np.unique(x, return_inverse=True)
    weight = np.bincount(which, weights)
    # The middle of each value's own weight decides, so that a heavy one does not fall into the next bin.
    share = (np.cumsum(weight) - weight / 2) / weight.sum()
    wanted = np.minimum((share * bins).astype(np.int64), bins - 1)
    occupied, number = np.unique(wanted[which], return_inverse=True)
    total = np.bincount(number, weights)
    mean = np.bincount(number, weights * y) / np.where(total > 0, total, 1)
    return mean[number], len(occupied)


def count_sentences(prepared: PreparedSet) -> tuple[pd.DataFrame, dict[str, int]]:
    """Sentences of the training reports with the numbers of training and of validate reports that hold them.

    Returns:
        columns sentence_id, train_reports (at least 1), validate_reports; and the numbers of "train" and "validate"
        reports.

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
    """The one CheXpert finding that a sentence names, and whether it says that it is there; None for none or several.

    By key words and words of negation: good enough for a share over many sentences, not for a diagnosis.
    """
    names = [name for name, pattern in _FINDING_PATTERNS.items() if pattern.search(text)]
    if len(names) != 1:
        return None
    return names[0], not _ABSENT_PATTERN.search(_UNCHANGED_PATTERN.sub("", text))


def findings_without_labels(labels: pd.DataFrame) -> list[str]:
    """Names of the CheXpert columns that hold no label at all: NaN there says nothing about the finding."""
    return labels.columns[labels.isna().all()].tolist()


def rho_by_labels(texts: pd.Series, labels: pd.DataFrame) -> pd.Series:
    """For each sentence the share of studies whose label matches it; NaN where no label can tell.

    No label can tell where the sentence names no finding or several, or one of `findings_without_labels`.

    Args:
        texts: sentences.
        labels: the CheXpert columns, a row for each training study; 1 positive, 0 negative, -1 uncertain, NaN not
            mentioned. An uncertain label matches nothing and is left out of the share; a missing one counts as
            negative, as long as its column holds any label.
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
