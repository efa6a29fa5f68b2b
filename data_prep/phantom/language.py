"""How reports word the phantom's classes: noun phrases in sentence frames of different length.

Everything drawn here comes from a class's own stream of random numbers and never sees the class's frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Literal zero-shot prompts that no report may contain, so that classification is not looking up a training sentence.
HELD_OUT_PROMPTS = ("Findings suggesting pneumonia", "Heart size normal", "No pleural effusions")
PRESENT_PROMPTS = {
    "no_pneumonia": "No signs of pneumonia.",
    "cardiomegaly": "Cardiomegaly.",
    "no_edema": "No pulmonary edema.",
    "edema": "Pulmonary edema.",
    "effusion": "Pleural effusions.",
    "no_pneumothorax": "No pneumothorax.",
    "pneumothorax": "Pneumothorax.",
}
# Sentences that a class has whatever is drawn: the prompts that are not held out, and the words of those that are.
FORCED = PRESENT_PROMPTS | {
    "edema_moderate": "Findings suggesting moderate pulmonary edema.",
    "effusion_right_small": "Findings suggesting a small right pleural effusion.",
}

WORDINGS_PER_CLASS = (2, 6)


@dataclass(frozen=True)
class Wording:
    """One sentence that says a class: its text, its share among the class's wordings, and how sure it sounds."""

    text: str
    weight: float
    hedged: bool = False
    held_out: bool = False


# A noun phrase is (grammatical number, text): "s" takes a/an, "m" is a mass noun, "p" is plural.
NounPhrase = tuple[str, str]

_SHORT = ("{N}.", "There {is} {A}.", "{C} {is} present.", "{C} {is} noted.", "{C} {is} seen.")
_MEDIUM = (
    "Unchanged {n}.",
    "{C} {is} unchanged from prior ___.",
    "Again noted {is} {A}.",
    "There {is} {A} on today's study.",
    "{C} {has} not changed since ___.",
    "There {is} {A}, as before.",
    "Redemonstration of {A}.",
)
_LONG = (
    "Again seen {is} {A}, not significantly changed from the prior examination of ___.",
    "There {is} {A}, which {was} also present on the prior study from ___.",
    "As compared to the previous radiograph from ___, there {is} {A}.",
    "{C} {is} redemonstrated and {appears} similar in extent to the prior study.",
    "In the interval since the examination of ___, {A} {has} become apparent.",
    "{C} {is} again demonstrated on today's examination, with little interval change since ___.",
    "There {is} {A}, and follow-up radiographs may be obtained if clinically indicated.",
    "On the current image, {A} {is} visible, and it was already described in the report of ___.",
)
_HEDGED = (
    "Possible {n}.",
    "{C} cannot be excluded.",
    "Findings may represent {A}.",
    "There may be {A}, although this is not certain on the present view.",
    "Questionable {n}, for which clinical correlation is recommended.",
)
_NEGATION_SHORT = (
    "No {x}.",
    "There is no {x}.",
    "No {x} is seen.",
    "No evidence of {x}.",
    "No {x} identified.",
)
_NEGATION_MEDIUM = (
    "There is no evidence of {x}.",
    "There is no {x} on today's study.",
    "There is no visible {x}.",
    "No {x} on the current radiograph.",
    "No {x}, unchanged from ___.",
    "No convincing evidence of {x}.",
)
_NEGATION_LONG = (
    "No {x} is identified on the current study, as on the prior radiograph from ___.",
    "There is no convincing evidence of {x} on this examination, similar to ___.",
    "As compared to the previous radiograph from ___, there is still no {x}.",
    "Within the limitations of this study, there is no evidence of {x}.",
    "On the current image, no {x} is visible, and the appearance is similar to ___.",
    "As far as can be judged on this single view, there is no {x}, similar to the prior examination of ___.",
)
_STATEMENT_SHORT = ("{S}.", "{S}.", "{S}.")
_STATEMENT_MEDIUM = (
    "{S} on today's study.",
    "{S}, unchanged.",
    "{S}, as before.",
    "{S}, unchanged from prior ___.",
    "Again, {s}.",
)
_STATEMENT_LONG = (
    "As on the prior study from ___, {s}.",
    "{S}, without significant interval change since the examination of ___.",
    "As compared to the previous radiograph from ___, {s}.",
    "Within the limitations of this study, {s}.",
    "{S}, and the appearance is similar to that on the prior examination.",
    "On the current image, {s}, and this was already so in the report of ___.",
    "As far as can be judged on this single view, {s}, similar to the prior examination of ___.",
)
# Words of a class's sentences on average: drawn from this range for each class, whatever it is about. Of as many random
# sentences as _CANDIDATES, the one nearest to that length is taken.
_LENGTHS = (4.0, 15.0)
_LENGTH_SPREAD = 2.0
_CANDIDATES = 12
_WEIGHTS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)

_WHERE = {
    "upper": ("{side} upper lobe", "{side} upper lung", "{side} upper lung zone"),
    "mid": ("{side} mid lung", "{side} midlung", "{side} mid lung zone"),
    "lower": ("{side} lower lobe", "{side} lung base", "{side} lower lung"),
}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _begins_with_vowel(text: str) -> bool:
    """As it is spoken: an ET tube, an NG tube."""
    return text[0].lower() in "aeiou" or text.startswith("NG ")


def _fill(frame: str, family: str, phrase: NounPhrase) -> str:
    number, text = phrase
    if family == "negation":
        return frame.format(x=text)
    if family == "statement":
        return frame.format(S=_capital(text), s=text)
    article = {"s": "an " if _begins_with_vowel(text) else "a ", "m": "", "p": ""}[number] + text
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


_FRAMES = {
    "finding": (*_SHORT, *_MEDIUM, *_LONG),
    "negation": (*_NEGATION_SHORT, *_NEGATION_MEDIUM, *_NEGATION_LONG),
    "statement": (*_STATEMENT_SHORT, *_STATEMENT_MEDIUM, *_STATEMENT_LONG),
}


def phrases(texts: Sequence[str], number: str = "s", **slots: str) -> tuple[NounPhrase, ...]:
    """Noun phrases from templates; a leading ``p:``, ``m:`` or ``s:`` overrides the grammatical number."""
    phrases = []
    for text in texts:
        own, template = (text[0], text[2:]) if text[1] == ":" else (number, text)
        places = [w.format(**slots) for w in _WHERE[slots["zone"]]] if "{where}" in template else [""]
        phrases += [(own, template.format(where=place, **slots)) for place in places]
    return tuple(dict.fromkeys(phrases))


def draw_wordings(
    phrases: Sequence[NounPhrase],
    family: str,
    *,
    forced: str | None,
    may_hedge: bool,
    may_hold_out: bool,
    taken: set[str],
    rng: np.random.Generator,
) -> tuple[Wording, ...]:
    """Draw the number, the length and the words of a class's sentences.

    Args:
        phrases: what the sentences are about.
        family: ``finding``, ``negation`` or ``statement``.
        forced: a sentence that the class must have.
        may_hedge: whether some may sound unsure.
        may_hold_out: whether one may be kept out of training.
        taken: sentences of all classes so far, added to: each says one class only.
        rng: of this class.
    """
    number = int(rng.integers(WORDINGS_PER_CLASS[0], WORDINGS_PER_CLASS[1] + 1))
    length = rng.uniform(*_LENGTHS)
    hedges = [bool(h) for h in rng.random(WORDINGS_PER_CLASS[1]) < 0.4]
    texts: list[tuple[str, bool]] = []
    if forced is not None:
        texts.append((forced, False))
        taken.add(forced)
    while len(texts) < number:
        # The first two are plain, so that a class never has only hedged or only held-out sentences.
        hedged = may_hedge and len(texts) >= 2 and hedges[len(texts)]
        frames = _HEDGED if hedged else _FRAMES[family]
        wanted = length + rng.normal(0, _LENGTH_SPREAD)
        candidates = [
            _fill(frames[int(rng.integers(len(frames)))], family, phrases[int(rng.integers(len(phrases)))])
            for _ in range(_CANDIDATES)
        ]
        free = [text for text in candidates if text not in taken]
        if free:
            text = min(free, key=lambda candidate: abs(len(candidate.split()) - wanted))
            taken.add(text)
            texts.append((text, hedged))
    weights = np.array(_WEIGHTS[:number])
    weights = rng.permutation(weights / weights.sum())
    # One wording in two of the well-provided classes with boxes is kept out of training: it is what a phrase that
    # the model has never read looks like.
    holds_one_out = may_hold_out and number >= 3 and rng.random() < 0.5 and not texts[-1][1]
    return tuple(
        Wording(text, float(weight), hedged, held_out=holds_one_out and i == number - 1)
        for i, ((text, hedged), weight) in enumerate(zip(texts, weights, strict=True))
    )
