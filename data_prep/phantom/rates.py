"""Chances of findings and of normal sentences in training and validate studies.

The catalogue's own (`ordinary`), or others on request (`other_rates`): see `dial`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from data_prep.phantom.catalogue import Catalogue
from data_prep.phantom.findings import FindingClass

RARE_FINDINGS = ("Enlarged Cardiomediastinum", "Fracture", "Lung Lesion", "Pleural Other")
"""CheXpert columns that `--rare_findings` makes rare. Their classes (44 places of 13 kinds) have no other column."""


@dataclass(frozen=True)
class Rates:
    """Chances that a phantom's training and validate studies are drawn with.

    Attributes:
        tail: chance of each class of `Catalogue.tail`, in its order.
        common: kind of a CheX5 finding and factor of its chances, in pairs.
        normal: a report leaves a normal sentence out with the chance (1 - mention) ** normal; None for the catalogue's
            `mention`.
    """

    tail: tuple[float, ...]
    common: tuple[tuple[str, float], ...]
    normal: float | None = None


@functools.cache
def ordinary(catalogue: Catalogue) -> Rates:
    """The catalogue's own rates."""
    factors = tuple((kind, 1.0) for kind in _common_kinds(catalogue))
    return Rates(tuple(c.frequency for c in catalogue.tail), factors)


def other_rates(
    catalogue: Catalogue, normal: float, evenness: float, amount: float, rare: float | None
) -> Rates:
    """Rates with other normal sentences and other findings.

    Args:
        normal: see `Rates`; 0: no report has a normal sentence beside a finding, 1: as the catalogue states.
        evenness: in [0, 1]; the frequency f of a class becomes f^(1 - evenness) * mean(f)^evenness, scaled so that a
            study has as many findings as before. 1: all classes are alike in frequency.
        amount: factor of all frequencies.
        rare: share of studies with a finding, for each of `RARE_FINDINGS`; None leaves them as they are.
    """
    drawn = [c for c in catalogue.classes if not c.is_derived]
    before = np.array([c.frequency for c in drawn])
    even = before ** (1 - evenness) * before.mean() ** evenness
    after = even * amount * before.sum() / even.sum()
    chances = {c.class_id: float(f) for c, f in zip(drawn, after, strict=True)}
    if rare is not None:
        for column in RARE_FINDINGS:
            of_column = _with_column(catalogue, column)
            total = sum(c.frequency for c in of_column)
            chances |= {c.class_id: rare * c.frequency / total for c in of_column}
    factors = []
    for kind in _common_kinds(catalogue):
        of_kind = [c for c in drawn if c.kind == kind]
        total = sum(chances[c.class_id] for c in of_kind)
        factors.append((kind, total / sum(c.frequency for c in of_kind)))
    return Rates(tuple(chances[c.class_id] for c in catalogue.tail), tuple(factors), normal)


def rare_classes(catalogue: Catalogue) -> list[FindingClass]:
    """The classes that `--rare_findings` makes rare."""
    return [c for column in RARE_FINDINGS for c in _with_column(catalogue, column)]


def _with_column(catalogue: Catalogue, column: str) -> list[FindingClass]:
    return [c for c in catalogue.tail if column in c.labels]


def _common_kinds(catalogue: Catalogue) -> list[str]:
    tail = {c.kind for c in catalogue.tail}
    return [kind for kind in catalogue.entries if kind not in tail]
