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
from typing import Any, NamedTuple

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


class Place(NamedTuple):
    """One of the combinations of side, zone and grade in which a finding exists."""

    entry: Entry
    side: str
    zone: str
    grade: str

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.entry.name, self.side, self.zone, self.grade)))

    @property
    def order(self) -> tuple[int, int, int]:
        """By side, zone and grade."""
        grades = list(self.entry.grades)
        return ("", *SIDES).index(self.side), ("", *ZONES).index(self.zone), grades.index(self.grade)

    @property
    def frequency(self) -> float:
        shares = ((self.entry.zones, self.zone), (self.entry.grades, self.grade))
        return self.entry.frequency * float(np.prod([s[k] for s, k in shares if isinstance(s, Mapping)]))


class Catalogue:
    """All classes of the phantom, numbered; the same in every process and every run.

    Attributes:
        entries: the common and rare findings, by kind.
        groups: names for several kinds.
        exclusive, exclusive_on_one_side: kinds of which a study, or one side of it, has at most one.
        classes: every class, by class_id.
        tail, derived: the classes of the long tail, and those that follow from findings.
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

        places = {
            name: _places(entries, ordered=name in ("common", "general"))
            for name, entries in sections.items()
        }
        drawn = _tail_frequencies(len(places["rare"]), np.random.default_rng([CATALOGUE_SEED, 0]))
        frequencies = {place.name: float(f) for place, f in zip(places["rare"], drawn, strict=True)}
        taken = {f"{prompt}." for prompt in self.held_out_prompts} | set(self.fixed_sentences.values())
        classes: list[FindingClass] = []
        for place in (place for section in places.values() for place in section):
            entry, number = place.entry, len(classes)
            where = data["places"].get(place.zone, ())
            wordings = draw_wordings(
                noun_phrases(entry.wordings, where, side=place.side, zone=place.zone, grade=place.grade),
                data["frames"][entry.form],
                data["frames"]["hedged"] if place.grade in entry.may_hedge else (),
                forced=self.fixed_sentences.get(place.name),
                may_hold_out=bool(entry.category),
                taken=taken,
                rng=np.random.default_rng([WORDING_SEED, 1, number]),
            )
            classes.append(
                FindingClass(
                    class_id=number,
                    name=place.name,
                    kind=entry.name if entry.holds is None else "derived",
                    side=place.side,
                    zone=place.zone,
                    grade=place.grade,
                    frequency=frequencies.get(place.name, place.frequency),
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
        self.tail = tuple(self.by_name[place.name] for place in places["rare"])
        self.derived = tuple(c for c in classes if c.is_derived)

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
        derived = [c for c in self.derived if c.rule is not None and c.rule.holds(state, c.side, c.zone)]
        return tuple(sorted([*state.findings, *derived], key=lambda c: c.class_id))

    def sentences(self) -> list[tuple[str, int]]:
        """Every sentence with its class_id, in the order of the catalogue."""
        return [(w.text, c.class_id) for c in self.classes for w in c.wordings]


def _places(entries: Iterable[Entry], ordered: bool) -> list[Place]:
    """Every place of every entry. Their order numbers the classes: by entry, or by place and then by entry."""
    places = [Place(e, *place) for e in entries for place in product(e.sides, e.zones, e.grades)]
    return sorted(places, key=lambda place: place.order) if ordered else places


def _tail_frequencies(number: int, rng: np.random.Generator) -> Float64[np.ndarray, " rank"]:
    """Frequencies of the long tail in random order: a shifted power law over the ranks, with a floor."""
    ranks = np.arange(number) + RARE_OFFSET
    frequencies = ranks**-RARE_EXPONENT
    frequencies *= RARE_PER_STUDY / frequencies.sum()
    return rng.permutation(np.maximum(frequencies, RARE_FLOOR))


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue (built once per process)."""
    return Catalogue()
