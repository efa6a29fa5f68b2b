"""Wordings of the phantom's classes: noun phrases in sentence frames of different length.

Every random draw comes from a class's own stream of random numbers and never sees the class's frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORDINGS_PER_CLASS = (2, 6)


@dataclass(frozen=True)
class Wording:
    """One sentence that states a class, with its share among the class's wordings.

    A hedged one expresses doubt; a held-out one is not in training reports.
    """

    text: str
    weight: float
    hedged: bool = False
    held_out: bool = False


# Grammatical number and text: "s" takes a/an, "m" is a mass noun, "p" is plural.
NounPhrase = tuple[str, str]

# Words of a class's sentences on average: drawn from this range for each class, whatever it is about. Of as many random
# sentences as _CANDIDATES, the one nearest to that length is taken.
_LENGTHS = (4.0, 15.0)
_LENGTH_SPREAD = 2.0
_CANDIDATES = 12
_WEIGHTS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fill(frame: str, phrase: NounPhrase) -> str:
    """A sentence; catalogue.yaml explains the slots of a frame."""
    number, text = phrase
    # As spoken: an ET tube, an NG tube.
    begins_with_vowel = text[0].lower() in "aeiou" or text.startswith("NG ")
    article = {"s": "an " if begins_with_vowel else "a ", "m": "", "p": ""}[number] + text
    plural = number == "p"
    return frame.format(
        N=_capital(text),
        n=text,
        A=article,
        C=_capital(article),
        **{"is": "are" if plural else "is", "was": "were" if plural else "was"},
        has="have" if plural else "has",
        appears="appear" if plural else "appears",
    )


def noun_phrases(wordings: Sequence[str], places: Sequence[str], **slots: str) -> tuple[NounPhrase, ...]:
    """Noun phrases from the wordings of catalogue.yaml.

    In `wordings`, "a" or "an" marks a countable noun, "some" a plural, neither a mass noun. Each of `places`, templates
    for the slot {where}, makes a phrase of its own.
    """
    phrases = []
    for wording in wordings:
        first, _, rest = wording.partition(" ")
        number = {"a": "s", "an": "s", "some": "p"}.get(first, "m")
        template = wording if number == "m" else rest
        where = [place.format(**slots) for place in places] if "{where}" in template else [""]
        phrases += [(number, template.format(where=place, **slots)) for place in where]
    return tuple(dict.fromkeys(phrases))


def draw_wordings(
    phrases: Sequence[NounPhrase],
    frames: Sequence[str],
    hedges: Sequence[str],
    *,
    forced: str | None,
    may_hold_out: bool,
    taken: set[str],
    rng: np.random.Generator,
) -> tuple[Wording, ...]:
    """Draw the number, the length and the words of a class's sentences.

    Args:
        phrases: noun phrases of the class.
        frames: sentences around a noun phrase.
        hedges: frames that express doubt.
        forced: a sentence that the class must have.
        may_hold_out: whether one may be kept out of training.
        taken: sentences of all classes so far, added to: each states one class only.
        rng: of this class.
    """
    number = int(rng.integers(WORDINGS_PER_CLASS[0], WORDINGS_PER_CLASS[1] + 1))
    length = rng.uniform(*_LENGTHS)
    may_be_hedged = rng.random(WORDINGS_PER_CLASS[1]) < 0.4
    texts: list[tuple[str, bool]] = []
    if forced is not None:
        texts.append((forced, False))
        taken.add(forced)
    while len(texts) < number:
        # The first two are plain, so that a class never has only hedged or only held-out sentences.
        hedged = bool(hedges) and len(texts) >= 2 and bool(may_be_hedged[len(texts)])
        choice = hedges if hedged else frames
        wanted = length + rng.normal(0, _LENGTH_SPREAD)
        candidates = [
            _fill(choice[int(rng.integers(len(choice)))], phrases[int(rng.integers(len(phrases)))])
            for _ in range(_CANDIDATES)
        ]
        free = [text for text in candidates if text not in taken]
        if free:
            text = min(free, key=lambda candidate: abs(len(candidate.split()) - wanted))
            taken.add(text)
            texts.append((text, hedged))
    weights = np.array(_WEIGHTS[:number])
    weights = rng.permutation(weights / weights.sum())
    # Half of the classes with boxes keep one wording out of training: a phrase that the model has never read.
    holds_one_out = may_hold_out and number >= 3 and rng.random() < 0.5 and not texts[-1][1]
    return tuple(
        Wording(text, float(weight), hedged, held_out=holds_one_out and i == number - 1)
        for i, ((text, hedged), weight) in enumerate(zip(texts, weights, strict=True))
    )
