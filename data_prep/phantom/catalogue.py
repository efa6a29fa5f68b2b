"""The catalogue of the phantom: all classes with their frequencies and sentences, from catalogue.yaml.

The catalogue depends on a fixed seed, never on the seed of a run: all phantoms share one language. The number of
wordings of a class, their length and their weights come from random streams of their own, independent of the class's
frequency; otherwise a language model's probability would be a good class probability by construction.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jaxtyping import Float64

from data_prep.phantom.findings import PARTS, SIDES, ZONES, FindingClass, Rule, StudyState
from data_prep.phantom.language import draw_wordings, noun_phrases

FILE = Path(__file__).with_name("catalogue.yaml")
CATALOGUE_SEED = 20231
# Of the first thirty seeds the one with the least chance correlation between wordings and frequency.
WORDING_SEED = 28

# Frequencies of the long tail: a power law over shifted ranks that sums to RARE_PER_STUDY, with a floor.
RARE_PER_STUDY = 1.1
RARE_EXPONENT = 1.4
RARE_OFFSET = 8
RARE_FLOOR = 0.001

_FORMS = {"negations": "negation", "statements": "statement"}
SECTIONS = ("common", "rare", "general", "combined", "negations", "statements")


@dataclass(frozen=True)
class Entry:
    """An entry of catalogue.yaml, which explains the keys."""

    name: str
    part: str
    wordings: Sequence[str]
    sides: Sequence[str] = ("",)
    zones: Collection[str] = ("",)
    grades: Collection[str] = ("",)
    frequency: float = 0.0
    may_hedge: Sequence[str] = ()
    category: str = ""
    present: Sequence[str] = ()
    absent: Sequence[str] = ()
    holds: Mapping[str, Any] | None = None
    mention: float = 0.0
    form: str = "finding"

    def places(self) -> list[tuple[str, str, str]]:
        """Sides, zones and grades in which the class exists."""
        return list(product(self.sides, self.zones, self.grades))

    def share(self, zone: str, grade: str) -> float:
        """Frequency in one zone and grade."""
        shares = ((self.zones, zone), (self.grades, grade))
        return self.frequency * float(np.prod([s[k] for s, k in shares if isinstance(s, Mapping)]))


class Catalogue:
    """All classes of the phantom, numbered; the same in every process and every run.

    Attributes:
        entries: the common and rare findings, by kind.
        groups: names for several kinds.
        exclusive, exclusive_on_one_side: kinds of which a study, or one side of it, has at most one.
        classes: every class, by class_id.
        tail: the classes of the long tail.
    """

    def __init__(self) -> None:
        data: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))
        sections = {
            name: [Entry(**{"form": _FORMS.get(name, "finding"), **values}) for values in data[name]]
            for name in SECTIONS
        }
        self.entries = {entry.name: entry for name in ("common", "rare") for entry in sections[name]}
        self.groups: dict[str, frozenset[str]] = {}
        self.groups = {name: self._kinds(kinds) for name, kinds in data["groups"].items()}
        self.exclusive = [self._kinds(kinds) for kinds in data["exclusive"]]
        self.exclusive_on_one_side = [self._kinds(kinds) for kinds in data["exclusive_on_one_side"]]
        self.held_out_prompts = tuple(data["held_out_prompts"])
        self.fixed_sentences: dict[str, str] = data["fixed_sentences"]

        number_in_tail = sum(len(entry.places()) for entry in sections["rare"])
        drawn = iter(_tail_frequencies(number_in_tail, np.random.default_rng([CATALOGUE_SEED, 0])))
        taken = {f"{prompt}." for prompt in self.held_out_prompts} | set(self.fixed_sentences.values())
        classes: list[FindingClass] = []
        places = [(name, *place) for name, entries in sections.items() for place in _ordered(name, entries)]
        for number, (section, entry, side, zone, grade) in enumerate(places):
            name = "_".join(filter(None, (entry.name, side, zone, grade)))
            where = data["places"].get(zone, ())
            of_place = {"side": side, "zone": zone, "grade": grade}
            wordings = draw_wordings(
                noun_phrases(entry.wordings, where, **of_place),
                data["frames"][entry.form],
                data["frames"]["hedged"] if grade in entry.may_hedge else (),
                forced=self.fixed_sentences.get(name),
                may_hold_out=bool(entry.category),
                taken=taken,
                rng=np.random.default_rng([WORDING_SEED, 1, number]),
            )
            classes.append(
                FindingClass(
                    class_id=number,
                    name=name,
                    kind=entry.name if entry.holds is None else "derived",
                    **of_place,
                    frequency=float(next(drawn)) if section == "rare" else entry.share(zone, grade),
                    category=entry.category,
                    labels=dict.fromkeys(entry.present, 1.0) | dict.fromkeys(entry.absent, 0.0),
                    part=PARTS.index(entry.part),
                    wordings=wordings,
                    mention=entry.mention,
                    rule=self._rule(entry),
                )
            )
        self.classes = tuple(classes)
        self.by_name = {c.name: c for c in classes}
        self.tail = tuple(c for c, place in zip(classes, places, strict=True) if place[0] == "rare")

    def _kinds(self, names: Iterable[str]) -> frozenset[str]:
        """Kinds of findings, with groups replaced by their members."""
        return frozenset(kind for name in names for kind in self.groups.get(name, (name,)))

    def _rule(self, entry: Entry) -> Rule | None:
        if entry.holds is None:
            return None
        kinds = {key: self._kinds(entry.holds[key]) for key in ("any", "all", "none") if key in entry.holds}
        return Rule(**{**entry.holds, **kinds})

    def holding(self, state: StudyState) -> tuple[FindingClass, ...]:
        """All classes that are true of a study, by number: its findings and what follows from them."""
        derived = [c for c in self.classes if c.rule is not None and c.rule.holds(state, c.side, c.zone)]
        return tuple(sorted([*state.findings, *derived], key=lambda c: c.class_id))

    def sentences(self) -> list[tuple[str, int]]:
        """Every sentence with its class_id, in the order of the catalogue."""
        return [(w.text, c.class_id) for c in self.classes for w in c.wordings]


def _ordered(section: str, entries: Iterable[Entry]) -> list[tuple[Entry, str, str, str]]:
    """Every place of every entry. Their order numbers the classes: by entry, or by place and then by entry."""
    places = [(entry, *place) for entry in entries for place in entry.places()]
    if section not in ("common", "general"):
        return places

    def order(place: tuple[Entry, str, str, str]) -> tuple[int, int, int]:
        entry, side, zone, grade = place
        return ("", *SIDES).index(side), ("", *ZONES).index(zone), list(entry.grades).index(grade)

    return sorted(places, key=order)


def _tail_frequencies(number: int, rng: np.random.Generator) -> Float64[np.ndarray, " rank"]:
    """Frequencies of the long tail in random order: a shifted power law over the ranks, with a floor."""
    ranks = np.arange(number) + RARE_OFFSET
    frequencies = ranks**-RARE_EXPONENT
    frequencies *= RARE_PER_STUDY / frequencies.sum()
    return rng.permutation(np.maximum(frequencies, RARE_FLOOR))


@functools.cache
def catalogue() -> Catalogue:
    return Catalogue()
