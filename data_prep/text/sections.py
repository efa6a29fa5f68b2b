"""The findings and impression sections of a report: of MIMIC-CXR, or of another source (`own_sections`).

Headers are at the beginning of a line, in capitals, before a colon (``\\n ([A-Z ()/,-]+):\\s`` in the official
parser). Beyond that: lower-case headers, headers within a line, missing colons, misspellings, combined headers.
Drafts and additions (WET READ, PRELIMINARY REPORT, ADDENDUM) and signatures are left out, see `_is_draft`.
A header that is neither findings nor impression ends the section if it is known to begin another (INDICATION,
COMPARISON, WET READ, ADDENDUM, ...); an unknown one (HEART, TECHNICAL QUALITY) belongs to the text around it. But
unless it is one of `languages.Words.reading`, it ends the impression (ACCESSION NUMBER), and before the reading of a
whole text of another source it begins another section (Klinische Fragestellung).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import NamedTuple

from data_prep.text import languages
from data_prep.text.plain_text import PLACEHOLDER
from data_prep.text.sentences import has_letter, passages, split_sentences, with_line_breaks

RULES_VERSION = 6
"""Incremented with every change of the resulting text; part of the options of a prepared set."""

BOTH = "findings_and_impression"
LAST_PARAGRAPH = "last_paragraph"
TEXT = "text"
NO_HEADER = "no_header"
"""Text under no header, see `own_sections`."""

OWN_RULES_VERSION = 5
"""As `RULES_VERSION`, of reports that are not MIMIC-CXR's: `own_sections` and `data_prep.text.plain_text`."""

LEFT_OUT, ENDED, KEPT = "left out", "ended the impression", "kept as text"
"""What is done with an unknown head, see `Notes`."""

_OTHER = "other"
_UNKNOWN = "unknown"
_REMARK = "remark"
_VIEWS = "views"
_MAIN = (*languages.SECTIONS, BOTH)

# Names of other sections, by any of their words: their text is not about what the image shows.
_OTHER_WORDS = re.compile(
    r"\b(?:INDICATIONS?|HISTORY|CLINICAL|REASONS?|COMPARISONS?|COMPARED|PRIORS?|TECHNIQUES?|EXAM|EXAMS|EXAMINATIONS?"
    r"|PROCEDURES?|PROTOCOL|WET READ|WETREAD|PRELIM(?:INARY)?|PROVISIONAL|PFI|ADDENDUM|ADDENDA|NOTIFICATIONS?"
    r"|RECOMMENDATIONS?|ATTESTATION|DOSE|FLUOROSCOPY|CONTRAST|DATE|TIME|DICTATED|TRANSCRIBED|APPROVED|SIGNED|REFERRING|ORDERING|QUESTION"
    r"|COMPLAINT|COMMUNICATION|DIAGNOSIS CODE|ICD|REQUEST|FINAL REPORT|END OF SECTION)\b"
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
    # Of no list: "Workstation ID: 3", "主诉：", "Nurse:Kim", and within a line "Clear. ACCESSION NUMBER: 3"
    | ^[ \t]*+[*\[]*+(?=[^\W\d_])(?![^\n:]{{0,60}}\b(?:{_KNOWN}|{_KNOWN_OTHER})[ \t]*:)
      (?P<line>[^\n:：!?;。，]{{1,60}}?)[ \t]*(?:：|:[*\]]*(?=\s|$)|(?<=[^\W\d_)]):(?!//)(?=\S))
    | (?:(?<=[.?!;_]\s)|(?<=[.?!;_]\s\s))(?P<flat>[A-Z][A-Za-z]+(?:[ \t]+[A-Za-z]+){{0,3}})[ \t]*:(?=\s|$)
    """,
    re.MULTILINE | re.VERBOSE,
)
# Heads before a colon, or alone on a line.
_NAMED = (
    r"(?im)(?:^[ \t*#\[]*|(?<=[.?!;_>\\]\s)|(?<=[>\\])|(?<=\\n))(?:{})[ \t*\]]*"
    r"(?:[:：]\**(?=\s|<|$|[^\W\d_])|$(?=\n\s*(?-i:[^\sa-zß-ÿ])))"
)
_END_OF_SECTION = re.compile(
    r"(?:^[ \t*=-]*|(?<=[.?!:;_]\s)|(?<=\s\s)|(?-i:(?=\bEND\b)))(?:[*=-]{1,9}[ \t])?END[ \t]+OF[ \t]+(?:THE[ \t]+)?"
    r"(?:IMPRESSION|FINDINGS?|REPORT|DICTATION|CONCLUSION|NARRATIVE|SUMMARY)\b[ \t]*(?:[:.*=-]+|$)"
    # CheXpert Plus: "SUMMARY:4-POSSIBLE SIGNIFICANT FINDINGS", a code.
    r"|\bSUMMARY(?:[ \t]*\d[ \t]*:|:[ \t]*\d[ \t]*[-–:])",
    re.MULTILINE | re.IGNORECASE,
)
# CheXpert Plus has these in nearly every report.
_NOTICES = re.compile(
    "I have personally reviewed the images? for this (?:examination|study) and agree with the report transcribed above"
    "[.]?|This report has been anonymi[sz]ed[.] All dates are offset from the actual dates by a fixed interval "
    "associated with the patient[.]?".replace(" ", r"\s+"),
    re.IGNORECASE,
)
# Alone in a section: "nan", "XXXX XXXX.", "Please see the impression below", "s.u.", "Ver conclusión".
_MISSING = re.compile(
    rf"(?:[\W\d_]*(?:{PLACEHOLDER}|x{{4,}}|not (?:available|applicable)|s\.\s?[ou]|"
    r"(?:(?:please )?(?:see|refer to|as(?: \w+ed)?(?: in| per)?|same as)|siehe|voir|ver|v[ée]ase|vide|vedi|zie|cf\.?) "
    r"(?:(?:the|la|las|los|les|le) )?(?:(?:separate|full|body of)(?: the)? )?(?:impression|impresi[oó]n|findings"
    r"|hallazgos|conclu\w+|report|above|below|oben|unten|befund|beurteilung|r[ée]sultats?|ci-dess\w+)"
    r"(?: (?:above|below|section))?(?: for (?:findings|details))?)(?![^\W_]))+[\W\d_]*".replace(" ", r"\s+"),
    re.IGNORECASE,
)
_NONE = re.compile(r"[\W\d_]*(?:none|nil)[\W_]*", re.IGNORECASE)
# The reading begins with a statement, not with a title ("City Hospital").
_BEGUN = re.compile(r"\w\W{1,3}\w[^\n]{0,200}?[.?!](?:\s|$)|(?:\b\w{1,40}[ \t,]{1,4}){5}\w|[^\n]{6}。")
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
# A head within a line that is not in capitals: "Accession number: 3".
_OF_RECORD = re.compile(r"\b(?:[Nn]umber|I[Dd]|[Cc]ode|[Dd]ate|[Bb]y)$")
# Characters of a line that is more than an author's.
_LONG = 100
# A line that the next one goes on.
_WRAPPED = re.compile(r"^.{50,}[^.:;?!\s][ \t]*\n[ \t]*[^\W\d_]", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


class Section(NamedTuple):
    """A piece of a report: its kind (`SECTIONS`, `BOTH`, `LAST_PARAGRAPH`, `NO_HEADER`), its text without header."""

    name: str
    text: str


@dataclass
class Notes:
    """Choices made while a report was read, by `findings_heads` beyond the listed ones.

    `heads`: unknown heads, in capitals, and `LEFT_OUT`, `ENDED` or `KEPT`. `placeholders`: sections that hold one alone
    and are missing. `is_of_unknown_heads`: the reading is under them. `longest`: of the longest text; its last line.
    """

    heads: dict[str, str] = field(default_factory=dict)
    placeholders: int = 0
    is_of_unknown_heads: bool = False
    longest: tuple[str, str] = ("", "")
    findings_heads: Sequence[str] = ()

    def add_head(self, head: str, action: str) -> None:
        self.heads[" ".join(head.upper().split())] = action


def study_sections(
    report: str, wanted: Collection[str] = languages.SECTIONS, notes: Notes | None = None
) -> list[Section]:
    """The chosen sections of a MIMIC-CXR report in order of appearance; none where it has nothing of the kind.

    Where a report has neither findings nor impression: the text under a header that names the views (CHEST, PA AND
    LATERAL), else the last paragraph under no header of another section, else a statement under
    EXAMINATION or RECOMMENDATION.
    """
    notes = notes or Notes()
    pieces = _pieces(_with_results(_NOTICES.sub("", report), notes), notes=notes)
    pieces = [piece for piece in pieces if has_letter(piece.text)]
    if main := _without_placeholders([piece for piece in pieces if piece.name in _MAIN], notes):
        return [piece for piece in main if piece.name in wanted or piece.name == BOTH]
    pieces = [piece for piece in pieces if piece.name not in _MAIN]
    notes.heads.clear()
    views = [Section("findings", piece.text) for piece in pieces if piece.name == _VIEWS]
    if views:
        return views if "findings" in wanted else []
    return _last_paragraph(pieces)


def own_sections(
    report: Sequence[Section], wanted: Collection[str] = languages.SECTIONS, notes: Notes | None = None
) -> list[Section]:
    """The chosen sections of a report of another source than MIMIC-CXR, without lines that say who wrote it.

    A section of the name `TEXT` is a whole text, with MIMIC-CXR's headers or those of `languages.Words.heads`. Where
    none names the findings, they are the text under no header (`NO_HEADER`), also that behind the line or the
    paragraph of another section (INDICATION) or of an unknown head. Sections that hold a placeholder alone are missing.
    """
    notes = notes or Notes()
    found: list[Section] = []
    for name, text in report:
        text = with_line_breaks(_NOTICES.sub("", text))
        found += (
            _of_whole_text(languages.with_english_headers(text), notes)
            if name == TEXT
            else [Section(name, text)]
        )
    found = [Section(name, _without_sign_off(text)) for name, text in found]
    texts = _without_placeholders([section for section in found if has_letter(section.text)], notes)
    without_header = NO_HEADER if "findings" in wanted or {*dict(texts)} == {NO_HEADER} else BOTH
    return [section for section in texts if section.name in (*wanted, BOTH, without_header)]


def _without_placeholders(sections: list[Section], notes: Notes) -> list[Section]:
    texts = [section for section in sections if not _MISSING.fullmatch(section.text)]
    texts = texts or [section for section in sections if _NONE.fullmatch(section.text)]
    notes.placeholders = len(sections) - len(texts)
    return texts


def _of_whole_text(text: str, notes: Notes) -> list[Section]:
    result = _with_results(text, notes)
    main = [piece for piece in _pieces(result, notes=notes) if piece.name in _MAIN and has_letter(piece.text)]
    is_whole = result == text and {"findings", BOTH} & {*dict(main)}
    return main if is_whole else [*_under_no_header(result, bool(main), notes), *main]


def _with_results(report: str, notes: Notes) -> str:
    """The report with FINDINGS for given heads, and for RESULT and the like if it has no other head of the findings."""
    given = (re.escape(head) for head in notes.findings_heads if _kind(head) not in _MAIN)
    report = re.sub(_NAMED.format("|".join(given) or "(?!)"), "\nFINDINGS: ", report)
    result = re.sub(
        _NAMED.format("|".join(w.results for w in languages.WORDS.values())), "\nFINDINGS: ", report
    )
    heads = _HEADER.finditer(report) if result != report else ()
    return report if {"findings", BOTH} & {_kind(head[head.lastgroup or 0]) for head in heads} else result


def _under_no_header(report: str, has_impression: bool, notes: Notes) -> list[Section]:
    """Text under no header or under a head of the reading, else a header's remark, else text under unknown heads."""
    pieces = _pieces(_without_sign_off(report, is_whole=True), at_views=False, is_whole=True)
    width = max(map(len, report.split("\n"))) if _WRAPPED.search(report) else math.inf
    before = [
        *itertools.takewhile(lambda piece: piece.name not in _MAIN or not has_letter(piece.text), pieces)
    ]
    remarks = [text for name, text in pieces if name == _REMARK and _STATEMENT.search(text)]
    if found := _reading(before, width, notes) or [Section(NO_HEADER, text) for text in remarks[-1:]]:
        return found
    if not has_impression and (found := _reading(before, width, notes, has_begun=True)):
        notes.is_of_unknown_heads = True
    return found


def _reading(pieces: Sequence[Section], width: float, notes: Notes, has_begun: bool = False) -> list[Section]:
    """Paragraphs that describe the image. An unknown head before them begins another section, and one in them none."""
    texts = [""]
    for name, text in pieces:
        is_text = name == TEXT or (name == _UNKNOWN and has_begun)
        head = _HEADER.match(text) if name == _UNKNOWN else None
        if head is not None:
            notes.add_head(head[head.lastgroup or 0], KEPT if is_text else LEFT_OUT)
        if is_text:
            texts[-1] += text
        else:
            texts.append(_behind_header(text[head.end() if head else 0 :], width))
        text = "" if has_begun else languages.without_views(texts[-1])
        of_reading = (
            match for match in _HEADER.finditer(text) if languages.is_of_reading(match[match.lastgroup or 0])
        )
        has_begun = has_begun or _BEGUN.search(text) is not None or len([*of_reading]) > 1
    found = []
    for part in filter(
        has_letter, itertools.chain(*(_BLANK_LINE.split(languages.without_views(text)) for text in texts))
    ):
        if not _NOTICE.match(" ".join(part.split())) or not _is_notice(part):
            found.append(Section(NO_HEADER, f"\n{part}"))
    return found


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


def _without_sign_off(text: str, is_whole: bool = False) -> str:
    """Leave out the lines that say who wrote a report, and all that follows them up to the next header.

    `is_whole`: above the reading of a whole text, the lines that follow stay.
    """
    kept: list[str] = []
    is_closed = has_text = False
    for line in text.split("\n"):
        header = _HEADER.match(line)
        is_known = header and header.lastgroup not in ("signature", "line", "flat")
        head = header[header.lastgroup or 0] if header else ""
        kind = _kind(head) if is_known else None
        is_closed = is_closed and kind is None
        signed = languages.SIGN_OFF.search(line)
        # "Author: X. Lungs clear. No effusion.", a whole report on one line, stays.
        if signed and (has_text or signed.start() or len(line) <= _LONG):
            line = line[: signed.start()]
        previous = kept[-1].rstrip() if kept else ""
        is_wrapped = len(previous) > 50 and previous[-1] not in ".:;?!)_"
        if not is_closed and (is_wrapped or not languages.names_signer(line)):
            kept.append(line)
            # "City Hospital", "Age: 50" and "Clinical details: cough." are no text.
            is_statement = not is_whole or languages.is_of_reading(head or line)
            is_statement = is_statement or (not head and line.rstrip().endswith((".", "。")))
            is_text = kind in _MAIN or (kind is None and is_statement)
            has_text = has_text or (is_text and has_letter(languages.without_views(line)))
        is_closed = is_closed or (
            signed is not None and has_text and not languages.TO_ANOTHER.match(signed[0])
        )
    return "\n".join(kept)


def _pieces(
    report: str, at_views: bool = True, is_whole: bool = False, notes: Notes | None = None
) -> list[Section]:
    """Cut a report at its headers, those of views included or not. Text under no header is `TEXT`.

    `is_whole`: before the findings and the impression, also cut at heads of the reading, which begin a `TEXT`, and at
    unknown heads, which begin an `_UNKNOWN`; both hold the heads.
    """
    report = _END_OF_SECTION.sub("\nEND OF SECTION:\n", _PAGE_BREAK.sub("", with_line_breaks(report)))
    headers = list(_HEADER.finditer(report))
    width = max(map(len, report.split("\n")))
    if notes is not None:
        ends = [*(match.start() for match in headers[1:]), len(report)]
        texts = ((end - m.end(), end, m[m.lastgroup or 0]) for m, end in zip(headers, ends, strict=False))
        _, end, head = max(texts, default=(0, 0, ""))
        if languages.is_head(head) and not (_kind(head) or languages.SIGN_OFF.match(f"{head}:")):
            last_line = report[:end].rstrip().rpartition("\n")[2]
            notes.longest = (" ".join(head.upper().split()), " ".join(last_line.upper().split()))
    last_title = max((match.start() for match in headers if match["title"]), default=-1)
    found: list[Section] = []
    name, start, draft, interruption = TEXT, 0, "", ""
    has_main = False
    for match in headers:
        header = match[match.lastgroup or 0]
        if match["bare_other"] and not languages.begins_a_line(report, match.start()):
            continue
        kind = TEXT if match["title"] else None if match["line"] or match["flat"] else _kind(header)
        start_of_text = match.end()
        if kind is None and match["capitals"] and _INTERRUPTS_FINDINGS.search(interruption) and not draft:
            kind, start_of_text = _resumed(header, found), match.start()
        elif match["capitalised"] and kind not in _MAIN and not _is_misspelled_other(header.upper()):
            kind = None
        is_open = kind is None or (kind == _VIEWS and (is_whole or name == "impression"))
        if is_open and _is_head(match, report, width):
            is_text = _is_of_reading(header, name)
            is_before = is_whole and name not in _MAIN and not has_main
            if name == "impression":
                kind = None if is_text or not has_letter(report[start : match.start()]) else _UNKNOWN
            elif is_before and not match["flat"]:
                kind = _UNKNOWN if not is_text else None if name == TEXT else TEXT
            start_of_text = match.start()
            is_signer = languages.SIGN_OFF.match(f"{header}:") is not None or languages.names_signer(
                f"{header}:"
            )
            if notes is not None and not is_text and not is_signer:
                action = ENDED if kind == _UNKNOWN else KEPT if name in _MAIN else LEFT_OUT
                notes.add_head(header, action)
        if kind is None or (kind == _VIEWS and (name in _MAIN or not at_views)):
            continue
        if match["title"]:
            draft = ""
        elif beginning := _NOT_FINAL.search(" ".join(header.upper().split())):
            draft = beginning[0]
        elif draft and kind in _MAIN and not has_main and match.start() > last_title:
            draft = ""  # an addendum on top: the report proper begins
        elif draft and _is_draft(draft, match.start() < last_title, found, name):
            kind = _OTHER
        found.append(Section(name, report[start : match.start()]))
        has_main = has_main or (name in _MAIN and has_letter(found[-1].text))
        name, start = kind, start_of_text
        interruption = header.upper() if kind in (_OTHER, _REMARK) else ""
    return [*found, Section(name, report[start:])]


def _is_head(match: re.Match[str], report: str, width: int) -> bool:
    """True for a short head that begins its line, or stands in capitals behind a sentence; not for a wrapped clause."""
    head = match[match.lastgroup or 0]
    line = report[report.rfind("\n", 0, max(0, match.start() - 1)) + 1 : match.start()].rstrip()
    is_open = match["flat"] is None and bool(line) and line[-1] not in ".:;?!)_。：；！？"
    is_wrapped = len(line) > 50 and len(line) + 1 + len(head.split()[0]) > width
    is_wrapped = is_wrapped and not (len(head) > 4 and head.isupper() and not line.isupper())
    is_text = match["flat"] is not None and not head.isupper() and not _OF_RECORD.search(head)
    return languages.is_head(head) and not is_text and not (is_open and (is_wrapped or head[0].islower()))


def _is_of_reading(head: str, name: str) -> bool:
    """True for a head of the findings, the views or `languages.Words.reading`."""
    kind = _kind(head)
    first = head.split()[0]
    # "Chest comparison" is of the reading, "Reason for chest film" and "Comparison films" are not.
    is_other = not languages.is_of_reading(first) or _OTHER_WORDS.search(first.upper()) is not None
    if languages.is_administrative(head) or (kind == _OTHER and name != "impression" and is_other):
        return False
    return (
        kind in _MAIN
        or languages.is_of_reading(head, name == "impression")
        or (kind == _VIEWS and head.upper().endswith("REPORT"))
    )


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
    impression lasts to the end; before them it ends where they begin.
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
