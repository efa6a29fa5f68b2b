"""What P of `rank --posterior` knows of real reports: Open-i with its gold labels, without images.

    python tests/benchmarks/label_study/label_open_i.py SET --labels negbio_gold_14_labels.csv

Run by hand, never in CI: nine minutes of a core. What is finished is kept in SET/label_study; a second command with
--last_first shares the work. SET is made by `prepare openi --text_only`. Ten times the reports
are halved at random. One half learns; sentences_open_i.yaml has the sentences of five findings, of which those count
that the half says at least twice. In the other half P(x, r) of a sentence is compared between reports that deny the
finding (a sentence does, gold 0), reports that are positive (gold 1), and silent ones (no sentence names it, gold 0).
Writes docs/results/label_study_open_i.csv, with means over sentences, then over halvings, and the AUC's deviation over
halvings. auc: of a denial for denying against positive reports, of a statement the other way round. labels:

- shown: all gold columns. hidden: without the finding's own column and `normal`.
- permuted: all columns, those of another report. rule: no P, but 1 unless the column contradicts the sentence.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy.sparse import csr_matrix, vstack
from sklearn.metrics import roc_auc_score

from medclip_dcl.common.files import read_yaml, write_text
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.rank_reports import Reports, posterior_vectors, reports_of, tfidf_rows
from medclip_dcl.objectives.posterior_targets import posterior

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parents[2] / "docs/results/label_study_open_i.csv"
HALVINGS, MIN_REPORTS = 10, 2
PATTERNS = read_yaml(HERE / "sentences_open_i.yaml")
Sentences = Mapping[str, Bool[np.ndarray, " sentence"]]


def found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def sign_of(finding: str, text: str) -> str:
    """denied, stated, or "" of a sentence that names the finding in another way or not at all."""
    patterns = PATTERNS["findings"][finding]
    if found(patterns["denied"], text):
        return "denied"
    is_stated = found(patterns["stated"], text) and not found(PATTERNS["negated"], text)
    return "stated" if is_stated else ""


def sentences_of(finding: str, texts: np.ndarray) -> Sentences:
    """Which sentences name the finding, deny it, and deny or state it alone of the five."""
    names = {one: [found(x["named"], text) for text in texts] for one, x in PATTERNS["findings"].items()}
    is_alone = np.sum([*names.values()], axis=0) == 1
    signs = np.array([sign_of(finding, text) for text in texts])
    is_named = np.array(names[finding])
    of_signs = {sign: is_named & is_alone & (signs == sign) for sign in ("denied", "stated")}
    return {"named": is_named, "denying": is_named & (signs == "denied"), **of_signs}


def learned(
    terms: csr_matrix, halves: list[Reports], labels: pd.DataFrame
) -> Float[np.ndarray, "sentence report"]:
    """P of all sentences and the reports of the second half, learned on the first."""
    ids = np.arange(terms.shape[0])
    vectors, parts = posterior_vectors(terms, ids, halves, labels)
    of_sentences = np.concatenate([np.hstack([x["vector"], x["log_c"]]) for x in parts])
    others = vectors[len(halves[0].study_id) :]
    return posterior(*map(torch.from_numpy, (of_sentences, others.astype(np.float32)))).numpy()


def compared(p: np.ndarray, groups: Mapping[str, np.ndarray], sign: str) -> dict[str, float]:
    """AUC, and mean P in each group, means over sentences (rows of `p`)."""
    true, false = ("denying", "positive") if sign == "denied" else ("positive", "denying")
    label = np.repeat([1, 0], [groups[true].sum(), groups[false].sum()])
    aucs = [roc_auc_score(label, np.concatenate([x[groups[true]], x[groups[false]]])) for x in p]
    return {"auc": float(np.mean(aucs)), **{f"p_{name}": float(p[:, x].mean()) for name, x in groups.items()}}


def halving(
    reports: Reports, texts: np.ndarray, gold: pd.DataFrame, draw: int, folder: Path
) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(draw)
    rows = random.permutation(len(reports.study_id))
    halves = [Reports(reports.study_id[x], reports.says[x]) for x in np.array_split(rows, 2)]
    count = np.asarray(halves[0].says.sum(0))[0]
    terms = tfidf_rows(texts, count > 0, folder)
    permuted = gold.set_axis(random.permutation(gold.index)).sort_index()
    whole = {"shown": learned(terms, halves, gold), "permuted": learned(terms, halves, permuted)}
    says = halves[1].says.toarray() > 0
    for finding, column in PATTERNS["columns"].items():
        of = sentences_of(finding, texts)
        label = gold[column].reindex(halves[1].study_id).to_numpy()
        groups = {
            "denying": says[:, of["denying"]].any(1) & (label == 0),
            "positive": label == 1,
            "silent": ~says[:, of["named"]].any(1) & (label == 0),
        }
        hidden = gold.drop(columns=[column, PATTERNS["hidden_too"]])
        by_labels = {**whole, "hidden": learned(terms, halves, hidden)}
        for sign in ("denied", "stated"):
            chosen = of[sign] & (count >= MIN_REPORTS)
            rule = np.tile(label == (sign == "stated"), (max(chosen.sum(), 1), 1)).astype(float)
            for labels, p in {**by_labels, "rule": None}.items():
                row = {"finding": finding, "sentences": sign, "labels": labels, "n_sentences": chosen.sum()}
                if chosen.any():
                    row |= compared(rule if p is None else p[chosen], groups, sign)
                yield {**row, **{f"n_{name}": x.sum() for name, x in groups.items()}}


def summary(files: Sequence[Path]) -> pd.DataFrame:
    """Means over the halvings of these files; `halvings` are those in which the finding has such a sentence."""
    rows = pd.concat([pd.read_csv(file) for file in sorted(files)])
    groups = rows.groupby(["finding", "sentences", "labels"], sort=False)
    table = groups.mean(numeric_only=True)
    table.insert(0, "halvings", groups["auc"].count())
    table.insert(3, "auc_deviation", groups["auc"].std())
    return table


def gold_labels(file: Path) -> pd.DataFrame:
    """By study_id, which is the number in a report's name."""
    table = pd.read_csv(file)
    table.index = table.pop("filename").str.removeprefix("CXR").astype(int).rename("study_id")
    return table.astype(float)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("data", type=Path, metavar="SET")
    parser.add_argument("--labels", type=Path, required=True, metavar="FILE")
    parser.add_argument("--last_first", action="store_true", help="for a second command beside the first")
    options = parser.parse_args()
    prepared, gold = PreparedSet(options.data), gold_labels(options.labels)
    uses = [reports_of(prepared, use) for use in ("train", "validate", "test")]
    reports = Reports(np.concatenate([x.study_id for x in uses]), vstack([x.says for x in uses]).tocsr())
    is_labelled = np.isin(reports.study_id, gold.index)
    reports = Reports(reports.study_id[is_labelled], reports.says[is_labelled])
    print(f"{is_labelled.sum():,} of {len(is_labelled):,} reports have gold labels")
    texts = prepared.table("sentences").sort_values("sentence_id")["text"].to_numpy(dtype=object)
    kept = prepared.folder / "label_study"
    kept.mkdir(exist_ok=True)
    for draw in range(HALVINGS)[:: -1 if options.last_first else 1]:
        if not (file := kept / f"{draw}.csv").is_file():
            rows = pd.DataFrame(halving(reports, texts, gold, draw, prepared.folder))
            write_text(rows.to_csv(index=False), file)
        table = summary([*kept.glob("*.csv")])
        table.to_csv(OUTPUT, float_format="%.4f")
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
