"""The catalogue of the phantom: all classes with their frequencies and sentences.

The catalogue depends on a fixed seed, never on the seed of a run: all phantoms share one language. The number of
wordings of a class, their length and their weights are drawn from streams of their own, which know nothing of the
class's frequency; otherwise a language model's probability would be a good class probability by construction.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float64

from data_prep.phantom.classes import chex5_entries, derived_entries, tail_entries
from data_prep.phantom.findings import FindingClass, StudyState
from data_prep.phantom.language import FORCED, HELD_OUT_PROMPTS, draw_wordings

CATALOGUE_SEED = 20231
# Of the first thirty seeds the one with the least chance correlation between wordings and frequency.
WORDING_SEED = 28

# Frequencies of the long tail: a power law over shifted ranks that sums to RARE_PER_STUDY, with a floor.
RARE_PER_STUDY = 1.1
RARE_EXPONENT = 1.4
RARE_OFFSET = 8
RARE_FLOOR = 0.001


def _tail_frequencies(number: int, rng: np.random.Generator) -> Float64[np.ndarray, " rank"]:
    """Frequencies of the long tail in random order: a shifted power law over the ranks, with a floor."""
    ranks = np.arange(number) + RARE_OFFSET
    frequencies = ranks**-RARE_EXPONENT
    frequencies *= RARE_PER_STUDY / frequencies.sum()
    return rng.permutation(np.maximum(frequencies, RARE_FLOOR))


class Catalogue:
    """All classes of the phantom, numbered; the same in every process and every run."""

    def __init__(self) -> None:
        common, tail, derived = chex5_entries(), tail_entries(), derived_entries()
        frequencies = _tail_frequencies(len(tail), np.random.default_rng([CATALOGUE_SEED, 0]))
        tail_frequency = {e.name: float(f) for e, f in zip(tail, frequencies, strict=True)}
        taken = {f"{p}." for p in HELD_OUT_PROMPTS} | set(FORCED.values())
        classes = []
        for number, entry in enumerate([*common, *tail, *derived]):
            wordings = draw_wordings(
                entry.words,
                entry.family,
                forced=FORCED.get(entry.name),
                may_hedge=entry.may_hedge,
                may_hold_out=bool(entry.category),
                taken=taken,
                rng=np.random.default_rng([WORDING_SEED, 1, number]),
            )
            frequency = tail_frequency[entry.name] if entry.frequency is None else entry.frequency
            classes.append(
                FindingClass(
                    class_id=number,
                    name=entry.name,
                    kind=entry.kind,
                    side=entry.side,
                    zone=entry.zone,
                    grade=entry.grade,
                    frequency=frequency,
                    category=entry.category,
                    labels=entry.labels,
                    system=entry.system,
                    wordings=wordings,
                    rule=entry.rule,
                )
            )
        self.classes: tuple[FindingClass, ...] = tuple(classes)
        self.by_name: dict[str, FindingClass] = {c.name: c for c in classes}
        self.tail: tuple[FindingClass, ...] = tuple(self.by_name[e.name] for e in tail)
        self.derived: tuple[FindingClass, ...] = tuple(c for c in classes if c.is_derived)

    def holding(self, state: StudyState) -> tuple[FindingClass, ...]:
        """All classes that are true of a study, by number: its findings and what follows from them."""
        derived = [c for c in self.derived if c.rule is not None and c.rule(state)]
        return tuple(sorted([*state.findings, *derived], key=lambda c: c.class_id))

    def sentences(self) -> list[tuple[str, int]]:
        """Every sentence with its class, in the order of the catalogue."""
        return [(w.text, c.class_id) for c in self.classes for w in c.wordings]


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue (built once per process)."""
    return Catalogue()
