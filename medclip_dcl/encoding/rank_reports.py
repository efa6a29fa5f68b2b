"""Learn from training reports which reports fit a sentence: for `RankedByText` and `PosteriorTargets`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from jaxtyping import Bool, Int
from scipy.sparse import csr_matrix, vstack

from medclip_dcl.common.command_line import in_words, progress_bar
from medclip_dcl.common.files import digest, require_writable
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.ranking import NEVER_TRUE, QUANTILES
from medclip_dcl.data.vectors import write_vectors
from medclip_dcl.encoding.mention_model import ROWS, batches, embedded, learned_mentions, sentence_vectors
from medclip_dcl.encoding.options import Rank
from medclip_dcl.metrics.false_negatives import auc_within_anchors

_TERMS, _DIM = 65_536, 64
_BATCH, _MIN_STEPS, _PASSES = 128, 1_500, 3
_LEARNING_RATE, _WEIGHT_DECAY = 3e-3, 0.01
# Reports whose scores give the quantiles.
_RANKED = 2_000
# Deviation below which a sentence's scores are taken for one and the same.
_SAME = 1e-3
# In a ranking's name. 2: 0 is coded as blank, as a silent report denies as truly as one that says so.
_CODES_VERSION = 2


class Reports(NamedTuple):
    """Reports, and the sentences that each has."""

    study_id: Int[np.ndarray, " report"]
    says: csr_matrix
    """(report, sentence) 1 where the report has the sentence."""


def rank_reports(settings: Rank) -> Path:
    """Write the ranking unless a sound one exists, and return its file."""
    for name, is_given in (("labels", settings.labels is not None), ("posterior", settings.posterior)):
        if settings.rest_alone and is_given:
            raise PreparedDataError(
                f"--rest_alone: expected no --{name}, as it reads no labels; leave out one of them"
            )
    prepared = PreparedSet(settings.data)
    labels = None if settings.rest_alone else _labels(prepared, settings.labels)
    if settings.posterior and labels is None:
        raise PreparedDataError(
            f"{settings.data}: --posterior expects a training report with a label 1 or -1, found none; name a table of "
            "labels by --labels, or prepare the set from a source with labels"
        )
    kind = "posterior" if settings.posterior else "ranking"
    seal = prepared.seal_of_reports()
    table = b"" if labels is None else f"codes {_CODES_VERSION}\n{labels.to_csv()}".encode()
    name = digest(*(x.encode() for x in seal.values()), table, str(settings.rest_alone).encode())[:8]
    stem = "labels" if settings.posterior else "rest" if labels is None else "rest_labels"
    file = prepared.folder / kind / f"{stem}-{name}.parquet"
    of_reports = prepared.folder / f"{kind}_reports" / file.name
    if file.is_file() and of_reports.is_file():
        try:
            prepared.ranking(file.stem, kind)
            print(f"{file} holds the {kind} of these reports: nothing to do")
            return file
        except PreparedDataError:
            print(f"{file} or {of_reports} is not as it was written, or lacks reports: both are made again")
    for folder in (file.parent, of_reports.parent):
        require_writable(folder)
    started = time.perf_counter()
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    train, validate = (reports_of(prepared, use) for use in ("train", "validate"))
    is_said = np.asarray(train.says.sum(0))[0] > 0
    terms = tfidf_rows(sentences["text"].to_numpy(dtype=object), is_said, settings.data)
    if not settings.posterior and (train.says.sum(1) > 1).sum() < 2:
        raise PreparedDataError(
            f"{settings.data}: expected two training reports of several sentences, found fewer"
        )
    if labels is None and not settings.rest_alone:
        print(
            f"no training report of {settings.data} has a label 1 or -1: the rest of the report alone ranks"
        )
    ids = sentences["sentence_id"].to_numpy()
    if labels is not None and settings.labels is None:
        seal |= prepared.seal_of_labels()
    if settings.posterior and labels is not None:
        vectors, parts = posterior_vectors(terms, ids, [train, validate], labels)
    else:
        vectors, parts = _ranking(terms, ids, [train, validate], labels)
    studies = np.concatenate([train.study_id, validate.study_id])
    order = np.argsort(studies)
    write_vectors([{"study_id": studies[order], "vector": vectors[order]}], of_reports, seal)
    # Last: it says that both are complete.
    unranked = list[int]()

    def counted() -> Iterator[dict[str, np.ndarray]]:
        for part in parts:
            is_ranked = part["log_c"] < NEVER_TRUE if settings.posterior else part["vector"].any(axis=1)
            unranked.append(int((~is_ranked).sum()))
            yield part

    write_vectors(counted(), file, seal)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(
        f"{file}: {len(ids):,} sentences, {len(train.study_id):,} training reports, {terms.shape[1]:,} terms, "
        f"{in_words(time.perf_counter() - started)}, peak memory {peak / 2**30:.2f} GiB"
    )
    if any(unranked):
        what = "have no known term, or one score for all reports: nothing is left out"
        if settings.posterior:
            what = "have no known term, or no training report says them: P is 0 for other reports"
        print(f"  {sum(unranked):,} sentences {what}")
    if len(names := prepared.models(kind)) > 1:
        print(f"  {file.parent} has {', '.join(names)}: remove what is of no use, or name one by data.{kind}")
    if settings.posterior and prepared.is_phantom:
        print("  a phantom's labels are exact readings of its reports: P of other labels is worse")
    for line in truth_lines(prepared, file.stem, kind):
        print(line)
    return file


_Learned = tuple[np.ndarray, Iterator[dict[str, np.ndarray]]]
"""Vectors of the reports of train, then of validate; and the parts of the table of sentences."""


def _ranking(
    terms: csr_matrix, ids: np.ndarray, uses: list[Reports], labels: pd.DataFrame | None
) -> _Learned:
    learned = [_learned(terms, uses[0].says, None)]
    if labels is not None:
        learned.append(_learned(terms, uses[0].says, _codes(labels, uses[0].study_id)))

    def vectors_of(reports: Reports) -> np.ndarray:
        rows = [reports.says @ terms, *([] if labels is None else [_codes(labels, reports.study_id)])]
        return np.concatenate([row @ part for row, (_, part) in zip(rows, learned, strict=True)], axis=1)

    of_train, of_validate = map(vectors_of, uses)
    vectors = (np.concatenate([of_train, of_validate]) - of_train.mean(0)).astype(np.float16)
    ranked = vectors[: len(of_train)].astype(np.float32)
    return vectors, _sentence_vectors(terms, ids, [weights for weights, _ in learned], ranked)


def posterior_vectors(
    terms: csr_matrix, ids: np.ndarray, uses: list[Reports], labels: pd.DataFrame
) -> _Learned:
    """By a mention model, with f(r) the codes 1 and -1 of each column less their means over training reports, and 1."""
    codes = [_codes(labels, x.study_id).toarray().reshape(-1, labels.shape[1], 3)[:, :, :2] for x in uses]
    varies = np.ptp(codes[0], axis=0) > 0
    if constant := [*labels.columns[~varies.any(axis=1)].astype(str)]:
        what = f"{len(constant)} of {labels.shape[1]} columns have one value among training reports (0 is as blank)"
        if len(constant) == labels.shape[1]:
            raise PreparedDataError(f"--posterior learns from labels: {what}; name another table by --labels")
        print(f"labels: {what} and are left out: {', '.join(constant)}")
    mean, says = codes[0].mean(0), uses[0].says
    features = [np.pad((x - mean)[:, varies], ((0, 0), (0, 1)), constant_values=1) for x in codes]
    options = (_BATCH, _steps(len(features[0])), _LEARNING_RATE, _WEIGHT_DECAY)
    weights = learned_mentions(terms, says, features[0], *options)
    # 1 meets the sentence's bias.
    vectors = [np.pad(x @ weights[1], ((0, 0), (0, 1)), constant_values=1) for x in features]
    return np.concatenate(vectors), sentence_vectors(terms, says, ids, weights, vectors[0])


def reports_of(prepared: PreparedSet, use: str) -> Reports:
    """The reports of one use; columns of `says` are the sentences by ascending sentence_id."""
    rows = prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
    rows = rows[rows["study_id"].isin(prepared.studies(use))]
    ids = np.sort(prepared.table("sentences")["sentence_id"].to_numpy())
    studies, study = np.unique(rows["study_id"].to_numpy(), return_inverse=True)
    places = (study, np.searchsorted(ids, rows["sentence_id"].to_numpy()))
    said = csr_matrix((np.ones(len(rows), np.float32), places), shape=(len(studies), len(ids)))
    return Reports(studies, said)


def tfidf_rows(texts: np.ndarray, is_said: Bool[np.ndarray, " sentence"], folder: Path) -> csr_matrix:
    """Tf-idf of all sentences, (sentence, term); the terms are those of training reports' sentences."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    tfidf = TfidfVectorizer(
        token_pattern=r"\b\w+\b",  # also words of one character
        ngram_range=(1, 3),
        min_df=2,
        max_features=_TERMS,
        dtype=np.float32,
    )
    try:
        rows = tfidf.fit_transform(texts[is_said])
    except ValueError as error:
        raise PreparedDataError(
            f"{folder}: expected a word that two sentences of training reports share, found none ({error})"
        ) from error
    if not is_said.all():
        rows = vstack([rows, tfidf.transform(texts[~is_said])], format="csr")
    order = np.concatenate([np.flatnonzero(is_said), np.flatnonzero(~is_said)])
    return rows[np.argsort(order)]


def _labels(prepared: PreparedSet, file: Path | None) -> pd.DataFrame | None:
    """Labels by study_id; None if no training report has 1 or -1."""
    source = prepared.folder / "labels.parquet" if file is None else file
    try:
        labels = prepared.table("labels") if file is None else pd.read_parquet(file)
        labels = labels.set_index("study_id").sort_index()
    except (KeyError, OSError, pa.ArrowException) as error:
        raise PreparedDataError(f"{source}: expected a Parquet table with study_id ({error})") from error
    is_wrong = labels.notna() & ~labels.isin([1, 0, -1])
    if labels.index.has_duplicates or is_wrong.any(axis=None):
        others = [str(name) for name in labels if is_wrong[name].any()]
        raise PreparedDataError(
            f"{source}: expected one row for each study_id, and 1, 0, -1 or blank in all other columns, found "
            f"{int(labels.index.duplicated().sum()):,} repeated study_id, and other values in the columns {others}"
        )
    is_of_training = labels.index.isin(prepared.studies("train"))
    return labels if labels[is_of_training].isin([1, -1]).any(axis=None) else None


def _codes(labels: pd.DataFrame, studies: Int[np.ndarray, " report"]) -> csr_matrix:
    """(report, 3 x finding) 1 at the code of each finding: 1, -1, or neither, as of a report without a row."""
    values = labels.reindex(studies).to_numpy(dtype=float, na_value=np.nan)
    codes = np.stack([values == 1, values == -1, ~np.isin(values, [1, -1])], axis=2)
    return csr_matrix(codes.reshape(len(studies), -1).astype(np.float32))


def _learned(terms: csr_matrix, says: csr_matrix, labels: csr_matrix | None) -> list[np.ndarray]:
    """Weights (term, dim) of sentences, and of reports (term or code, dim): InfoNCE of sentences with their reports.

    A step takes reports without repetition, and a sentence of each. Its positive is the rest of its report, whose
    tf-idf is summed over sentences, or the report's labels; the other reports of the step are negatives.
    """
    import torch

    of_reports = says @ terms if labels is None else labels
    count = np.diff(says.indptr)
    used = np.flatnonzero(count > 1) if labels is None else np.arange(len(count))
    batch, steps = min(_BATCH, len(used)), _steps(len(used))
    draws, weights = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sizes = (terms.shape[1], of_reports.shape[1])
    parts = [torch.randn(size, _DIM, generator=weights).div_(_DIM**0.5).requires_grad_() for size in sizes]
    optimizer = torch.optim.AdamW(parts, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True)
    drawn = batches(draws, used, batch)
    for _ in progress_bar(iterable=range(steps), desc=f"ranking by {'rest' if labels is None else 'labels'}"):
        chosen = next(drawn)
        places = says.indptr[chosen] + (draws.random(batch) * count[chosen]).astype(np.int64)
        own = terms[says.indices[places]]
        others = of_reports[chosen]
        sentences, reports = (
            embedded(own, parts[0]),
            embedded(others - own if labels is None else others, parts[1]),
        )
        loss = torch.nn.functional.cross_entropy(sentences @ reports.T, torch.arange(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [part.detach().numpy() for part in parts]


def _steps(reports: int) -> int:
    return max(_MIN_STEPS, -(-_PASSES * reports // _BATCH))


def _sentence_vectors(
    terms: csr_matrix, ids: Int[np.ndarray, " sentence"], weights: Sequence[np.ndarray], reports: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Parts of the table of sentences; `reports` (report, dim), those of training, are centred."""
    covariances = [np.cov(part.T, bias=True) for part in np.split(reports, len(weights), axis=1)]
    drawn = np.random.default_rng(0).permutation(len(reports))[:_RANKED]
    place = np.linspace(0, len(drawn) - 1, QUANTILES)
    below = np.minimum(place.astype(int), len(drawn) - 2)
    for start in range(0, len(ids), ROWS):
        vectors = []
        for weight, covariance in zip(weights, covariances, strict=True):
            vector = terms[start : start + ROWS] @ weight
            deviation = np.sqrt(np.einsum("nd,de,ne->n", vector, covariance, vector).clip(min=0))
            scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=deviation > _SAME)
            vectors.append(vector * scale[:, None])
        vector = np.concatenate(vectors, axis=1).astype(np.float16)
        # Sorted whole: np.quantile takes five times as long for so many.
        scores = np.sort(vector.astype(np.float32) @ reports[drawn].T, axis=1)
        least, next_one = scores[:, below], scores[:, below + 1]
        quantiles = (least + (next_one - least) * (place - below)).astype(np.float16)
        yield {"sentence_id": ids[start : start + ROWS], "vector": vector, "quantiles": quantiles}


def truth_lines(prepared: PreparedSet, name: str, kind: str = "ranking") -> list[str]:
    """On a phantom the AUC within anchors of the scores, of the reports of training and of validate; else nothing."""
    if not (prepared.has("classes") and prepared.has("image_classes")):
        return []
    import torch

    ranking, lines = prepared.ranking(name, kind), list[str]()
    for use in ("train", "validate"):
        reports = reports_of(prepared, use)
        rows = np.searchsorted(ranking.study_id, reports.study_id)
        dim, of_reports = ranking.reports.shape[1], ranking.reports[rows].astype(np.float32)
        scores = ranking.sentences[:, :dim].astype(np.float32) @ of_reports.T
        if kind == "posterior":
            from medclip_dcl.objectives.posterior_targets import posterior

            scores = posterior(*map(torch.from_numpy, (ranking.sentences, of_reports))).numpy()
        fits = true_reports(prepared, reports.study_id)
        auc = auc_within_anchors(scores, fits, reports.says.T.toarray() > 0)
        lines.append(f"  AUC within anchors, {use} reports (the phantom's truth): {auc:.3f}")
    return lines


def true_reports(
    prepared: PreparedSet, studies: Int[np.ndarray, " report"]
) -> Bool[np.ndarray, "sentence report"]:
    """True where a sentence of a phantom, by ascending sentence_id, is true of an image of the study."""
    images = prepared.table("image_classes").merge(prepared.table("images")[["dicom_id", "study_id"]])
    images = images[images["study_id"].isin(studies)]
    classes = prepared.table("classes").sort_values("sentence_id")["class_id"].to_numpy()
    is_true = np.zeros((max(classes.max(), images["class_id"].max()) + 1, len(studies)), dtype=bool)
    is_true[images["class_id"], np.searchsorted(studies, images["study_id"])] = True
    return is_true[classes]
