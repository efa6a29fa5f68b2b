"""Reports of other sources than MIMIC-CXR."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_prep.text.languages import CAPITALISED, HEADER_WORDS
from data_prep.text.reports import MAX_CHARACTERS, Report, read_passages
from data_prep.text.sections import BOTH, NO_HEADER, SECTIONS, Section, own_sections, study_sections
from tests.data_prep.text.test_sections import SHAPES

# One letter for the section of each passage that is found.
KINDS = {"findings": "F", "impression": "I", BOTH: "B", NO_HEADER: "N"}


def found(text: str, *wanted: str) -> str:
    passages = read_passages(Report(1, sections=(Section("text", text),)), wanted or SECTIONS).found
    return "|".join(f"{KINDS[name]} {passage}" for name, passage in passages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Without a known header the whole text, but titles, other sections and who wrote it.
        (
            "CHEST PA\n\nLarge left effusion.\n\nNo pneumothorax.\n\nDictated by: J. Smith\nTranscribed by: X",
            "N Large left effusion.|N No pneumothorax.",
        ),
        ("CHEST PA\nTHERE IS AN EFFUSION.\nNO EDEMA.\nDR. SMITH, MD", "N THERE IS AN EFFUSION. NO EDEMA."),
        ("EXAM: CHEST PA\nINDICATION: Cough.\nLungs clear.\r\nNo effusion.", "N Lungs clear. No effusion."),
        ("Clinical history: Cough\nLungs clear.", "N Lungs clear."),
        (
            "INDICATION: 65-year-old woman with cough and fever for three days. Please\nevaluate for pneumonia.\n"
            "Lungs are clear.",
            "N Lungs are clear.",
        ),
        ("Dictated by: Dr. Smith\nAP CHEST, 3:15 P.M.:\nLungs clear.", "N Lungs clear."),
        ("INDICATION: cough<BR>Lungs clear.<BR>~3 cm nodule.", "N Lungs clear.|N ~3 cm nodule."),
        ("CHEST WALL: Normal.\nHEART: Large.", "N CHEST WALL: Normal. HEART: Large."),
        ("Dear Dr. Roy,\nLungs clear.\nI have personally reviewed the images.\nJ. Smith", "N Lungs clear."),
        ("FINDINGS:\nHISTORY: Cough\nLungs clear.", "N Lungs clear."),
        ("Signed out to ICU. Tube 3 cm above carina.", "N Signed out to ICU. Tube 3 cm above carina."),
        ("No effusion. Electronically signed by J. Smith on 1/2.", "N No effusion."),
        ("INDICATION: Cough.", ""),
        # An impression alone: the text above it is that of the findings.
        ("CHEST PA\n\nLungs clear.\n\nIMPRESSION: Normal.\nSigned: X\nReviewed.", "N Lungs clear.|I Normal."),
        (
            "Röntgen Thorax p.a.\n\nGroßer Erguss.\n\nBeurteilung: Erguss.\n\nMit freundlichen Grüßen\nDr. Muster",
            "N Großer Erguss.|I Erguss.",
        ),
        # Headers of other languages: in any case, without accents or colon, within a line.
        ("Befund\nKein Erguss.\n\nBEURTEILUNG\nNormal.\ngez. Dr. Muster, Radiologe", "F Kein Erguss.|I Normal."),
        ("Klinik: Husten. Befund: Kein Erguss. Beurteilung: Normal.", "F Kein Erguss.|I Normal."),
        ("ANAMNESE: HUSTEN BEFUND: KEIN ERGUSS BEURTEILUNG: NORMAL", "F KEIN ERGUSS|I NORMAL"),
        ("Befund und Beurteilung (Thorax): Normal.", "B Normal."),
        ("Kein\nBefund\nlinks. Guter Befund: normal.", "N Kein Befund links. Guter Befund: normal."),
        ("Motivo: tos\nHallazgos: Sin derrame.\nIMPRESION: Normal.\nFdo.: Dra. Gil", "F Sin derrame.|I Normal."),
        ("Motif : toux\nResultats : Clair.\nConclusion : Normal.\nCordialement,\nDr Roy", "F Clair.|I Normal."),
        ("<p>INDICATION: cough</p><p><b>FINDINGS:</b> Clear &lt;5 mm.</p>", "F Clear <5 mm."),
    ],
)  # fmt: skip
def test_sections_of_own_reports(text: str, expected: str) -> None:
    assert found(text) == expected


@pytest.mark.parametrize("report", [report for report, expected in SHAPES if re.match("F|B|I 1", expected)])
def test_findings_under_mimics_headers_stay(report: str) -> None:
    views = re.match(" (?:CHEST, TWO|REPORT)", report)
    expected = [(NO_HEADER if views else name, text.split()) for name, text in study_sections(report)]
    assert [(name, text.split()) for name, text in own_sections([Section("text", report)])] == expected


def test_one_section_of_an_own_report() -> None:
    assert found("Lungs clear.\nIMPRESSION: Normal.", "findings") == "N Lungs clear."
    assert found("Lungs clear.\nIMPRESSION: Normal.", "impression") == "I Normal."
    assert found("Lungs clear.", "impression") == "N Lungs clear."


def test_columns_of_sections_lose_marks_and_signatures() -> None:
    sections = (Section("findings", "<b>Clear</b>_x000D_\nSigned by: X"), Section("impression", "&nbsp;"))
    report = read_passages(Report(1, sections=sections), SECTIONS)
    assert report.found == (("findings", "Clear"),)
    assert report.taken == ("findings (marks of an export taken off)", "1 of 4 words, on 1 line")


def test_a_text_of_absurd_length_is_named() -> None:
    report = Report(1, sections=(Section("text", "Clear. " * MAX_CHARACTERS),))
    assert read_passages(report, SECTIONS).reason == "report has more than 262,144 characters"


def test_the_documentation_lists_every_header() -> None:
    text = (Path(__file__).parents[3] / "docs" / "other_data.md").read_text("utf-8")
    words = ", ".join([*HEADER_WORDS.values(), CAPITALISED]).split(", ")
    assert [word for word in words if not re.search(rf"\b{word}\b", text)] == []
