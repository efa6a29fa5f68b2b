"""Findings and impression of a report."""

from __future__ import annotations

import csv
import textwrap
from pathlib import Path

import pytest

from data_prep.text.sections import BOTH, LAST_PARAGRAPH, study_sections
from data_prep.text.sentences import has_letter, passages

TITLE = "                                 FINAL REPORT\n"


def found(report: str, *wanted: str) -> list[tuple[str, str]]:
    sections = study_sections(report, wanted) if wanted else study_sections(report)
    return [(section.name, " ".join(section.text.split())) for section in sections]


WHOLE = (
    TITLE
    + " EXAMINATION:  CHEST (PA AND LAT)\n \n INDICATION:  ___F with cough.\n \n TECHNIQUE:  PA and lateral.\n \n"
    " COMPARISON:  ___.\n \n FINDINGS: \n \n The lungs are clear.  Heart size is\n normal.\n \n"
    " IMPRESSION: \n \n No acute process.\n \n NOTIFICATION:  Dr. ___ was called.\n"
)


@pytest.mark.parametrize(
    "line_break",
    [
        "\n",
        "\r",
        "\r\n",
        "\\n",
        "\\r\\n",
        "\\r\n",
        "<br>",
        "<BR/>",
        "<br />\n",
        "</p><p>",
        "\\.br\\",
        "\u2029",
    ],
)
def test_headers_stand_behind_line_breaks_of_every_kind(line_break: str) -> None:
    lines = ["INDICATION: Cough", "FINDINGS", "Lungs clear.", "No effusion.", "IMPRESSION: Normal chest."]
    found = [
        (section.name, " ".join(passages(section.text))) for section in study_sections(line_break.join(lines))
    ]
    assert found == [("findings", "Lungs clear. No effusion."), ("impression", "Normal chest.")]


def test_lines_broken_by_tags_are_one_paragraph() -> None:
    (section,) = study_sections("Heart is normal<br>Lungs are clear<br>No effusion")
    assert section.name == LAST_PARAGRAPH
    assert passages(section.text) == ["Heart is normal", "Lungs are clear", "No effusion"]
    assert study_sections("FINDINGS:<br><br>IMPRESSION:<br>Clear.<br>")[0].name == "impression"


def test_one_section_can_be_chosen() -> None:
    assert found(WHOLE, "impression") == [("impression", "No acute process.")]
    assert found(WHOLE, "findings") == [("findings", "The lungs are clear. Heart size is normal.")]
    assert found(" FINDINGS AND IMPRESSION:  Clear.\n", "impression") == [(BOTH, "Clear.")]
    # A report with the other section is not searched for a last paragraph: it would be that other section.
    assert found(" FINDINGS:  Clear.\n", "impression") == []


# One letter for the kind of each section that is found: findings, impression, both, last paragraph.
KINDS = {"F": "findings", "I": "impression", "B": BOTH, "P": LAST_PARAGRAPH}
SHAPES = [
    (" FINDINGS:  Clear.\n \n IMPRESSION:  Normal.\n", "F Clear.|I Normal."),
    ("Findings:  Clear.\nImpression:  Normal.\n", "F Clear.|I Normal."),
    ("findings: clear.\nimpression: normal.\n", "F clear.|I normal."),
    (" FINDINGS  Clear.\n \n IMPRESSION  Normal.\n", "F Clear.|I Normal."),
    (" FINDINGS.  Clear.\n \n IMPRESSION.  Normal.\n", "F Clear.|I Normal."),
    (" FINDINGS:Clear.\n \n IMPRESSION:Normal.\n", "F Clear.|I Normal."),
    (" ADDENDUM:  Rib is broken.\n \n" + TITLE + " FINDINGS:  Clear.\n", "F Clear."),
    (" FINDINGS:  Clear.\n \n ADDENDUM:  Rib is broken.\n", "F Clear."),
    (" ADDENDUM:  Rib is broken.\n \n FINDINGS:  Clear.\n IMPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" IMPRESSION:  Clear.\n \n ADDENDUM by Dr. ___ on ___: Rib is broken.\n", "I Clear."),
    (
        " WET READ: ___ ___ ___ 3:15 PM\n  Edema.\n ____________\n" + TITLE + " FINDINGS:  Clear.\n",
        "F Clear.",
    ),
    (" IMPRESSION:  Clear.\n \n WET READ VERSION #1 ___ ___ 3:15 PM\n  Edema.\n", "I Clear."),
    (
        " WET READ VERSION #1: Edema.\n WET READ VERSION #2: More edema.\n"
        + TITLE
        + " IMPRESSION:  Clear.\n",
        "I Clear.",
    ),
    (" PRELIMINARY REPORT\n FINDINGS:  Edema.\n \n FINAL REPORT\n FINDINGS:  Clear.\n", "F Clear."),
    (" IMPRESSION:  Clear.\n \n NOTIFICATION:  Dr. ___ was told.\n", "I Clear."),
    (" FINDINGS (PA AND LATERAL):  Clear.\n", "F Clear."),
    (" FINDINGS:\n \n IMPRESSION:  Normal.\n", "I Normal."),
    (" FINDINGS: Clear. IMPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" FINDINGS: Clear. COMPARISON: ___. IMPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" FINDNGS: Clear.\n IMPRESSON: Normal.\n", "F Clear.|I Normal."),
    (" IMPRESSION: Clear.\n \n *** ADDENDUM ***\n Rib is broken.\n", "I Clear."),
    (" FINDINGS: Clear.\n COMPARISON\n Film of ___.\n \n IMPRESSION\n Normal.\n", "F Clear.|I Normal."),
    (
        " IMPRESSION: No change from the\n wet read of ___: Clear.\n",
        "I No change from the wet read of ___: Clear.",
    ),
    (
        " FINDINGS: LUNGS: Clear.\n PROCEDURE: None.\n HEART AND MEDIASTINUM: Normal.\n BONES: Old.\n"
        " IMPRESSION: Normal.\n",
        "F LUNGS: Clear.|F HEART AND MEDIASTINUM: Normal. BONES: Old.|I Normal.",
    ),
    (" FINDINGS: Clear.\n WET READ: Edema.\n LUNGS: Edema.\n", "F Clear."),
    # Parts of the body in the history are history, and behind the impression nothing resumes.
    (" FINDINGS: Clear.\n IMPRESSION: Clear.\n PROCEDURE: None.\n ABDOMEN: Pain.\n", "F Clear.|I Clear."),
    # Words of a sentence that are headers elsewhere.
    (
        " IMPRESSION:\n 1. Clear.\n Preliminary report was given by ___ as follows:  clear.\n 2. Stable heart.\n",
        "I 1. Clear. Preliminary report was given by ___ as follows: clear. 2. Stable heart.",
    ),
    (
        " FINDINGS: Clear.\n Addendum to the prior report is noted: no growth.\n IMPRESSION: Clear.\n",
        "F Clear. Addendum to the prior report is noted: no growth.|I Clear.",
    ),
    (
        " FINDINGS:\n THE PATIENT HAS A\n HISTORY\n OF SURGERY. NO EDEMA.\n",
        "F THE PATIENT HAS A HISTORY OF SURGERY. NO EDEMA.",
    ),
    (" IMPRESSION:\n (ADDENDUM) none.\n Clear.\n", "I (ADDENDUM) none. Clear."),
    (" INDINGS: Clear.\n MPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" FINDINGS: Clear.\n COMPARISION: Film of ___.\n IMPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" IMPRESSION: Clear.\n NOTIFICATON: Dr. ___ was told.\n", "I Clear."),
    (" Clear.\n \n IDICATION: Cough.\n NDICATION: There is fever.\n", "P Clear."),
    (
        " FINDINGS:\n COMPRESSION FRACTURES: Old.\n TECHNICAL QUALITY: Poor.\n INDICATORS: None.\n",
        "F COMPRESSION FRACTURES: Old. TECHNICAL QUALITY: Poor. INDICATORS: None.",
    ),
    (" IMPRESSION AND FINDINGS: Clear.\n", "B Clear."),
    (" Findings and Impression: Clear.\n", "B Clear."),
    (" FINDINGS AND IMPRESSION\n Clear.\n", "B Clear."),
    (" EXAM: CHEST TWO VIEWS\n REASON FOR EXAM: Cough.\n FINDINGS: Clear.\n", "F Clear."),
    (" REASON FOR EXAM: Cough.\n \n Clear.\n", "P Clear."),
    (" IMPRESSION: Clear.\n \n Electronically signed by ___, MD on ___ at ___.\n", "I Clear."),
    (
        " IMPRESSION: Clear.\n \n Dr. ___ has reviewed the images and report.\n",
        "I Clear. Dr. ___ has reviewed the images and report.",
    ),
    (" FINDINGS:\n Comparison is made to ___.  Clear.\n", "F Comparison is made to ___. Clear."),
    (" FINDINGS: Clear.\n COMPARISON  ___\n \n IMPRESSION: Normal.\n", "F Clear.|I Normal."),
    (" CONCLUSION: Clear.\n", "I Clear."),
    (" PORTABLE CHEST: Clear.\n IMPRESSION: Normal.\n", "I Normal."),
    (
        " AP CHEST, 3:15 A.M., ___:\n \n HISTORY: Cough.\n \n IMPRESSION: AP chest compared to ___: Clear.\n",
        "I AP chest compared to ___: Clear.",
    ),
    (" INDICATION: Cough.\n", "-"),
    (" INDICATION: There is cough.\n COMPARISON: There is none.\n NOTIFICATION: Dr. ___ is told.\n", "-"),
    (" EXAMINATION: CHEST (PA AND LAT)\n INDICATION: Cough.\n TECHNIQUE: There are two views.\n", "-"),
    (" EXAMINATION: The lungs are clear.\n INDICATION: Cough.\n", "P The lungs are clear."),
    (" INDICATION: Cough.\n RECOMMENDATION(S): CT is recommended.\n", "P CT is recommended."),
    (" INDICATION: Cough. FINDINGS: Clear.\n", "F Clear."),
    (" The impression: of a mass is wrong.\n", "P The impression: of a mass is wrong."),
    (
        " IMPRESSION:  Clear.\n \n Findings were discussed with: Dr. ___.\n",
        "I Clear. Findings were discussed with: Dr. ___.",
    ),
    (" **FINDINGS:** Clear.\n **IMPRESSION:** Normal.\n", "F Clear.|I Normal."),
    (" IMPRESSION:  Clear.\n \n ADDENDUM:\n IMPRESSION:  Rib is broken.\n", "I Clear."),
    (" ADDENDUM:\n IMPRESSION:  Rib is broken.\n", "I Rib is broken."),
    (" WET READ: Edema.\n \n FINDINGS: Clear.\n", "F Clear."),
    (
        " FINDINGS: THERE ARE NO\n FINDINGS OF EDEMA IN\n COMPARISON WITH ___.\n",
        "F THERE ARE NO FINDINGS OF EDEMA IN COMPARISON WITH ___.",
    ),
    (" FINDINGS: No change in\n comparison to ___.\n", "F No change in comparison to ___."),
    (
        " INDICATION: Cough.\n \n COMPARISON: ___.\n \n Clear.\n \n Electronically signed by ___.\n",
        "P Clear.",
    ),
]


# Drafts, pages, views and last paragraphs.
OTHER_SHAPES = [
    (
        WHOLE,
        "F The lungs are clear. Heart size is normal.|I No acute process.",
    ),
    (" FINDINGS: Clear. Impression: Normal.\n", "F Clear.|I Normal."),
    (" WET READ:  Pneumonia!\n ______________\n" + TITLE + " IMPRESSION:  Clear.\n", "I Clear."),
    (" PROVISIONAL FINDINGS IMPRESSION (PFI):  Edema.\n \n" + TITLE + " FINDINGS:  Clear.\n", "F Clear."),
    ("    FINAL ADDENDUM\n ADDENDUM:  Wrong side.\n \n" + TITLE + " FINDINGS:  Clear.\n", "F Clear."),
    (" FINDINGS:  \n \n FINDINGS:  Clear.\n \n IMPRESSION: \n", "F Clear."),
    (
        TITLE + " FINDINGS:  Clear\n                    (Over)\n \n" + TITLE + "        (Cont)\n lungs.\n",
        "F Clear lungs.",
    ),
    (" CHEST, PA AND LATERAL:  Clear.\n", "F Clear."),
    (" Portable film.\n \n Lungs are clear.\n", "P Lungs are clear."),
    (" INDICATION:  Cough.\n \n Lungs are clear.\n", "P Lungs are clear."),
    ("Lungs are clear.", "P Lungs are clear."),
    (
        "Film.\n\nLungs are clear.\n\nFindings were telephoned to Dr. ___ at 3:45 p.m.  He understood.\n",
        "P Lungs are clear.",
    ),
    ("AP single view of the chest.\n\nFindings of mild edema.", "P Findings of mild edema."),
    (
        "AP view.\n\nFindings compatible with previously reported edema, now improved. No pneumothorax.",
        "P Findings compatible with previously reported edema, now improved. No pneumothorax.",
    ),
    (
        "AP single view of the chest.\n\nFindings were discussed with Dr. ___. There is a large pneumothorax.",
        "P Findings were discussed with Dr. ___. There is a large pneumothorax.",
    ),
    (
        "AP single view of the chest.\n\nDr. ___ was called at 5 p.m. with these findings: new left pneumothorax.",
        "P Dr. ___ was called at 5 p.m. with these findings: new left pneumothorax.",
    ),
    (
        "AP single view of the chest.\n\nThe findings discussed above are most consistent with pneumonia.",
        "P The findings discussed above are most consistent with pneumonia.",
    ),
    (
        "AP single view of the chest.\n\nImpression is that of pneumonia, as reported on the CT of ___.",
        "P Impression is that of pneumonia, as reported on the CT of ___.",
    ),
    (
        "AP single view of the chest.\n\nSigned out to ICU. Tube 3 cm above carina.",
        "P Signed out to ICU. Tube 3 cm above carina.",
    ),
    ("Dr. ___ was paged.", "P Dr. ___ was paged."),
    ("", "-"),
]


@pytest.mark.parametrize(("report", "expected"), [*SHAPES, *OTHER_SHAPES])
def test_shapes_in_which_reports_are_written(report: str, expected: str) -> None:
    """`expected`: kind and text of each section, "-" for a report without any."""
    report = report if "FINAL REPORT" in report else TITLE + report
    pieces = [] if expected == "-" else expected.split("|")
    assert found(report) == [(KINDS[piece[0]], piece[2:]) for piece in pieces]
    # The same with the line ends of another system.
    assert found(report.replace("\n", "\r\n")) == found(report)


# --- All of Open-i, in MIMIC-CXR's layout ---------------------------------------------------------------------------

HEADERS = {
    "indication": "INDICATION",
    "comparison": "COMPARISON",
    "findings": "FINDINGS",
    "impression": "IMPRESSION",
}
# The impression of this report holds a whole report with headers of its own.
WITH_HEADERS_INSIDE = [2415]
# "END OF REPORT." is no sentence of the impression.
WITH_AN_END = [180, 739, 1448, 3144]


def mimic_layout(row: dict[str, str]) -> str:
    """A report as MIMIC-CXR writes it: a title, headers behind a blank, 79 characters a line, blanks in empty lines."""
    parts = [TITLE]
    for column, header in HEADERS.items():
        if row[column].strip():
            text = textwrap.wrap(
                f"{header}:  {' '.join(row[column].split())}",
                width=78,
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
            parts.append("".join(f" {line}\n" for line in text))
    return " \n".join(parts)


@pytest.fixture(scope="module")
def openi(real_data: Path) -> list[dict[str, str]]:
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_sections_of_every_open_i_report_come_back(openi: list[dict[str, str]]) -> None:
    assert len(openi) == 3955
    others = []
    for row in openi:
        # The two line-break tags of Open-i stand where a line was wrapped.
        written = [
            (c, " ".join(row[c].replace("<BR>", " ").split()))
            for c in ("findings", "impression")
            if has_letter(row[c])
        ]
        if found(mimic_layout(row)) != written:
            others.append(int(row["uid"]))
    assert sorted(others) == sorted(WITH_HEADERS_INSIDE + WITH_AN_END)
