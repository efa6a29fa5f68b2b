"""Parts of the label study that are not in the package: `--import label_arms`.

A text encoder on tf-idf, targets of the arms, and evaluations that may score sentences by the label head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation import Grounding, Retrieval, SentenceClassification
from medclip_dcl.evaluation.callback import EvaluationCallback, EvaluationResult, Values, embed_anew
from medclip_dcl.evaluation.regions import Region, Size
from medclip_dcl.evaluation.retrieval import BoxesAndPhrases
from medclip_dcl.metrics import Agreement
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.objectives import PosteriorTargets, SoftTargets
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors
from medclip_dcl.objectives.negative_weights import cosines
from medclip_dcl.pictures.geometry import Seen

# The text encoder


class TfidfSentences(SentenceEncoder):
    """Tf-idf of a sentence by given terms, of length 1, projected; a text without a known term is 0 before it.

    Args:
        file: JSON of terms, each with its idf, as `write_terms` makes it.
        dim: size of the projected sentences.
        terms: content of the file, as `config` returns it.
    """

    def __init__(self, file: str | None = None, dim: int = 128, *, terms: str | None = None) -> None:
        super().__init__()
        self.terms = Path(str(file)).read_text(encoding="utf-8") if terms is None else terms
        known: dict[str, float] = json.loads(self.terms)
        self.vocabulary = {term: place for place, term in enumerate(known, 1)}  # 0 pads
        self.dim = dim
        self._split = TfidfVectorizer(**SPLIT).build_analyzer()
        self.weights = _Idf([*known.values()])
        self.projection = nn.Linear(len(known), dim)

    @property
    def transformer(self) -> nn.Module:
        return self.weights

    def config(self) -> dict[str, Any]:
        return {"dim": self.dim, "terms": self.terms}

    def transformer_settings(self) -> dict[str, Any]:
        return {"terms": self.terms}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        found = [[self.vocabulary.get(term, 0) for term in self._split(text)] for text in texts]
        return [[place for place in places if place] or [0] for places in found]

    def states(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence hidden"]:
        idf = self.weights.idf
        found = idf.new_zeros(len(tokens), len(idf)).scatter_add_(1, tokens, idf[tokens])
        return nn.functional.normalize(found[:, 1:])

    def project(self, states: Float[Tensor, "sentence hidden"]) -> Float[Tensor, "sentence dim"]:
        return self.projection(states)

    def forward(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence dim"]:
        return self.project(self.states(tokens, lengths))


class _Idf(nn.Module):
    idf: Tensor

    def __init__(self, known: list[float]) -> None:
        super().__init__()
        self.register_buffer("idf", torch.tensor([0.0, *known]))


# As in `rank`.
SPLIT: dict[str, Any] = {"token_pattern": r"\b\w+\b", "ngram_range": (1, 3)}


def write_terms(texts: Sequence[str], file: Path) -> None:
    """Write the terms that two of the texts have, with their idf."""
    tfidf = TfidfVectorizer(**SPLIT, min_df=2).fit(texts)
    terms = {term: round(float(tfidf.idf_[place]), 6) for term, place in sorted(tfidf.vocabulary_.items())}
    file.write_text(json.dumps(terms), encoding="utf-8")


# Targets


class TrueTargets(PosteriorTargets):
    """P is the phantom's truth: an oracle."""

    anchor_requires = ("class_id",)
    candidate_requires = ("image_classes",)

    def posterior(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        classes = anchors.of_candidates["image_classes"]
        return classes.T[anchors.of_anchors["class_id"].long()].float()


class ShuffledPosterior(PosteriorTargets):
    """The P of an anchor's negatives, dealt out among them anew in every step: how much, not of which."""

    def posterior(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        found = super().posterior(anchors)
        # Negatives in the order of a random number, others behind them, in place.
        last = torch.where(anchors.is_negative, 0.0, 2.0)
        among = (torch.rand(found.shape, device=found.device) + last).argsort(1)
        in_place = (torch.arange(found.shape[1], device=found.device) + last * found.shape[1]).argsort(1)
        return found.scatter(1, in_place, found.gather(1, among))


class LabelCosine(SoftTargets):
    """Soft targets by the cosine of the reports' labels, as MedCLIP has them: softmax(cosine / temperature).

    A report's labels are 1 at the findings that it states and, in places of their own, at those it is uncertain of.
    """

    anchor_requires = ()
    candidate_requires = ("labels",)
    uses_image_to_text = False

    def targets(self, anchors: Anchors) -> Float[Tensor, "anchor candidate"]:
        own, others = (_codes(x["labels"]) for x in (anchors.of_anchors, anchors.of_candidates))
        is_candidate = anchors.is_positive | anchors.is_negative
        cosine = cosines(own, others).masked_fill(anchors.is_positive, 1.0).to(anchors.logits.dtype)
        return (cosine / self.temperature).masked_fill(~is_candidate, -torch.inf).softmax(1)


def _codes(labels: Float[Tensor, "report finding"]) -> Float[Tensor, "report code"]:
    return torch.cat([labels == 1, labels == -1], dim=1).float()


class NoContrast(AnchorLoss):
    """No contrastive loss, so that `label_weight` alone trains."""

    uses_class_probability = uses_negative_weights = False

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        return 0 * anchors.logits.sum(1)


# Scores


class MentionScores:
    """Logits of g(x, r) with the label head's chances in place of a report's labels, linear in these.

    A label of -1, of which the head knows nothing, counts with its mean over training reports.

    Args:
        file: .npz that `label_replicates.mention_model` wrote.
    """

    def __init__(self, file: str) -> None:
        with np.load(file) as found:
            self.finding = found["finding"].tolist()
            self.row = {int(one): row for row, one in enumerate(found["sentence_id"])}
            self.sentences = torch.from_numpy(found["sentence"])
            self.silent, self.of_finding = (torch.from_numpy(found[x]) for x in ("silent", "of_finding"))

    def __call__(
        self, network: ImageTextNetwork, encoded: Encoded, sentence_ids: Sequence[int]
    ) -> Float[Tensor, "sentence image"]:
        chances = network.label_logits(encoded).sigmoid().float().cpu()
        return self.of_chances(chances, network.label_findings, sentence_ids)

    def of_chances(
        self, chances: Float[Tensor, "image finding"], findings: Sequence[str], sentence_ids: Sequence[int]
    ) -> Float[Tensor, "sentence image"]:
        """The same of given chances."""
        of_finding = self.of_finding[[self.finding.index(one) for one in findings]]
        reports = self.silent + chances @ of_finding
        return self.sentences[[self.row[int(one)] for one in sentence_ids]] @ reports.T


def scores_of(
    network: ImageTextNetwork,
    encoded: Encoded,
    embedded: Tensor,
    ids: Sequence[int],
    by: MentionScores | None,
) -> np.ndarray:
    """(image, sentence) by the image-text scores, or by the label head."""
    found = network.scores(encoded, embedded) if by is None else by(network, encoded, ids)
    return found.T.contiguous().numpy()


class Sentences(SentenceClassification):
    """`SentenceClassification` of all arms, with further means over classes in the section by_mentions, of test alone.

    rare_often, rare_seldom, rare_never: of rare classes that at least five, one to four, none of the training reports
    mention. seen, unseen: of the wordings that a training report has, or none.

    Args:
        mentions: Parquet file with sentence_id and n_train, the number of training reports that have the sentence.
        by_labels: file of `MentionScores`; null for the image-text scores.
    """

    stages = ("test",)

    def __init__(self, mentions: str, by_labels: str | None = None) -> None:
        super().__init__()
        self.mentions = pd.read_parquet(mentions).set_index("sentence_id")["n_train"]
        self.by = None if by_labels is None else MentionScores(by_labels)

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        if self.by is None:
            return super().measure(network, encoded, dicom_ids)
        rows = [row for row, dicom_id in enumerate(dicom_ids) if dicom_id in self._expected]
        some = encoded.each(lambda tensor: tensor[rows])
        found = self.by(network, some, self.sentence_ids).T.contiguous().numpy()
        return {dicom_ids[row]: scores for row, scores in zip(rows, found, strict=True)}

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> dict[str, EvaluationResult]:
        found = super().summarise(network, values, tables)
        means = further_means(found[self.section].predictions, self.mentions)
        return {**found, "by_mentions": EvaluationResult(means)}

    @property
    def sentence_ids(self) -> list[int]:
        """Of the scores of an image, in this order, after `prepare`."""
        return self._sentences["sentence_id"].tolist()


def further_means(cases: pd.DataFrame, mentions: pd.Series) -> dict[str, float | None]:
    """Mean AUC over classes of the groups that `Sentences` describes; None for an empty one."""
    aucs = sentence_aucs(cases)
    of = cases.drop_duplicates("sentence_id").set_index("sentence_id")[["class", "rho"]]
    of = of.assign(auc=aucs, n_train=mentions.reindex(of.index).fillna(0))
    by_class = of.groupby("class").agg(auc=("auc", "mean"), rho=("rho", "first"), said=("n_train", "sum"))
    rare = by_class[by_class["rho"] < 0.1]
    groups = {
        "rare_often": rare.loc[rare["said"] >= 5, "auc"],
        "rare_seldom": rare.loc[rare["said"].between(1, 4), "auc"],
        "rare_never": rare.loc[rare["said"] == 0, "auc"],
        "seen": of[of["n_train"] > 0].groupby("class")["auc"].mean(),
        "unseen": of[of["n_train"] == 0].groupby("class")["auc"].mean(),
    }
    return {name: float(x.mean()) if len(x) else None for name, x in groups.items()}


def sentence_aucs(cases: pd.DataFrame) -> pd.Series:
    """AUC by sentence_id, equal scores counted half."""
    rank = cases.groupby("sentence_id")["score"].rank()
    is_true = (cases["label"] == 1).astype(float)
    of = pd.DataFrame({"n": 1.0, "true": is_true, "rank": rank * is_true}).groupby(cases["sentence_id"]).sum()
    return (of["rank"] - of["true"] * (of["true"] + 1) / 2) / (of["true"] * (of["n"] - of["true"]))


class Contrast(Grounding):
    """The contrast-to-noise ratio of `Grounding` of each box alone, quicker; its other numbers are NaN."""

    def __init__(self) -> None:
        super().__init__(examples=0)

    def compared(
        self, heat_map: Float[Tensor, "height width"], regions: Sequence[Region], original: Size, seen: Seen
    ) -> dict[str, Any]:
        values = heat_map[seen.slices].double()
        values = values - values[0, 0]
        total = _sums(values)
        nothing = (math.nan,) * 3
        of_boxes, size = {}, (heat_map.shape[0], heat_map.shape[1])
        for region in regions:
            box = region.pixels(original, size).within(*seen)
            assert box is not None
            inside = _sums(values[box.top : box.bottom, box.left : box.right])
            (mean_in, variance_in), (mean_out, variance_out) = map(_moments, (inside, total - inside))
            cnr = (mean_in - mean_out) / math.sqrt(variance_in + variance_out)
            of_boxes[region.row] = Agreement(cnr, *nothing)
        return {"boxes": of_boxes, "pair": Agreement(math.nan, *nothing), "unseen": 0}


class ReportRetrieval(Retrieval):
    """`Retrieval` of a test without that of boxes."""

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        super().prepare(tables, stage)
        self._items = [one for one in self._items if not isinstance(one, BoxesAndPhrases)]
        return set().union(*(items.images for items in self._items))

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        yield from ()  # those of Retrieval show the ranks of boxes


def _sums(values: Float[Tensor, "height width"]) -> np.ndarray:
    flat = values.reshape(-1)
    return np.array([flat.numel(), float(flat.sum()), float(flat @ flat)])


def _moments(sums: np.ndarray) -> tuple[float, float]:
    mean = sums[1] / sums[0]
    return mean, sums[2] / sums[0] - mean**2


class OwnSentences(EvaluationCallback):
    """Mean reciprocal rank of an image's own sentences among all sentences of the stage's reports: no label, no truth.

    mrr: 1 / rank, mean over an image's distinct sentences, then over images; equal scores have the mean of their ranks.
    mrr_within: the same after each sentence's mean score over the images is taken off, which `image_to_text: 0.0`
    leaves untrained. Logs ``<stage>/own_mrr`` and ``<stage>/own_mrr_within``.

    Args:
        by_labels: as of `Sentences`.
    """

    section = "own_sentences"
    measures_images = True

    def __init__(self, by_labels: str | None = None) -> None:
        super().__init__()
        self.by = None if by_labels is None else MentionScores(by_labels)

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        texts = tables.sentences.drop_duplicates("sentence_id").sort_values("sentence_id")
        self._ids, self._texts = texts["sentence_id"].tolist(), texts["text"].tolist()
        self._states, self._embedded = tables.sentence_states, torch.empty(0)
        return set(tables.sentences["dicom_id"])

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        if self.by is None and not len(self._embedded):
            states = None if self._states is None else self._states(self._ids)
            self._embedded = embed_anew(network, self._texts, states)
        found = scores_of(network, encoded, self._embedded, self._ids, self.by)
        of_images = zip(dicom_ids, found, strict=True)
        return {dicom_id: scores for dicom_id, scores in of_images if dicom_id in self._expected}

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> dict[str, EvaluationResult]:
        scores = np.stack([*values.values()])
        said = pd.crosstab(tables.sentences["dicom_id"], tables.sentences["sentence_id"]) > 0
        own = said.reindex(index=[*values], columns=self._ids, fill_value=False).to_numpy()
        metrics = {
            "mrr": mean_reciprocal_rank(scores, own),
            "mrr_within": mean_reciprocal_rank(scores - scores.mean(0), own),
        }
        scalars = {f"own_{name}": value for name, value in metrics.items()}
        return {self.section: EvaluationResult(metrics, scalars)}


def mean_reciprocal_rank(scores: np.ndarray, own: np.ndarray) -> float:
    """Of (image, sentence) scores and of which sentences are an image's own, of which each has one."""
    ranks = pd.DataFrame(-scores).rank(axis=1).to_numpy()
    return float((np.where(own, 1 / ranks, 0).sum(1) / own.sum(1)).mean())
