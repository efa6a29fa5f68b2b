"""Estimate (a, k) of eta(x) = a * p_LM(x)^k for a language model's scores, from reports alone.

    python -m data_prep.fit_class_probability --data SET --output configs/objective/dcl_lm_fitted.yaml

SSD's (0.2, 0.35) belong to CXR-BERT's scale of log p; another language model needs its own. The paper searches a grid;
this estimate is a choice, not from the paper. It is a starting point for such a search, or replaces it:

- the sentences are those of the training reports; each counts as often as it is an anchor, once for each training
  report that holds it, because eta is needed there;
- what is counted is in how many of the VALIDATE reports the sentence stands, zero included. Counting in the training
  reports would be biased: every sentence was found there at least once;
- that count is binomial with probability a * exp(k * log p), 0 <= a < 1 and k >= 0; maximum likelihood (a convex
  problem). Test and grounding patients are not looked at.

Exact sentences are counted, not classes: other wordings of the same statement, and images of which it is true but not
said, are missed. So eta is fitted to a LOWER BOUND of rho, the share of images that the sentence fits; relative sizes
are what it gets right.

The output is a configuration to compose with that of a training:
    python -m medclip_dcl fit --config configs/mimic_cxr.yaml --config configs/objective/dcl_lm_fitted.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_prep.command import run_command
from medclip_dcl.prepared import PreparedDataError, PreparedSet, write_text

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MAX_ETA = 0.3
_LARGEST_A = 0.999
_LARGEST_K = 10.0
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# Outside, eta is next to InfoNCE or next to the floor for most anchors (METHOD: warn).
_USUAL_MEDIAN = (1e-4, 0.5)
# Ratio of the 95% to the 5% quantile of eta below which the sentence hardly matters.
_LEAST_SPREAD = 2.0


class LogLinearFit(NamedTuple):
    """eta = a * exp(k * log p), and which of the two stand at a bound of what is allowed."""

    a: float
    k: float
    at_bound: tuple[str, ...]


def fit_log_linear(
    log_p: np.ndarray, successes: np.ndarray, trials: int, weights: np.ndarray
) -> LogLinearFit:
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
    import numpy as np
    from scipy.optimize import minimize

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
    limits = [(-50.0, float(np.log(_LARGEST_A))), (0.0, _LARGEST_K * scale)]
    start = np.array([min(np.log(mean), limits[0][1]), 0.0])
    found = minimize(
        loss, start, jac=True, bounds=limits, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-12}
    )
    a, k = float(np.exp(found.x[0])), float(found.x[1] / scale)
    at_bound = [
        f"{name} is at its bound {bound:g}"
        for name, value, bound in (("a", a, _LARGEST_A), ("k", k, 0.0), ("k", k, _LARGEST_K))
        if abs(value - bound) <= 1e-6 * max(1.0, bound)
    ]
    return LogLinearFit(a, k, tuple(at_bound))


def count_sentences(prepared: PreparedSet) -> tuple[pd.DataFrame, int]:
    """Sentences of the training reports with the numbers of training and of validate reports that hold them.

    Returns:
        columns sentence_id, train_reports (at least 1), validate_reports; and the number of validate reports.

    Raises:
        PreparedDataError: no validate report, or no training report.
    """
    images, reports = prepared.table("images"), prepared.table("reports")
    reports = reports[["study_id", "sentence_id"]].drop_duplicates()
    holding = {}
    for use in ("train", "validate"):
        studies = images.loc[images["use"] == use, "study_id"]
        holding[use] = reports[reports["study_id"].isin(studies)]
        if holding[use].empty:
            raise PreparedDataError(
                f"{prepared.folder} has no {use} reports; both train and validate are needed"
            )
    counts = holding["train"]["sentence_id"].value_counts().rename("train_reports").rename_axis("sentence_id")
    table = counts.sort_index().reset_index()
    validate = holding["validate"]["sentence_id"].value_counts()
    table["validate_reports"] = table["sentence_id"].map(validate).fillna(0).astype("int64")
    return table, int(holding["validate"]["study_id"].nunique())


def fit_class_probability(data: Path, log_p: str | None, output: Path) -> LogLinearFit:
    """Estimate (a, k), print what eta becomes, write the configuration.

    Args:
        data: the prepared set.
        log_p: stem of a file in SET/log_p; None for the only one there.
        output: YAML file to write.

    Raises:
        PreparedDataError: no such set or scores; training sentences without a score; no sentence in common between
            training and validate reports.
    """
    prepared = PreparedSet(data)
    name = prepared.log_p_file(log_p).stem
    table, validate_reports = count_sentences(prepared)
    table["log_p"] = table["sentence_id"].map(prepared.log_p(name).set_index("sentence_id")["log_p"])
    missing = table.loc[table["log_p"].isna(), "sentence_id"]
    if len(missing):
        raise PreparedDataError(
            f"log_p/{name}.parquet: {len(missing)} of {len(table)} training sentences have NaN log_p (first: "
            f"sentence_id {missing.iloc[0]}); score the sentences again"
        )
    if not table["validate_reports"].any():
        raise PreparedDataError(
            f"{data}: none of the {len(table):,} training sentences stands in one of the {validate_reports:,} validate "
            "reports; eta cannot be estimated from so few, use ConstantClassProbability"
        )
    fit = fit_log_linear(
        table["log_p"].to_numpy(),
        table["validate_reports"].to_numpy(),
        validate_reports,
        table["train_reports"].to_numpy(),
    )
    print(_report(fit, table, validate_reports, name, prepared))
    write_text(_yaml(fit, name, len(table), validate_reports), output)
    print(f"written: {output}")
    return fit


def _report(fit: LogLinearFit, table: pd.DataFrame, trials: int, name: str, prepared: PreparedSet) -> str:
    import numpy as np

    eta = fit.a * np.exp(fit.k * table["log_p"].to_numpy())
    of_anchors = np.minimum(np.repeat(eta, table["train_reports"]), MAX_ETA)
    quantiles = np.quantile(of_anchors, _QUANTILES)
    lines = [
        f"eta = {fit.a:.4g} * exp({fit.k:.4g} * log p), log p from {name}; "
        f"{len(table):,} training sentences counted in {trials:,} validate reports",
        "eta of the anchors (training sentences as often as reports hold them), capped at "
        f"{MAX_ETA}: "
        + ", ".join(f"{100 * q:g}% {value:.3g}" for q, value in zip(_QUANTILES, quantiles, strict=True)),
        f"Spearman correlation of eta with the share of validate reports: "
        f"{_spearman(eta, table['validate_reports'])}",
    ]
    if prepared.has("classes"):
        truth = prepared.table("classes").set_index("sentence_id").reindex(table["sentence_id"])
        lines.append(
            f"Spearman correlation of eta with the truth: {_spearman(eta, truth['rho'])} with rho (share of images of "
            f"which the sentence is true), {_spearman(eta, truth['sentence_share'])} with the share of sentences that "
            "say it"
        )
    lines += [f"warning: {problem}; {_MEANING[problem[0]]}" for problem in fit.at_bound]
    low, high = np.quantile(of_anchors, (0.05, 0.95))
    if high < _LEAST_SPREAD * low:
        lines.append(
            f"warning: eta is {low:.3g} to {high:.3g} for nine anchors of ten: next to a constant class probability; "
            "the scores say little about how common a sentence is"
        )
    median = float(np.median(of_anchors))
    if not _USUAL_MEDIAN[0] <= median <= _USUAL_MEDIAN[1]:
        lines.append(
            f"warning: the median of eta, {median:.3g}, lies outside [{_USUAL_MEDIAN[0]:g}, {_USUAL_MEDIAN[1]:g}]: "
            + ("hardly any correction" if median < _USUAL_MEDIAN[0] else "most anchors will sit on the floor")
        )
    return "\n".join(lines)


_MEANING = {
    "a": "log p does not fall where sentences are common",
    "k": "log p says nothing about how common a sentence is, or all about it: look at the scores",
}


def _spearman(eta: np.ndarray, other: pd.Series) -> str:
    """Rank correlation over distinct sentences for which the other value is known."""
    from scipy.stats import spearmanr

    known = other.notna().to_numpy()
    if len(set(eta[known])) < 2 or other[known].nunique() < 2:
        return "undefined (one of the two does not vary)"
    return f"{spearmanr(eta[known], other[known]).statistic:.3f}"


def _yaml(fit: LogLinearFit, name: str, sentences: int, validate_reports: int) -> str:
    return f"""\
# eta(x) = a * p_LM(x)^k, estimated by data_prep.fit_class_probability (choice, not from the paper): binomial maximum
# likelihood on {sentences} sentences of training reports, counted in {validate_reports} validate reports.
# (a, k) belong to these scores and to no others.
model:
  init_args:
    class_probability:
      class_path: medclip_dcl.objectives.LanguageModelClassProbability
      init_args:
        a: {fit.a:#.4g}
        k: {fit.k:#.4g}
        max_eta: {MAX_ETA}
data:
  init_args:
    log_p: {name}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and estimate."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.fit_class_probability",
        description="Estimate (a, k) of eta = a * p_LM^k on training and validate reports; write a configuration.",
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="SET", help="prepared data set with scores"
    )
    parser.add_argument("--log_p", metavar="NAME", help="stem of a file in SET/log_p (default: the only one)")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.yaml", help="configuration to write"
    )
    options = parser.parse_args(arguments)
    fit_class_probability(options.data, options.log_p, options.output)


if __name__ == "__main__":
    run_command(main)
