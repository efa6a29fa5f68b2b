"""Weights of the negatives of each anchor: removal, reweighting and resampling of suspected false negatives.

Each rule compares an anchor's own image x+ with every candidate image (SSD, section 3.2).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from medclip_dcl.common.devices import widest_float
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.findings import CHEX5, CHEXPERT
from medclip_dcl.objectives.contrastive import at_least_float32, checked
from medclip_dcl.objectives.part import ObjectivePart

Fields = Mapping[str, Tensor]
Weights = Float[Tensor, "anchor candidate"]
Pairs = Bool[Tensor, "anchor candidate"]
Keys = Int[Tensor, "anchor key"]

_ROUNDING = 1e-6
# Constants of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MAX_SHARE, _MAX_MEAN_SHARE = 0.95, 0.9
_LOG_MAX_SHARE = math.log(_MAX_SHARE)
# Pairs of texts of which the share above a threshold is estimated.
_PAIRS = 10_000


class NegativeWeights(ObjectivePart):
    """Base class: weight of each candidate as a negative of each anchor, at least 0.

    A rule defines `pair_weights`; `finished` then scales or draws, row by row, among the candidates that are negatives.
    Your own rule may require of candidates any numeric column of images and labels of the prepared set, or of the
    Parquet file in `data.init_args.fields`, and of anchors what a `ClassProbability` may.

    Attributes:
        anchor_requires: names of the anchors' (sentences') fields that the rule takes by keyword.
        candidate_requires: names of the candidates' (images') fields that it takes by keyword.
        keeps_count: True scales the weights of an anchor's negatives to sum to their number.
        uses_class_probability: False refuses every class probability but a constant 0.
        prepare_requires: those of `anchor_requires`, numbers, that `prepare` takes.
        step: of training, set before the weights of a batch are computed.
    """

    anchor_requires: tuple[str, ...] = ()
    candidate_requires: tuple[str, ...] = ()
    keeps_count = False
    uses_class_probability = True
    prepare_requires: tuple[str, ...] = ()
    step = 0

    def prepare(self, anchors: Float[Tensor, "sentence"], fields: Fields) -> str:
        """Get ready for training, before a checkpoint is restored; returns a line to log.

        Args:
            anchors: expected number of anchors of an epoch, by sentence of the training reports.
            fields: the sentences' fields of `prepare_requires`, (sentence,).
        """
        return ""

    def check_sentences(self, fields: Fields) -> None:
        """Check the fields of a sample of the training reports' sentences, (sentence, ...)."""

    def figures(self, weights: Weights, is_negative: Tensor, anchor: Fields) -> dict[str, Tensor]:
        """Statistics to log of sentences as anchors, scalars, from the weights before scaling; without gradient."""
        return {}

    def check(self, fields: Fields) -> None:
        """Check the training images' fields, (image, ...), before training: refuse what would train nothing."""

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        """Weight of each pair, before scaling or drawing.

        Args:
            anchor: the anchors' fields, and under the candidates' names those of each anchor's own image.
            candidate: the candidates' fields.
            logits: (anchor, candidate), for rules that need them.
        """
        raise NotImplementedError

    def finished(self, weights: Weights, is_negative: Pairs, keys: Keys) -> Weights:
        """The weights of the negatives, from those of pairs: scaled if `keeps_count`; 0 elsewhere."""
        weights = weights.masked_fill(~is_negative, 0.0)
        if not self.keeps_count:
            return weights
        total, count = weights.sum(1, keepdim=True), is_negative.sum(1, keepdim=True)
        # Rows of zeros stay zero.
        return weights * (count / total.where(total > 0, torch.ones_like(total)))

    def forward(
        self,
        positives: Int[Tensor, "anchor"],
        logits: Float[Tensor, "anchor candidate"] | None = None,
        is_negative: Pairs | None = None,
        keys: Keys | None = None,
        step: int = 0,
        **fields: Tensor,
    ) -> Weights:
        """Weights of all candidates for each anchor.

        Args:
            positives: the column of each anchor's own image.
            logits: for rules that need them.
            is_negative: True for negatives; None: all but the anchor's own image.
            keys: integers, at least 0, that seed an anchor's random draw together with `step`; None: its position.
            step: of training.
            **fields: the required fields, (anchor, ...) or (candidate, ...).
        """
        own = {name: fields[name][positives] for name in self.candidate_requires}
        anchor = {**own, **{name: fields[name] for name in self.anchor_requires}}
        candidate = {name: fields[name] for name in self.candidate_requires}
        self.step = step
        weights = self.pair_weights(anchor, candidate, logits)
        if is_negative is None:
            is_negative = torch.arange(weights.shape[1], device=weights.device) != positives[:, None]
        if keys is None:
            keys = torch.arange(len(weights))[:, None]
        return self.finished(weights, is_negative, keys)


class RemoveByLabel(NegativeWeights):
    """Removes candidates whose study shares a positive finding with the anchor's (SSD table 1, "Remove by CheX5").

    Args:
        findings: CheXpert columns that are compared.
        normals: True also removes candidates without any positive finding where the anchor's study has none
            (False: SSD compares shared labels only).
    """

    candidate_requires = ("labels",)

    def __init__(self, findings: Sequence[str] = tuple(CHEX5), normals: bool = False) -> None:
        super().__init__()
        unknown = [finding for finding in findings if finding not in CHEXPERT]
        if unknown or not findings:
            raise UserError(
                f"negative_weights.findings: expected some of {list(CHEXPERT)}, found {unknown or list(findings)}"
            )
        self.findings, self.normals = list(findings), normals

    def check(self, fields: Fields) -> None:
        """Warn if no study has any of the findings: nothing is removed."""
        if not self._positive(fields["labels"]).any() and not self.normals:
            warnings.warn(
                f"RemoveByLabel: no training study is positive for any of {self.findings}: nothing is removed",
                stacklevel=2,
            )

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        """`labels` (image, 14) in the order of `CHEXPERT`: 1 positive, all else not."""
        mine, other = self._positive(anchor["labels"]), self._positive(candidate["labels"])
        is_shared = mine @ other.T > 0
        if self.normals:
            is_shared |= ~mine.any(1)[:, None] & ~other.any(1)
        return (~is_shared).to(torch.get_default_dtype())

    def _positive(self, labels: Num[Tensor, "image finding"]) -> Float[Tensor, "image own_finding"]:
        return (labels[:, [CHEXPERT.index(finding) for finding in self.findings]] == 1).float()


class _TextSimilarity(NegativeWeights):
    """Rules on the cosine of the two images' report embeddings, (image, dim)."""

    candidate_requires = ("text_embedding",)

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        return self.weight_of(cosines(anchor["text_embedding"], candidate["text_embedding"]))

    def weight_of(self, cosine: Weights) -> Weights:
        """1 - max(cosine, 0): 1 for unlike reports, 0 for equal ones (choice: the paper gives no formula)."""
        weights = 1 - cosine.clamp(min=0)
        # Rounding errors of equal reports must not be scaled up to a weight.
        return weights.masked_fill(weights < _ROUNDING, 0.0)


class RemoveByTextSimilarity(_TextSimilarity):
    """Removes candidates whose report is too similar to the anchor's (SSD table 1, "Remove by text similarity").

    Args:
        threshold: greatest cosine of the report embeddings that is kept, in [-1, 1]. SSD searched a grid and
            does not report the result (0.9: choice); `medclip-dcl similar` prints the cosines' quantiles.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        super().__init__()
        check_range("negative_weights", "[-1, 1]", threshold=threshold)
        self.threshold = threshold

    def check(self, fields: Fields) -> None:
        """Estimate the share of removed pairs on a sample: all is an error, more than half a warning."""
        share = share_above(self.threshold, fields["text_embedding"])
        message = (
            f"negative_weights.threshold: {self.threshold} removes {share:.0%} of the pairs of reports; choose from "
            "the quantiles that medclip-dcl similar prints"
        )
        if share == 1.0:
            raise UserError(message)
        if share > 0.5:
            warnings.warn(message, stacklevel=2)

    def weight_of(self, cosine: Weights) -> Weights:
        return (cosine <= self.threshold).to(cosine.dtype)


class ReweightByTextSimilarity(_TextSimilarity):
    """Weights candidates by the reports' dissimilarity (SSD table 1, "Reweight by text similarity"), scaled to keep N.

    Args:
        threshold: t in [0, 1) of the weight 1 - max(cosine - t, 0) / (1 - t), 1 up to a cosine of t (all: choices). SSD
            searched a grid and does not report the result (0: choice).
    """

    keeps_count = True

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        check_range("negative_weights", "[0, 1)", threshold=threshold)
        self.threshold = threshold

    def weight_of(self, cosine: Weights) -> Weights:
        weights = super().weight_of((cosine - self.threshold) / (1 - self.threshold))
        return weights.masked_fill(cosine > 1 - _ROUNDING, 0.0)


class ResampleByTextSimilarity(_TextSimilarity):
    """Resamples negatives with replacement (SSD table 1, "Resample by text similarity").

    The probability of a draw is proportional to 1 - max(cosine, 0) of the reports (choice); a candidate's weight is the
    number of its draws.

    Args:
        draws: number of draws; None for the number of negatives (choice).
        seed: of the draws; a draw depends only on (seed, step, sentence, place of its image in the batch).
    """

    def __init__(self, draws: int | None = None, seed: int = 0) -> None:
        super().__init__()
        check_range("negative_weights", "[1, inf)", draws=draws)
        check_range("negative_weights", "[0, inf)", seed=seed)
        self.draws, self.seed = draws, seed

    def finished(self, weights: Weights, is_negative: Pairs, keys: Keys) -> Weights:
        place = _precise(weights.device)
        chances = weights.masked_fill(~is_negative, 0.0).to(place, torch.float64)
        until = chances.cumsum(1)
        most = chances.shape[1] if self.draws is None else self.draws
        # Inverse transform sampling: chances that differ in the last digit, as between one process and several, give
        # the same counts.
        places = uniform(keys.to(place), most, self.seed, self.step) * until[:, -1:]
        drawn = torch.searchsorted(until, places, right=True)
        numbers = torch.arange(chances.shape[1], device=place)
        last = (numbers * (chances > 0)).amax(1, keepdim=True)
        counts = is_negative.to(place).sum(1, keepdim=True) if self.draws is None else self.draws
        is_drawn = (torch.arange(most, device=place) < counts) & (until[:, -1:] > 0)
        found = torch.zeros_like(chances).scatter_add(1, drawn.minimum(last), is_drawn.double())
        return found.to(weights)


class HardNegatives(NegativeWeights):
    """Weights candidates by exp(beta * s), scaled to their number (Robinson et al., ICLR 2021, "hard negatives").

    With a class probability it is their debiased form. beta = 0 is no weighting.

    Args:
        beta: at least 0; how strongly similar candidates count more, per unit of logit.
    """

    def __init__(self, beta: float = 0.5) -> None:
        super().__init__()
        check_range("negative_weights", "[0, inf)", beta=beta)
        self.beta = beta

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        """Log weights, beta * s, which `finished` takes: exp of them may overflow before it is scaled."""
        assert logits is not None
        return self.beta * at_least_float32(logits)

    def finished(self, weights: Weights, is_negative: Pairs, keys: Keys) -> Weights:
        has_negatives = is_negative.any(1, keepdim=True)
        # A row without negatives would be NaN: all of it takes part, and is set to 0.
        log_weights = weights  # as `pair_weights` returns them
        shares = log_weights.masked_fill(has_negatives & ~is_negative, -math.inf).softmax(1)
        return (shares * is_negative.sum(1, keepdim=True)).masked_fill(~is_negative, 0.0)


class TrueNegatives(NegativeWeights):
    """Keeps the true negatives alone, scaled to the number of candidates: the unbiased loss (DCL eq. 2 with Q = N).

    It needs the truth, which the phantom has: the classes of each image and of each sentence.
    """

    anchor_requires = ("class_id",)
    candidate_requires = ("image_classes",)
    keeps_count = True

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        """`class_id` (anchor,); `image_classes` (image, class): 1 where the class is true of the image."""
        is_true = candidate["image_classes"][:, anchor["class_id"]].T == 1
        return (~is_true).to(torch.get_default_dtype())


class RankedByText(NegativeWeights):
    """Leaves out the negatives whose reports fit an anchor best, as many as its probability says.

    A share of the images, by the sentence's pseudo-likelihood p(x), is left out; the reports say which (not from a
    paper)::

        share(x) = min{ c p(x)^k, 0.95 }
        w(x, u)  = 0  where  score(x, report of u) > quantile of x's scores at 1 - share(x),  else 1

    `medclip-dcl rank` learns the scores on the training reports alone; the quantiles are over at most 2,000
    of these, drawn at random. Reports with equal scores are kept or left out together. The other negatives are scaled
    to keep N; an anchor with nothing left costs 0. A sentence of unknown words keeps all its negatives. No class
    probability stands beside it: the false negatives would count twice.

    Args:
        mean_share: mean of share(x) over the training anchors, in (0, 0.9], for which c is solved before training;
            null where c is given (0.5: choice).
        k: exponent of p(x), at least 0; 0 is the same share for every sentence, without scores (0.35: SSD's).
        c: factor, above 0; null to solve it.
        random_seed: None ranks by text. A number leaves out the same share of images at random, a control, which
            knows no ranking and leaves out images of unranked sentences, too; a draw depends on (random_seed, sentence,
            image, step) alone.
    """

    keeps_count = True
    uses_class_probability = False
    log_c: Tensor

    def __init__(
        self,
        mean_share: float | None = 0.5,
        k: float = 0.35,
        c: float | None = None,
        random_seed: int | None = None,
    ) -> None:
        super().__init__()
        if (mean_share is None) == (c is None):
            raise UserError(
                f"negative_weights: expected mean_share or c, and null for the other, found {mean_share} and {c}"
            )
        check_range("negative_weights", f"(0, {_MAX_MEAN_SHARE}]", mean_share=mean_share)
        check_range("negative_weights", "(0, inf)", c=c)
        check_range("negative_weights", "[0, inf)", k=k, random_seed=random_seed)
        self.mean_share, self.k, self.c, self.random_seed = mean_share, k, c, random_seed
        of_pairs = (("sentence_ranking",), ("report_ranking",))
        if random_seed is not None:
            of_pairs = (("sentence_id",), ("image_row",))
        self.prepare_requires = ("log_p",) if k else ()
        self.anchor_requires, self.candidate_requires = self.prepare_requires + of_pairs[0], of_pairs[1]
        self.register_buffer("log_c", torch.tensor(math.nan if c is None else math.log(c)))
        self._is_prepared = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if self._is_prepared:  # a training has its own, also from another's checkpoint
            state_dict[f"{prefix}log_c"] = self.log_c
        super()._load_from_state_dict(state_dict, prefix, *others)

    def prepare(self, anchors: Float[Tensor, "sentence"], fields: Fields) -> str:
        """Solve c; refuse a given one that leaves out nearly everything."""
        log_p = fields["log_p"] if self.k else torch.zeros_like(anchors)
        if log_p.isnan().any():
            raise UserError(
                "log_p: expected a number for each sentence of the training reports, found NaN, that of an empty "
                "sentence; leave it out, or score the sentences again"
            )
        exponent, chances = self.k * log_p.double(), anchors.double() / anchors.sum()

        def mean(log_c: float) -> float:
            return float((chances * (log_c + exponent).clamp(max=_LOG_MAX_SHARE).exp()).sum())

        if self.mean_share is not None:
            low, high = math.log(self.mean_share), -float(exponent.min())
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if mean(middle) < self.mean_share else (low, middle)
            self.log_c.fill_(high)
        self._is_prepared = True
        share, c = mean(float(self.log_c)), math.exp(self.log_c)
        if share > _MAX_MEAN_SHARE + _ROUNDING:
            raise UserError(
                f"negative_weights.c: {c:g} leaves out {share:.3f} of the negatives on average, more than "
                f"{_MAX_MEAN_SHARE}; lower it, or set c: null and a mean_share"
            )
        return f"RankedByText: c {c:.4g}; mean share left out {share:.3f} over anchors of {len(anchors):,} sentences"

    def check_sentences(self, fields: Fields) -> None:
        """Say how many sentences the ranking does not cover."""
        if self.random_seed is None and not (is_ranked := _is_ranked(fields)).all():
            message = "have no known term, or one score for all reports: they keep all their negatives"
            warnings.warn(
                f"RankedByText: {int((~is_ranked).sum()):,} of {len(is_ranked):,} sampled anchors {message}",
                stacklevel=2,
            )

    def pair_weights(self, anchor: Fields, candidate: Fields, logits: Tensor | None) -> Weights:
        """`sentence_ranking` (anchor, dim + 101), `report_ranking` (image, dim), `log_p` (anchor,)."""
        share = self.share(anchor)
        if self.random_seed is not None:
            pairs = torch.cartesian_prod(anchor["sentence_id"], candidate["image_row"]).reshape(-1, 2)
            numbers = uniform(pairs.to(_precise(pairs.device)), 1, self.random_seed, self.step)
            is_left_out = numbers.to(share).reshape(len(share), -1) < share[:, None]
        else:
            quantiles = anchor["sentence_ranking"][:, candidate["report_ranking"].shape[1] :]
            place = (1 - share) * (quantiles.shape[1] - 1)
            below = place.long().clamp(max=quantiles.shape[1] - 2)
            ends = [quantiles.gather(1, number[:, None]) for number in (below, below + 1)]
            least = ends[0].lerp(ends[1], (place - below).to(quantiles)[:, None])
            # In the quantiles' precision: a report at the quantile, as many equal reports may be, is not above it.
            is_left_out = self.scores(anchor, candidate).half() > least
        return (~is_left_out).to(torch.get_default_dtype()).masked_fill(share.isnan()[:, None], math.nan)

    def scores(self, anchor: Fields, candidate: Fields) -> Weights:
        """Scores of the images' reports for the anchors; those of half precision are exact, in a batch of any shape."""
        reports = candidate["report_ranking"].to(widest_float(candidate["report_ranking"].device))
        return anchor["sentence_ranking"][:, : reports.shape[1]].to(reports) @ reports.T

    def share(self, anchor: Fields) -> Float[Tensor, "anchor"]:
        """Share of an anchor's negatives that is left out; 0 of an empty sentence, which has no log p.

        Raises:
            UserError: c is not solved. Where `log_c` is not on the host, shares are NaN.
        """

        def error() -> UserError:
            return UserError(
                "negative_weights.c: expected a number, found none, as no datamodule prepared the training; give c, or "
                "call RankedByText.prepare"
            )

        log_c = checked(self.log_c, self.log_c.isnan(), error)
        if not self.k:
            return log_c.exp().clamp(max=_MAX_SHARE).expand(len(next(iter(anchor.values()))))
        exponent = (self.k * anchor["log_p"]).nan_to_num(-math.inf)
        return (log_c + exponent).clamp(max=_LOG_MAX_SHARE).exp()

    def figures(self, weights: Weights, is_negative: Tensor, anchor: Fields) -> dict[str, Tensor]:
        is_left_out = (weights == 0) & is_negative
        is_empty = (is_left_out == is_negative).all(1) & is_negative.any(1)
        count = is_negative.sum().clamp(min=1)
        found = {"share": self.share(anchor).mean(), "left_out": is_left_out.sum() / count}
        if self.random_seed is None:
            found["unranked"] = (~_is_ranked(anchor)).float().mean()
        return {**found, "nothing_left": is_empty.float().mean()}


def _precise(device: torch.device) -> torch.device:
    """The CPU in place of MPS, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _is_ranked(anchor: Fields) -> Bool[Tensor, "anchor"]:
    """False where a sentence has no known term, or one score for all reports: its vector is 0."""
    return (anchor["sentence_ranking"] != 0).any(1)


def cosines(
    mine: Float[Tensor, "anchor dim"], other: Float[Tensor, "candidate dim"]
) -> Float[Tensor, "anchor candidate"]:
    """Cosines of all pairs in [-1, 1], in float32 or float64 even under autocast: those of reports crowd near 1."""
    with torch.autocast(device_type=mine.device.type, enabled=False):
        mine, other = (normalize(at_least_float32(x), dim=-1) for x in (mine, other))
        return (mine @ other.T).clamp(-1, 1)


def share_above(threshold: float, embedding: Float[Tensor, "text dim"]) -> float:
    """Share with a greater cosine of 10,000 random pairs (seed 0) of different texts; 0 of a single text."""
    generator = np.random.default_rng(0)
    mine, other = (generator.integers(len(embedding), size=_PAIRS) for _ in range(2))
    is_pair = mine != other
    pairs = zip(embedding[mine[is_pair]].split(1024), embedding[other[is_pair]].split(1024), strict=True)
    found = torch.cat([cosine_similarity(a.float(), b.float()) > threshold for a, b in pairs])
    return found.float().mean().item() if len(found) else 0.0


def uniform(keys: Int[Tensor, "row key"], draws: int, *seeds: int) -> Float[Tensor, "row draw"]:
    """Uniform numbers in [0, 1) in float64: splitmix64 of the seeds, the row's keys and the number of the draw."""
    state = torch.zeros(len(keys), 1, dtype=torch.int64, device=keys.device)
    words: list[int | Tensor] = [*seeds, *keys[:, :, None].unbind(1)]
    for word in [*words, torch.arange(draws, device=keys.device)]:
        state = state + word + _STEP
        for places, factor in zip((30, 27), _FACTORS, strict=True):
            state = (state ^ _shifted(state, places)) * factor  # wraps around at 64 bits
        state = state ^ _shifted(state, 31)
    return (_shifted(state, 11)).double() * 2.0**-53


def _shifted(state: Int[Tensor, "row draw"], places: int) -> Int[Tensor, "row draw"]:
    """Shift to the right without the sign."""
    return (state >> places) & (2 ** (64 - places) - 1)
