"""Describe what a language model's sentence scores say about class probabilities, and eta(x) = a * p_LM(x)^k of them.

    python -m data_prep.eta_report --data SET

Into SET/eta/ (or --output FOLDER) go

- report.md with the most and least probable sentences, rank correlations of log p, estimates of (a, k), and the
  distance of 1/(1 - eta) from 1/(1 - rho), the term that a wrong eta adds to SSD's error bound (proposition 2.1). It
  holds report texts: it is patient data where the reports are;
- eta.png: histograms of log p and eta, and rho over log p;
- class_probability.yaml, the configuration to train with:
  python -m medclip_dcl fit --config configs/mimic_cxr.yaml --config configs/objective/dcl_lm.yaml \
      --config SET/eta/class_probability.yaml
  It holds SSD's (a, k) unless another is asked for. If training would warn that these do not fit the scores, it holds
  SSD's constant eta instead, and the command says so.

All numbers are computed on the sentences of the training reports, each weighted by the number of training reports that
contain it, its frequency as an anchor. SSD chose (a, k) by training, as configs/experiments/search_eta.yaml does.
"reports" is the maximum-likelihood fit to the number of VALIDATE reports that contain each sentence, zero included:
counting in the training reports would be biased, since every sentence was found there at least once. Test and grounding
patients are not used. data_prep.scores.eta_estimates has the other estimates.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from data_prep.scores.eta_estimates import MAX_ETA, SOURCES, Estimates, LogLinearFit, best_constant, estimate
from medclip_dcl.common.command_line import option, parse_options, run_command
from medclip_dcl.common.errors import WorseResultError
from medclip_dcl.common.files import write_bytes, write_text
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

SSD = (0.2, 0.35)
SSD_CONSTANT = 0.05
DEFAULT_ESTIMATE = "ssd"
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# Ratio of the 95% to the 5% quantile of eta below which the sentence hardly matters.
_LEAST_SPREAD = 2.0
_SHOWN_SENTENCES = 15
# Share of the anchors, the least probable, that the figure leaves out on the left.
_NOT_SHOWN = 0.05
_MEANING = {
    "a": "sentences with log p well below 0 are so common that eta would have to exceed 1 at log p = 0",
    "k": "log p says nothing about how common a sentence is, or all about it: look at the scores",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the command."""

    data: Path = option("prepared data set with scores", type=Path, metavar="SET")
    log_p: str | None = option("stem of a file in SET/log_p (the only one)", None, metavar="NAME")
    output: Path | None = option("folder of the report (SET/eta)", None, type=Path, metavar="FOLDER")
    a: float | None = option("use this a, with --k, instead of SSD's", None, type=float)
    k: float | None = option("use this k, with --a, instead of SSD's", None, type=float)
    estimate: str | None = option(
        "(a, k) that class_probability.yaml takes: ssd (default: 0.2, 0.35), reports, or SOURCE_least_squares or "
        "SOURCE_bound with SOURCE one of truth (phantom), labels, reports",
        None,
        metavar="NAME",
    )


def write_report(settings: Settings) -> None:
    """Write report.md, eta.png and class_probability.yaml; print the summary, which has no report texts.

    Where the median eta is unusual, class_probability.yaml has SSD's constant.

    Raises:
        PreparedDataError: see `estimate`; an estimate that this set does not allow; (a, k) out of range; the output
            cannot be written.
        WorseResultError: the output has (a, k) of other scores, and would have a constant.
    """
    prepared, a, k = PreparedSet(settings.data), settings.a, settings.k
    output = settings.output or settings.data / "eta"
    if (a is None) != (k is None):
        raise PreparedDataError("--a and --k go together; give both or neither")
    if a is not None and settings.estimate is not None:
        raise PreparedDataError("--estimate does not go with --a and --k")
    found = estimate(prepared, settings.log_p)
    found.fits["ssd"] = LogLinearFit(*SSD)
    name = prepared.log_p_file(settings.log_p).stem
    chosen = DEFAULT_ESTIMATE if settings.estimate is None else settings.estimate
    if a is not None and k is not None:
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
    summary = [*_summary(found, fit, chosen, name), *_estimates_table(found)]
    problem = _unusual(found, fit)
    warnings = _warnings(found, fit)
    if problem:
        warnings.append(_refusal(found, chosen, name, problem))
    text = [f"# eta of {name}", "", *summary, *warnings, "", "![](eta.png)", "", *_sentences(found, fit)]
    figure = io.BytesIO()
    _figure(found, fit, chosen).savefig(figure, dpi=110)
    print("\n".join([*summary, *warnings]))
    file = output / "class_probability.yaml"
    try:
        earlier = file.read_text(encoding="utf-8") if file.is_file() else name
        if problem and "LanguageModel" in earlier and name not in earlier:
            raise WorseResultError(
                f"{output} is kept: its {file.name} has (a, k) of other scores than {name}; give another --output"
            )
        write_text("\n".join(text) + "\n", output / "report.md")
        write_text(
            _constant_yaml(problem, chosen, name) if problem else _yaml(fit, chosen, name, found), file
        )
        write_bytes(figure.getvalue(), output / "eta.png")
    except OSError as error:
        raise PreparedDataError(
            f"--output {output} cannot be written ({error.strerror}); name a folder that can be"
        ) from error
    constant = f" (a constant eta, {SSD_CONSTANT})" if problem else ""
    print(f"written: {output / 'report.md'}, eta.png, class_probability.yaml{constant}")


def _summary(found: Estimates, fit: LogLinearFit, chosen: str, name: str) -> list[str]:
    table = found.table
    quantiles = zip(_QUANTILES, np.quantile(found.anchors(fit), _QUANTILES), strict=True)
    columns = {
        "number of training reports that contain the sentence": "train_reports",
        "share of validate reports that contain it": "validate_reports",
        "its number of tokens": "n_tokens",
        "frequency of the positive CheXpert labels of its reports": "label_frequency",
        **{f"rho ({source})": f"rho_{source}" for source in found.sources if source != "reports"},
    }
    return [
        f"eta = {_a(fit):.4g} * exp({fit.k:.4g} * log p) ({chosen}), log p from {name}; {len(table):,} training "
        f"sentences of {found.reports['train']:,} reports, counted in {found.reports['validate']:,} validate reports",
        "",
        f"eta of the anchors (training sentences, once for each report that contains them), capped at {MAX_ETA}: "
        + ", ".join(f"{100 * q:g}% {value:.3g}" for q, value in quantiles),
        "",
        "Spearman correlation of log p over distinct sentences with",
        "",
        *(
            f"- {meaning}: {_spearman(table['log_p'], table[column])}"
            for meaning, column in columns.items()
            if column in table
        ),
        "",
    ]


def _spearman(log_p: pd.Series, other: pd.Series) -> str:
    """Rank correlation over the sentences for which the other value is known."""
    known = other.notna()
    if log_p[known].nunique() < 2 or other[known].nunique() < 2:
        return "undefined (one of the two does not vary)"
    return f"{spearmanr(log_p[known], other[known]).statistic:.3f}"


_WORTH = (
    "An estimate says whether scores predict class probabilities at all, and where a search may begin "
    "(configs/experiments/search_eta.yaml); it does not say how well a model trains."
)


def _estimates_table(found: Estimates) -> list[str]:
    """Distance of each eta from each rho, as Markdown."""
    sources = {name: found.bounded(name) for name in found.sources}
    lines = [
        "E|1/(1 - eta) - 1/(1 - rho)| over anchors (SSD proposition 2.1; in brackets: with eta capped at "
        f"{MAX_ETA}, as in training).",
        "",
        *(f"- {name}: {SOURCES[name]} ({_counted(found, name)})" for name in sources),
    ]
    if found.without_labels:
        lines.append(
            f"- without labels: {len(found.without_labels)} of {len(CHEXPERT)} CheXpert columns hold no label for any "
            f"training study ({', '.join(found.without_labels)}); sentences that name one of these have no rho (labels)"
        )
    lines += ["", f"| eta | a | k | {' | '.join(sources)} |", "|---|---|---|" + "---|" * len(sources)]

    def row(label: str, a: str, k: str, eta_of: Mapping[str, np.ndarray]) -> str:
        cells = (
            f"{found.distance(n, eta, capped=False):.3f} ({found.distance(n, eta):.3f})"
            for n, eta in eta_of.items()
        )
        return f"| {' | '.join((label, a, k, *cells))} |"

    lines.append(row("none (0)", "", "", {n: np.zeros_like(s.rho) for n, s in sources.items()}))
    constants = {n: best_constant(s.rho, s.weights) for n, s in sources.items()}
    listed = ", ".join(f"{value:.3g}" for value in constants.values())
    best = {n: np.full_like(s.rho, constants[n]) for n, s in sources.items()}
    lines.append(row(f"the best constant for each ({listed})", "", "", best))
    for label, fit in found.fits.items():
        eta_of = {n: fit.eta(s.log_p) for n, s in sources.items()}
        lines.append(row(label, _parameter(fit, "a"), _parameter(fit, "k"), eta_of))
    return [*lines, "", _WORTH, ""]


def _counted(found: Estimates, name: str) -> str:
    """Number of sentences with this rho, and the share of the anchors that are left out because it is 1."""
    rho, weights = found.table[f"rho_{name}"], found.table["train_reports"]
    certain = float(weights[rho >= 1].sum() / weights.sum())
    left_out = (
        f"; {certain:.1%} of the anchors have rho 1 and are left out: the term is infinite" if certain else ""
    )
    return f"{int((rho < 1).sum()):,} sentences{left_out}"


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


def _warnings(found: Estimates, fit: LogLinearFit) -> list[str]:
    """Parameters at a bound, an eta no better than a constant, an eta that hardly varies."""
    lines = [f"warning: {problem}; {_MEANING[problem[0]]}" for problem in fit.at_bound]
    known = [name for name in ("truth", "labels") if name in found.sources]
    for name in known[:1]:
        source = found.bounded(name)
        constant = best_constant(source.rho, source.weights)
        of_eta = found.distance(name, fit.eta(source.log_p))
        of_constant = found.distance(name, np.full_like(source.rho, constant))
        if not of_eta < of_constant:
            lines.append(
                f"warning: capped at {MAX_ETA} as in training, this eta is {of_eta:.3f} away from rho ({name}), the "
                f"best constant, {constant:.3g}, {of_constant:.3f} (the table's measure): train with "
                "ConstantClassProbability as well and compare, or take another estimate (--estimate)"
            )
    low, high = np.quantile(found.anchors(fit), (0.05, 0.95))
    if high < _LEAST_SPREAD * low:
        lines.append(
            f"warning: eta is {low:.3g} to {high:.3g} for nine of ten anchors: almost a constant class probability; "
            "the scores say little about how common a sentence is"
        )
    return lines


def _unusual(found: Estimates, fit: LogLinearFit) -> str:
    """Training's warning about the median eta, by its own rule and rounding; "" for none."""
    import torch

    from medclip_dcl.objectives.class_probability import LanguageModelClassProbability, unusual_median

    log_p = torch.tensor(found.table["log_p"].to_numpy()).float()
    return unusual_median(LanguageModelClassProbability(_a(fit), _k(fit), MAX_ETA)(log_p).numpy())


def _refusal(found: Estimates, chosen: str, name: str, problem: str) -> str:
    """Reason why the configuration has no (a, k), and the alternatives."""
    others = [
        other
        for other, fit in found.fits.items()
        # At its lower bound k = 0 eta depends on no score.
        if other not in (chosen, "given", "ssd")
        and not _unusual(found, fit)
        and "k is at its bound 0" not in fit.at_bound
    ]
    instead = (
        f"within this range: --estimate {' or '.join(others)}"
        if others
        else f"no estimate in which eta depends on log p lies within it: the scores of {name} cannot carry eta here"
    )
    return (
        f"warning: {problem} (a, k by {chosen}); {instead}. class_probability.yaml holds SSD's constant eta, "
        f"{SSD_CONSTANT}, instead; SSD's (a, k) = {SSD} belong to the scores of CXR-BERT "
        "(configs/objective/dcl_lm.yaml has them)"
    )


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
    """Histograms of log p and eta; rho over log p for each source, with the fitted lines."""
    sources = [name for name in found.sources if found.source(name).rho.any()]
    figure = Figure(figsize=(13.5, 7.6), layout="constrained")
    grid = figure.add_gridspec(2 if sources else 1, 2 * max(len(sources), 1))
    half = grid.ncols // 2
    axes = [figure.add_subplot(grid[0, :half]), figure.add_subplot(grid[0, half:])]
    axes += [figure.add_subplot(grid[1, 2 * place : 2 * place + 2]) for place in range(len(sources))]
    log_p, weights = found.table["log_p"].to_numpy(), found.table["train_reports"].to_numpy()
    # A few very improbable sentences would squeeze all others into a corner.
    left, right = float(np.quantile(np.repeat(log_p, weights), _NOT_SHOWN)), max(0.0, float(log_p.max()))
    if left == right:
        left -= 1.0
    edges = np.linspace(left, right, 41).tolist()
    for values, label in ((np.ones(len(log_p)), "distinct sentences"), (weights, "as often as they occur")):
        axes[0].hist(np.maximum(log_p, left), edges, weights=values / values.sum(), alpha=0.6, label=label)
    axes[0].set(
        xlabel="log p (natural); the first bar holds all further left",
        ylabel="share",
        title="log p of training sentences",
    )
    axes[0].legend(fontsize=8)
    axes[1].hist(found.anchors(fit), 40, color="#3a9d5d")
    axes[1].set(xlabel=f"eta ({chosen})", ylabel="anchors", title="eta of the anchors")
    axes[1].locator_params(axis="x", nbins=6)
    for axis, name in zip(axes[2:], sources, strict=True):
        x, rho, w = found.source(name)
        positive = rho > 0
        axis.scatter(
            x[positive], rho[positive], s=np.clip(w[positive], 3, 60), alpha=0.25, color="#3b7dd8", lw=0
        )
        on_line = np.linspace(left, right, 200)
        for label, style in ((f"{name}_least_squares", "-"), (f"{name}_bound", "--"), (chosen, ":")):
            line = found.fits[label]
            parameters = ", ".join(f"{each} {_parameter(line, each)}" for each in ("a", "k"))
            axis.plot(on_line, line.eta(on_line), style, label=f"{label}: {parameters}")
        axis.set(
            xlabel=f"log p (natural); {_NOT_SHOWN:.0%} of the anchors lie further left",
            ylabel="rho",
            yscale="log",
            title=f"rho: {name}",
            xlim=(left, right),
            ylim=(rho[positive].min() / 2, 1.5),
        )
        axis.legend(fontsize=7)
    return figure


def _constant_yaml(problem: str, chosen: str, name: str) -> str:
    return f"""\
# SSD's constant eta, by data_prep.eta_report, instead of eta(x) = a * p_LM(x)^k of the scores {json.dumps(name)}:
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
# eta(x) = a * p_LM(x)^k by data_prep.eta_report: {_origin(chosen, found)}.
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


def _origin(chosen: str, found: Estimates) -> str:
    """Origin of (a, k)."""
    if chosen == DEFAULT_ESTIMATE:
        return "SSD's (a, k), found by a grid search with the scores of CXR-BERT"
    if chosen == "given":
        return "(a, k) as given by --a and --k"
    sentences = f"{len(found.table)} sentences of {found.reports['train']} training"
    return (
        f'"{chosen}" (choice, not from the paper), on\n'
        f"# {sentences} and {found.reports['validate']} validate reports. They belong to these scores and to no others"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    write_report(parse_options(Settings, "data_prep.eta_report", __doc__, arguments))


if __name__ == "__main__":
    run_command(main)
