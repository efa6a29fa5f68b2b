"""The share of false negatives on request: the rates under which reports reach a mean rho.

An anchor is a sentence of a training report, once for each report that has it; `--false_negatives` is the mean of rho
over all anchors. From few to many, a path of three linear stages of `other_rates` leads from findings of like frequency
and no normal sentences to the catalogue's findings with a ninth of its normal sentences, then to 1.75 times its normal
sentences (only the reports differ), then to 0.4 times as many findings. The mean at a place of the path is an
expectation over `_STUDIES` drawn studies, always the same. docs/other_data.md has the consequences.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from jaxtyping import Bool
from scipy.optimize import brentq

from data_prep.phantom.catalogue import CATALOGUE_SEED, Catalogue
from data_prep.phantom.options import Options
from data_prep.phantom.rates import Rates, other_rates
from data_prep.phantom.reports import mention_chance, repeat_chance, said_instead
from data_prep.phantom.studies import draw_state
from medclip_dcl.common.errors import UserError

_STUDIES = 3000
# Place on the path -> arguments of `other_rates`.
_PLACES = (0.0, 1.0, 2.0, 3.0)
_NORMAL = (0.0, 0.1, 2.0, 2.0)
_EVENNESS = (1.0, 0.0, 0.0, 0.0)
_AMOUNT = (1.0, 1.0, 1.0, 0.4)
# Of the path; the mean changes by less than half as much.
_TOLERANCE = 1e-3


def dialled_rates(catalogue: Catalogue, options: Options) -> Rates | None:
    """The rates of a phantom's training and validate studies; None for the catalogue's, as without a dial."""
    asked, rare = options.false_negatives, options.rare_findings
    if asked is None:
        return None if rare is None else other_rates(catalogue, 1.0, 0.0, 1.0, rare)

    def mean_at(place: float) -> float:
        return expected_mean(catalogue, _rates_at(place, catalogue, rare))

    means = [mean_at(place) for place in _PLACES]
    if not means[0] <= asked <= means[-1]:
        raise UserError(
            f"--false_negatives: expected {math.ceil(means[0] * 100) / 100:g} to "
            f"{math.floor(means[-1] * 100) / 100:g} with these --rare_findings, found {asked:g}"
        )
    stage = next(k for k, mean in enumerate(means[1:]) if asked <= mean)
    ends = _PLACES[stage : stage + 2]
    place = brentq(lambda place: mean_at(place) - asked, *ends, xtol=_TOLERANCE)
    return _rates_at(place, catalogue, rare)


def expected_mean(catalogue: Catalogue, rates: Rates) -> float:
    """Expected mean of rho over the anchors of training reports at these rates, in [0, 1]."""
    # Reports change nothing about which classes hold.
    holds, instead = _drawn_studies(catalogue, replace(rates, normal=1.0))
    chance = np.array([mention_chance(c, rates.normal) for c in catalogue.classes])
    repeats = np.array([repeat_chance(c) for c in catalogue.classes])
    # Anchors of a class: its first sentence, another one, and where it is all that a report states.
    is_empty = np.where(holds, 1 - chance, 1.0).prod(1)
    anchors = (holds * chance * (1 + repeats)).sum(0) + is_empty @ instead
    return float(anchors @ holds.mean(0) / anchors.sum())


def _rates_at(place: float, catalogue: Catalogue, rare: float | None) -> Rates:
    normal, evenness, amount = (
        float(np.interp(place, _PLACES, values)) for values in (_NORMAL, _EVENNESS, _AMOUNT)
    )
    return other_rates(catalogue, normal, evenness, amount, rare)


@functools.lru_cache(maxsize=16)
def _drawn_studies(
    catalogue: Catalogue, rates: Rates
) -> tuple[Bool[np.ndarray, "study class"], Bool[np.ndarray, "study class"]]:
    """Classes that hold in each of the drawn studies, and those that a report states that by chance states none."""
    holds = np.zeros((_STUDIES, len(catalogue.classes)), bool)
    instead = np.zeros_like(holds)
    for study in range(_STUDIES):
        # The same numbers at any rates, so that the mean changes smoothly with them.
        state = draw_state(catalogue, np.random.default_rng([CATALOGUE_SEED, 2, study]), None, rates)
        holds[study, [c.class_id for c in catalogue.holding(state)]] = True
        instead[study, [c.class_id for c in said_instead(catalogue, state, rates.normal)]] = True
    return holds, instead
