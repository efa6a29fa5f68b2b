"""Sentence boundaries of a passage: PySBD (Sadvilkar and Neumann, 2020) and a short table of rules for radiology.

`_CLOSES` lists boundaries that PySBD misses: a forgotten blank ("clear.No effusion") or full stop, and words that it
takes for abbreviations ("mass.", "PA."). `_GOES_ON` lists full stops and question marks that close nothing ("5 mm.
nodule", "Pt. is rotated"); they are hidden from PySBD, which decides about all others.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

from data_prep.text.abbreviations import full_stops
from data_prep.text.languages import WORDS, is_head

# No sentence ends with these.
_FUNCTION_WORDS = "|".join(WORDS["en"].goes_on.split()) + (
    "|no|any|some|each|all|both|this|these|those|its|his|her|their|our|may|might|can|could|should|would|will|do|does"
    "|not|who|where|very|more|most|less|now|new|up|only|least"
)

_UNIT = r"(?:[cmk]?m|ft|mc?g|kg|m?l|cc|oz|lbs?|secs?|hrs?|wks?|mos?|yrs?|[Ff]r)"
_TITLE = r"(?:[Dd]rs?|DRS?|[Mm](?:r|rs|s)|Prof|[Ff]igs?|vs|e\.g|i\.e|y\.o|Capt|Sgt)"
_SHORTENED = (
    "(?:approx|avg|incl|excl|poss|prob|pt|hx|max|min|est|temp|assoc|resp|prev|diff|lat|ant|post|med|lg|sm|calc|unch"
    "|neg|rt|lt|bilat)"
)
# Names that end with a letter or a number.
_NAMED = "(?:ribs?|grade|stage|type|levels?|zone|segment|class|category|hepatitis|vitamin|influenza|factor|lead|no)"
_REDACTED = "(?:XX+|__+)"
_OPENER = "(?:The|There|No|This|It|the|there|no|this|it)"
# What a head ends with, and words that it may begin with: "Left Costophrenic Angle:", "The visualized Bones: intact".
_ORGAN = (
    "(?:lungs?(?: fields?| bases| volumes)?|heart|cardi[a-z]+|mediastin[a-z]+|hil(?:a|um)|pleura|bon(?:es|y)|osseous"
    "|soft tissues?|tissues?|lines|tubes|abdomen|chest(?: wall)?|airways?|trachea|spine|ribs|neck|angles?|aorta"
    "|(?:hemi)?diaphragms?|silhouettes?|contours?|structures?|spaces?|vasculature|vessels|devices?|thorax"
    "|regions?|apices|arter(?:y|ies)|veins?|lobes?|zones?|nodes?|clavicles?|shoulders?|skeleton|vertebra[el]?|bowel)"
)
_PART = f"(?:{_ORGAN}|recommendations?|notifications?|comparisons?|technique|indication|history)"
_OF_PART = (
    "(?:right|left|bilateral|upper|lower|middle|mid|central|visuali[sz]ed|visible|imaged|remaining|acute|prior|previous"
    "|portable|AP|PA|thoracic|cervical|lumbar|soft|pulmonary|pleural|costophrenic|osseous|bony|support"
    "|musculoskeletal|upright|supine|erect|lateral|frontal|anterior|posterior|known|active|post|further|other)"
)
_WORD = rf"(?:(?!XX)[A-Z](?:[a-z]|[A-Z]{{2}})[\w'-]*|(?i:and|or|of|the|{_PART}|{_OF_PART})|&)"
_HEAD = (
    rf"(?=[A-Z])(?:{_WORD}(?: ?[/,] ?| )){{0,6}}?(?:(?i:{_PART}):|(?i:{_ORGAN})(?: \w+){{0,2}} (?:is|are)\b)"
)

# "Pleural effusion: No", or "-", at the end of a passage; a stop between digits is none. "Right" / "lung:" is one.
_LABEL = r"([^\W\d_][^:：.;?!]{0,60}?) ?[:：](?=\s|$|[^\W\d_])"
_ENTRY = re.compile(rf"(?:^|[.:;?!] ){_LABEL} ?(?P<value>\S|(?:(?![.:;?!：]\D).)+)$")
# Characters before a line's end that matter, and those of an entry.
_NEAR, _LONG = 40, 200
GOES_ON = rf"(?<![^\W_])(?:{'|'.join(' '.join(w.goes_on for w in WORDS.values()).split())})$|[,;/&(-]$"
"""Ends of lines behind which a sentence goes on, in any case."""
_HIDDEN = "\ue000"  # stands for a mark that closes nothing

NO_ITEM_FOLLOWS = re.compile(
    rf"\b(?:{_TITLE}|no)\.\s*$|\b(?:and|or|of|to|than|an?|the|no|with|is|are|was|has|by|from|for|at|in|on|{_NAMED}|\w)\s*$",
    re.IGNORECASE,
)
"""Behind these a number is part of the sentence, and does not mark an item of a list."""

# Each matches up to a boundary that it is sure of.
_CLOSES = re.compile(
    "|".join(
        (
            # A forgotten blank: "clear.No", "clear.no", "(base).No", "SVC.The", "T7.No", "___.___", "CLEAR.NO".
            r"[a-z)\]%][.?!](?=[A-Z_(])",
            r"[a-z]{3}\.(?=[a-z]{3}|no\b)",
            r"[A-Z0-9]{2}\.(?=[A-Z][a-z]|XX)",
            r"(?:XX|__)\.(?=[A-Z]|__)",
            r"[A-Z]{3}\.(?=[A-Z]{2})",
            r"[a-z]{3}\.(?=\d\s*[a-z])",
            # A left-over mark: "clear. .", "clear..", "clear.;", ".No".
            r"^\.(?= ?\w)",
            r"(?<!\.)\.(?= ?[.;](?:\s|$))",
            # "[Lungs are clear.] [No effusion.]", "size normal...lungs clear"
            r"[.?!][\]>](?= ?[\w\[<(])|[^\W\d_]{2}(?:\.{2,}|…)(?=[^\W\d_]{2})",
            # Abbreviations of PySBD: "No mass. No", "on PA. The", "5 mm. No", "given q.d. Edema".
            r"\bmass\.(?= \w)",
            rf"\b(?:PA|AP|CT|[Pa-z]{_HIDDEN}[Aa-z]|{_UNIT})\.(?= {_OPENER}\b| [A-Z][a-z]+ [a-z])",
            # A letter or a number at the end: "hepatitis C. No", "37 C. Heart", "of 5. Clear".
            rf"\b(?:{_NAMED}|the|\d+) (?:[A-Z]|[IVX]+|\d+)\.(?= [A-Z(]| \d+ ?{_UNIT}\b| {_OPENER}\b)",
            r"\d\.(?= [A-Z])",
            # A forgotten full stop: "No effusion The heart is large", "since XXXX There is"; before a whole head,
            # "clear Left Lung: large", but not "the left Lung: large", "the normal Heart is".
            rf"\b(?=[a-zX_]+\)? [A-Z])(?!(?i:{_FUNCTION_WORDS})\b)(?:(?:[a-z]{{3,}}(?<!ing)|{_REDACTED})"
            r"(?= The(?: \w+){0,2} (?:is|are)\b| There (?:is|are)\b| No [a-z]+\b)"
            rf"|(?!{_OF_PART}\b|(?:(?<=\b[TtHhIi](?:he|is|er|ts) )|(?<=\b[Nn]o )|(?<=\b[Aa] ))"
            rf"[a-z]+(?:ed|al|ic|ary|ous) )(?:[a-z]{{2,}}(?<!ing)\)?|(?<!\bthe ){_REDACTED})"
            rf"(?= {_HEAD}))",
        )
    )
)
# The same in capitals, where only an earlier head tells: "HEART: NORMAL LUNGS: CLEAR".
_CLOSES_HEAD = re.compile(
    rf":[^.:;?!]*?\b(?!(?i:{_FUNCTION_WORDS}|{_OF_PART})\b)(?<!\b[Aa][Nn][Dd] )(?<![/&,] )\w+\)?"
    rf"(?= (?=[A-Z])(?:(?i:{_PART}|{_OF_PART})(?: ?[/,&] ?| )(?i:and (?:\w+ )?)?(?i:of |the )*){{0,6}}?(?i:{_PART}):)"
)
# Marks of other scripts, and a forgotten blank between letters that are not ASCII's.
_CLOSES_ELSEWHERE = re.compile(
    r"(?:[。！？；｡।॥؟۔։።။]|(?<!\d)．|．(?!\d)|(?<=[⺀-鿿])[.;?!](?=[⺀-鿿]))+[」』”’）】》\"')]*(?=\s*\S)"
    r"|[à-ÿ]\.(?=[A-ZÀ-Þ])|[a-z]\.(?=[À-Þ])|[а-яёα-ώ]{2}\.(?=[А-ЯЁΑ-Ω])"
)
# Each matches up to a mark that closes nothing.
_GOES_ON = re.compile(
    "|".join(
        (
            rf"\b{_TITLE}\.",
            rf"\b(?i:{_SHORTENED})\.(?=\s?[a-z\d]|\s[A-Z][a-z]+ lobe)",
            rf"\d\s?{_UNIT}\.(?=\s(?!(?:the|there|no|it)\b)[a-z])",
            rf"\d\.(?=\s?\d*\s?{_UNIT}\b)",
            r"\b[A-Za-z]\.(?=[A-Za-z]\.)",
            r"(?<=\b[A-Za-z]\.)[A-Za-z]\.(?=\s(?!(?:the|there|no|it)\b)[a-z])",
            r"\b[RL]\.(?= [a-z])",
            r"\b(?:an?|the|no|of|with|and|or|is|are|was|were)\.(?= [a-z])",
            r"\b[A-Z]\.(?= [A-Z]\.)",
            r"[.?](?= (?:and|or|nor|versus|of|is|are|was|were|which)\b)",
            # "?granuloma", "38?C", "opacities?, as", "organisms ? such"
            r"\?(?=[A-Z]?[a-z]|[CF]\b|,)|(?<=\s)\?(?= (?!no\b)[a-z])",
        )
    )
)
# PySBD's own, with the same groups. There "\d{1,3},?\s?-?\s?" repeats, which cuts digits in exponentially many ways.
_NUMBERED_REFERENCE = (
    r"(?<=[^\d\s])(\.|∯)((\[(\d+(?:,\s?-?|\s-?|-)\s?)*\d{1,3}\])+|((\d{1,3}\s?)?\d{1,3}))(\s)(?=[A-Z])"
)
# PySBD's time grows with the square of a text's length; no real passage is as long.
_CHUNK = re.compile(r".{1,2000}(?:[.?!] |$)|.{1,4000}(?: |$)|.{1,4000}", re.DOTALL)


def sentence_starts(passage: str, language: str = "en") -> list[int]:
    """Ascending positions, the first 0, at which the sentences of a passage (one line, not empty) begin.

    `language`: one of `languages.LANGUAGES`. What stands between two of them may lack a letter ("___.", ". .").
    """
    known, found = passage, set()
    if (rules := full_stops(language)) is not None:
        known = rules[0].sub(lambda match: match[0].replace(".", _HIDDEN), passage)
        found = {match.end() for match in rules[1].finditer(passage) if known[match.end() - 1] == "."}
    hidden = _GOES_ON.sub(lambda match: match[0][:-1] + _HIDDEN, known)
    for closes in (_CLOSES, _CLOSES_HEAD, *(() if passage.isascii() else (_CLOSES_ELSEWHERE,))):
        found |= {match.end() for match in closes.finditer(hidden)}
    sure = sorted({0, *found, len(passage)})
    starts = set()
    for begin, end in zip(sure, sure[1:], strict=False):
        for chunk in _CHUNK.finditer(hidden, begin, end):
            text = chunk[0]
            starts.add(chunk.start() + len(text) - len(text.lstrip()))
            if re.search(r"[.?!]\W*\w", text):
                starts |= {chunk.start() + span.start for span in _segmenter().segment(text)}
    return sorted({0, *starts} - {len(passage)})


def line_ends_sentence(before: str, line: str, is_short: bool) -> bool:
    """True if the passage `before` a line ends a sentence without a full stop: "Heart: normal", "Lungs: clear".

    `is_short`: the first word of the line would have fitted behind it.
    """
    last = before.rsplit(" ", 1)[-1]
    label = re.match(_LABEL, line)
    entry = _ENTRY.search(before, max(0, len(before) - _LONG)) if label and is_head(label[1]) else None
    if entry and not re.match(f"(?i:{_OF_PART}) (?i:{_PART})", f"{last} {line}"):
        is_whole = len(entry["value"]) == 1 or not re.search(f"(?i){GOES_ON}", before)
        if is_whole and (line[0].islower() or last[-1] not in ".?!"):
            return True
    goes_on = rf"(?i:{_FUNCTION_WORDS})|(?=[A-Z])(?i:{_OF_PART})|.*[,;:/&(-]"
    # "There is a left" / "Port-A-Cath"
    is_open = re.fullmatch(goes_on, last) or re.search(rf"\b[Aa]n? (?:\w+ )?{_OF_PART}$", before[-_NEAR:])
    if is_open or not re.match(r"[A-Z][a-z]", line):
        return False
    # Behind a capitalised word the label may have two words: "Imaging" / "Notes:".
    begins_label = re.match(r"[A-Z]\w+:", line) is not None and not re.match(r"[A-Z][a-z]", last)
    return " " in before and (begins_label or is_short)


@functools.cache
def _segmenter() -> Any:
    with warnings.catch_warnings():
        # PySBD 0.3.4 has invalid escapes in its regular expressions, of which newer Pythons warn.
        warnings.simplefilter("ignore")
        import pysbd
        from pysbd.lang.english import English

    segmenter = pysbd.Segmenter(language="en", clean=False, char_span=True)
    segmenter.language_module = type("English", (English,), {"NUMBERED_REFERENCE_REGEX": _NUMBERED_REFERENCE})
    return segmenter
