"""What tells false negatives on a phantom: scores of pairs of a sentence and a report, between and within anchors.

    python tests/benchmarks/study_text_rankings.py SET --language_model LM --text_alone ENCODER --run RUN
    python tests/benchmarks/study_text_rankings.py SET

Run by hand, never in CI. SET is a prepared phantom, scored by LM (which it embeds here) and ranked; RUN was trained on
its pairs. Writes docs/results/false_negatives_by_text.csv:

- anchors: a sentence of a report; pairs: an anchor with another report of the same use.
- auc_between: of the score for false negatives over all pairs. auc_within: its mean within an anchor.
- left_out: pairs above an anchor's quantile of the score at 1 - share(x), `RankedByText` with a mean share of .5; of
  these, precision, recall and contradictions.
- contradictions: the report has a sentence whose class is never true of an image together with the anchor's, although
  ten such images of the set would be expected by chance.
- ranking_rest_labels, ranking_rest: `medclip-dcl rank` without and with --rest_alone. initial_model: LM's [CLS].
- text_alone: ENCODER, RUN/text_encoder of `--config unimodal/sentences --config unimodal/sentences_bert` with
  --model.init_args.context null: from LM, sentences of one report as positives; its [CLS].
- trained_text_encoder: that of RUN.
- a cosine is the greatest of the sentence with one of the report's.

Both forms write docs/results/false_negatives_by_band.csv: auc_within of each ranking, and of its part of labels alone,
for the anchors of each band of rho; and of the P of `rank --posterior`, with its mean over pairs and the share of pairs
that fit. A ranking's rows have its name up to the last "-". codes_apart is one that `rank`
made at 4b3b9e86, with 0 and blank apart, its two files renamed to codes_apart-7afafedd.parquet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

from medclip_dcl import load
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.embed_sentences import embed_sentences
from medclip_dcl.encoding.options import Embed
from medclip_dcl.encoding.rank_reports import Reports, reports_of, true_reports
from medclip_dcl.metrics.false_negatives import auc_within_anchors
from medclip_dcl.metrics.table import RHO_BANDS
from medclip_dcl.objectives import RankedByText
from medclip_dcl.objectives.posterior_targets import posterior

OUTPUT = Path(__file__).resolve().parents[2] / "docs/results/false_negatives_by_text.csv"
BY_BAND = OUTPUT.with_name("false_negatives_by_band.csv")
MIN_EXPECTED = 10


def best_cosines(vectors: np.ndarray, says: np.ndarray) -> np.ndarray:
    """(sentence, report)"""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-9)
    cosines = unit @ unit.T
    return np.stack([cosines[:, row].max(1) for row in says.T], axis=1)


def contradicting_classes(prepared: PreparedSet) -> np.ndarray:
    """(class, class)"""
    table = prepared.table("image_classes")
    count = max(table["class_id"].max(), prepared.table("classes")["class_id"].max()) + 1
    images, row = np.unique(table["dicom_id"], return_inverse=True)
    is_true = np.zeros((len(images), count), dtype=np.float32)
    is_true[row, table["class_id"]] = 1
    expected = np.outer(is_true.sum(0), is_true.sum(0)) / len(images)
    return (is_true.T @ is_true == 0) & (expected >= MIN_EXPECTED)


def rows_of(
    prepared: PreparedSet, use: str, scores: dict[str, np.ndarray], shares: np.ndarray, reports: Reports
) -> list[dict[str, object]]:
    says = reports.says.T.toarray() > 0
    fits = true_reports(prepared, reports.study_id)
    classes = prepared.table("classes").sort_values("sentence_id")["class_id"].to_numpy()
    contradicting = contradicting_classes(prepared)[np.ix_(classes, classes)]
    contradicts = contradicting.astype(np.float32) @ says.astype(np.float32) > 0
    # Anchors of each sentence that a report is a pair of: those of the other reports.
    weights = (says.sum(1, keepdims=True) - says).astype(np.float64)

    def share(of: np.ndarray, among: np.ndarray) -> float:
        return float((weights * (of & among)).sum() / (weights * among).sum())

    every = np.ones_like(fits)
    prevalence = {"precision": share(fits, every), "contradictions": share(contradicts, every)}
    rows: list[dict[str, object]] = [{"score": "all_pairs", "reports": use, **prevalence}]
    is_said = says.any(1)
    for name, score in scores.items():
        row: dict[str, object] = {"score": name, "reports": use}
        flat = [x[is_said].ravel() for x in (fits, score, weights)]
        row["auc_between"] = roc_auc_score(flat[0], flat[1], sample_weight=flat[2])
        row["auc_within"] = auc_within_anchors(score, fits, says)
        if (score.min(1) < score.max(1)).any():
            least = [np.quantile(x, 1 - s) for x, s in zip(score, shares, strict=True)]
            is_left_out = score > np.array(least)[:, None]
            row |= {"left_out": share(is_left_out, every), "precision": share(fits, is_left_out)}
            row |= {"recall": share(is_left_out, fits), "contradictions": share(contradicts, is_left_out)}
        rows.append(row)
    return rows


def ranking_scores(prepared: PreparedSet, reports: Reports) -> dict[str, dict[str, np.ndarray]]:
    """(sentence, report) of each ranking, whole and of its part of labels, and each posterior, by name."""
    scores: dict[str, dict[str, np.ndarray]] = {"whole": {}, "labels": {}, "posterior": {}}
    for stem in prepared.models("ranking"):
        ranking, name = prepared.ranking(stem), stem.rpartition("-")[0]
        of_reports = ranking.reports[np.searchsorted(ranking.study_id, reports.study_id)].astype(np.float32)
        dim = of_reports.shape[1]
        of_sentences = ranking.sentences[:, :dim].astype(np.float32)
        scores["whole"][name] = of_sentences @ of_reports.T
        if name != "rest":
            scores["labels"][name] = of_sentences[:, dim // 2 :] @ of_reports[:, dim // 2 :].T
    for stem in prepared.models("posterior"):
        found = prepared.ranking(stem, "posterior")
        of_reports = found.reports[np.searchsorted(found.study_id, reports.study_id)]
        p = posterior(*map(torch.from_numpy, (found.sentences, of_reports))).numpy()
        scores["posterior"][stem.rpartition("-")[0]] = p
    return scores


def write_bands(prepared: PreparedSet) -> None:
    rho = prepared.table("classes").sort_values("sentence_id")["rho"].to_numpy()
    band = np.array([*RHO_BANDS])[np.searchsorted([*RHO_BANDS.values()], rho, side="right")]
    rows = []
    for use in ("train", "validate"):
        reports = reports_of(prepared, use)
        says, fits = reports.says.T.toarray() > 0, true_reports(prepared, reports.study_id)
        for part, scores in ranking_scores(prepared, reports).items():
            for name, score in scores.items():
                for chosen in ("all", *RHO_BANDS):
                    of = np.isin(band, [*RHO_BANDS] if chosen == "all" else [chosen])
                    auc = auc_within_anchors(score[of], fits[of], says[of])
                    row = {"ranking": name, "part": part, "reports": use, "band": chosen}
                    rows.append({**row, "anchors": says[of].sum(), "auc_within": auc})
                    if part == "posterior":
                        pairs = says[of].sum(1)[:, None] - says[of]
                        means = {"mean_p": score, "share_true": fits}
                        rows[-1] |= {key: np.average(x[of], weights=pairs) for key, x in means.items()}
    table = pd.DataFrame(rows)
    print(table.round(3).to_string())
    table.to_csv(BY_BAND, index=False, float_format="%.4f")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="SET")
    parser.add_argument("--language_model")
    parser.add_argument("--text_alone", metavar="ENCODER")
    parser.add_argument("--run")
    options = parser.parse_args()
    prepared = PreparedSet(options.data)
    write_bands(prepared)
    encoders = (options.language_model, options.text_alone, options.run)
    if not any(encoders):
        return
    if not all(encoders):
        parser.error("expected all of --language_model, --text_alone and --run, or none")
    sentences = prepared.table("sentences").sort_values("sentence_id")
    texts = sentences["text"].tolist()
    log_p = prepared.log_p().set_index("sentence_id")["log_p"].loc[sentences["sentence_id"]].to_numpy()
    rho = prepared.table("classes").sort_values("sentence_id")["rho"].to_numpy()
    initial, text_alone = (
        prepared.text_embedding(
            embed_sentences(Embed(data=options.data, model=model, device="cpu")).stem
        ).embedding
        for model in (options.language_model, options.text_alone)
    )
    train = reports_of(prepared, "train")
    of_train = np.asarray(train.says.sum(0))[0] > 0
    tfidf = TfidfVectorizer(ngram_range=(1, 3), token_pattern=r"\b\w+\b").fit(np.array(texts)[of_train])
    vectors = {
        "initial_model": initial,
        "initial_model_standardised": (initial - initial[of_train].mean(0))
        / initial[of_train].std(0).clip(1e-6),
        "tfidf": tfidf.transform(texts).toarray(),
        "text_alone": text_alone,
        "trained_text_encoder": np.asarray(load(options.run).embed_texts(texts)),
    }
    rule = RankedByText()
    anchors = torch.from_numpy(np.asarray(train.says.sum(0))[0])
    print(rule.prepare(anchors, {"log_p": torch.tensor(log_p)}))
    shares = rule.share({"log_p": torch.tensor(log_p)}).numpy()
    rows = []
    for use in ("train", "validate"):
        reports = reports_of(prepared, use)
        says, shape = reports.says.T.toarray() > 0, (1, len(reports.study_id))
        scores = {
            "log_p": np.tile(log_p[:, None], shape),
            "rho": np.tile(rho[:, None], shape),
            **{name: best_cosines(values, says) for name, values in vectors.items()},
        }
        scores |= {
            f"ranking_{name}": score for name, score in ranking_scores(prepared, reports)["whole"].items()
        }
        rows += rows_of(prepared, use, scores, shares, reports)
    table = pd.DataFrame(rows)
    print(table.round(3).to_string())
    table.to_csv(OUTPUT, index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
