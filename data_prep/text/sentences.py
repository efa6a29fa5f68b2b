"""Sentences of report text.

First the layout is read (`passages`): wrapped lines are joined; blank lines, ruled lines, ``<BR>``, list items and
names of whole sections begin a new passage, and dashes, numbers and names are left out, so that "1. No pneumothorax."
and "No pneumothorax." are one sentence. Then PySBD and a few rules (`boundaries`) cut each passage.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from data_prep.text.abbreviations import ORDINAL_FOLLOWS
from data_prep.text.boundaries import GOES_ON, NO_ITEM_FOLLOWS, line_ends_sentence, sentence_starts

RULES_VERSION = 7
"""Incremented with every change of the resulting sentences; part of the options of a prepared set."""

# HTML's, and that of HL7 messages; "\u2029" is Unicode's, and the one that `with_line_breaks` leaves.
_LINE_BREAK_TAG = re.compile(r"</?(?:br|p)\s*/?>|\\\.br\\|\u2029", re.IGNORECASE)
# "The previously<BR>described nodule": a line that was wrapped, in a text whose sentences end with full stops.
_WRAPPING_TAG = re.compile(r"(?<=[a-z0-9,X_])[ ]?(?:<(?i:br)\s*/?>|\\\.(?i:br)\\)\s*(?=[a-z])")
_FULL_STOP = re.compile(r"[.?!](?:\s|<|\\|$)")
# As some databases write a line break into a table: "\n" in two characters. "Right\normal" holds none.
_ESCAPED_BREAK = re.compile(r"(?:\\r)?\\n|\\r(?=\s|$)")
_ESCAPED_RETURN = re.compile(r"\\r(?=\n)")
_CERTAIN_BREAK = re.compile(r"(?:^|[.:;?!\s])(?:\\r)?\\n|(?:\\r)?\\n(?:[^a-z]|$)")
_RULED_LINE = re.compile(r"(?=.*?[_=*-]{5})[\s_=*-]+")
# "- No effusion", "* No effusion", "-No effusion"; a number ("- 5") or "-sided" is not a list item.
_DASH = re.compile(
    r"[-–*•●▪◦·]+\s+(?=[A-Za-z_(])|[-–*•●▪◦·]+(?=[A-Z])|[•●▪◦]+\s*(?=\w)|[-–*]+\s*(?=\(?\d{1,2}[.)]\s*[A-Za-z])"
)
# The same within a line: bullets always, dashes behind a closing mark.
_INNER_DASH = re.compile(r"(?:^|(?<=\s))[•●▪◦]\s*(?=\w)|(?<=[.?!])\s+[-–*]+\s+(?=[A-Z])")
# "- Clear lungs - Normal heart", where a dash began the line.
_DASH_BETWEEN = re.compile(r"\s[-–*]+\s+(?=[A-Z])")
# "1 No effusion" on a line of its own, see `_numbered_lines`.
_LINE_NUMBER = re.compile(r"(\d{1,2})\s+(?=[A-Z])")
# Another sign of a list, see `_bullets`; those that state something are none: "? edema", "↑ markings".
_SIGN = re.compile(
    r"\s*(?!\? [a-zß-ÿ])((?:(?![_(\[{<\"'“„«¿¡≈≠≤≥±∅¬↑↓↔.,;:)&/%])[^\w\s]){1,3}|o)\s+(?!\W?\d)(?=\S)"
)
# Boxes of a form: "[x] Effusion", "☐ Edema". Those that are not `is_sure` need one of the other kind beside them.
_BOX = re.compile(
    r"(?P<indent>\s*)(?:[-*•]\s+)?(?P<is_sure>(?=[\[☒☑☐✗✘✅🗹❌✖]))?(?P<box>(?P<ticked>\[ ?[xX✓✔√] ?\]|\( ?[xX] ?\)"
    r"|[☒☑■✓✔✅🗹◼⬛])|\[ *_? *\]|\( *\)|[☐□✗✘❌✖◻⬜🗆])(?P<text>\s*[^\s.,;:)].*)"
)
# A line with a mark, of more than 38 characters, with a stop that is not the last, or behind which a sentence goes on.
_NOT_LISTED = re.compile(rf"(?im)^\s*(?:[^\w\s]|\d|\w{{1,3}}[.)])|\S.{{38}}|[.;?!]\s|{GOES_ON}")

_NAME = r"(?:FINDINGS?|IMPRESSIONS?|CONCLUSIONS?)"
_NAMES = rf"{_NAME}(?:\s*(?:AND|&|/)\s*{_NAME})?"
# At the beginning or behind a closing mark in any case; else with a capital behind a small word ("Imaging Findings:"
# and "no new findings:" are not names of sections).
_SECTION = re.compile(
    rf"(?:^|(?<=[.?!)])\s*)(?i:{_NAMES})\s*:\s*"
    rf"|(?P<word>(?:^|(?<=\s))(?:[a-z]\S*|\d\S*|X+|_+))\s+(?:(?:{_NAMES}|Findings|Impression|Conclusion)\s*:\s*"
    r"|(?:FINDINGS|IMPRESSION|CONCLUSION)\s+(?=[A-Z][a-z]))"
)

_LETTER = re.compile(r"[^\W\d_]")


def has_letter(sentence: str) -> bool:
    """False for text without content: "___.", "1.", "...."."""
    return _LETTER.search(sentence) is not None


def with_line_breaks(text: str) -> str:
    """Replace escapes by line breaks, and tags, which begin a new passage, by a sign between line breaks."""
    text = _unwrapped(text.replace("\r\n", "\n").replace("\r", "\n"))
    return _LINE_BREAK_TAG.sub("\n\u2029\n", text)


def _unwrapped(text: str) -> str:
    """Escapes as line breaks, and without the tags at which a line was wrapped."""
    if "\n" in text:
        text = _ESCAPED_RETURN.sub("", text)
    elif _CERTAIN_BREAK.search(text):
        text = _ESCAPED_BREAK.sub("\n", text)
    return _WRAPPING_TAG.sub(" ", text) if _FULL_STOP.search(text) else text


def passages(text: str) -> list[str]:
    """Join the wrapped lines of a section (without its header), and cut it where the layout begins a new passage.

    The passages have single blanks; each holds one sentence or more.
    """
    lines = _LINE_BREAK_TAG.sub("\n\n", _unwrapped(text)).splitlines()
    found = "\n".join(_joined_lines(lines, has_tags=_LINE_BREAK_TAG.search(text) is not None))
    found = "\n".join(_INNER_DASH.sub("\n", line) for line in found.split("\n"))
    found = "\n".join(_SECTION.sub(lambda m: f"{m['word'] or ''}\n", line) for line in found.split("\n"))
    return [item for item in map(str.strip, _without_marks(found).split("\n")) if item]


def split_sentences(passage: str, language: str = "en") -> list[str]:
    """Sentences of one passage, as written, with single blanks; together they are the whole passage.

    Also those without a letter, see `has_letter`.
    """
    passage = " ".join(passage.split())
    starts = sentence_starts(passage, language)
    pieces = (passage[a:b].strip() for a, b in zip(starts, [*starts[1:], len(passage)], strict=True))
    return [piece for piece in pieces if piece]


def _joined_lines(lines: list[str], has_tags: bool) -> list[str]:
    joined: list[str] = []
    is_open = False
    width = max((len(line.rstrip()) for line in lines), default=0)
    numbered, bullets = _numbered_lines(lines), _bullets(lines)
    items = {**dict(() if has_tags else _listed_lines(lines)), **bullets, **_boxes(lines)}
    previous = 0
    for at, raw in enumerate(lines):
        line = " ".join(items.get(at, raw).split())
        if not line or _RULED_LINE.fullmatch(line):
            is_open = False
            continue
        mark = _DASH.match(line) or (_LINE_NUMBER.match(line) if at in numbered else None)
        if mark is not None:
            first, *others = _DASH_BETWEEN.split(line[mark.end() :])
            is_list = all(" " in item for item in (first, *others))
            joined += [first, *others[:-1]] if is_list and others else []
            line = others[-1] if is_list and others else line[mark.end() :]
        is_short = previous + 1 + len(line.split(" ", 1)[0]) <= width
        is_item = mark is not None or at in items
        is_between = at < max(bullets, default=0)
        if is_open and not is_item and (is_between or not line_ends_sentence(joined[-1], line, is_short)):
            joined[-1] += f" {line}"
        else:
            joined.append(line)
        is_open = at not in items or has_letter(line)
        # A header stood before the first line: how long that was is not known.
        previous = len(raw.rstrip()) if at else width
    return joined


def _boxes(lines: list[str]) -> dict[int, str]:
    """Lines with a box, and what stays: the box, with its text if it is ticked."""
    found = {at: box for at, line in enumerate(lines) if (box := _BOX.fullmatch(line))}
    kinds = {(box["indent"], bool(box["ticked"])) for box in found.values()}
    items: dict[int, str] = {}
    for at, box in found.items() if len(found) > 1 else ():
        if box["is_sure"] is not None or (box["indent"], not box["ticked"]) in kinds:
            items[at] = box["box"] + (box["text"] if box["ticked"] else "")
            rest = itertools.takewhile(lambda line: line.strip()[:1].islower(), lines[at + 1 :])
            items |= {} if box["ticked"] else dict.fromkeys(range(at + 1, at + 1 + len([*rest])), "")
    return items


def _bullets(lines: list[str]) -> dict[int, str]:
    """Lines of a list whose sign begins the first line and a second one, without their signs."""
    signs = {at: match for at, line in enumerate(lines) if (match := _SIGN.match(line))}
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    is_list = first in signs and [sign[1] for sign in signs.values()].count(signs[first][1]) > 1
    # Word's "o" on the second level is told from the Spanish and Italian "or" by what follows.
    skipped = re.compile(r"\s*o [^A-Z ]" if is_list and signs[first][1] != "o" else "(?!)")
    items = (at for at in signs if is_list and not skipped.match(lines[at]))
    return {at: lines[at][signs[at].end() :] for at in items if not _DASH.match(lines[at].strip())}


def _listed_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Short lines, three or more, that are a passage each: no text can have been wrapped into them."""
    for is_text, block in itertools.groupby(range(len(lines)), lambda at: bool(lines[at].strip())):
        texts = {at: lines[at].rstrip() for at in block}
        if not is_text or len(texts) < 3 or _NOT_LISTED.search("\n".join(texts.values())):
            continue
        # Behind the first line, which may follow a header: widths at which greedy wrapping gives the same lines.
        whole = [line for at, line in texts.items() if at]
        ends = (len(a) + len(b.split()[0]) for a, b in itertools.pairwise(whole))
        if max(24, *map(len, whole)) > min(ends):
            yield from ((at, line) for at, line in texts.items() if not lines[at - 1].rstrip().endswith(":"))


def _numbered_lines(lines: list[str]) -> set[int]:
    """Lines that begin with 1, 2, ... and nothing behind the number, if there are two of them or more."""
    numbers = {at: int(m[1]) for at, line in enumerate(lines) if (m := _LINE_NUMBER.match(line.strip()))}
    is_list = len(numbers) > 1 and list(numbers.values()) == list(range(1, len(numbers) + 1))
    return set(numbers) if is_list else set()


_LETTERS = tuple("abcdefghijklmnop")
_ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")
_NUMBERS = tuple(str(number) for number in range(1, 100))
_ORDERS = (_NUMBERS, _LETTERS, tuple(map(str.upper, _LETTERS)), _ROMAN, tuple(map(str.upper, _ROMAN)))
# Characters before a mark that matter; all of them would make long texts slow.
_NEAR = 100
_ENDS_CLAUSE = re.compile(r"(?:^|[.:;?!)\]\"。：；？！])\s*$", re.MULTILINE)
# "Hand 1. Fracture of the thumb."
_HEADING = re.compile(r"(?:^|[.:;?!]\s+)(?:[A-Z][a-z]+\s+)?[A-Za-z][a-z]{3,}\s*$", re.MULTILINE)
# "(1) a nodule and (2) an effusion" behind a colon: an enumeration within a sentence.
_ENUMERATION = re.compile(r"\([^)]\)\s+[a-z]")


def _mark(order: tuple[str, ...]) -> re.Pattern[str]:
    """ "1. No", "1) No", "(1) No", "1.No", "1.) No", "[1] No", "#1 No", "1: No", "1- No"; not "1.5 cm"."""
    signs = "|".join(sorted(order, key=len, reverse=True))
    numbers = r"|\#\s?(?P<hashed>\d{1,2})[.:)]?\s+(?=[\w(])|(?P<loose>\d{1,2})(?::|\s?-)\s*(?=[A-Z])"
    numbers += r"|（?(?P<wide>\d{1,2})[．、）]\s*(?=[^\W\d_])"
    return re.compile(
        rf"(?<![\w,/:-])(?<!\d\.)(?<!\b[A-Za-z]\.)"
        rf"(?:[(\[]?(?P<sign>{signs})\s?[.)\]]+-?(?:\s+(?=[\w(\"])|(?=[A-Z⺀-鿿])|(?<=\))(?=[a-z]{{2}}))"
        rf"{numbers if order is _NUMBERS else ''})"
    )


_MARKS = [(order, _mark(order)) for order in _ORDERS]


def _without_marks(text: str) -> str:
    """Put a line break in the place of every "1.", "(2)", "b)" or "III." that marks the items of a list."""
    for order, mark in _MARKS:
        pieces, at = [], 0
        for match in _items(text, order, mark):
            pieces.append(text[at : match.start()])
            at = match.end()
        text = "\n".join([*pieces, text[at:]])
    return text


def _items(text: str, order: tuple[str, ...], mark: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Marks that begin an item: at the beginning of a clause, or the next ones of a list that has begun."""
    ranks = {sign: rank for rank, sign in enumerate(order)}
    signs = ((match[match.lastgroup or 0], match) for match in mark.finditer(text))
    found = [(ranks[sign], match) for sign, match in signs if sign in ranks]
    final = {rank: match.start() for rank, match in found}
    last: int | None = None
    for rank, match in found:
        before = text[max(0, match.start() - _NEAR) : match.start()]
        next_sign = text[match.end() : match.end() + 1]
        follows = last is not None and rank == last + 1
        if NO_ITEM_FOLLOWS.search(before) or (order is _NUMBERS and ORDINAL_FOLLOWS.match(text, match.end())):
            continue
        if not _ENDS_CLAUSE.search(before):
            is_heading = match[0].startswith("1.") and next_sign.isupper() and _HEADING.search(before)
            is_item = follows and not next_sign.isdigit() or bool(is_heading)
        elif before.rstrip().endswith(":") and _ENUMERATION.match(match[0] + next_sign):
            is_item = False
        elif order is _NUMBERS:
            # "2. 5 cm" is a length, unless it follows "1."; a number may be left out or come twice.
            begins_line = not before.rpartition("\n")[2].strip()
            may_skip = begins_line or (last is not None and rank >= last)
            is_item = rank == 0 or follows or (may_skip and not next_sign.isdigit())
        else:
            # A single letter may be an initial: the second of the list must come later.
            is_item = follows or (rank == 0 and final.get(1, -1) > match.start())
        if is_item:
            yield match
            last = rank
