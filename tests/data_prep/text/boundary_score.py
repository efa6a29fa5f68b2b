"""Agreement of found sentence boundaries with those labelled by hand (`sentence_boundaries/`).

A boundary is the end of a sentence, for every sentence of a text but the last. Its position is the number of word
characters (letters, digits, `_`) before it that stand within labelled sentences. So blanks, full stops, numbers of list
items and section headers, which splitters keep, drop or hang on either side, change no position; a cut within a
sentence, also one behind its "rib 2." or before its "___", does.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence

Spans = Sequence[Sequence[int]]
"""[start, end) of each sentence, in characters of the text, in order."""

_WORD_CHARACTER = re.compile(r"\w")


def boundaries(text: str, sentences: Spans, labelled: Spans) -> set[int]:
    """Positions of the ends of sentences, without the last end.

    Args:
        text: the text as it stands in the report.
        sentences: found or labelled ones.
        labelled: the sentences labelled by hand, whose word characters are counted.

    Returns:
        positions above 0 and below the number of counted characters: an end before the first or after the last of them
        parts nothing.
    """
    counted = [
        match.start() for start, end in labelled for match in _WORD_CHARACTER.finditer(text, start, end)
    ]
    return {bisect.bisect_left(counted, end) for _, end in sentences} - {0, len(counted)}


def boundary_f1(texts: Iterable[tuple[str, Spans, Spans]]) -> float:
    """2 both / (found + labelled) of the boundaries over (text, found sentences, labelled sentences)."""
    both = every = 0
    for text, found, labelled in texts:
        ours, true = boundaries(text, found, labelled), boundaries(text, labelled, labelled)
        both, every = both + len(ours & true), every + len(ours) + len(true)
    return 2 * both / every


def locate(text: str, sentences: Sequence[str]) -> list[tuple[int, int]]:
    """Places of sentences that a splitter gives as texts with other blanks, without list numbers, tags and marks.

    Their word characters are looked for in order, each sentence behind the one before it; it ends behind its last
    word character. One without any is left out.

    Raises:
        ValueError: the word characters of a sentence do not follow in the text.
    """
    places = [match.start() for match in _WORD_CHARACTER.finditer(text)]
    letters, begin = "".join(text[place] for place in places), 0
    spans: list[tuple[int, int]] = []
    for number, sentence in enumerate(sentences):
        wanted = "".join(_WORD_CHARACTER.findall(sentence))
        if not wanted:
            continue
        at = letters.find(wanted, begin)
        if at < 0:
            raise ValueError(
                f"sentence {number} of {len(sentences)}: its letters do not follow behind letter {begin} of the"
                f" text's {len(letters)}; the splitter changed or moved words"
            )
        begin = at + len(wanted)
        spans.append((places[at], places[begin - 1] + 1))
    return spans
