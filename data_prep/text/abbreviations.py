"""Language of a report by its function words, and abbreviations in languages other than English.

The rules of `boundaries` apply to every language. No list holds for all: "dx." is a side in Italian and a diagnosis in
Spanish, and English sentences end with "max." or "st.".
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from typing import NamedTuple


class Words(NamedTuple):
    """Words of a language, with blanks between them and without their last full stop; the last three are patterns.

    `function`: words by which the language is known. `abbreviations`: never end a sentence. `sides`: end one before a
    capital, unless a word of `places` follows or one of `governs` stands before. `endings`: end one before any capital.
    `ordinals`: what an ordinal number counts.
    """

    function: str
    abbreviations: str = ""
    sides: str = ""
    endings: str = ""
    ordinals: str = "(?!)"
    places: str = r"(?-i:[LS][SIM][DGIS]?)\b|lobe\b|l[oó]b(?:ul)?o\b|base\b|champs?\b|campos?\b"
    governs: str = "(?!)"


LANGUAGES = {
    "en": Words(
        "the is are was were of and with without there no not in on at to for from by or as an this that has have "
        "been be within",
    ),
    "de": Words(
        "der die das dem den des ein eine einer eines einem einen kein keine keinen keiner keines und oder mit ohne "
        "im in am an auf bei von vom zum zur ist sind nicht für nach sowie als auch wie bis beim unter über",
        "ca bzw ggf evtl vgl inkl incl insb insbes sog bzgl bez max min mind vermutl wahrsch fragl verm dd dr dr.med "
        "prof nr abb st pat klin radiol path postop präop intraop entspr zusätzl geringgr mäßiggr hochgr ausgepr deutl "
        "ger chron pulm kard mediast unverä zzt derz ehem sek prim st.p st.n n i.vgl insges progr segm vv aa proc "
        "lig resp röntg rö voraufn jug subcl pathol verd norm oberh unterh",
        "re li bds bd beids beidseits bilat bil r l",
        "o.b o.p.b o.a a.p p.a d.v v.d i.v i.d.n i.o s.o s.u o.ä u.ä u.s.w n.a k.a etc usw usf ff ant post "
        "lat med kaud kran inf sup int ext ventr dors apik bas seitl",
        r"rippen?|rippenbogens?|i[ck]r|inter[ck]ostal\w+|[blh]wk|(?:brust|lenden|hals)?wirbel\w*|tag\w*|wochen?|"
        r"monat\w*|lebens\w+|postop\w*|januar|februar|märz|april|mai|juni|juli|august|september|oktober|november|"
        r"dezember|hälfte|drittel|finger\w*|zehe\w*",
        r"(?!herz|rest)\w*(?:lappen|lappens|feld|felde[rs]?|feldern|geschoss|hemithorax|hilus|pleura|winkel|kuppel|"
        r"lungenspitze|basis|hälfte|seite|lunge(?!\s(?:sonst\s)?(?:frei|klar|normal|unauff|o\.|regel))|lungenflügel|"
        r"bronchus|rippen?|rippenbogen|schulter|[kc]lavi[ck]ula|s[ck]apula|vorhof|ventrikels?|recessus|sinus|segment|lingula|axilla|mamma|niere|"
        r"humerus\w*|arterie|vene|arm|thoraxwand|zwerchfellhälfte)\b|(?-i:[OUM][LF])\b",
        r"(?i:kein\w*|ein\w*|mit|ohne|i[mn]|a[mn]|d(?:er|ie|as|em|en|es)|bei)|[a-zäöüß]+e[rsnm]?|(?:Klein|Gro(?:ß|"
        r"ss)|Gering|Mäßig|Diskret|Neu|Alt|Bekannt|Zart|Ausgedehnt)e[rsnm]?",
    ),
    "fr": Words(
        "le la les des du de un une et ou avec sans pas au aux est sont dans sur en ce par pour il à",
        "env ex p.ex c.-à-d cf dr pr mme mlle mr fig max min approx évt éventl susp prob lob segm st pt antéc atcd "
        "st.p cr radiogr échogr vs",
        "dt dte drt drte g gche gau bilat bil",
        "r.a.s a.p p.a etc rx ant post inf sup lat int ext méd",
        r"côtes?|arcs?|espaces?|vertèbres?|jours?",
    ),
    "es": Words(
        "el la los las de del un una y con sin no se en al por para es son ni que lo su sus",
        "sr sra dr dra p.ej ej aprox máx mín vs pac pte fig núm prob posib sosp compat dx comp tto seg segm lób vert "
        "bibl cm.h2o",
        "izq izqda izqdo izda izdo dcho dcha dch drcho drcha der bilat bil",
        "a.p p.a etc rx ant post inf sup lat int ext",
        r"arcos?|costillas?|espacios?|vértebras?|días?|cuerpos?",
    ),
    "it": Words(
        "il lo la i gli le di del della dei delle dello un una con senza non si in nel nella al alla è sono da per "
        "ed al",
        "ca es p.es dott dott.ssa sig cfr max min fig pz paz sosp prob compat rif radiol segm lob vs st",
        "dx sx dex sin bilat bil ds",
        "n.d.r n.d.p n.n a.p p.a ecc rx tc ant post inf sup lat int est med",
        r"costa|coste|arc[oh]i?|spazio|vertebra|giornata",
    ),
    "nl": Words(
        "de het een en of met zonder geen in op van aan bij is zijn niet voor na te er ook door naar wordt",
        "ca bijv evt mogel waarsch vgl vergl dr pat pt nr afb max min resp incl excl aanw st ivm tov tgv bekl "
        "vermoed verd ond ong vs",
        "re li bdz bds beiderz dubbelz bilat",
        "g.a g.b z.b a.p p.a v.a etc enz ant post lat",
        r"rib(?:ben)?|wervel\w*|intercostaal\w*|dag",
        r"\w*(?:kwab|long|longveld|longtop|hilus|hemithorax|sinus|rib|basis|schouder)\b|(?-i:[RL]?[OBM]K)\b",
        r"(?i:geen|een|het|de|met|zonder|in|van|bij|aan|kleine|grote|geringe)",
    ),
}
"""Language (ISO 639-1) -> its words."""

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
