"""Where the sentences of a passage end: one decision for every place where one could.

A place is a closing mark, or a blank before a capital where the mark may have been forgotten. It is decided by the
words on either side (`_closes`, `_was_forgotten`), from left to right, so that the words before it are those of its
own sentence. Radiology writes so many full stops that close nothing ("5 mm. nodule", "R. base", "p.o.", "2. 5 cm"),
and leaves out so many blanks and full stops, that a decision needs both sides. PySBD (Sadvilkar and Neumann, 2020) is
asked where these words leave it in doubt: behind a single letter, or a title that only PySBD knows.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# --- Words -------------------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Never the last word: a name or what it shortens follows.
_TITLES = _words(
    """
    dr drs doc mr mrs ms prof messrs mt st capt sgt fig figs e.g i.e eg ie vs v.s cf viz y.o yo s.p
    h.o c.o c.w w.o r.o
    """
)
# Shortened words that others follow. Last words only where the next sentence begins as sentences do ("The", "No").
_SHORTENED = _words(
    """
    approx appx ca max min avg incl excl esp resp assoc prob poss prev est temp pt hx dx rt lt bilat
    ant post lat inf sup prox dist med mod sev sl sm lg mult sig calc diff susp unch unchg aprox wt
    ht sq cu mid rec ref req attn cont imp comp tech
    """
)
# Shortened words that can be last words; a capital decides.
_UNITS = _words(
    """
    cm mm dm km m in ft mg kg g gm mcg ml cc dl oz lb lbs sec secs hr hrs wk wks mo mos yr yrs fr ga
    """
)
_MAY_CLOSE = _UNITS | _words(
    """
    etc al fx fxs tx rx sx abd vol jr sr inc dept hosp ext pts surg univ esq am pm min mins temp dec
    jan feb mar apr jun jul aug sep sept oct nov sat sun mon tue tues wed thu thurs fri post lat sup
    inf ant dx hx op eff eval cath neg pos norm nl wnl
    """
)
_MONTHS = _words("jan feb mar apr jun jul aug sep sept oct nov dec")
_BEFORE_NUMBERS = _MONTHS | _words("no nos fig figs pg pp ext tel vol im ser se img rm ca sat")
ABBREVIATIONS = _TITLES | _BEFORE_NUMBERS | _words("approx no al")
_DAYS = re.compile(
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|(?:January|February|April|June|July|August"
    r"|(?:Septem|Octo|Novem|Decem)ber)\b"
)
# "hepatitis C.", "vitamin D.", "rib 2.": the letter or number belongs to the name, and the stop closes the sentence.
_NAMED_BY_SIGN = _words(
    """
    rib ribs grade grades stage type types level levels zone zones segment segments station lobe
    class number no image images series slice view position lead leads group hepatitis vitamin
    influenza protein factor phase category birads lungrads appendix
    """
)
COUNTED = _NAMED_BY_SIGN | _words("and or of to the than")
# A sentence does not end behind these, unless a capital says so behind a full stop.
FUNCTION_WORDS = _words(
    """
    a an the no any some each every all both either neither this that these those its his her their
    our my and or nor but of in on at to from by with without within for as than into onto over
    under above below between through along across near around about since until before after during
    per via versus vs is are was were be been being has have had may might can could should would
    will shall must do does did not if when while although though because whether which who whose
    where there very more most less rather upon toward towards against behind beneath beside dr mr
    mrs ms prof drs again also still now otherwise likely new compared overlying including
    """
)
_STRAY = _words(
    """
    a an the no of with and or to is are was were has have by from for at than its their any
    """
)
_BEFORE_AMOUNTS = _words("in on about approximately measures measuring only least most up at")
BEFORE_A_NUMBER = COUNTED | _STRAY | _BEFORE_AMOUNTS
"""Behind these a number is part of the sentence, and numbers no item of a list."""
_DETERMINERS = _words("a an the no any of with without some and or new other")
# Go before a noun: "no focal. consolidation", "normal Heart".
_ADJECTIVES = _words(
    """
    focal acute pleural pulmonary cardiac mediastinal cardiopulmonary cardiomediastinal hilar large
    small significant definite discrete interstitial osseous bony vascular suspicious obvious
    confluent lobar mild moderate severe active chronic old left right upper lower middle bilateral
    apical basilar bibasilar basal lateral medial anterior posterior superior inferior central
    peripheral minimal trace stable unchanged normal clear enlarged borderline prominent tortuous
    calcified low high possible probable early subtle patchy diffuse hazy dense further additional
    overt gross frank large-scale airspace
    """
)
_PURE_ADJECTIVES = _ADJECTIVES - _words(
    """
    left right apical base clear normal stable unchanged enlarged early low high old
    """
)
# Behind these an adjective is said of something: "heart is normal", "lungs clear".
_COPULA = _words(
    """
    is are was were be been appears appear remains remain seems seem looks look being grossly mildly
    heart lungs size bones silhouette contours contour vasculature mediastinum pleura otherwise
    """
)
# A lower-case word with which no statement begins: the full stop before it slipped in.
_GOES_ON = _words(
    """
    of and or nor but is are was were which that than has have been being versus vs
    """
)
# The same, where what stands before could not stand alone.
_MAY_GO_ON = _words(
    """
    with without to by from due consistent at along including compatible suggesting suggestive
    """
)
# Sentences begin with these, whatever stands before.
_OPENERS = _words("the there no this these it an")
_LATE_OPENERS = _OPENERS | _words(
    """
    he she again otherwise however additionally please recommend we they his her
    """
)
# These begin one where it says something of them (`_STATES`).
_SUBJECTS = _words(
    """
    heart cardiac cardiomediastinal cardiopulmonary lungs lung pulmonary pleura pleural mediastinum
    mediastinal hila hilar bones bony osseous trachea tracheal aorta aortic degenerative vascular
    visualized costophrenic soft tubes lines central interval overall endotracheal nasogastric
    enteric diaphragm hemidiaphragms spine thoracic airspace multiple left right bilateral patient
    catheter
    """
)
_ORGANS = _words("heart lungs bones mediastinum trachea aorta")
# These begin one before a noun.
_SIZES = _words(
    """
    mild minimal moderate severe small large trace normal clear stable unchanged low old
    """
)
# These begin one at the beginning of a line.
_OTHER_OPENERS = _words(
    """
    normal stable unchanged clear old low lower upper slight subtle possible probable increased
    decreased improved new calcified prominent enlarged limited single frontal mildly grossly
    negative sternotomy surgical status post pneumonia effusion edema atelectasis cardiomegaly
    scoliosis osteopenia granuloma emphysema copd patchy streaky hazy bibasilar
    """
)
_LINE_OPENERS = _LATE_OPENERS | _SUBJECTS | _SIZES | _OTHER_OPENERS
_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|appears?|remains?|shows?|demonstrates?|contains?|ends?|terminates?|projects?|may|can)\b"
)
_STATES = re.compile(
    rf"{_VERB.pattern}|\b(?:normal|unchanged|stable|clear|intact|unremarkable|enlarged|within|seen|noted|demonstrated)\b"
)
# "Compared to the prior study There is", "If there is concern The": the sentence has only begun.
_SUBORDINATE = _words(
    """
    if when although while because though as whether since until unless
    """
)
_INTRODUCTORY = _words(
    """
    given compared comparing in on at with after before due despite following for from relative to
    """
)
_ASKING = _words("is are was were does do did has have any can could")
_TAKES_OBJECT = re.compile(
    r"(?:shows?|showed|shown?|demonstrat(?:es?|ed)|reveal(?:s|ed)?|identif(?:y|ies)|suggests?|represents?|indicates?|sees?"
    r"|find|finds|noted?|contains?|include[sd]?|involves?|called|says?|states?|reads?|(?!\w*(?:megaly|anomaly)\b)\w+ly"
    r"|(?!(?:scarr|thicken|blunt|widen|tent|crowd|flatten|strand|shadow|cuff|wedg|cours|loop|infold|cephaliz|kink)ing\b)\w+ing)"
)
_NAMED_BY = _words("with by per and to from for dr md drs")
# Parts of the body and of a report that are named before a colon.
_PART = (
    r"(?:LUNGS?|HEART|CARDI\w+|MEDIASTIN\w+|HILA|HILAR|PLEURAL?|BON(?:ES|Y)|OSSEOUS|SKELETAL|SOFT|LINES|TUBES|SUPPORT"
    r"|DEVICES|OTHER|UPPER|ABDOMEN|CHEST|AIRWAYS?|TRACHEA|VESSELS|VASCULA\w+|PULMONARY|DIAPHRAGMS?|SPINE|RIBS|VISUALIZED"
    r"|MUSCULOSKELETAL|RECOMMENDATIONS?|NOTIFICATIONS?|COMPARISONS?|TECHNIQUE|INDICATION|HISTORY|ADDITIONAL|THORA\w+"
    r"|WET READ|HARDWARE|CATHETERS?|LIMITATIONS|VIEWS?|IMPRESSION|FINDINGS|CONCLUSION|NOTE)"
)
_LABEL = re.compile(
    rf"(?:(?:{_PART}|{_PART.title()}|[A-Z][a-z]+)(?:(?:[ /]| ?& ?)[A-Za-z]+){{0,3}}"
    r"|(?!XX)[A-Z]{4,}(?:[ /&]+[A-Z]+){0,3}):(?!\d)"
)
_PART_BEGINS = re.compile(rf"{_PART}\b", re.IGNORECASE)

_REDACTED = re.compile(r"(?:X{2,}|_{2,})")
_NEXT_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+|_{2,}")
_DOTTED = re.compile(r"(?:[A-Za-z]{1,2}\.){1,3}[A-Za-z]{1,2}|[Pp]h\.[Dd]|q\.\d?h")
_ADDRESS = re.compile(r"(?:www\.|https?:)\S*$|\S@\S*$|\S\.(?:com|org|edu|gov|net)$", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:,\d{3})*")
_LISTED = re.compile(r"[(\[#]?(?:\d{1,2}|[A-Za-z]|[IVXivx]{1,4})[)\]]?")

# --- Places ------------------------------------------------------------------------------------------------------

_PLACE = re.compile(
    r"""(?P<mark>\.{3,}|\.(?:[ ]\.){2,}|[?!…][.?!…]*|\.)(?P<closing>(?:[)\]}"'”’>]|&[gl]t;)*)(?=\s*\S)
      | (?<=[\w)%\]])(?P<blank>[ ])(?=[A-Z])""",
    re.VERBOSE,
)


# Before the first word: brackets, quotation marks, left-over full stops, "+vomiting".
_OPENING = re.compile(r"^(?:&[gl]t;|[^\w,;:/%-])*(?:-+\s*(?=[^\W\d]))?")


# Characters on either side of a place that may matter; more would make long passages slow.
_FAR = 400


class Place(NamedTuple):
    """A place where a sentence may end.

    Attributes:
        before: the sentence up to the mark (or blank), without blanks at its ends.
        mark: "." or "?!" or the like; empty where it may have been forgotten.
        closing: brackets and quotation marks directly behind the mark.
        after: the rest of the passage, without blanks and opening marks before its first word.
        is_apart: a blank stands between mark and rest.
        has_case: False in a passage in capitals, whose capitals say nothing.
        stands_apart: a blank stands before the mark.
    """

    before: str
    mark: str
    closing: str
    after: str
    is_apart: bool
    has_case: bool
    stands_apart: bool = False

    @property
    def last(self) -> str:
        """The last word before the place, with the full stops within it: "clear", "p.m", "T12", "1.5"."""
        word = self.before.rsplit(" ", 1)[-1].lstrip("([{\"'“‘-–—")
        is_whole = _DOTTED.fullmatch(word) or _NUMBER.match(word)
        return word if is_whole else re.split(r"[.?!/]+(?=[A-Za-z])", word)[-1]

    @property
    def last_but_one(self) -> str:
        words = self.before.split()
        return words[-2].lower().rstrip(".") if len(words) > 1 else ""

    @property
    def next(self) -> str:
        """The first word after it: letters, or digits, or a redaction."""
        match = _NEXT_WORD.match(self.after)
        return match[0] if match else ""

    @property
    def begins_capital(self) -> bool:
        """A capital or a redaction follows, where capitals say something."""
        return self.has_case and (self.next[:1].isupper() or self.next[:1] == "_")

    @property
    def begins_lower(self) -> bool:
        """A word follows that need not begin a sentence."""
        return self.next[:1].isalpha() and not self.begins_capital


def sentence_starts(passage: str) -> list[int]:
    """Where the sentences of a passage begin.

    Args:
        passage: one line of text with single blanks, not empty.

    Returns:
        ascending positions, the first 0. What stands between two of them may lack a letter ("___.", ". .").
    """
    starts = [0]
    has_case = _has_case(passage)
    enclosed = list(_enclosed(passage))
    for match in _PLACE.finditer(passage):
        begin, end = starts[-1], match.end()
        at = match.start()
        if end <= begin or any(a < at and end <= b and passage[begin:a].strip() for a, b in enclosed):
            continue
        place = _place(passage, begin, match, has_case)
        if match["blank"]:
            closes: bool | None = _was_forgotten(place) or _is_own_bracket(passage, begin, at, enclosed)
        else:
            within = any(a < at < b < end and passage[begin:a].strip() for a, b in enclosed)
            closes = not (within and place.begins_lower) and _closes(place)
        if closes is None:
            closes = any(at < start <= end + 1 for start in _pysbd_starts(passage))
        if closes:
            starts.append(end + len(passage[end:]) - len(passage[end:].lstrip()))
    return starts


def _place(passage: str, begin: int, match: re.Match[str], has_case: bool) -> Place:
    rest = passage[match.end() : match.end() + _FAR]
    return Place(
        passage[max(begin, match.start() - _FAR) : match.start()].strip(),
        match["mark"] or "",
        match["closing"] or "",
        _OPENING.sub("", rest),
        rest[:1] == " ",
        has_case,
        passage[match.start() - 1 : match.start()] == " ",
    )


def _has_case(passage: str) -> bool:
    """False where less than a tenth of the letters is small."""
    letters = [letter for letter in passage if letter.isalpha()]
    return sum(letter.islower() for letter in letters) >= 0.1 * len(letters)


def _enclosed(passage: str) -> Iterator[tuple[int, int]]:
    """Pairs of brackets and of quotation marks, [open, close]; those without their other half are none."""
    opened: list[int] = []
    quote = None
    for match in re.finditer(r"""[()\[\]{}"“”]""", passage):
        at, sign = match.start(), match[0]
        if sign in "([{":
            opened.append(at)
        elif sign in ")]}":
            if opened:
                yield opened.pop(), at
        elif quote is not None:
            yield quote, at
            quote = None
        elif sign != "”" and not passage[at - 1 : at].isdigit():  # 12" is a length
            quote = at


def _is_own_bracket(passage: str, begin: int, at: int, enclosed: Iterable[tuple[int, int]]) -> bool:
    """A bracket that is the whole sentence, before a capital: "(See above) No effusion"."""
    return any(b == at - 1 and b - a > 4 and not passage[begin:a].strip() for a, b in enclosed)


@functools.lru_cache(maxsize=16)
def _pysbd_starts(passage: str) -> frozenset[int]:
    return frozenset(span.start for span in _segmenter().segment(passage))


@functools.cache
def _segmenter() -> Any:
    with warnings.catch_warnings():
        # PySBD 0.3.4 has invalid escapes in its regular expressions, which newer Pythons remark upon.
        warnings.simplefilter("ignore")
        import pysbd

    return pysbd.Segmenter(language="en", clean=False, char_span=True)


@functools.cache
def _pysbd_titles() -> frozenset[str]:
    _segmenter()
    from pysbd.lang.english import English

    return frozenset(English.Abbreviation.PREPOSITIVE_ABBREVIATIONS)


# --- Decisions ---------------------------------------------------------------------------------------------------


def _closes(place: Place) -> bool | None:
    """Whether the mark at this place ends the sentence; None where PySBD should be asked."""
    if not re.search(r"\w", place.before):
        # "?pneumonia" and "? pneumonia" ask; other marks without a word before them are left over.
        return "?" not in place.mark
    if not place.next:
        # ". ." and ".;" at the end: left over as well. "- 5 cm" goes on.
        return re.search(r"\w", place.after) is None
    if place.after[0] in ",;:/%-":
        return False
    if "!" in place.mark:
        return True
    if "?" in place.mark:
        return _question_closes(place)
    if "…" in place.mark or len(place.mark) > 2:
        return not place.begins_lower or place.next in ("no", "there")
    if place.closing.strip("\"'”’"):
        # "(2 cm.)", "(e.g.)": the bracket takes the place of the last word.
        return not place.begins_lower or place.next.lower() in _OPENERS
    return _full_stop_closes(place)


def _question_closes(place: Place) -> bool:
    """ "effusion? or atelectasis" goes on, "Is there edema? no." does not; "?granuloma" asks about the next word."""
    if not place.is_apart and (not re.search(r"[\w)]$", place.before) or len(place.next) == 1):
        return False  # also "38?C", a sign that was lost
    if not place.begins_lower or place.next.lower() in ("no", "yes", "there"):
        return True
    return place.before.split()[0].lower() in _ASKING


def _full_stop_closes(place: Place) -> bool | None:
    last, low, after = place.last, place.last.lower(), place.next.lower()
    low = low.rsplit("-", 1)[-1] if re.search(r"-\w\w+$", low) else low  # "post-op." is as "op."
    is_first = " " not in place.before
    if place.next.isdigit() and not place.is_apart and _is_decimal(place, low):
        return False
    if last[-1:].isdigit() and place.begins_lower and after in _UNITS and after not in ("in", "m"):
        return False  # 4. cm
    if not place.is_apart and _ADDRESS.search(place.before + "." + place.after.split()[0]):
        return False
    if _NUMBER.fullmatch(last):
        return _number_closes(place, is_first)
    if _REDACTED.fullmatch(last):
        return not (place.begins_lower and after in _GOES_ON | _UNITS)
    if len(last) == 1 and last.isalpha():
        return _letter_closes(place, is_first)
    if _DOTTED.fullmatch(last):
        return _dotted_closes(place, is_first)
    if low in _TITLES:
        return False
    if low == "no" and (after.isdigit() or (after[:1] == "_" and not is_first)):
        return False  # "No. 5", not "Edema? No. ___ catheter"
    if low in _BEFORE_NUMBERS and after.isdigit():
        return False
    is_unit = low in _UNITS and (low != "in" or place.last_but_one[-1:].isdigit())
    behind_number = place.last_but_one[-1:].isdigit() or bool(re.match(r"\d", last))
    if is_unit or (low in _MAY_CLOSE and (low not in _SHORTENED or behind_number)):
        if is_first and not is_unit:
            return False
        if place.begins_lower:
            return _statement_follows(place)
        return not (low in ("am", "pm") and _DAYS.match(place.after))
    if low in _SHORTENED and not (place.has_case and last.isupper() and len(last) > 1):  # "CA" is no "ca."
        return not is_first and after in _LATE_OPENERS and (place.begins_capital or after in _OPENERS)
    if place.begins_lower:
        return _lower_case_begins(place)
    return None if low in _pysbd_titles() else True


def _is_decimal(place: Place, low: str) -> bool:
    """A full stop glued to a digit: ".5 cm", "1.5", "03.11.13", "___.5", "No.5"; not "mass.2 clips"."""
    return (
        place.stands_apart
        or place.last[-1:].isdigit()
        or low in _BEFORE_NUMBERS
        or _REDACTED.fullmatch(place.last) is not None
    )


def _statement_follows(place: Place) -> bool:
    """In lower case behind "5 mm." or "p.m.": "the tube is low"; "heart is normal", if there was a verb before."""
    after = place.next.lower()
    clause = re.split(r"[.,;:?!]", place.after, maxsplit=1)[0]
    has_verbs = all(_VERB.search(part.lower()) is not None for part in (place.before, clause))
    return after in _OPENERS or (has_verbs and after in _ORGANS)


def _number_closes(place: Place, is_first: bool) -> bool:
    """ "2. 5 cm" and "4. cm" are measurements, "2. Stable" at the beginning is an item, "of rib 2. 5 mm" is an end."""
    if is_first:
        return False
    after = place.next.lower()
    if place.begins_lower and after in _UNITS | {"x"}:
        return False
    if place.next.isdigit() and len(place.last) < 3 and place.last_but_one not in _NAMED_BY_SIGN:
        measures = re.match(r"\d{1,2}(?:\s?-?\s?(?:cm|mm|m|ml|cc|mg|kg|in|inch|inches|x|%)\b|%)", place.after)
        return measures is None
    if place.begins_lower and not place.is_apart:
        return after in _OPENERS or len(place.next) > 2
    return not (place.begins_lower and after in _GOES_ON)


def _letter_closes(place: Place, is_first: bool) -> bool | None:
    """ "vitamin D. Osteopenia" ends, "R. base", "E. coli" and "J. Smith" do not."""
    after = place.next.lower()
    if is_first:
        return False
    if place.last_but_one[-1:].isdigit():
        return not place.begins_lower or after in _LATE_OPENERS  # "37 C. The", "7 F. catheter"
    if place.last_but_one in _NAMED_BY_SIGN:
        return not place.begins_lower or after in _LATE_OPENERS | _SUBJECTS
    if after in _LATE_OPENERS and (place.is_apart or place.begins_capital):
        return True
    if place.begins_lower or len(place.next) == 1:
        return False
    if place.last_but_one in _NAMED_BY or not place.is_apart:
        return False
    if place.begins_capital and after in _LINE_OPENERS and not place.before.split()[-2][:1].isupper():
        return place.last not in "RL"
    return None


def _dotted_closes(place: Place, is_first: bool) -> bool:
    """ "q.d. Edema", "4 p.m. The" end; "P.A. and", "I.V. contrast", "J.R. Carter", "U.S. hospital" do not."""
    after = place.next.lower()
    if is_first or place.last.lower() in _TITLES or (len(after) == 1 and not place.is_apart):
        return False
    if place.begins_lower:
        return _statement_follows(place)
    if place.next.isdigit():
        return not re.match(r"\d{1,4}[/:.-]\d", place.after)
    if _DAYS.match(place.after):
        return False
    is_name = place.last[:1].isupper() and place.last_but_one in _NAMED_BY and after not in _LINE_OPENERS
    return not (is_name or place.last == "U.S")


def _lower_case_begins(place: Place) -> bool:
    """Behind an ordinary word: closed, unless the full stop slipped into the middle of a sentence."""
    low, after = place.last.lower(), place.next.lower()
    if low in _STRAY or after in _GOES_ON:
        return False
    stands_alone = _VERB.search(place.before) is not None or place.before.lower().startswith("no ")
    if after in _MAY_GO_ON and not stands_alone:
        return False
    if low in _PURE_ADJECTIVES and place.last_but_one in _DETERMINERS | _ADJECTIVES:
        return False
    if not place.is_apart and len(place.next) < 2:
        return False
    if re.fullmatch(r"[b-df-hj-np-tv-xz]+|[a-z]", place.last):
        return after in _LINE_OPENERS  # a word without a vowel is a shortened one
    return True


def _was_forgotten(place: Place) -> bool:
    """Whether a full stop is missing at this blank, without doubt: "No effusion The heart is large"."""
    if not re.search(r"[\w%)]$", place.before):
        return False
    last, low, after = place.last, place.last.lower(), place.next.lower()
    if low in FUNCTION_WORDS or low.rstrip(".") in _TITLES or _LISTED.fullmatch(place.before):
        return False
    if label := _LABEL.match(place.after):
        is_part = _PART_BEGINS.match(place.after) is not None
        is_plain = not last[:1].isupper() or _REDACTED.fullmatch(last) is not None
        if is_part and (":" in place.before or (label[0].isupper() and place.has_case)):
            return True
        return is_plain and place.has_case and low not in _ADJECTIVES
    if not place.has_case:
        return False
    if not re.fullmatch(r"[A-Z][a-z]+", place.next) or place.before.count(" ") == 0:
        return False
    if _TAKES_OBJECT.fullmatch(low) or _only_begun(place.before):
        return False
    if after in _LATE_OPENERS:
        return True
    if _REDACTED.fullmatch(last) and not (_VERB.search(place.before) or place.before.startswith("No ")):
        return False
    if last[:1].isupper() and not _REDACTED.fullmatch(last):
        return False
    if low in _ADJECTIVES and place.last_but_one not in _COPULA:
        return False
    if after in _SIZES:
        noun = place.after[len(place.next) :].split()[:1]
        return bool(noun) and noun[0].rstrip(".,;").islower() and noun[0] not in FUNCTION_WORDS
    clause = re.split(r"[.,;:?!]", place.after, maxsplit=1)[0]
    return after in _SUBJECTS and _STATES.search(clause) is not None


def _only_begun(before: str) -> bool:
    """A clause or phrase that leads to the main clause: "Compared to the prior study", "If there is concern"."""
    first = before.split()[0].lower()
    if first in _SUBORDINATE:
        return "," not in before or _VERB.search(before.split(",", 1)[1]) is None
    return first in _INTRODUCTORY and _VERB.search(before) is None


def line_ends_sentence(before: str, line: str, is_short: bool) -> bool:
    """Whether a line ended a statement without a full stop: "Heart: normal", "Lungs: clear".

    Args:
        before: the passage up to the end of a line, without a closing mark.
        line: the next line.
        is_short: the first word of the next line had fitted behind it.
    """
    before = before[-_FAR:]
    place = Place(before, "", "", line, True, _has_case(before + line))
    word = place.next
    if not place.begins_capital or _REDACTED.fullmatch(word) or not re.search(r"[\w%)\]]$", before):
        return False
    if _was_forgotten(place):
        return True
    low = place.last.lower()
    if (
        low in FUNCTION_WORDS | _TITLES
        or _TAKES_OBJECT.fullmatch(low)
        or _only_begun(before)
        or not word[1:].islower()
    ):
        return False
    if low in _ADJECTIVES and place.last_but_one not in _COPULA and word.lower() not in _LATE_OPENERS:
        return False
    return is_short or word.lower() in _LINE_OPENERS
