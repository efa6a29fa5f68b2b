"""Which text of a report is findings and impression."""

from __future__ import annotations

import pytest

from data_prep.sections import BOTH, LAST_PARAGRAPH, study_sections

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
    ("report", "expected"),
    [
        (
            WHOLE,
            [("findings", "The lungs are clear. Heart size is normal."), ("impression", "No acute process.")],
        ),
        (TITLE + " FINDINGS AND IMPRESSION:  Clear.\n", [(BOTH, "Clear.")]),
        (TITLE + " FINDINGS/IMPRESSION:\n Clear.\n", [(BOTH, "Clear.")]),
        (
            TITLE + " FINDINGS:  Clear.\n \n CONCLUSION:  Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (TITLE + " IMPRESSION AND RECOMMENDATION:  Follow up.\n", [("impression", "Follow up.")]),
        # Misspelled, in lower case, without a colon, within a line.
        (
            TITLE + " FIDNINGS:  Clear.\n IMPRSSION:  Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (
            TITLE + " FINDINGDS:  Clear.\n IMPRESSIONS:  Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (
            TITLE + " Findings: Clear.\n Impression: Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (
            TITLE + " FINDINGS\n Clear.\n \n IMPRESSION\n Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (
            TITLE + " FINDINGS: Clear. IMPRESSION: Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        (
            TITLE + " FINDINGS: Clear. Impression: Normal.\n",
            [("findings", "Clear."), ("impression", "Normal.")],
        ),
        # Headers of parts belong to the text around them, those of other sections end it.
        (
            TITLE + " FINDINGS:\n LUNGS:  Clear.\n CHEST:  Normal.\n",
            [("findings", "LUNGS: Clear. CHEST: Normal.")],
        ),
        (TITLE + " FINDINGS:  Clear.\n COMPARISON:  Prior of ___.\n", [("findings", "Clear.")]),
        (
            TITLE + " INDICATION:  Question of IMPRESSION on film.\n FINDINGS:  Clear.\n",
            [("findings", "Clear.")],
        ),
        (TITLE + " COMPRESSION:  Of what?\n IMPRESSION:  None.\n", [("impression", "None.")]),
        # Drafts and additions are not the final reading.
        (
            " WET READ:  Pneumonia!\n ______________\n" + TITLE + " IMPRESSION:  Clear.\n",
            [("impression", "Clear.")],
        ),
        (
            " PROVISIONAL FINDINGS IMPRESSION (PFI):  Edema.\n \n" + TITLE + " FINDINGS:  Clear.\n",
            [("findings", "Clear.")],
        ),
        (
            "    FINAL ADDENDUM\n ADDENDUM:  Wrong side.\n \n" + TITLE + " FINDINGS:  Clear.\n",
            [("findings", "Clear.")],
        ),
        # Findings twice; empty ones are left out.
        (TITLE + " FINDINGS:  \n \n FINDINGS:  Clear.\n \n IMPRESSION: \n", [("findings", "Clear.")]),
        # Pages.
        (
            TITLE
            + " FINDINGS:  Clear\n                    (Over)\n \n"
            + TITLE
            + "        (Cont)\n lungs.\n",
            [("findings", "Clear lungs.")],
        ),
        # No such section: the text beside the views, else the last paragraph that belongs to no other section.
        (TITLE + " CHEST, PA AND LATERAL:  Clear.\n", [("findings", "Clear.")]),
        (TITLE + " Portable film.\n \n Lungs are clear.\n", [(LAST_PARAGRAPH, "Lungs are clear.")]),
        (TITLE + " INDICATION:  Cough.\n \n Lungs are clear.\n", [(LAST_PARAGRAPH, "Lungs are clear.")]),
        (
            TITLE + " COMPARISON:  ___.\n \n Lungs are clear.\n \n ___\n",
            [(LAST_PARAGRAPH, "Lungs are clear.")],
        ),
        ("Lungs are clear.", [(LAST_PARAGRAPH, "Lungs are clear.")]),
        (TITLE + " INDICATION:  Cough.\n", []),
        (TITLE, []),
        ("", []),
    ],
)
def test_sections_of_report_shapes(report: str, expected: list[tuple[str, str]]) -> None:
    assert found(report) == expected
    # The same with the line ends of another system.
    assert found(report.replace("\n", "\r\n")) == expected


def test_one_section_can_be_chosen() -> None:
    assert found(WHOLE, "impression") == [("impression", "No acute process.")]
    assert found(WHOLE, "findings") == [("findings", "The lungs are clear. Heart size is normal.")]
    assert found(" FINDINGS AND IMPRESSION:  Clear.\n", "impression") == [(BOTH, "Clear.")]
    # A report with the other section is not searched for a last paragraph: it would be that other section.
    assert found(" FINDINGS:  Clear.\n", "impression") == []
