"""Sentences of report text: PySBD, and what it does not know about radiology reports.

PySBD (Sadvilkar and Neumann, 2020) finds the boundaries. Before it, the text of a section becomes passages: wrapped
lines are joined, and blank lines, ruled lines, list items and numbered impressions are boundaries of their own, with
their dashes and numbers removed, so that "1. No pneumothorax." and "No pneumothorax." are one sentence. Words stay as
they are written.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

RULES_VERSION = 1
"""Raised with every change that gives other sentences; stands in the options of a prepared set."""

_LINE_BREAK_TAG = re.compile(r"<br\s*/?>", re.IGNORECASE)
_RULED_LINE = re.compile(r"[\s_=*-]*[_=*-]{5,}[\s_=*-]*")
# "- No effusion", "* No effusion", "-No effusion"; a number ("- 5") or "-sided" is no list item.
_DASH = re.compile(r"(?:[-*•·]+\s+(?=[A-Za-z_(])|[-*•·]+(?=[A-Z]))")
# "1. No", "2) Stable", "(3) No", "1.No"; not "1.5 cm".
_NUMBER = re.compile(r"(?<![\w.,/])\(?(\d{1,2})[.)](?:\s+|(?=[A-Z]))(?=[A-Za-z_(\"])")
_ENDS_CLAUSE = re.compile(r"(?:^|[.:;?!)])\s*$")
# "rib 2. Stable" ends a sentence; "effusion 2. Stable" begins the second item.
_COUNTED = re.compile(
    r"\b(?:[A-Za-z]|ribs?|grade|stage|type|level|zone|segment|station|lobe|class|number|no|image|series|of|and|to|the)\s*$",
    re.IGNORECASE,
)
# "clear.No", "T5.No", "CT.No": a sentence end without its blank. Not "Dr.Smith", not "e.g.No".
_GLUED = re.compile(r"(?:[a-z]{2}|[A-Z]{2}|\d|[)%])[.?!](?=(?:[A-Z][a-z]|[A-Z]{2}|[A-Z]\s|___))")
_GLUED_TITLE = re.compile(r"\b(?:dr|drs|mr|mrs|ms|st|vs|prof|approx|no|nos|fig)[.?!]$", re.IGNORECASE)
_LETTER = re.compile(r"[^\W\d_]")


def has_letter(sentence: str) -> bool:
    """False for what says nothing: "___.", "1.", "...."."""
    return _LETTER.search(sentence) is not None


def passages(text: str) -> list[str]:
    """Join the wrapped lines of a section; blank lines, list items and numbered items begin a new passage.

    Args:
        text: a section of a report, without its header.

    Returns:
        passages in order, none empty, with single blanks; each holds one sentence or more.
    """
    joined: list[list[str]] = []
    is_open = False
    for line in _LINE_BREAK_TAG.sub("\n\n", text).splitlines():
        line = " ".join(line.split())
        if not line or _RULED_LINE.fullmatch(line):
            is_open = False
            continue
        dash = _DASH.match(line)
        if dash is not None:
            line = line[dash.end() :]
        if is_open and dash is None:
            joined[-1].append(line)
        else:
            joined.append([line])
        is_open = True
    return [item for lines in joined for item in _numbered_items(" ".join(lines)) if item]


def _numbered_items(passage: str) -> Iterator[str]:
    """Cut before "1.", "2.", ... where they number a list, and leave the numbers out."""
    start, last = 0, None
    for match in _NUMBER.finditer(passage):
        number, before = int(match[1]), passage[: match.start()]
        follows = last is not None and number == last + 1
        if _ENDS_CLAUSE.search(before):
            is_item = not before.strip() or number == 1 or follows
        else:
            # Without a full stop before it, only the next number of a list that has begun.
            is_item = follows and not _COUNTED.search(before)
        if is_item:
            yield passage[start : match.start()].strip()
            start, last = match.end(), number
    yield passage[start:].strip()


def split_sentences(passage: str) -> list[str]:
    """Sentences of one passage, as written, with single blanks; together they are the whole passage.

    Args:
        passage: one line of text, see `passages`.

    Returns:
        sentences in order; also those without a letter, see `has_letter`.
    """
    found = []
    for piece in _unglue(" ".join(passage.split())):
        # Only PySBD's boundaries are used, not its texts: nothing can be lost between them.
        starts = [0, *(span.start for span in _segmenter().segment(piece)[1:]), len(piece)]
        found += [piece[a:b].strip() for a, b in zip(starts, starts[1:], strict=False)]
    return [sentence for sentence in found if sentence]


def _unglue(passage: str) -> list[str]:
    ends = [m.end() for m in _GLUED.finditer(passage) if not _GLUED_TITLE.search(passage[: m.end()])]
    return [passage[a:b] for a, b in zip([0, *ends], [*ends, len(passage)], strict=True)]


@functools.cache
def _segmenter() -> Any:
    with warnings.catch_warnings():
        # PySBD 0.3.4 has invalid escapes in its regular expressions, which newer Pythons remark upon.
        warnings.simplefilter("ignore")
        import pysbd

    return pysbd.Segmenter(language="en", clean=False, char_span=True)
