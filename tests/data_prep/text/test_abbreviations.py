"""Abbreviations and ordinal numbers by language, marks of other scripts, and the language of a report."""

from __future__ import annotations

import time

import pytest

from data_prep.text.abbreviations import language_of
from data_prep.text.languages import LANGUAGES, SECTIONS
from data_prep.text.reports import Report, Sentences, read_sentences
from data_prep.text.sections import Section
from data_prep.text.sentences import passages, split_sentences

# Invented reports; "|" marks where a sentence ends.
IN_PLACE = {
    "de": """
V.a. Pneumonie re. Unterlappen. | Kein Erguss li. | Herz ca. 10 cm.
Fraktur der 5. Rippe. | Herz o.B. | Lunge frei. | Knochen o. B. | Lunge i.O. | Herz normal.
Z. n. Sternotomie. | V. a. Infiltrat re. basal, z.B. Pneumonie bzw. Atelektase. | Ggf. Kontrolle.
Thorax a.p. | Herz normal groß. | Im p.a. Strahlengang unauffällig. | i.v. Gabe von KM. | Dr. med. Meier.
Bds. Ergüsse. | Li. Lunge frei. | Re. UF verschattet. | Kleiner li. Pleuraerguss. | V.a. re. Pneumothorax.
Kein re. Erguss. | Geringer re. Erguss. | ZVK re. via V. jugularis int. | Spitze in der V. cava sup. | Kein Pneu.
Fraktur der 4. und 5. Rippe li. | Kein Pneumothorax. | Alte Fraktur 3.-6. Rippe re. | Herz normal.
Am 3. postoperativen Tag. | Aufnahme vom 3. März 2020. | Vergleich mit dem 12. 3. 2020. | BWK 12. | Herz normal.
Stauung bds. | Zwerchfell glatt. | Erguss li. | Lunge sonst frei. | Infiltrat re. Lunge.
5. Rippe li. gebrochen. | Der 2. ICR re. ist frei.
Drain im 4. ICR li. | Spitze apikal. | ZVK V. jug. int. re. | Mind. 5 Herde. | Lt. Voraufn. vom 1.2.2020 stabil.
ERGUSS LI. | HERZ NORMAL GROSS. | St.p. Lobektomie re. | Restlunge frei. | D.h. keine Änderung. | u.a. Granulome.
Herz i.d.N. | Lunge frei. | Äußere Weichteile o.p.B. | Insb. kein Rundherd > 2.5 cm. | Infiltrat akut. | Keine Stauung.
Unverändert i. Vgl. zur Voraufnahme. | Erguss re. > li. | Kardiomegalie. | Erguss li., Infiltrat re.; Herz normal.
""",
    "fr": """
Épanchement pleural dt. | Cœur normal. | Opacité du lobe inf. g. | Pas de pneumothorax. | ATCD. chirurgicaux.
Fracture du 5e. arc costal. | Cœur R.A.S. | Poumons clairs. | Nodule d'env. 5 mm. | Fracture de la 3ème. côte g.
Rx. | Suivi.
Opacité p.ex. infectieuse. | Cf. scanner. | Dr. Dupont. | Épanchement bilat. | Éléments stables. | Opacité dte. LID.
""",
    "es": """
Derrame pleural izq. | Corazón normal. | Fractura del 3er. arco costal dcho. | Silueta normal.
4to. espacio intercostal.
Nódulo de aprox. 5 mm. | No derrame. | Infiltrado en lób. inf. dcho. | Índice normal. | P.ej. neumonía.
Lesión izq. LSI.
Fractura de la 5.ª costilla izq. posterior. | Derrame a la izq. | Corazón normal. | Dx. previo: neumonía.
Pte. con disnea.
""",
    "it": """
Versamento pleurico dx. | Cuore nei limiti. | Addensamento in sede basale sx. | Ilo normale.
Consigliata TC. | Cuore normale. | Versamento dx. | Si osserva stasi. | Esiti sx. LIS.
Frattura della 5a. costa dx. | Cuore n.d.r. | Polmoni chiari. | Nodulo di ca. 5 mm. | È stabile. | P.es. polmonite.
""",
    "nl": """
Pleuravocht li. | Hart normaal. | Infiltraat re. onderkwab. | Geen re. Pleuravocht. | Hart g.a. | Longen helder.
Bijv. pneumonie. | I.v.m. koorts. | T.o.v. vorig onderzoek geen verandering. | Fractuur 5e. rib li. | D.d. atelectase.
""",
    # English has none of these: "li.", "V.a." and the like are no abbreviations there.
    "en": """
Effusion on the L. | No effusion on the R. | Old rib fx. | Fracture of rib 5. | Stable.
Known CA. | The lungs are clear.
双肺纹理清晰。 | 心影大小正常！ | 未见胸腔积液？ | 结节直径3．5cm； | “正常。” | 其余正常．
肺野は清明である． | 心拡大なし。 | 変化なし
لا يوجد انصباب؟ | القلب طبيعي۔ | الرئتان صافيتان.
फेफड़े साफ हैं। | हृदय सामान्य है।
Лёгкие чистые. | Сердце в норме.
""",
}


@pytest.mark.parametrize(
    ("language", "marked"),
    [(language, line) for language, lines in IN_PLACE.items() for line in lines.strip().splitlines()],
)
def test_sentences_end_by_the_languages_rules(language: str, marked: str) -> None:
    expected = marked.split(" | ")
    found = [s for passage in passages(" ".join(expected)) for s in split_sentences(passage, language)]
    assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("双肺清晰。心影正常！无积液", "双肺清晰。|心影正常！|无积液"),
        ("双肺清晰.心影正常;无积液.结节3.5cm", "双肺清晰.|心影正常;|无积液.|结节3.5cm"),
        ("1.双肺清晰。2.心影正常。(3)无积液。", "双肺清晰。|心影正常。|无积液。"),
        ("1、双肺清晰。\n2、心影\n正常。\n（3）无积液。", "双肺清晰。|心影 正常。|无积液。"),
        ("意见：1．双肺清晰；2．心影正常；直径3．5cm", "意见：|双肺清晰；|心影正常；|直径3．5cm"),
        ("Лёгкие чистые.Сердце в норме.", "Лёгкие чистые.|Сердце в норме."),
        ("Pas d'opacité.Épanchement.", "Pas d'opacité.|Épanchement."),
        # An ordinal number at the beginning is no mark of an item.
        (
            "5. Rippe gebrochen.\n\n1. Rippen frei.\n2. Kein Erguss.",
            "5. Rippe gebrochen.|Rippen frei.|Kein Erguss.",
        ),
    ],
)
def test_marks_without_blanks_and_lists(text: str, expected: str) -> None:
    language = language_of(text)[0] or "en"
    assert "|".join(s for passage in passages(text) for s in split_sentences(passage, language)) == expected


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The lungs are clear. There is no effusion.", ("en", 5)),
        ("Kein Erguss, keine Stauung.", ("de", 2)),
        ("V.a. Pneumonie re. Unterlappen. Kein Erguss li.", ("de", 1)),
        ("Pas d'épanchement. La silhouette cardiaque est normale.", ("fr", 3)),
        ("Sin derrame. El corazón es normal.", ("es", 3)),
        ("Non versamento. Cuore nei limiti della norma.", ("it", 2)),
        ("Geen pleuravocht, het hart is normaal.", ("nl", 3)),
        ("No derrame. No effusion.", ("", 0)),
        ("Clear.", ("", 0)),
    ],
)
def test_language_by_its_function_words(text: str, language: tuple[str, int]) -> None:
    assert language_of(text) == language


def read(*texts: str, language: str | None = None, others: str | None = None) -> Sentences:
    reports = [Report(n, sections=(Section("text", text),)) for n, text in enumerate(texts)]
    return read_sentences(reports, len(texts), SECTIONS, None, "none", language, others)


SHORT = "Narbe re. Oberlappen."


def test_reports_without_function_words_follow_most() -> None:
    german, english = "Kein Erguss und keine Stauung.", "The scar max. The rest is clear."
    found = read(german, english, SHORT, "Kein Infiltrat.", "双肺清晰。")
    assert [len(found.of_study[study]) for study in range(5)] == [1, 2, 1, 1, 1]
    assert (found.language, found.scripts) == ("de", {"CJK": 1})
    assert found.languages == {"de (too few words tell)": 3, "de": 1, "en": 1}
    # Of a set that grows what was told at first holds, and a given language for all.
    assert len(read(SHORT, "The scar is old and there is no mass.").of_study[0]) == 2
    assert len(read(SHORT, "The scar is old and there is no mass.", others="de").of_study[0]) == 1
    given = read(SHORT, "The scar is old and there is no mass.", language="de", others="en")
    assert len(given.of_study[0]) == 1 and given.languages == {}


@pytest.mark.parametrize(
    "language", [pytest.param(x, marks=[pytest.mark.slow] * (x != "en")) for x in LANGUAGES]
)
def test_long_text_takes_no_long_time(language: str) -> None:
    begin = time.perf_counter()
    for unit in ("V.a. ", "li. ", "re. Kleine ", "5. ", "a. b ", "eeeeee", "。"):
        split_sentences(unit * 1000, language)
    assert time.perf_counter() - begin < 5
