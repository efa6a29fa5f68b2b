"""What a language model's sentence scores mean, and (a, k) of eta(x) = a * p_LM(x)^k for them, before anyone trains.

    python -m data_prep.eta_report --data SET

Into SET/eta/ (or --output FOLDER) go

- report.md with the most and least probable sentences, what log p goes along with (how often a sentence occurs, its
  length, how common the findings of its reports are), estimates of (a, k), and how far 1/(1 - eta) is from
  1/(1 - rho), the term of SSD's error bound (proposition 2.1) that a wrong eta adds. It holds report texts: it is
  patient data where the reports are;
- eta.png: histograms of log p and eta, and log rho over log p: is class probability log-linear in text probability?
- class_probability.yaml, the configuration to train with:
  python -m medclip_dcl fit --config configs/mimic_cxr.yaml --config configs/objective/dcl_lm.yaml \
      --config SET/eta/class_probability.yaml
  Where training would warn that these (a, k) do not fit the scores, it holds SSD's constant eta instead, and the
  command says so.

All is computed on the sentences of the training reports, each weighted by the number of training reports that hold it,
because that is how often it is an anchor. The default estimate, "reports", is the maximum-likelihood fit to in how many
VALIDATE reports each sentence stands, zero included: counting in the training reports would be biased, since every
sentence was found there at least once. Test and grounding patients are not looked at. See
data_prep.scores.eta_estimates for the others.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_prep.command import run_command
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.files import write_text
from medclip_dcl.findings import CHEXPERT

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

    from data_prep.scores.eta_estimates import LogLinearFit

MAX_ETA = 0.3
SSD = (0.2, 0.35)
SSD_CONSTANT = 0.05
DEFAULT_ESTIMATE = "reports"
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# Ratio of the 95% to the 5% quantile of eta below which the sentence hardly matters.
_LEAST_SPREAD = 2.0
_SHOWN_SENTENCES = 15
# Share of the anchors, the least probable, that the figure leaves out on the left.
_NOT_SHOWN = 0.05
# Share of log rho's variance: below it log p says little; bins must explain so much more than a line to call it curved.
_LITTLE, _CURVED = 0.2, 0.05
# Two bins are a straight line, whatever the relation.
_FEWEST_BINS = 3
_MEANING = {
    "a": "sentences with log p well below 0 are so common that eta would have to exceed 1 at log p = 0",
    "k": "log p says nothing about how common a sentence is, or all about it: look at the scores",
}
_SOURCES = {
    "truth": "rho is the phantom's truth: the share of images of which the sentence is true",
    "labels": "rho is the share of training studies whose CheXpert label matches the finding that the sentence names",
    "reports": "rho is the share of training reports that hold the very sentence, which estimates a LOWER BOUND",
}


class Source(NamedTuple):
    """Sentences with one kind of rho, as arrays of equal length."""

    log_p: np.ndarray
    rho: np.ndarray
    weights: np.ndarray

    def where(self, chosen: np.ndarray) -> Source:
        """The chosen sentences."""
        return Source(*(column[chosen] for column in self))


class Estimates(NamedTuple):
    """Everything that the report says in numbers.

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

    def bounded(self, name: str) -> Source:
        """Those with rho below 1, where SSD's error bound is finite."""
        source = self.source(name)
        return source.where(source.rho < 1)

    @property
    def sources(self) -> list[str]:
        """Names of the kinds of rho that are known here, and below 1 for some sentence."""
        return [
            name for name in _SOURCES if f"rho_{name}" in self.table and (self.table[f"rho_{name}"] < 1).any()
        ]


def estimate(prepared: PreparedSet, log_p: str | None = None) -> Estimates:
    """Estimates of rho and (a, k) from a prepared set with scores.

    Raises:
        PreparedDataError: no scores; training sentences without a score; no sentence in common between training and
            validate reports.
    """
    from data_prep.scores.eta_estimates import (
        binomial_fit,
        bound_fit,
        count_sentences,
        findings_without_labels,
        least_squares_fit,
        rho_by_labels,
    )

    name = prepared.log_p_file(log_p).stem
    table, reports = count_sentences(prepared)
    scores = prepared.log_p(name).set_index("sentence_id")
    table["log_p"] = table["sentence_id"].map(scores["log_p"])
    table["n_tokens"] = table["sentence_id"].map(scores["n_tokens"])
    missing = table.loc[table["log_p"].isna(), "sentence_id"]
    if len(missing):
        raise PreparedDataError(
            f"log_p/{name}.parquet: {len(missing)} of {len(table)} training sentences have NaN log_p (first: "
            f"sentence_id {missing.iloc[0]}); score the sentences again, and if they have no word pieces, prepare the "
            "set again: training refuses them"
        )
    if not table["validate_reports"].any():
        raise PreparedDataError(
            f"{prepared.folder}: none of the {len(table):,} training sentences stands in one of the "
            f"{reports['validate']:,} validate reports; eta cannot be estimated from so few, use "
            "ConstantClassProbability"
        )
    table["text"] = table["sentence_id"].map(prepared.table("sentences").set_index("sentence_id")["text"])
    table["rho_reports"] = table["train_reports"] / reports["train"]
    without_labels: list[str] = []
    if prepared.has("labels"):
        labels = _training_labels(prepared)
        without_labels = findings_without_labels(labels)
        rho = rho_by_labels(table["text"], labels)
        if rho.notna().any():
            table["rho_labels"] = rho
        table["label_frequency"] = table["sentence_id"].map(_label_frequency(prepared, labels))
    if prepared.has("classes"):
        table["rho_truth"] = table["sentence_id"].map(
            prepared.table("classes").set_index("sentence_id")["rho"]
        )
    found = Estimates(table, reports, {}, without_labels)
    counts = (
        table["log_p"].to_numpy(),
        table["validate_reports"].to_numpy(),
        reports["validate"],
        table["train_reports"].to_numpy(),
    )
    found.fits["reports"] = binomial_fit(*counts)
    for name in found.sources:
        if found.source(name).rho.any():
            found.fits[f"{name}_least_squares"] = least_squares_fit(*found.source(name))
            found.fits[f"{name}_bound"] = bound_fit(*found.bounded(name))
    return found


def _training_labels(prepared: PreparedSet) -> pd.DataFrame:
    """CheXpert columns of the training studies, by study_id."""
    studies = prepared.studies("train")
    labels = prepared.table("labels").drop_duplicates("study_id").set_index("study_id")[list(CHEXPERT)]
    return labels.loc[labels.index.isin(studies)]


def _label_frequency(prepared: PreparedSet, labels: pd.DataFrame) -> pd.Series:
    """By sentence_id: the mean, over its training reports, of how common the report's positive labels are."""
    import numpy as np

    positive = labels == 1
    frequency = positive.mean()
    by_study = (positive * frequency).sum(axis=1) / positive.sum(axis=1).replace(0, np.nan)
    reports = prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
    return reports.assign(value=reports["study_id"].map(by_study)).groupby("sentence_id")["value"].mean()


def write_report(
    prepared: PreparedSet,
    log_p: str | None,
    output: Path,
    *,
    given: tuple[float, float] | None = None,
    chosen: str = DEFAULT_ESTIMATE,
) -> LogLinearFit:
    """Write report.md, eta.png and class_probability.yaml; print the summary, which has no report texts.

    Args:
        prepared: the set.
        log_p: stem of a file in SET/log_p; None for the only one there.
        output: folder.
        given: (a, k) to look at instead of an estimate; the configuration then has these.
        chosen: name of the estimate for the configuration. Where its median eta is unusual, the configuration has
            SSD's constant.

    Raises:
        PreparedDataError: see `estimate`; an estimate that this set does not allow; (a, k) out of range; `output` is
            no folder or cannot be written.
    """
    from data_prep.scores.eta_estimates import LogLinearFit

    _check_output(output)
    found = estimate(prepared, log_p)
    name = prepared.log_p_file(log_p).stem
    if given is not None:
        a, k = given
        if not (0 <= a < 1 and 0 <= k < math.inf):
            raise PreparedDataError(
                f"--a must lie in [0, 1) and --k be at least 0 and finite, got {a} and {k}"
            )
        found.fits["given"], chosen = LogLinearFit(a, k), "given"
    if chosen not in found.fits:
        raise PreparedDataError(
            f"{prepared.folder} does not allow the estimate {chosen!r}; there are {', '.join(found.fits)}"
        )
    fit = found.fits[chosen]
    summary = [*_summary(found, fit, chosen, name), *_estimates_table(found), *_log_linearity(found)]
    problem = _unusual(found, fit)
    warnings = _warnings(found, fit) + _refusal(found, chosen, name, problem)
    text = [f"# eta of {name}", "", *summary, *warnings, "", "![](eta.png)", "", *_sentences(found, fit)]
    texts = {
        "report.md": "\n".join(text) + "\n",
        "class_probability.yaml": _constant_yaml(problem, chosen, name)
        if problem
        else _yaml(fit, chosen, name, found),
    }
    _write(output, texts, _figure(found, fit, chosen))
    print("\n".join([*summary, *warnings]))
    constant = f" (a constant eta, {SSD_CONSTANT})" if problem else ""
    print(f"written: {output / 'report.md'}, eta.png, class_probability.yaml{constant}")
    return fit


def _check_output(output: Path) -> None:
    """Refuse, before the work, what is or lies below a file, or cannot be looked up."""
    try:
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    except OSError as error:
        raise PreparedDataError(
            f"--output {output} cannot be used ({error.strerror}); name another folder"
        ) from error
    if not existing.is_dir():
        raise PreparedDataError(f"--output {output}: {existing} is a file; name a folder")


def _write(output: Path, texts: Mapping[str, str], figure: Figure) -> None:
    """The texts by file name, and eta.png."""
    try:
        for file, text in texts.items():
            write_text(text, output / file)
        figure.savefig(output / "eta.png", dpi=110)
    except OSError as error:
        raise PreparedDataError(
            f"--output {output} cannot be written ({error.strerror}); name a folder that can be"
        ) from error


def _summary(found: Estimates, fit: LogLinearFit, chosen: str, name: str) -> list[str]:
    import numpy as np

    table = found.table
    of_anchors = _eta_of_anchors(found, fit)
    quantiles = zip(_QUANTILES, np.quantile(of_anchors, _QUANTILES), strict=True)
    columns: dict[str, pd.Series] = {
        "how many training reports hold the sentence": table["train_reports"],
        "share of validate reports that hold it": table["validate_reports"],
        "its number of word pieces": table["n_tokens"],
    }
    if "label_frequency" in table:
        columns["how common the positive CheXpert labels of its reports are"] = table["label_frequency"]
    columns |= {f"rho ({source})": table[f"rho_{source}"] for source in found.sources if source != "reports"}
    log_p = table["log_p"].to_numpy()
    return [
        f"eta = {_a(fit):.4g} * exp({fit.k:.4g} * log p) ({chosen}), log p from {name}; {len(table):,} training "
        f"sentences of {found.reports['train']:,} reports, counted in {found.reports['validate']:,} validate reports",
        "",
        f"eta of the anchors (training sentences as often as reports hold them), capped at {MAX_ETA}: "
        + ", ".join(f"{100 * q:g}% {value:.3g}" for q, value in quantiles),
        "",
        "Spearman correlation of log p over distinct sentences with",
        "",
        *(f"- {what}: {_spearman(log_p, column)}" for what, column in columns.items()),
        "",
    ]


def _eta_of_anchors(found: Estimates, fit: LogLinearFit) -> np.ndarray:
    import numpy as np

    eta = fit.eta(found.table["log_p"].to_numpy())
    return np.minimum(np.repeat(eta, found.table["train_reports"]), MAX_ETA)


def _estimates_table(found: Estimates) -> list[str]:
    """How far each eta is from each rho, as Markdown."""
    import numpy as np

    from data_prep.scores.eta_estimates import best_constant, bound_term

    sources = {name: found.bounded(name) for name in found.sources}
    lines = [
        "E|1/(1 - eta) - 1/(1 - rho)| over anchors (SSD proposition 2.1; in brackets: with eta capped at "
        f"{MAX_ETA}, as in training).",
        "",
        *(f"- {name}: {_SOURCES[name]} ({_counted(found, name)})" for name in sources),
        *_without_labels(found),
        "",
        f"| eta | a | k | {' | '.join(sources)} |",
        "|---|---|---|" + "---|" * len(sources),
    ]

    def terms(eta_of: Mapping[str, np.ndarray]) -> str:
        cells = []
        for name, source in sources.items():
            plain = bound_term(eta_of[name], source.rho, source.weights)
            capped = bound_term(np.minimum(eta_of[name], MAX_ETA), source.rho, source.weights)
            cells.append(f"{plain:.3f} ({capped:.3f})")
        return " | ".join(cells)

    lines.append(f"| none (0) | | | {terms({n: np.zeros_like(s.rho) for n, s in sources.items()})} |")
    constants = {n: best_constant(s.rho, s.weights) for n, s in sources.items()}
    listed = ", ".join(f"{value:.3g}" for value in constants.values())
    best = terms({n: np.full_like(s.rho, constants[n]) for n, s in sources.items()})
    lines.append(f"| the best constant for each ({listed}) | | | {best} |")
    from data_prep.scores.eta_estimates import LogLinearFit

    for label, fit in {"SSD's, for CXR-BERT": LogLinearFit(*SSD), **found.fits}.items():
        row = terms({n: fit.eta(s.log_p) for n, s in sources.items()})
        lines.append(f"| {label} | {_parameter(fit, 'a')} | {_parameter(fit, 'k')} | {row} |")
    return [*lines, ""]


def _parameter(fit: LogLinearFit, name: str) -> str:
    """`a` or `k` of a fit to four digits, as the configuration has it, and whether it is at a bound."""
    value = _a(fit) if name == "a" else fit.k
    is_at_bound = any(problem.startswith(f"{name} ") for problem in fit.at_bound)
    return f"{value:.4g}" + (" (at its bound)" if is_at_bound else "")


def _a(fit: LogLinearFit) -> float:
    """`a` to four digits, but below 1."""
    return min(float(f"{fit.a:.4g}"), 0.9999)


def _k(fit: LogLinearFit) -> float:
    """`k` to four digits."""
    return float(f"{fit.k:.4g}")


def _counted(found: Estimates, name: str) -> str:
    """How many sentences have this rho, and which share of the anchors was left out because it is 1."""
    rho, weights = found.table[f"rho_{name}"], found.table["train_reports"]
    certain = float(weights[rho >= 1].sum() / weights.sum())
    text = f"{int((rho < 1).sum()):,} sentences"
    return (
        f"{text}; {certain:.1%} of the anchors have rho 1 and are left out: the term is infinite"
        if certain
        else text
    )


def _without_labels(found: Estimates) -> list[str]:
    """Which findings the labels cannot tell anything about."""
    names = found.without_labels
    if not names:
        return []
    return [
        f"- without labels: {len(names)} of {len(CHEXPERT)} CheXpert columns hold no label for any training study "
        f"({', '.join(names)}); sentences that name one of these have no rho (labels)"
    ]


def _log_linearity(found: Estimates) -> list[str]:
    """Is log rho a straight line in log p? For each source of rho, over the sentences that have a log rho."""
    lines = ["Is class probability log-linear in text probability?", ""]
    lines += [_linearity_of(found, name) for name in found.sources if found.source(name).rho.any()]
    return [*lines, ""]


def _linearity_of(found: Estimates, name: str) -> str:
    """What each line, and any shape, explains of log rho, and what follows from that.

    The verdict is about the best line of all: whether an allowed (a, k) gives that line is another question.
    """
    import numpy as np

    from data_prep.scores.eta_estimates import adjusted_r_squared, binned_means, straight_line

    source = found.source(name)
    log_p, rho, weights = source.where(source.rho > 0)
    log_rho = np.log(rho)
    means, bins = binned_means(log_p, log_rho, weights, _bins(weights))
    any_shape = adjusted_r_squared(means, log_rho, weights, bins)
    if bins < _FEWEST_BINS or np.isnan(any_shape):
        return _too_few(name, source, bins)
    line = straight_line(log_p, rho, weights)
    of_line, allowed, bound = (
        adjusted_r_squared(predicted, log_rho, weights, 2)
        for predicted in (
            line.at(log_p),
            found.fits[f"{name}_least_squares"].log_eta(log_p),
            found.fits[f"{name}_bound"].log_eta(log_p),
        )
    )
    beyond = f"; no allowed (a, k) is the best line: {line.beyond}" if line.beyond else ""
    return (
        f"- {name}: of the variance of log rho the best straight line explains {_explained(of_line)}, the best with an "
        f"allowed (a, k) {_explained(allowed)}, the bound's minimiser {_explained(bound)}, {bins} bins of log p "
        f"{_explained(any_shape)} (adjusted R^2; {len(rho):,} sentences with rho above 0{_left_out(source)}): "
        f"{_verdict(of_line, any_shape)}{beyond}"
    )


def _verdict(line: float, any_shape: float) -> str:
    """Of what the straight line and bins of log p explain."""
    if max(line, any_shape) < _LITTLE:
        return "log p says little about rho, whatever the shape"
    if any_shape - line > _CURVED:
        return "the relation is no straight line"
    return "a straight line says what log p has to say"


def _too_few(name: str, source: Source, bins: int) -> str:
    """That nothing can be said, and why."""
    import numpy as np

    from data_prep.scores.eta_estimates import effective_number

    log_p, rho, weights = source.where(source.rho > 0)
    return (
        f"- {name}: too few different sentences to tell ({len(rho):,} with rho above 0{_left_out(source)}, worth "
        f"{effective_number(weights):.3g} equally common ones; {len(np.unique(log_p)):,} different log p in {bins} "
        f"bins, {len(np.unique(rho)):,} different rho)"
    )


def _explained(share: float) -> str:
    return f"{share:.3f}" if not share < 0 else f"nothing ({share:.3g}: the mean is closer)"


def _left_out(source: Source) -> str:
    """How many sentences have no log rho."""
    count = int((source.rho == 0).sum())
    return f"; {count:,} have rho 0 and no logarithm" if count else ""


def _bins(weights: np.ndarray) -> int:
    """Bins of log p that so many sentences can fill."""
    from data_prep.scores.eta_estimates import effective_number

    return int(min(20, max(3, effective_number(weights) // 10)))


def _warnings(found: Estimates, fit: LogLinearFit) -> list[str]:
    import numpy as np

    of_anchors = _eta_of_anchors(found, fit)
    lines = [f"warning: {problem}; {_MEANING[problem[0]]}" for problem in fit.at_bound]
    lines += _against_constant(found, fit)
    low, high = np.quantile(of_anchors, (0.05, 0.95))
    if high < _LEAST_SPREAD * low:
        lines.append(
            f"warning: eta is {low:.3g} to {high:.3g} for nine anchors of ten: next to a constant class probability; "
            "the scores say little about how common a sentence is"
        )
    return lines


def _unusual(found: Estimates, fit: LogLinearFit) -> str:
    """What training would say of the median eta, by its own rule and rounding; "" for nothing."""
    import torch

    from medclip_dcl.objectives.class_probability import LanguageModelClassProbability, unusual_median

    log_p = torch.tensor(found.table["log_p"].to_numpy()).float()
    return unusual_median(LanguageModelClassProbability(_a(fit), _k(fit), MAX_ETA)(log_p).numpy())


def _refusal(found: Estimates, chosen: str, name: str, problem: str) -> list[str]:
    """Why the configuration has no (a, k), and what can be done."""
    if not problem:
        return []
    others = [
        other
        for other, fit in found.fits.items()
        if other not in (chosen, "given")
        and not _unusual(found, fit)
        # At its lower bound k = 0 eta depends on no score.
        and not any(bound.startswith("k ") for bound in fit.at_bound)
    ]
    instead = (
        f"within this range: --estimate {' or '.join(others)}"
        if others
        else f"no estimate in which eta depends on log p lies within it: the scores of {name} cannot carry eta here"
    )
    return [
        f"warning: {problem} (a, k by {chosen}); {instead}. class_probability.yaml holds SSD's constant eta, "
        f"{SSD_CONSTANT}, instead; SSD's (a, k) = {SSD} belong to the scores of CXR-BERT "
        "(configs/objective/dcl_lm.yaml has them)"
    ]


def _against_constant(found: Estimates, fit: LogLinearFit) -> list[str]:
    """Says so where eta is no closer to the class frequency, if that is known from elsewhere, than a constant is."""
    import numpy as np

    from data_prep.scores.eta_estimates import best_constant, bound_term

    name = next((name for name in ("truth", "labels") if name in found.sources), None)
    if name is None:
        return []
    source = found.bounded(name)
    constant = best_constant(source.rho, source.weights)
    of_eta, of_constant = (
        bound_term(np.minimum(eta, MAX_ETA), source.rho, source.weights)
        for eta in (fit.eta(source.log_p), np.full_like(source.rho, constant))
    )
    if of_eta < of_constant:
        return []
    return [
        f"warning: capped at {MAX_ETA} as in training, this eta is {of_eta:.3f} away from rho ({name}), the best "
        f"constant, {constant:.3g}, {of_constant:.3f} (the table's measure): train with ConstantClassProbability as "
        "well and compare, or take another estimate (--estimate)"
    ]


def _sentences(found: Estimates, fit: LogLinearFit) -> list[str]:
    """The most and the least probable sentences, as Markdown."""
    table = found.table.assign(eta=fit.eta(found.table["log_p"].to_numpy())).sort_values(
        ["log_p", "sentence_id"], ascending=[False, True]
    )
    lines = []
    for title, some in (("Most", table.head(_SHOWN_SENTENCES)), ("Least", table.tail(_SHOWN_SENTENCES))):
        lines += [f"## {title} probable training sentences", ""]
        lines += ["| log p | eta | training reports | sentence |", "|---|---|---|---|"]
        for row in some.to_dict("records"):
            text = " ".join(str(row["text"]).replace("|", "\\|").split())
            lines.append(f"| {row['log_p']:.2f} | {row['eta']:.3g} | {row['train_reports']} | {text} |")
        lines.append("")
    return lines


def _figure(found: Estimates, fit: LogLinearFit, chosen: str) -> Figure:
    """Histograms of log p and eta; log rho over log p for each source, with bins and lines."""
    import numpy as np
    from matplotlib.figure import Figure

    from data_prep.scores.eta_estimates import binned_means

    sources = [name for name in found.sources if found.source(name).rho.any()]
    figure = Figure(figsize=(13.5, 7.6), layout="constrained")
    grid = figure.add_gridspec(2 if sources else 1, 2 * max(len(sources), 1))
    half = grid.ncols // 2
    axes = [figure.add_subplot(grid[0, :half]), figure.add_subplot(grid[0, half:])]
    axes += [figure.add_subplot(grid[1, 2 * place : 2 * place + 2]) for place in range(len(sources))]
    log_p, weights = found.table["log_p"].to_numpy(), found.table["train_reports"].to_numpy()
    # The few very improbable ones would press all others into a corner.
    left, right = float(np.quantile(np.repeat(log_p, weights), _NOT_SHOWN)), max(0.0, float(log_p.max()))
    if left == right:
        left -= 1.0
    axis_label = f"log p (natural); {_NOT_SHOWN:.0%} of the anchors lie further left"
    edges = np.linspace(left, right, 41).tolist()
    for values, label in ((np.ones(len(log_p)), "distinct sentences"), (weights, "as often as they occur")):
        axes[0].hist(np.maximum(log_p, left), edges, weights=values / values.sum(), alpha=0.6, label=label)
    axes[0].set(
        xlabel="log p (natural); the first bar holds all further left",
        ylabel="share",
        title="log p of training sentences",
    )
    axes[0].legend(fontsize=8)
    axes[1].hist(_eta_of_anchors(found, fit), 40, color="#3a9d5d")
    axes[1].set(xlabel=f"eta ({chosen})", ylabel="anchors", title="eta of the anchors")
    axes[1].locator_params(axis="x", nbins=6)
    for axis, name in zip(axes[2:], sources, strict=True):
        source = found.source(name)
        x, rho, w = source.where(source.rho > 0)
        axis.set(xlabel=axis_label, ylabel="rho", yscale="log", title=f"rho: {name}")
        axis.scatter(x, rho, s=np.clip(w, 3, 60), alpha=0.25, color="#3b7dd8", linewidths=0)
        order = np.argsort(x)
        means, bins = binned_means(x, np.log(rho), w, _bins(w))
        axis.plot(x[order], np.exp(means[order]), color="black", linewidth=1, label=f"{bins} bins of log p")
        for label, line in ((f"{name}_least_squares", "-"), (f"{name}_bound", "--"), (chosen, ":")):
            one = found.fits[label]
            parameters = ", ".join(f"{each} {_parameter(one, each)}" for each in ("a", "k"))
            axis.plot(x[order], one.eta(x[order]), line, label=f"{label}: {parameters}")
        axis.set(xlim=(left, right), ylim=(rho.min() / 2, 1.5))
        axis.legend(fontsize=7)
    return figure


def _spearman(log_p: np.ndarray, other: pd.Series) -> str:
    """Rank correlation over distinct sentences for which the other value is known."""
    from scipy.stats import spearmanr

    known = other.notna().to_numpy()
    if len(set(log_p[known])) < 2 or other[known].nunique() < 2:
        return "undefined (one of the two does not vary)"
    return f"{spearmanr(log_p[known], other[known]).statistic:.3f}"


def _constant_yaml(problem: str, chosen: str, name: str) -> str:
    return f"""\
# SSD's constant eta, by data_prep.eta_report, and not eta(x) = a * p_LM(x)^k of the scores {json.dumps(name)}:
# with (a, k) by "{chosen}" {problem}.
model:
  init_args:
    class_probability:
      class_path: medclip_dcl.objectives.ConstantClassProbability
      init_args:
        eta: {SSD_CONSTANT}
"""


def _yaml(fit: LogLinearFit, chosen: str, name: str, found: Estimates) -> str:
    return f"""\
# eta(x) = a * p_LM(x)^k by data_prep.eta_report, estimate "{chosen}" (choice, not from the paper), on
# {len(found.table)} sentences of {found.reports["train"]} training and {found.reports["validate"]} validate reports.
# (a, k) belong to these scores and to no others.
model:
  init_args:
    class_probability:
      class_path: medclip_dcl.objectives.LanguageModelClassProbability
      init_args:
        a: {_a(fit)}
        k: {_k(fit)}
        max_eta: {MAX_ETA}
data:
  init_args:
    log_p: {json.dumps(name)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.eta_report",
        description="What a language model's sentence scores mean, and (a, k) of eta = a * p_LM^k for them.",
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="SET", help="prepared data set with scores"
    )
    parser.add_argument("--log_p", metavar="NAME", help="stem of a file in SET/log_p (default: the only one)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: SET/eta")
    parser.add_argument("--a", type=float, help="look at this a, with --k, instead of an estimate")
    parser.add_argument("--k", type=float, help="look at this k, with --a, instead of an estimate")
    parser.add_argument(
        "--estimate",
        metavar="NAME",
        help="estimate that class_probability.yaml takes: reports (default), or SOURCE_least_squares or SOURCE_bound "
        "with SOURCE one of truth (phantom), labels, reports",
    )
    options = parser.parse_args(arguments)
    if (options.a is None) != (options.k is None):
        parser.error("--a and --k go together")
    if options.a is not None and options.estimate is not None:
        parser.error("--estimate does not go with --a and --k")
    given = None if options.a is None else (options.a, options.k)
    output = options.output or options.data / "eta"
    chosen = DEFAULT_ESTIMATE if options.estimate is None else options.estimate
    write_report(PreparedSet(options.data), options.log_p, output, given=given, chosen=chosen)


if __name__ == "__main__":
    run_command(main)
