"""Describe what a language model's sentence scores give: eta(x) = a * p_LM(x)^k of the training reports' sentences."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from data_prep.options import Eta
from medclip_dcl.common.files import write_bytes, write_text
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet

SSD = (0.2, 0.35)
SSD_CONSTANT = 0.05
MAX_ETA = 0.3
# Ratio of the 95% to the 5% quantile of eta below which the sentence hardly matters.
_MIN_SPREAD = 2.0
_SHOWN_SENTENCES = 15
# Share of the anchors, the least probable, that the figure leaves out on the left.
_NOT_SHOWN = 0.05


def write_report(settings: Eta) -> None:
    """Write report.md, eta.png and class_probability.yaml; print the summary, which has no report texts."""
    prepared = PreparedSet(settings.data)
    output = settings.output or settings.data / "eta"
    a, k, chosen = settings.a, settings.k, "given"
    if (a is None) != (k is None):
        raise PreparedDataError("--a and --k go together; give both or neither")
    if a is None or k is None:
        a, k, chosen = *SSD, "ssd"
    name = prepared.file_of_model("log_p", settings.log_p).stem
    sentences, problem = scored_sentences(prepared, name, a, k)
    summary = [
        f"eta = {a:.4g} * exp({k:.4g} * log p) ({chosen}), log p from {name}",
        "",
        *_summary(sentences),
    ]
    warnings = _warnings(sentences, problem, chosen)
    text = [f"# eta of {name}", "", *summary, *warnings, "", "![](eta.png)", "", *_examples(sentences)]
    figure = io.BytesIO()
    _figure(sentences).savefig(figure, dpi=110)
    print("\n".join([*summary, *warnings]))
    configuration = _yaml(a, k, chosen, name, problem)
    write_text("\n".join(text) + "\n", output / "report.md")
    write_text(configuration, output / "class_probability.yaml")
    write_bytes(figure.getvalue(), output / "eta.png")
    constant = f" (a constant eta, {SSD_CONSTANT})" if problem else ""
    print(f"written: {output / 'report.md'}, eta.png, class_probability.yaml{constant}")


def scored_sentences(prepared: PreparedSet, log_p: str, a: float, k: float) -> tuple[pd.DataFrame, str]:
    """Sentences of the training reports with scores and eta, by training's rule, and the problem of their median eta.

    Returns:
        sentence_id, text, train_reports (at least 1), n_tokens, log_p, eta; on a phantom rho.
    """
    from medclip_dcl.data.eta import training_sentences, with_eta
    from medclip_dcl.objectives.class_probability import LanguageModelClassProbability, unusual_median

    table = training_sentences(prepared).merge(prepared.log_p(log_p), on="sentence_id", how="left")
    if table.empty:
        raise PreparedDataError(f"{prepared.folder} has no train reports")
    missing = table.loc[table["log_p"].isna(), "sentence_id"]
    if len(missing):
        raise PreparedDataError(
            f"log_p/{log_p}.parquet: {len(missing)} of {len(table)} training sentences have NaN log_p (first: "
            f"sentence_id {missing.iloc[0]}), which training refuses; score the sentences again, or prepare the set "
            "again if they have no tokens"
        )
    if prepared.has("classes"):
        table = table.merge(prepared.table("classes")[["sentence_id", "rho"]], on="sentence_id")
    table = with_eta(table, LanguageModelClassProbability(a, k, MAX_ETA))
    return table, unusual_median(table["eta"].to_numpy())


def _of_anchors(sentences: pd.DataFrame, column: str) -> np.ndarray:
    """A value of each anchor: of a sentence as often as training reports contain it."""
    return np.repeat(sentences[column].to_numpy(), sentences["train_reports"])


def _summary(sentences: pd.DataFrame) -> list[str]:
    """Quantiles of log p and eta, and rank correlations of log p, as Markdown."""
    from medclip_dcl.data.eta import QUANTILES

    lines = [
        f"{sentences['train_reports'].sum():,} anchors: {len(sentences):,} training sentences, once for each report "
        f"that contains them; eta is capped at {MAX_ETA}",
        "",
        f"| quantile | {' | '.join(f'{share:.0%}' for share in QUANTILES)} |",
        "|---" * (len(QUANTILES) + 1) + "|",
    ]
    for column, title in (("log_p", "log p"), ("eta", "eta")):
        quantiles = np.quantile(_of_anchors(sentences, column), QUANTILES)
        lines.append(f"| {title} | {' | '.join(f'{value:.3g}' for value in quantiles)} |")
    lines += ["", "Spearman correlation of log p over distinct sentences with", ""]
    columns = {
        "number of training reports that contain the sentence": "train_reports",
        "its number of tokens": "n_tokens",
        "rho, the share of images of which it is true": "rho",
    }
    lines += [
        f"- {meaning}: {_spearman(sentences['log_p'], sentences[column])}"
        for meaning, column in columns.items()
        if column in sentences
    ]
    return [*lines, ""]


def _spearman(log_p: pd.Series, other: pd.Series) -> str:
    if log_p.nunique() < 2 or other.nunique() < 2:
        return "undefined (one of the two does not vary)"
    return f"{spearmanr(log_p, other).statistic:.3f}"


def _warnings(sentences: pd.DataFrame, problem: str, chosen: str) -> list[str]:
    """An eta that hardly varies, and why the configuration has no (a, k)."""
    lines = []
    low, high = np.quantile(_of_anchors(sentences, "eta"), (0.05, 0.95))
    if high < _MIN_SPREAD * low:
        lines.append(
            f"warning: eta is {low:.3g} to {high:.3g} for nine of ten anchors: almost a constant class probability; "
            "the scores say little about how common a sentence is"
        )
    if problem:
        lines.append(
            f"warning: {problem} (a, k by {chosen}). class_probability.yaml holds SSD's constant eta, {SSD_CONSTANT}, "
            f"instead; SSD's (a, k) = {SSD} belong to the scores of CXR-BERT (--config objective/dcl_lm has them); "
            "medclip-dcl study search_eta searches others, --a and --k try them"
        )
    return lines


def _examples(sentences: pd.DataFrame) -> list[str]:
    from medclip_dcl.report.report import probable_sentences

    lines = []
    for title, some in probable_sentences(sentences, _SHOWN_SENTENCES).items():
        lines += [f"## {title}", "", "| log p | eta | training reports | sentence |", "|---|---|---|---|"]
        for row in some.to_dict("records"):
            text = " ".join(str(row["text"]).replace("|", "\\|").split())
            lines.append(f"| {row['log_p']:.2f} | {row['eta']:.3g} | {row['train_reports']} | {text} |")
        lines.append("")
    return lines


def _figure(sentences: pd.DataFrame) -> Figure:
    from medclip_dcl.report.charts import draw_eta, draw_truth

    figure = Figure(figsize=(13.5 if "rho" in sentences else 9, 3.8), layout="constrained")
    first, *others = figure.subplots(1, 3 if "rho" in sentences else 2)
    log_p, reports = sentences["log_p"], sentences["train_reports"]
    # A few very improbable sentences would squeeze all others into a corner.
    left = float(np.quantile(_of_anchors(sentences, "log_p"), _NOT_SHOWN))
    for weights, label in ((reports**0, "distinct sentences"), (reports, "as often as they occur")):
        first.hist(log_p.clip(lower=left), 40, weights=weights / weights.sum(), alpha=0.6, label=label)
    first.set(xlabel="log p (the first bar holds all further left)", ylabel="share")
    first.legend(fontsize=8)
    draw_eta(others[0], sentences["eta"])
    if "rho" in sentences:
        draw_truth(others[1], sentences)
    return figure


def _yaml(a: float, k: float, chosen: str, name: str, problem: str) -> str:
    """Configuration of (a, k), or of SSD's constant eta because of a problem."""
    origin = {
        "ssd": "SSD's (a, k), found by a grid search with the scores of CXR-BERT",
        "given": "(a, k) as given by --a and --k",
    }[chosen]
    rule, options = "LanguageModelClassProbability", {"a": a, "k": k, "max_eta": MAX_ETA}
    data: dict[str, Any] = {"data": {"init_args": {"log_p": name}}}
    why = f"eta(x) = a * p_LM(x)^k by medclip-dcl eta: {origin}."
    if problem:
        rule, options, data = "ConstantClassProbability", {"eta": SSD_CONSTANT}, {}
        why = f"SSD's constant eta by medclip-dcl eta; of {origin} {problem}."
    chosen_rule = {"class_path": f"medclip_dcl.objectives.{rule}", "init_args": options}
    configuration = {"model": {"init_args": {"class_probability": chosen_rule}}, **data}
    return f"# {why}\n{yaml.safe_dump(configuration, sort_keys=False)}"
