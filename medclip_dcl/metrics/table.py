"""The numbers of results.json, each declared once: its place, heading, direction, decimals, chance and computation.

A number stands at each of the `parts` of its section: "" is the section itself, "by_finding/*" each finding. One that
is added here is computed by tests and gets intervals; with a `family` it stands in the tables of the report by finding,
too. Without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from medclip_dcl.metrics.weighted import Weights, weighted_auc, weighted_average_precision, weighted_mean

CLASSIFICATIONS = ("classification", "finding_classification")
KS = (1, 5, 10, 50, 100)
MEAN_KS = (10, 50, 100)
"""Of the mean recall, as in SSD's table 1."""
DIRECTIONS = ("image_to_text", "text_to_image")
BANDS = ("head", "middle", "tail")
RHO_BANDS = {"rare": 0.1, "middle": 0.4, "common": math.inf}
"""Band of sentence classes -> the share of images of which they are true (rho) lies below this and not in the band
before."""
_ABOVE_0, _RANK, ANY = (0.0, math.inf), (1.0, math.inf), (-math.inf, math.inf)
"""Bounds of numbers."""
ARROWS = {True: " ↑", False: " ↓", None: ""}
"""Mark of the better direction, behind a heading."""


class Number(NamedTuple):
    """A number: its path below a part of its section (* stands for any name), heading, better direction and decimals.

    Attributes:
        compute: scores (or, of a calibration, which cases are called positive), positive and weights -> value in each
            draw. None: the mean of the column of this name, or what the section's function in `summaries` computes.
        chance: counts of cases (positives and negatives, by keyword) -> level without skill.
        family: numbers among which p is adjusted; a later number is a family of its own, so that others keep their p.
        bounds: its range.
        is_rounded: results.json holds it in single precision.
        scores: column of the predictions by prompts that `compute` takes, in place of the difference.
        is_optional: predictions may lack its column.
    """

    name: str
    heading: str = ""
    higher_is_better: bool | None = True
    digits: int = 3
    compute: Callable[..., Any] | None = None
    chance: Callable[..., float] | None = None
    family: str = ""
    bounds: tuple[float, float] = (0.0, 1.0)
    is_rounded: bool = False
    scores: str = ""
    is_optional: bool = False


@dataclass(frozen=True)
class Section:
    """A section of results.json.

    Attributes:
        numbers: of each part.
        parts: each entry of a part that ends with /* is a finding or a category.
        case_columns: identify a case in the predictions, to pair two runs.
        value_columns: of the predictions, from which the numbers are computed.
        first: a number that has a value if the section was measured.
    """

    numbers: tuple[Number, ...]
    parts: tuple[str, ...] = ("",)
    case_columns: tuple[str, ...] = ()
    value_columns: tuple[str, ...] = ()
    first: str = "auc"

    @property
    def names(self) -> list[str]:
        """Names of the numbers that are always there."""
        return [number.name for number in self.numbers if not number.is_optional]

    @property
    def paths(self) -> Iterator[str]:
        """Each path below the section; * stands for any name."""
        return (f"{part}/{number.name}".removeprefix("/") for part in self.parts for number in self.numbers)


def _accuracy(scores: np.ndarray, positive: np.ndarray, weights: Weights) -> np.ndarray:
    return weighted_mean((scores > 0) == positive, weights)


def _sensitivity(is_above: np.ndarray, positive: np.ndarray, weights: Weights) -> np.ndarray:
    return weighted_mean(is_above[positive].astype("float64"), weights.compress(positive, axis=1))


def _specificity(is_above: np.ndarray, positive: np.ndarray, weights: Weights) -> np.ndarray:
    return _sensitivity(~is_above, ~positive, weights)


def _balanced_accuracy(scores: np.ndarray, positive: np.ndarray, weights: Weights) -> np.ndarray:
    """Mean of sensitivity and specificity where a score above 0 is called positive."""
    return (_sensitivity(scores > 0, positive, weights) + _specificity(scores > 0, positive, weights)) / 2


def _f1(is_above: np.ndarray, positive: np.ndarray, weights: Weights) -> np.ndarray:
    """2 TP / (2 TP + FP + FN); NaN without any."""
    true, called, present = (weights @ x.astype("float64") for x in (is_above & positive, is_above, positive))
    with np.errstate(invalid="ignore"):
        return 2 * true / (called + present)


def band_of(share: float, head: float, tail: float) -> str:
    """Band of a finding by the share of train patients that have it: head above, tail below these shares."""
    return BANDS[(share <= head) + (share < tail)]


def _half(**n: int) -> float:
    return 0.5


def _commoner(**n: int) -> float:
    return max(n.values()) / sum(n.values())


def _prevalence(positives: int, negatives: int) -> float:
    return positives / (positives + negatives)


# fmt: off
_NUMBERS = (
    Number("auc", "AUC", compute=weighted_auc, chance=_half, is_rounded=True),
    Number("average_precision", "average precision", compute=weighted_average_precision, chance=_prevalence,
           family="average_precision", is_rounded=True),
    Number("acc", "ACC", compute=_accuracy, chance=_commoner),
    Number("balanced_acc", "balanced ACC", compute=_balanced_accuracy, chance=_half, family="balanced_acc"),
    Number("pos", "POS", compute=weighted_auc, chance=_half, family="pos", scores="score_positive"),
    Number("neg", "NEG", compute=lambda scores, positive, weights: weighted_auc(scores, ~positive, weights),
           chance=_half, family="neg", scores="score_negative"),
    Number("gain", "PNC − POS", family="gain", bounds=(-1.0, 1.0)),
)
_OF_LOGITS = (_NUMBERS[0], _NUMBERS[1]._replace(family=""), *_NUMBERS[2:4])
_CASES: dict[str, Any] = {
    "parts": ("", "by_finding/*"), "case_columns": ("finding", "dicom_id", "subject_id", "label"),
}


def _with_bands(*numbers: Number) -> tuple[Number, ...]:
    """The numbers, and means of some of them over the findings of each band."""
    its = [x for x in numbers if x.name in ("auc", "average_precision", "pos", "neg")]
    return (*numbers, *(Number(f"{b}/{x.name}", f"{x.heading}, {b}", family=b) for b, x in product(BANDS, its)))


_RANKS = (
    Number("recall", "Recall"), Number("medr", "MedR", False, 0, bounds=_RANK),
    *(Number(f"{way}/R@{k}", f"R@{k}", digits=2) for way in DIRECTIONS for k in KS),
    *(Number(f"{way}/MedR", "MedR", False, 0, bounds=_RANK) for way in DIRECTIONS),
)
_BOXES = (
    Number("cnr", "CNR", digits=2, bounds=_ABOVE_0), Number("cnr_signed", "signed CNR", digits=2, bounds=ANY),
    Number("miou", "mIoU"),
)
_MAPS = (
    Number("hit", "hit"), Number("area", "area", None), *_BOXES[1:], Number("iou", "IoU"), Number("dice", "Dice"),
    Number("reader_iou", "readers' IoU", None), Number("reader_dice", "readers' Dice", None),
    Number("hit_within", "hit within", family="hit_within", is_optional=True),
    Number("iou_normalised", "IoU, normalised", family="iou_normalised", is_optional=True),
)
_POINTED = (  # declared later
    Number("hit", "hit", family="hit", is_optional=True), Number("area", "area", None, family="hit", is_optional=True),
    Number("reader_iou", "readers' IoU", None, family="readers", is_optional=True),
    Number("reader_dice", "readers' Dice", None, family="readers", is_optional=True),
)
SECTIONS = {
    "classification": Section(_with_bands(*_NUMBERS), **_CASES, value_columns=("score_positive", "score_negative")),
    "finding_classification": Section(_with_bands(*_OF_LOGITS), **_CASES, value_columns=("logit",)),
    "prompts": Section(
        tuple(Number(x, "NEG", family="prompts") for x in ("neg_lowest", "neg_median", "wordings/*")),
        ("by_finding/*",), ("side", "prompt", *_CASES["case_columns"]), ("score",), "by_finding",
    ),
    "grounding": Section(
        (*_BOXES, *_POINTED), ("", "by_category/*", "by_pair", "by_reader/*"),
        ("box", "dicom_id", "subject_id", "category", "phrase"),
        (*(x.name for x in _BOXES), "pair_cnr_signed", "pair_miou"), "miou",
    ),
    "localisation": Section(
        _MAPS, ("", "by_category/*"), ("category", "dicom_id", "subject_id"),
        tuple(x.name for x in _MAPS if not x.is_optional), "hit",
    ),
    "retrieval": Section(
        _RANKS, ("", "tolerant"), ("direction", "box", "dicom_id", "subject_id"), ("rank", "rank_tolerant"), "recall"
    ),
    "report_retrieval": Section(
        _RANKS, ("image_report", "image_report/tolerant", "image_sentence"),
        ("task", "direction", "query", "subject_id"), ("rank", "rank_tolerant"), "image_report/recall",
    ),
    "sentences": Section(
        (Number("auc", "AUC"), Number("precision_at_10", "P@10")), ("", *RHO_BANDS),
        ("class", "sentence_id", "dicom_id", "subject_id", "label"), ("rho", "score"),
    ),
}
"""Section of results.json -> its numbers that are computed from predictions."""
CALIBRATION = Section(
    (
        Number("sensitivity", compute=_sensitivity), Number("specificity", compute=_specificity),
        Number("f1", "F1", compute=_f1, family="f1"),
        *(Number(f"{time}/{x}", "", False) for time in ("before", "after") for x in ("ece", "brier", "bins/*")),
    ),
    ("by_finding/*",),
)
"""Numbers of a calibrated classification, a section that results.json never has."""
STORED = {
    **dict.fromkeys(CLASSIFICATIONS, Section((Number("n_findings", "", None, bounds=_ABOVE_0),))),
    "texts": Section((Number("accuracy"), Number("auc"), Number("f1", "F1", is_optional=True)), ("*",)),
    "unimodal": Section((
        *map(Number, ("knn/accuracy", "mean_classifier/accuracy", "average_k/*/accuracy", "classifiers/*/*")),
        Number("linear_probe*/*/accuracy"),
        *(Number(x, "", False, bounds=_ABOVE_0)
          for x in ("intraclass_deviation", "mean_classifier/loss", "average_k/*/loss")),
    )),
    "validate": Section((
        *map(Number, (*(x.name for x in _NUMBERS), "retrieval_recall", "knn_accuracy")),
        *(Number(f"{number.name}_*") for number in _NUMBERS),
        *(Number(f"sentences_{path.replace('/', '_')}") for path in SECTIONS["sentences"].paths),
        Number("loss", "", False, bounds=ANY),
        *(Number(x, "", False, bounds=_RANK) for x in ("perplexity", "medr", *(f"{way}_medr" for way in DIRECTIONS))),
    )),
}
"""Section of results.json, or validate/ of metrics.csv -> numbers that nothing computes from predictions."""
# fmt: on


class Place(NamedTuple):
    """Place of a number: its finding or category ("" for none), its name behind it, and its declaration."""

    entry: str
    name: str
    number: Number


@cache
def place_of(path: str) -> Place | None:
    """Place of a path that begins with the section; None in a section of another name, such as a user's."""
    section, _, rest = path.partition("/")
    declared = (SECTIONS.get(section), STORED.get(section), CALIBRATION if section == "calibration" else None)
    for part, number in (one for x in filter(None, declared) for one in product(x.parts, x.numbers)):
        prefix = f"{part}/".removeprefix("/").replace("*", "(.+)")
        if found := re.fullmatch(prefix + f"({re.escape(number.name)})".replace(r"\*", ".*"), rest):
            return Place("".join(found.groups()[:-1]), found.groups()[-1], number)
    return None


def is_computed(path: str) -> bool:
    """The number follows from predictions, so that results.json may lack it."""
    section, place = SECTIONS.get(path.partition("/")[0]), place_of(path)
    return section is not None and place is not None and place.number in section.numbers


def bounds_of(paths: Sequence[str]) -> tuple[float, float]:
    """Range of a mean over the numbers at the paths."""
    bounds = [ANY if (place := place_of(path)) is None else place.number.bounds for path in paths]
    return min(least for least, _ in bounds), max(most for _, most in bounds)


def is_higher_better(metric: str) -> bool | None:
    """Direction of a declared number, or of a user's metric such as validate/my_auc; None for any other."""
    if (place := place_of(metric)) is not None:
        return place.number.higher_is_better
    if re.fullmatch(r"(train|validate)/(\w+_)?(loss|perplexity|medr)", metric):
        return False
    return True if re.fullmatch(r"validate/(\w+_)?(recall|accuracy|auc|precision_at_10)", metric) else None
