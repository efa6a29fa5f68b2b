"""The findings and impression sections of a report: of MIMIC-CXR, or of another source (`own_sections`).

Headers are at the beginning of a line, in capitals, before a colon (``\\n ([A-Z ()/,-]+):\\s`` in the official
parser). Beyond that: lower-case headers, headers within a line, missing colons, misspellings, combined headers.
Drafts and additions (WET READ, PRELIMINARY REPORT, ADDENDUM) and signatures are left out, see `_is_draft`.
A header that is neither findings nor impression ends the section if it is known to begin another (INDICATION,
COMPARISON, WET READ, ADDENDUM, ...); an unknown one (HEART, LUNGS, LINES AND TUBES) belongs to the text around it.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from data_prep.text.languages import (
    SIGN_OFF,
    begins_a_line,
    names_signer,
    with_english_headers,
    without_views,
)
from data_prep.text.sentences import has_letter, passages, split_sentences, with_line_breaks

RULES_VERSION = 3
"""Incremented with every change of the resulting text; part of the options of a prepared set."""

SECTIONS = ("findings", "impression")
"""Sections to choose from. A combined section (FINDINGS AND IMPRESSION) counts as either."""

BOTH = "findings_and_impression"
LAST_PARAGRAPH = "last_paragraph"
TEXT = "text"
NO_HEADER = "no_header"
"""Text under no header, see `own_sections`."""

OWN_RULES_VERSION = 1
"""As `RULES_VERSION`, of reports that are not MIMIC-CXR's: `own_sections` and `data_prep.text.exports`."""

_OTHER = "other"
_REMARK = "remark"
_VIEWS = "views"
_MAIN = (*SECTIONS, BOTH)

# Names of other sections, by any of their words: their text is not about what the image shows.
_OTHER_WORDS = re.compile(
    r"\b(?:INDICATIONS?|HISTORY|CLINICAL|REASONS?|COMPARISONS?|COMPARED|PRIORS?|TECHNIQUES?|EXAM|EXAMS|EXAMINATIONS?"
    r"|PROCEDURES?|PROTOCOL|WET READ|WETREAD|PRELIM(?:INARY)?|PROVISIONAL|PFI|ADDENDUM|ADDENDA|NOTIFICATIONS?"
    r"|RECOMMENDATIONS?|ATTESTATION|DOSE|FLUOROSCOPY|CONTRAST|DATE|TIME|DICTATED|TRANSCRIBED|APPROVED|SIGNED|REFERRING|ORDERING|QUESTION"
    r"|COMPLAINT|COMMUNICATION|DIAGNOSIS CODE|ICD|REQUEST|FINAL REPORT)\b"
)
# Misspelled ones end a section as well: "COMPARISION", "IDICATION", "NDICATION".
_OTHER_NAMES = (
    *("COMPARISON", "COMPARISONS", "INDICATION", "TECHNIQUE", "EXAMINATION", "HISTORY"),
    *("NOTIFICATION", "RECOMMENDATION", "RECOMMENDATIONS", "ADDENDUM"),
)
# These make even a header with FINDINGS or IMPRESSION in it something else: "PROVISIONAL FINDINGS IMPRESSION (PFI)".
_NOT_FINAL = re.compile(r"\b(?:WET READ|WETREAD|PRELIM(?:INARY)?|PROVISIONAL|PFI|ADDENDUM|ADDENDA)\b")
# A report without other text may have its reading under these headers (some of those that the official script
# leaves out or lists by hand), if it states something: "EXAMINATION:  The lungs are clear."
_MAY_HOLD_READING = re.compile(r"\b(?:EXAM|EXAMINATION|PROCEDURE|RECOMMENDATIONS?)\b")
_STATEMENT = re.compile(
    r"\b(?:is|are|has|have|there|no|clear|normal|unchanged|stable|recommended)\b", re.IGNORECASE
)
_IMPRESSION_WORDS = re.compile(r"\b(?:CONCLUSIONS?|OPINION|SUMMARY|INTERPRETATION|IMP)\b")
# "CHEST, PA AND LATERAL: The heart is ...": findings where the report has no header for them.
_VIEW_WORDS = re.compile(
    r"\b(?:CHEST|RADIOGRAPHS?|VIEWS?|X-?RAYS?|CXR|FRONTAL|PORTABLE|UPRIGHT|SUPINE|REPORT)\b"
)

# "FINDINGS: ... PROCEDURE: ... BONES: Normal.": findings again.
_BODY_PART = (
    r"(?:LUNGS?|HEART|PLEURA|MEDIASTINUM|HILA|BONES?|CHEST WALL|SOFT TISSUES?|OSSEOUS STRUCTURES?|LINES|TUBES"
    r"|DEVICES|DIAPHRAGMS?|UPPER ABDOMEN|ABDOMEN|AIRWAYS?|TRACHEA|VASCULATURE|CARDIAC SILHOUETTE|SPINE|RIBS)"
)
_BODY_PARTS = re.compile(rf"(?:THE )?{_BODY_PART}(?:(?: AND |, (?:AND )?| ?[/&] ?){_BODY_PART})*")

_KNOWN = r"FINDINGS?|IMPRESSIONS?|CONCLUSIONS?|FINDINGS?\s*(?:AND|&|/)\s*IMPRESSIONS?"
_KNOWN_OTHER = (
    r"INDICATION|HISTORY|COMPARISONS?|TECHNIQUE|EXAMINATION|WET[ \t]READ|ADDENDUM"
    r"|RECOMMENDATIONS?|NOTIFICATIONS?"
)
_HEADER = re.compile(
    rf"""
    ^[ \t]*(?:(?:[\[*\#]+|\d{{1,2}}[.)])[ \t]*)?                                         # at the beginning of a line
      (?P<capitals>[A-Z][A-Z0-9 \t()\[\]/,.&'_-]{{1,70}}?)[ \t]*[\]*]*[:;]\**(?=\s|$)
    | ^[ \t]*(?P<any_case>(?i:{_KNOWN}|{_KNOWN_OTHER}))[ \t]*:                          # the same, not in capitals
    | ^[ \t]*(?P<bare>{_KNOWN})[ \t]*$                                                  # without its colon
    | ^[ \t]*(?P<bare_other>{_KNOWN_OTHER})[ \t]*$
    | (?:(?<=\s)|(?<=[.)_]))(?P<inside>{_KNOWN}|{_KNOWN_OTHER})[ \t]*:(?=\s|$)           # within a line
    | (?<=[.?!]\s)(?P<after_stop>Findings|Impression|Conclusion)[ \t]*:(?=\s)
    | ^[ \t]*(?P<capitalised>[A-Z][a-z]{{5,12}})[ \t]*:(?=\s|$)                            # misspelled
    # "IMPRESSION  Clear.", "COMPARISON ___": small letters behind the name, which are not those of a sentence
    | ^[ \t]*(?P<loose>(?:{_KNOWN}|{_KNOWN_OTHER}))(?:[ \t]*[.–-][ \t]|[ \t])[ \t]*(?=[A-Z][a-z]|_|\d)
    | ^[ \t]*(?P<title>FINAL[ \t]REPORT)[ \t]*$
    | ^[ \t]*(?P<draft>(?:FINAL[ \t]+)?ADDENDUM|WET[ \t]?READ|PRELIMINARY[ \t]REPORT)\b(?:[^:\n]*:(?=\s|$))?
    | ^[ \t]*\*{{2,}}[ \t]*(?P<starred>(?:FINAL[ \t]+)?ADDENDUM|WET[ \t]?READ)[ \t]*\*{{2,}}
    | ^[ \t]*(?P<small_draft>Addendum|Wet[ \t][Rr]ead|Preliminary[ \t][Rr](?:eport|ead))[ \t]*
      (?:(?:by|from|at|of|on|dated|version|\#|\d|_)[^\n]{{0,60}}?)?:(?=\s|$)
    | ^[ \t]*(?P<signature>(?i:electronically[ \t]+signed|dictated[ \t]+by|transcribed[ \t]+by|approved[ \t]+by))\b
    """,
    re.MULTILINE | re.VERBOSE,
)
# A report of several pages: "(Over)", blank lines, the title again, "(Cont)".
_PAGE_BREAK = re.compile(
    r"^[ \t]*\(Over\)[ \t]*\n(?:.*\n){0,12}?.*\(Cont\)[ \t]*$", re.MULTILINE | re.IGNORECASE
)
# A sentence that only says who was told, or who wrote: "Findings were telephoned to Dr. ___ at 3 p.m."
_NOTICE = re.compile(
    r"(?:(?:these|the|above|critical|preliminary|important) )*(?:findings?|results?|report)(?: above)? "
    r"(?:was|were|has been|have been) (?:\w+ly )?"
    r"(?:telephoned|discussed|communicated|conveyed|relayed|reported|called|emailed)\b.*\b(?:to|with|by)\b.*"
    r"|dr\.?(?: \S+){1,3} (?:was|has been) (?:\w+ly )?(?:paged|called|notified|informed|telephoned)\b.*"
    r"|(?:he|she|dr\.? \S+) (?:understood|acknowledged|agreed|confirmed)\b.*"
    r"|(?:electronically )?signed(?: by\b.*)?\W*|(?:dictated|transcribed) by\b.*",
    re.IGNORECASE,
)
# Behind such a header the name of a part of the body goes on with the findings: the header's text is not the history.
_INTERRUPTS_FINDINGS = re.compile(r"\b(?:PROCEDURES?|TECHNIQUES?|PROTOCOL|CONTRAST|COMPARISONS?|COMPARED)\b")
# A line that the next one goes on.
_WRAPPED = re.compile(r"^.{50,}[^.:;?!\s][ \t]*\n[ \t]*[^\W\d_]", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


class Section(NamedTuple):
    """A piece of a report: its kind (`SECTIONS`, `BOTH`, `LAST_PARAGRAPH`, `NO_HEADER`), its text without header."""

    name: str
    text: str


def study_sections(report: str, wanted: Collection[str] = SECTIONS) -> list[Section]:
    """The chosen sections of a MIMIC-CXR report in order of appearance; none where it has nothing of the kind.

    Where a report has neither findings nor impression: the text under a header that names the views (CHEST, PA AND
    LATERAL), else the last paragraph under no header of another section, else a statement under
    EXAMINATION or RECOMMENDATION.
    """
    pieces = [piece for piece in _pieces(report) if has_letter(piece.text)]
    main = [piece for piece in pieces if piece.name in _MAIN]
    if main:
        return [piece for piece in main if piece.name in wanted or piece.name == BOTH]
    views = [Section("findings", piece.text) for piece in pieces if piece.name == _VIEWS]
    if views:
        return views if "findings" in wanted else []
    return _last_paragraph(pieces)


def own_sections(report: Sequence[Section], wanted: Collection[str] = SECTIONS) -> list[Section]:
    """The chosen sections of a report of another source than MIMIC-CXR, without lines that say who wrote it.

    A section of the name `TEXT` is a whole text, with MIMIC-CXR's headers or those of `languages.HEADER_WORDS`. Where
    none names the findings, they are the text under no header (`NO_HEADER`), also that behind the line or the
    paragraph of another section (INDICATION).
    """
    found: list[Section] = []
    for name, text in report:
        text = with_line_breaks(text)
        found += _of_whole_text(with_english_headers(text)) if name == TEXT else [Section(name, text)]
    without_header = NO_HEADER if "findings" in wanted or {*dict(found)} == {NO_HEADER} else BOTH
    names = (*wanted, BOTH, without_header)
    kept = [Section(name, _without_sign_off(text)) for name, text in found if name in names]
    return [section for section in kept if has_letter(section.text)]


def _of_whole_text(text: str) -> list[Section]:
    main = [piece for piece in _pieces(text) if piece.name in _MAIN and has_letter(piece.text)]
    return main if {"findings", BOTH} & {*dict(main)} else [*_under_no_header(text), *main]


def _under_no_header(report: str) -> list[Section]:
    """Text under no header, else a header's remark."""
    pieces = _pieces(_without_sign_off(report), at_views=False)
    width = max(map(len, report.split("\n"))) if _WRAPPED.search(report) else math.inf
    found = []
    for name, text in itertools.takewhile(
        lambda piece: piece.name not in _MAIN or not has_letter(piece.text), pieces
    ):
        text = text if name == TEXT else _behind_header(text, width)
        for part in filter(has_letter, _BLANK_LINE.split(without_views(text))):
            if not _NOTICE.match(" ".join(part.split())) or not _is_notice(part):
                found.append(Section(NO_HEADER, f"\n{part}"))
    remarks = [text for name, text in pieces if name == _REMARK and _STATEMENT.search(text)]
    return found or [Section(NO_HEADER, text) for text in remarks[-1:]]


def _behind_header(text: str, width: float) -> str:
    """Text behind a header's own, which ends with a blank line, or where no line of `width` was wrapped."""
    lines = text.split("\n")
    begin = next((at for at, line in enumerate(lines) if line.strip()), len(lines))
    for at in range(begin + 1, len(lines)):
        line = lines[at].strip()
        # How long the header was is not known.
        length = len(lines[at - 1].rstrip()) + (12 if at == 1 else 0) + 1 + len(line.split(" ", 1)[0])
        if not line or (length <= width and not line[0].islower()):
            return "\n".join(lines[at:])
    return ""


def _without_sign_off(text: str) -> str:
    """Leave out the lines that say who wrote a report, and all that follows them up to the next header."""
    kept: list[str] = []
    is_closed = has_text = False
    for line in text.split("\n"):
        header = _HEADER.match(line)
        kind = _kind(header[header.lastgroup or 0]) if header and not header["signature"] else None
        is_closed = is_closed and kind is None
        if signed := SIGN_OFF.search(line):
            line = line[: signed.start()]
        previous = kept[-1].rstrip() if kept else ""
        is_wrapped = len(previous) > 50 and previous[-1] not in ".:;?!)_"
        if not is_closed and (is_wrapped or not names_signer(line)):
            kept.append(line)
            has_text = has_text or (kind in (None, *_MAIN) and has_letter(without_views(line)))
        is_closed = is_closed or (signed is not None and has_text)
    return "\n".join(kept)


def _pieces(report: str, at_views: bool = True) -> list[Section]:
    """Cut a report at its headers, those of views included or not. Text under no header is `TEXT`."""
    report = _PAGE_BREAK.sub("", with_line_breaks(report))
    headers = list(_HEADER.finditer(report))
    last_title = max((match.start() for match in headers if match["title"]), default=-1)
    found: list[Section] = []
    name, start, draft, interruption = TEXT, 0, "", ""
    for match in headers:
        header = match[match.lastgroup or 0]
        if match["bare_other"] and not begins_a_line(report, match.start()):
            continue
        kind = TEXT if match["title"] else _kind(header)
        is_misread = (
            match["capitalised"] is not None
            and kind not in _MAIN
            and not _is_misspelled_other(header.upper())
        )
        start_of_text = match.end()
        if kind is None and _INTERRUPTS_FINDINGS.search(interruption) and not draft:
            kind, start_of_text = _resumed(header, found), match.start()
        if kind is None or is_misread or (kind == _VIEWS and (name in _MAIN or not at_views)):
            continue
        if match["title"]:
            draft = ""
        elif beginning := _NOT_FINAL.search(" ".join(header.upper().split())):
            draft = beginning[0]
        elif draft and _is_draft(draft, match.start() < last_title, found, name):
            kind = _OTHER
        found.append(Section(name, report[start : match.start()]))
        name, start = kind, start_of_text
        interruption = header.upper() if kind in (_OTHER, _REMARK) else ""
    return [*found, Section(name, report[start:])]


def _resumed(header: str, found: Sequence[Section]) -> str | None:
    """The findings, if they came last before the other section and a part of the body goes on with them."""
    if not _BODY_PARTS.fullmatch(header.strip()):
        return None
    main = next((section.name for section in reversed(found) if section.name in _MAIN), None)
    return main if main in ("findings", BOTH) else None


def _is_notice(paragraph: str) -> bool:
    """True if no sentence describes the image; text behind a colon may."""
    said = [sentence for passage in passages(paragraph) for sentence in split_sentences(passage)]
    return not re.search(r":\s", paragraph) and all(map(_NOTICE.fullmatch, said))


def _is_draft(draft: str, is_before_title: bool, found: Collection[Section], name: str) -> bool:
    """True if a section behind WET READ, PRELIMINARY or ADDENDUM belongs to it.

    Everything before the title FINAL REPORT does. Without that title behind it, an addendum to findings or an
    impression lasts to the end; any other ends with the next section, which is all that there is.
    """
    if is_before_title or not draft.startswith("ADDEND"):
        return is_before_title
    return name in _MAIN or any(section.name in _MAIN and has_letter(section.text) for section in found)


@functools.lru_cache(maxsize=65536)
def _kind(header: str) -> str | None:
    """Kind of section that a header begins; None for an unknown one, which belongs to the text around it."""
    words = " ".join(header.upper().split())
    if _NOT_FINAL.search(words):
        return _OTHER
    is_findings = _resembles(words, "FINDINGS")
    is_impression = _resembles(words, "IMPRESSION") or _IMPRESSION_WORDS.search(words) is not None
    if is_findings or is_impression:
        return BOTH if is_findings and is_impression else "findings" if is_findings else "impression"
    if _OTHER_WORDS.search(words):
        return _REMARK if _MAY_HOLD_READING.search(words) and "REASON" not in words else _OTHER
    if _VIEW_WORDS.search(words):
        return _VIEWS
    return _OTHER if _is_misspelled_other(words) else None


def _is_misspelled_other(words: str) -> bool:
    return not _OTHER_WORDS.search(words) and any(_resembles(words, name) for name in _OTHER_NAMES)


def _resembles(words: str, name: str) -> bool:
    """True if one of the words is the name or a misspelling of it: FIDNINGS, IMPRSSION, MPRESSION, IMPRESSIONS."""
    return any(
        word == name[1:] or (word[0] == name[0] and SequenceMatcher(None, word, name).ratio() > 0.8)
        for word in re.findall(r"[A-Z]+", words)
    )


def _last_paragraph(pieces: list[Section]) -> list[Section]:
    """The last paragraph that describes the image, else the last one, else a header's remark."""
    notices = []
    for piece in reversed(pieces):
        paragraphs = [text for text in _BLANK_LINE.split(piece.text) if text.strip()]
        if piece.name in (_OTHER, _REMARK):
            # The header announces the first paragraph; paragraphs behind a blank line are independent.
            paragraphs = paragraphs[1:]
        for text in reversed([text for text in paragraphs if has_letter(text)]):
            if not _is_notice(text):
                return [Section(LAST_PARAGRAPH, text)]
            notices.append(text)
    if notices:
        return [Section(LAST_PARAGRAPH, notices[0])]
    remarks = [text for name, text in pieces if name == _REMARK and _STATEMENT.search(text)]
    return [Section(LAST_PARAGRAPH, text) for text in remarks[-1:]]
