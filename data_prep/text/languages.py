"""Words by which reports of hospitals are laid out, by language."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

import yaml

SECTIONS = ("findings", "impression")
"""Sections to choose from. A combined section (FINDINGS AND IMPRESSION) counts as either."""


class Words(NamedTuple):
    """Words of a language, from ``words.yaml``, which explains them; those from `ordinals` on are patterns."""

    heads: Mapping[str, str]
    reading: str = ""
    function: str = ""
    goes_on: str = ""
    results: str = "(?!)"
    abbreviations: str = ""
    sides: str = ""
    endings: str = ""
    ordinals: str = "(?!)"
    places: str = r"(?-i:[LS][SIM][DGIS]?)\b|lobe\b|l[oó]b(?:ul)?o\b|base\b|champs?\b|campos?\b"
    governs: str = "(?!)"
    signed: str = ""
    report: str = ""


_TABLE = yaml.safe_load((files("data_prep.text") / "words.yaml").read_text(encoding="utf-8"))
WORDS = {language: Words(**words) for language, words in _TABLE.items()}
"""Words by language (ISO 639-1)."""

LANGUAGES = {language: words for language, words in WORDS.items() if words.function}
"""Languages that a report can be cut by."""

CAPITALISED = (
    "Findings, Impression, Conclusion, Conclusions, Indication, Technique, Comparison, History, Clinical history, "
    "Clinical information, Reason for exam, Reason for study, Exam, Examination, Procedure, Date"
)
"""MIMIC-CXR's headers, there in capitals; elsewhere like those of `Words.heads`."""

_NOT_OF_READING = re.compile(
    r"\b(?:RATE|PAIN|HISTORY|INDICATIONS?|\w*(?:SCHMERZ|FREQUENZ)\w*|DOULEURS?|DOLOR|DOR|PHYSICIAN|SURGEON|\w+(?<!ETI)(?<!PATH)OLOG(?:IST|IN|UE|[EOAY])?"
    r"|CLINIC|DEPARTMENT|WARD|TEAM|SERVICE|\w*NUM(?:BER|MER|ERO)|NR|NO|ID|CODE|DAT[EA]|\w*DATUM|FECHA|TIME|BY)\b\W*$"
    r"|\b(?:\w*QUALI[TD]\w*|CALIDAD|KWALITEIT|CRITICAL|SCREENING|CODE|PHONE|PAGER)\b"
)
_PROSE = re.compile(
    r"(?i)\b(?:is|are|was|were|be|been|has|have|had|may|might|can|could|should|would|will|there|this|that|these|it|we|i"
    r"|which|includ\w+|ist|sind|wurden?|wird|est|sont|fue|hay|foi|sono|viene)\b|^(?:no|not|without|kein\w*) |\w{4,}\. "
)
_JOINING = re.compile(
    r"(?i)\([^)]*\)|\b(?:of|the|for|and|to|by|in|on|at|de[lr]?|des|du|d|di|da|do|della|et|y|e|und|en|van|het|für|zur?|la"
    r"|le|les|pour|para|por|per|a|à)\b|[^\w\s]"
)


def _plain(text: str) -> str:
    return re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFD", text)).upper()


def _reading_words(mark: str = "") -> str:
    words = re.findall(
        rf"(?<!\S){mark}([*\w]\S*)", _plain(" ".join(words.reading for words in WORDS.values()))
    )
    return "|".join(re.escape(word).replace(r"\*", r"\w*") for word in words)


_FIRST, _BEHIND = r"\^", r"\+"
_READING = re.compile(rf"(?<![^\W_])(?:{_reading_words()}|(?<!.)(?:{_reading_words(_FIRST)}))(?![^\W_])")
_OF_IMPRESSION = re.compile(rf"(?<![^\W_])(?:{_reading_words(_BEHIND)})(?![^\W_])")

_HEADS = [
    (word, header)
    for words in WORDS.values()
    for header, listed in words.heads.items()
    for word in listed.split(", ")
]
_ENGLISH = {_plain(word): header for word, header in _HEADS}
_ENGLISH |= {word.upper(): word.upper() for word in CAPITALISED.split(", ")}
_WORD = "|".join(
    re.sub("[^ -~]", lambda match: f"[{match[0]}{_plain(match[0])}]", word).replace(" ", r"[ \t]+")
    for word in sorted([*(word for word, _ in _HEADS), *CAPITALISED.split(", ")], key=len, reverse=True)
)
_HEADER = re.compile(
    # At the beginning of a line; behind a full stop or two blanks; in capitals.
    r"(?:^(?P<line>[ \t]*(?:\d[.)][ \t]*)?)|(?<=[.?!;)_]\s)|(?<=[。！？；])|(?<=\s\s)"
    r"|(?<=\s)(?=(?-i:[A-ZÀ-Þ]{4})))[\[*\#]*"
    rf"(?P<first>{_WORD})(?:[ \t]*(?:und|and|y|et|e|en|[&/,])[ \t]*(?P<second>{_WORD}))?"
    r"(?:[ \t]+(?:R[öo]e?ntgen|Thorax|T[óo]rax|vom|des|der|du|del)\b[^:：\n]{0,40}|[ \t]*\([^)\n]{0,40}\))?"
    r"[ \t\]*]*(?:[:：]\**|(?(line)(?:(?<=[ \t])[-–—](?=[ \t])|(?P<bare>$)(?=\n\s*(?-i:[^\sa-zß-ÿ])))|(?!)))",
    re.MULTILINE | re.IGNORECASE,
)
# "CHEST PA AND LATERAL", before a colon or on a line of its own.
_VIEWS = re.compile(
    r"^[ \t]*(?=\D|[12]\b)(?:(?:chest|thorax|t[óo]rax|x-?rays?|xr|cxr|rx|radiographs?|radiograf[íi]a|radiographie"
    r"|thoracique|r[öo]e?ntgen|p\.?a|a\.?p|lat|lateral|frontal|face|profil|views?|ebenen|films?|portable|upright|supine|erect|stehend"
    r"|liegend|exam|study|report|narrative|bericht|informe|one|two|single|\d+|[ap]\.?m|at|in|of|the|de|y|et|und|and)\b"
    r"[ \t,/&().:_-]*)+(?::|$(?!\n[ \t]*(?-i:[a-zß-ÿ])))",
    re.MULTILINE | re.IGNORECASE,
)
_SIGNED, _REPORT = (
    f"(?:{'|'.join(filter(None, (getattr(words, kind) for words in WORDS.values())))})"
    for kind in ("signed", "report")
)
_BY = r"(?:by|von|durch|por|par|da|dal(?:la)?|door)"
SIGN_OFF = re.compile(
    # "Cardiomegaly Dictated by: X", without a full stop.
    r"(?:^[ \t]*|(?<=[.?!。]\s)|(?<=\w )(?=(?-i:[A-Z])\w+(?: \w+)? by[ \t]*:))"
    r"(?:(?:electronically|digitally) (?:signed|approved|verified|authenticated)\b"
    # In any order: "This report was electronically signed by X", "Signed (Electronic Signature): X", "By: X".
    rf"|(?:{_REPORT}\W{{1,3}}){{0,7}}{_SIGNED}(?:\W{{1,3}}(?:{_REPORT}|{_SIGNED})){{0,6}}[ \t]*"
    r"(?:(?:\([^)\n]{0,40}\)[ \t]*)?:|\((?:electronic|digital)|(?:on|am|el|le|il)[ \t]+\d[\d./-]{5}"
    rf"|{_BY}\b(?:(?<=signed by)|(?<=dictated by)|[ \t]*(?::|$|(?=(?:dra?|prof)\b"
    r"|(?:the |an? )?(?:attend|staff|radiolog)|(?!(?:CT|MRI?|PET|US|TA?C|RM)\b)(?-i:[A-ZÀ-Þ_])))))"
    rf"|(?:{_REPORT}\W{{1,3}}){{0,7}}{_BY}[ \t]*:|c\.?c\.?(?:[ \t]*:|[ \t]+(?=dr|prof))"
    r"|[ck]op(?:y|i[ea]) (?:to|à|aa?n?)[ \t]*:|/s/"
    r"|(?:sincerely|(?:kind|best) regards|yours (?:sincerely|truly))\b"
    r"|(?:\w+ ){0,2}(?:physician|doctor|author|technologist|transcriptionist|radiologist"
    r"|\w{0,6}医[生师師]|врач|подпис\w+|befunder|arzt|[äa]rztin|arts|radioloog"
    r"|m[ée]decin(?: \w+)?|m[ée]dic[oa](?: \w+)?)[ \t]*[:：]"
    r"|mit (?:freundlich|kollegial|best)\w* (?:\w+ )?gr(?:ü|ue?)(?:ß|ss)|hochachtungsvoll|(?:gez|sgd)\.|i\. ?a\. "
    r"|unterschrift|fdo\b|atentamente\b|(?:un )?saludos?\b|(?:bien )?(?:cordialement|confraternellement)|sehr geehrte"
    r"|dear (?:dr|coll)|(?:i|we)(?:,[^,\n]{1,60},)? have (?:personally )?reviewed|estimad[oa] "
    r"|cher (?:confr|coll|docteur))",
    re.IGNORECASE,
)
"""Where a line says who wrote the report, or to whom: "Dictated by", "gez.", "Dear Dr."; not "Signed out to ICU"."""

TO_ANOTHER = re.compile(
    r"\s*(?:(?:referr|request|order|zuweis|einweis|solicit|prescr|aanvr|richied)\w* |dear|sehr|estim|cher )",
    re.I,
)
"""Where such a line names another than the author: the report may follow."""

_ROLE = (
    r"(?:radiologist|radiologin|radiologe|radiologue|radi[óo]log[oa]|(?:fach|ober|chef|assistenz)(?:a|ä|ae)rzt(?:in)?"
    r"|consultant|attending|resident|m[ée]decin|m[ée]dic[oa]|facultativo)\b[^.:;]{0,40}(?::.*|\.)?"
)
_NAME = r"(?:(?-i:[A-ZÀ-Þ_][\w'’.-]*|von|van|de[lr]?|la)(?:[ ,]+|$))"
_DEGREE = r"(?:m\.?d|d\.?o|mbbs|frcr|facr|dnb|dmrd)\b"
_SIGNED_ON = r"(?:(?:on|am|el|le|il|op|em) )?\d{1,4}[./-]\d{1,2}[./-]\d{2,4}\b[\d ,:.aphm]{0,20}"
_SIGNER = re.compile(
    r"(?:by |il medico radiologo |pd )?(?:prof|dra?|dott(?:\. ?ssa)?)\b[. ]*(?:(?:dr|med|habil)\b[. ]*)*"
    rf"{_NAME}{{0,4}}(?:[-–] )?(?:{_ROLE}|(?:col|crm|rpps)\b.{{0,30}})?(?:{_SIGNED_ON})?|{_ROLE}"
    rf"|{_NAME}{{1,4}}{_DEGREE}(?:[^:]|:\d){{0,40}}|{_DEGREE}(?:\W+(?:{_DEGREE}|radio\w+))*\W*"
    rf"|(?P<listed>(?=[^\s,]+,){_NAME}{{2,4}}{_SIGNED_ON})",
    re.IGNORECASE,
)


def with_english_headers(report: str) -> str:
    """Replace the headers of `Words.heads` by MIMIC-CXR's."""

    def english(match: re.Match[str]) -> str:
        words = [" ".join(_plain(word).split()) for word in match.group("first", "second") if word]
        headers = list(dict.fromkeys(_ENGLISH[word] for word in words))
        is_wrapped = match["bare"] is not None and not begins_a_line(report, match.start())
        if headers[0] == match["first"] or (is_wrapped and headers[0] not in ("FINDINGS", "IMPRESSION")):
            return match[0]
        return f"\n{' AND '.join(headers)}: "

    return _HEADER.sub(english, report)


def without_views(text: str) -> str:
    """Leave out "CHEST PA AND LATERAL", before a colon or on a line of its own."""
    return _VIEWS.sub(lambda match: "" if begins_a_line(text, match.start()) else match[0], text)


def begins_a_line(report: str, start: int) -> bool:
    """False for a line of wrapped prose: "THE PATIENT HAS A", "HISTORY", "OF SURGERY."."""
    before = report[:start].rstrip()
    return not before or before[-1] in ".:;?!)_" or report.count("\n", len(before), start) > 1


def is_head(words: str) -> bool:
    """True for one to four words before a colon that are no clause: "Klinische Fragestellung", "Workstation ID"."""
    return not _PROSE.search(words) and 0 < len(_JOINING.sub(" ", words).split()) <= 4


def is_of_reading(head: str, is_behind_impression: bool = False) -> bool:
    """True for a head of `Words.reading`: "Right lower lobe", "PICC", "New", "Note"."""
    head = _plain(head).strip()
    is_of_impression = is_behind_impression and _OF_IMPRESSION.search(head) is not None
    return is_of_impression or _READING.search(head) is not None


def is_administrative(head: str) -> bool:
    """True for a head that is none of the reading whatever its other words: "Chest pain", "Critical findings"."""
    return _NOT_OF_READING.search(_plain(head).strip()) is not None


def names_signer(line: str) -> bool:
    """True for "Dr. med. A. Muster, Radiologe", "JOHN SMITH, M.D.", "Muster, Anna on 1/2/2020 3:04 PM" and the like."""
    match = _SIGNER.fullmatch(line.strip()) if len(line) <= 100 else None
    return match is not None and not (match["listed"] and is_of_reading(line))
