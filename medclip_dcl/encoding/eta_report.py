"""Describe what a language model's sentence scores give: eta(x) = a * p_LM(x)^k of the training reports' sentences."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_bytes, write_text
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.encoding.options import Eta
from medclip_dcl.pictures.plots import MUTED

SSD = (0.2, 0.35)
SSD_CONSTANT = 0.05
MAX_ETA = 0.3
# Ratio of the 95% to the 5% quantile of eta below which the sentence hardly matters.
_MIN_SPREAD = 2.0
_SHOWN_SENTENCES = 15
# Share of the anchors, the least probable, that the figure leaves out on the left.
_NOT_SHOWN = 0.05
BATCHES = (64, 512, 4096)
SHARES = {
    "same": "reports with the same sentence (a lower bound)",
    "same_named": "the same, for the sentences of --sentences",
    "agreeing": "reports whose labels agree, for these sentences",
    "rho": "images of which it is true (the truth)",
}
"""Share of the other images that are false negatives of a sentence, in [0, 1] or NaN: column -> how it is counted."""


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
    if settings.sentences is not None:
        sentences = with_labels(prepared, sentences, settings.sentences)
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
        sentence_id, text, train_reports (at least 1), n_tokens, log_p, eta, same of `SHARES`; on a phantom rho.
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
    others = prepared.table("reports")["study_id"].drop_duplicates().isin(prepared.studies("train")).sum() - 1
    table["same"] = (table["train_reports"] - 1) / max(others, 1)
    table = with_eta(table, LanguageModelClassProbability(a, k, MAX_ETA))
    return table, unusual_median(table["eta"].to_numpy())


def with_labels(prepared: PreparedSet, sentences: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The table with same_named and agreeing of `SHARES`, and sign, of the sentences of `Eta.sentences`, NaN elsewhere.

    Label 1 says that a finding is present, 0 and blank that it is absent, -1 agrees with both; reports without a label
    do not count. The sign is + where any of a sentence's findings has it.
    """
    from medclip_dcl.common.findings import require_labelled
    from medclip_dcl.evaluation.sentences import read_sentences

    labels = prepared.table("labels").set_index("study_id")
    labels = labels[labels.index.isin(prepared.studies("train"))].dropna(how="all").dropna(axis=1, how="all")
    rows = read_sentences(file, "--sentences")
    require_labelled(rows["finding"].unique(), [*labels], f"--sentences {file}")
    agrees = pd.concat([labels.isin([1, -1]).add_suffix(" +"), (labels != 1).add_suffix(" -")], axis=1)
    classes = rows.groupby("text")["class"]
    named = {
        "agreeing": classes.agg(lambda names: agrees[[*names]].all(axis=1).mean()),
        "sign": classes.agg(lambda names: names.str[-1].min()),  # "+" is less than "-"
    }
    table = sentences.join(pd.DataFrame(named), on="text")
    if table["sign"].isna().all():
        raise UserError(
            f"--sentences {file}: expected sentences of training reports as they are split, found none"
        )
    return table.assign(same_named=table["same"].where(table["agreeing"].notna()))


def false_negatives(sentences: pd.DataFrame) -> pd.DataFrame:
    """Expected number of false negatives of an anchor in a batch of so many images (columns), by how it is counted.

    The column anchors is the share of the anchors over which it is the mean.
    """
    anchors, rows = sentences["train_reports"], {}
    for column, counted in SHARES.items():
        if column in sentences:
            known = anchors.where(sentences[column].notna(), 0)
            mean = (sentences[column] * known).sum() / known.sum()
            rows[counted] = {"anchors": known.sum() / anchors.sum()} | {n: mean * (n - 1) for n in BATCHES}
    return pd.DataFrame.from_dict(rows, orient="index")


def _of_anchors(sentences: pd.DataFrame, column: str) -> np.ndarray:
    """A value of each anchor: of a sentence as often as training reports contain it."""
    return np.repeat(sentences[column].to_numpy(), sentences["train_reports"])


def _summary(sentences: pd.DataFrame) -> list[str]:
    """Quantiles of log p and eta, and rank correlations of log p, as Markdown."""
    from medclip_dcl.data.eta import QUANTILES

    lines = [
        f"{(reports := sentences['train_reports']).sum():,} anchors: {len(sentences):,} training sentences, once for "
        f"each report that contains them, {reports.eq(1).sum() / reports.sum():.1%} of the anchors "
        f"({reports.eq(1).mean():.0%} of the sentences) in no other report; eta is capped at {MAX_ETA}",
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
    for meaning, signs in {"": "+-", ", sentences with a +": "+", ", with - alone": "-"}.items():
        if "sign" in sentences:
            some = sentences[sentences["sign"].isin([*signs])]
            found = _spearman(some["log_p"], some["agreeing"])
            lines.append(f"- share of reports whose labels agree{meaning} ({len(some):,} sentences): {found}")
    heads = ["false negatives in a batch of", "anchors", *(f"{batch:,}" for batch in BATCHES)]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for counted, anchors, *numbers in false_negatives(sentences).itertuples():
        lines.append(f"| {counted} | {anchors:.0%} | {' | '.join(f'{number:,.1f}' for number in numbers)} |")
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
    """Four plots: log p, eta, false negatives by batch, and log p against the truth, or what labels say of it."""
    from medclip_dcl.report.charts import draw_eta

    figure = Figure(figsize=(10, 7.4), layout="constrained")
    first, second, third, fourth = figure.subplots(2, 2).flat
    log_p, reports = sentences["log_p"], sentences["train_reports"]
    # A few very improbable sentences would squeeze all others into a corner.
    left = float(np.quantile(_of_anchors(sentences, "log_p"), _NOT_SHOWN))
    for weights, label in ((reports**0, "distinct sentences"), (reports, "as often as they occur")):
        first.hist(log_p.clip(lower=left), 40, weights=weights / weights.sum(), alpha=0.6, label=label)
    first.set(xlabel="log p (the first bar holds all further left)", ylabel="share")
    draw_eta(second, sentences["eta"])
    numbers = false_negatives(sentences)[[*BATCHES]]
    third.loglog(BATCHES, numbers.T, marker="o", label=numbers.index)
    third.set(xlabel="images in a batch", ylabel="false negatives of an anchor")
    third.set_xticks(BATCHES, map("{:,}".format, BATCHES))
    for column in sentences.columns.intersection(["rho", "agreeing"]):
        fourth.scatter(log_p, sentences[column], s=4 * np.sqrt(reports), alpha=0.4, label=SHARES[column])
    fourth.plot(*np.sort(sentences[["log_p", "eta"]].to_numpy().T), color=MUTED, label="eta")
    fourth.set(xlabel="log p", ylabel="share of reports or images", xlim=(left, 0), ylim=(-0.02, 1.02))
    for axes in (first, third, fourth):
        axes.legend(fontsize=8)
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
