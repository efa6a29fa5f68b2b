"""Words by which reports of German, Spanish, French and English speaking hospitals are laid out."""

from __future__ import annotations

import re
import unicodedata

HEADER_WORDS = {
    "FINDINGS": "Befund, Befunde, Röntgenbefund, Radiologischer Befund, Beschreibung, Hallazgos, Hallazgos "
    "radiológicos, Descripción, Résultat, Résultats, Description, Constatations",
    "IMPRESSION": "Beurteilung, Zusammenfassende Beurteilung, Zusammenfassung, Fazit, Impresión, Impresión "
    "diagnóstica, Conclusión, Conclusiones, Au total, Synthèse",
    "INDICATION": "Indikation, Rechtfertigende Indikation, Klinische Angaben, Klinik, Anamnese, Fragestellung, "
    "Technik, Vergleich, Voraufnahme, Voraufnahmen, Voruntersuchung, Empfehlung, Datum, Geburtsdatum, Indicación, "
    "Motivo, Motivo de consulta, Datos clínicos, Antecedentes, Técnica, Comparación, Fecha, Motif, Antécédents, "
    "Renseignements cliniques, Comparaison, Patient, Patient name, Patient ID, Name, MRN, DOB",
    "EXAMINATION": "Untersuchung, Estudio, Exploración, Examen",
}
"""Header of MIMIC-CXR -> words that begin the same section elsewhere: in any case, with or without accents, before a
colon or alone on a line."""

CAPITALISED = (
    "Findings, Impression, Conclusion, Conclusions, Indication, Technique, Comparison, History, Clinical history, "
    "Clinical information, Reason for exam, Reason for study, Exam, Examination, Procedure, Date"
)
"""MIMIC-CXR's headers, there in capitals; elsewhere like those of `HEADER_WORDS`."""


def _plain(text: str) -> str:
    return re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFD", text)).upper()


_ENGLISH = {_plain(word): header for header, words in HEADER_WORDS.items() for word in words.split(", ")}
_ENGLISH |= {word.upper(): word.upper() for word in CAPITALISED.split(", ")}
_WORD = "|".join(
    re.sub("[^ -~]", lambda match: f"[{match[0]}{_plain(match[0])}]", word).replace(" ", r"[ \t]+")
    for word in sorted(", ".join([*HEADER_WORDS.values(), CAPITALISED]).split(", "), key=len, reverse=True)
)
_HEADER = re.compile(
    # At the beginning of a line; behind a full stop or two blanks; in capitals.
    rf"(?:^(?P<line>[ \t]*(?:\d[.)][ \t]*)?)|(?<=[.?!;)_]\s)|(?<=\s\s)|(?<=\s)(?=(?-i:[A-ZÀ-Þ]{{4}})))[\[*\#]*"
    rf"(?P<first>{_WORD})(?:[ \t]*(?:und|and|y|et|[&/,])[ \t]*(?P<second>{_WORD}))?"
    r"(?:[ \t]+(?:R[öo]e?ntgen|Thorax|T[óo]rax|vom|des|der|du|del)\b[^:\n]{0,40}|[ \t]*\([^)\n]{0,40}\))?"
    r"[ \t\]*]*(?::\**|(?(line)(?P<bare>$)(?=\n\s*(?-i:[^\sa-zß-ÿ]))|(?!)))",
    re.MULTILINE | re.IGNORECASE,
)
# "CHEST PA AND LATERAL", before a colon or on a line of its own.
_VIEWS = re.compile(
    r"^[ \t]*(?=\D|[12]\b)(?:(?:chest|thorax|t[óo]rax|x-?rays?|xr|cxr|rx|radiographs?|radiograf[íi]a|radiographie"
    r"|thoracique|r[öo]e?ntgen|p\.?a|a\.?p|lat|lateral|frontal|face|profil|views?|ebenen|films?|portable|upright|supine|erect|stehend"
    r"|liegend|exam|study|report|bericht|informe|one|two|single|\d+|[ap]\.?m|at|in|of|the|de|y|et|und|and)\b"
    r"[ \t,/&().:_-]*)+(?::|$(?!\n[ \t]*(?-i:[a-zß-ÿ])))",
    re.MULTILINE | re.IGNORECASE,
)
SIGN_OFF = re.compile(
    r"(?:^[ \t]*|(?<=[.?!]\s))(?:(?:electronically|digitally) (?:signed|approved|verified|authenticated)\b"
    r"|(?:signed|dictated|transcribed|approved|finali[sz]ed|verified|interpreted|reported|typed|read|reviewed)"
    r"(?: and \w+)?(?: electronically)?(?: by\b|:)|(?:sincerely|(?:kind|best) regards|yours (?:sincerely|truly))\b"
    r"|mit (?:freundlich|kollegial|best)\w* (?:\w+ )?gr(?:ü|ue?)(?:ß|ss)|hochachtungsvoll|gez\.|i\. ?a\. |unterschrift"
    r"|(?:diktiert|geschrieben|befundet|validiert|freigegeben|unterschrieben|signiert)(?: von| durch|:)"
    r"|elektronisch (?:signiert|unterschrieben|freigegeben|validiert)|fdo\b|firmado\b|atentamente\b|(?:un )?saludos?\b"
    r"|(?:dictado|transcrito|informado|validado) por|(?:dict|sign|valid)[ée] (?:[ée]lectroniquement|par)"
    r"|(?:bien )?(?:cordialement|confraternellement)|(?:i|we) have (?:personally )?reviewed"
    r"|dieser (?:befund|bericht) wurde|sehr geehrte|dear (?:dr|colleague)|estimad[oa] |cher (?:confr|coll|docteur))",
    re.IGNORECASE,
)
"""Where a line says who wrote the report, or to whom: "Dictated by", "gez.", "Dear Dr."; not "Signed out to ICU"."""

_ROLE = (
    r"(?:radiologist|radiologin|radiologe|radiologue|radi[óo]log[oa]|(?:fach|ober|chef|assistenz)(?:a|ä|ae)rzt(?:in)?"
    r"|consultant|attending|resident|m[ée]decin|m[ée]dic[oa]|facultativo)\b[^.:;]{0,40}(?::.*|\.)?"
)
_NAME = r"(?:(?-i:[A-ZÀ-Þ_][\w'’.-]*|von|van|de[lr]?|la)(?:[ ,]+|$))"
_SIGNER = re.compile(
    rf"(?:pd )?(?:prof|dra?)\b[. ]*(?:(?:dr|med|habil)\b[. ]*)*{_NAME}{{0,4}}(?:{_ROLE})?|{_ROLE}"
    rf"|{_NAME}{{1,4}}(?:m\.?d|d\.?o|mbbs|frcr|facr)\b[^:]{{0,40}}",
    re.IGNORECASE,
)


def with_english_headers(report: str) -> str:
    """Replace the headers of `HEADER_WORDS` by MIMIC-CXR's."""

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


def names_signer(line: str) -> bool:
    """True for "Dr. med. A. Muster, Radiologe", "JOHN SMITH, M.D." and "Consultant radiologist"."""
    return len(line) <= 100 and _SIGNER.fullmatch(line.strip()) is not None
