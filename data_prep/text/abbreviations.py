"""Language of a report by its function words, and abbreviations in languages other than English.

The rules of `boundaries` apply to every language. No list holds for all: "dx." is a side in Italian and a diagnosis in
Spanish, and English sentences end with "max." or "st.".
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter

from data_prep.text.languages import LANGUAGES

_NUMBER = r"(?<![\w.,])(?:\d{1,2}|[IVX]+)"
_NUMBERED = "".join(
    f"(?<!{word} )" for word in ("Rippe", "Rippen", "BWK", "LWK", "HWK", "ICR", "Grad", "Typ", "Segment")
)
_ORDINAL = rf"{_NUMBER}(?:er|[rdtmvns]?[ao]|e|de|ste|i?ème|re|nde?|[ºª°^])\.(?=\s?[a-zß-ÿ])|\d\.(?=[ºª°])"
# German has no other form of ordinal numbers: "der 5. Rippe", "der 4. und 5. Rippe", "die 2. linke", "dem 12. 3. 2020".
_GERMAN_ORDINAL = (
    r"\b(?:[Dd](?:er|ie|as|em|en|es)|[AaIi]m|[Vv]om|[Bb]eim|[Zz]u[mr])\s\d{1,2}\.(?:\s\d{1,2}\.(?=\s\d{2}))?"
    rf"|{_NUMBER}\.(?=\s?[-/,]|\s[a-zß-ÿ])"
)
# "a.p. Strahlengang", "i.v. Gabe"
_OF_VIEW = r"strahlengang\w*|projektion|aufnahmen?|technik|bild|gabe|kontrast\w*|km|injektion|zugang"
ORDINAL_FOLLOWS = re.compile(
    r"\s?(?:Rippe|I[CK]R|Inter[ck]ostalraum|[BLH]WK|(?:Brust|Lenden|Hals)wirbel\w*|postoperative\w*)\b(?!:)"
)
"""Behind a number at the beginning of a line that is an ordinal one, and not the mark of an item: "5. Rippe"."""

_WORD = re.compile(r"[^\W\d_]+")
_FUNCTION = {name: frozenset(words.function.split()) for name, words in LANGUAGES.items()}


@functools.cache
def full_stops(language: str) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """Patterns of abbreviations and ordinal numbers: those that end no sentence, and those that end one unless they do.

    None for English.
    """
    words = LANGUAGES[language]
    if not words.abbreviations:
        return None
    sides, endings = words.sides.split(), words.endings.split()
    # "li." and "LI." may end a sentence; "Li." begins one.
    side, end = _any([*sides, *map(str.upper, sides)]), f"(?i:{_any(endings)})"
    governed = rf"(?:\s(?:{side})\.)?" if words.governs != "(?!)" else ""
    patterns = (
        rf"(?<![\w.])(?:(?i:{_any(words.abbreviations.split())})|(?!{end}\.)(?:[^\W\d_]\.\s?)+[^\W\d_])\.{governed}",
        rf"\b(?:{words.governs})\s(?:{side})\.|(?<![\w.])(?:{_any([*map(str.capitalize, sides)])})\.",
        rf"(?<![\w.])(?:{side})\.(?!\s?(?!(?i:{words.places}))[A-ZÀ-Þ])",
        rf"(?<![\w.]){end}\.(?!\s?(?!(?i:{_OF_VIEW})\b)[A-ZÀ-Þ])",
        rf"\b\d{{1,2}}\.\s\d{{1,2}}\.(?=\s\d{{2}})|{_NUMBER}{_NUMBERED}\.(?=\s?(?i:{words.ordinals})\b)|{_ORDINAL}",
        r"(?<![\w.])[^\W\d_]\.(?=\s[^\W\d_]\.)",
        _GERMAN_ORDINAL if language == "de" else "(?!)",
    )
    return re.compile("|".join(patterns)), re.compile(rf"(?<![\w.])(?:{side}|{end})\.(?=\s?[A-ZÀ-Þ])")


def _any(words: list[str]) -> str:
    patterns = (re.escape(word).replace(r"\.", r"\.\s?") for word in sorted(words, key=len, reverse=True))
    return "|".join(patterns) or "(?!)"


def language_of(text: str) -> tuple[str, int]:
    """The language with the most function words in a text, and their number; ("", 0) where two have as many."""
    words = Counter(_WORD.findall(text.lower()))
    found = {name: sum(words[word] for word in known) for name, known in _FUNCTION.items()}
    best = max(found, key=found.__getitem__)
    return (best, found[best]) if list(found.values()).count(found[best]) == 1 else ("", 0)


def unknown_script(text: str) -> str:
    """Script of most letters of a text, as Unicode names it (CJK, ARABIC), if it is not the Latin one; else ""."""
    if text.isascii():
        return ""
    names = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in "".join(_WORD.findall(text)))
    name = max(names, key=names.__getitem__, default="LATIN")
    return "" if name == "LATIN" or 2 * names["LATIN"] > names.total() else name
