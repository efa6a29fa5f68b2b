"""Sentence boundaries of report text."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from data_prep.sentences import has_letter, passages, split_sentences


def sentences(text: str) -> list[str]:
    return [sentence for passage in passages(text) for sentence in split_sentences(passage)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Lines are wrapped anywhere, and blank lines end a sentence without a full stop.
        (
            "The lungs are\n clear.  Heart size is\n normal.\n",
            ["The lungs are clear.", "Heart size is normal."],
        ),
        ("No acute process\n \n Heart is normal", ["No acute process", "Heart is normal"]),
        ("Lungs clear.\r\n No effusion.\r\n", ["Lungs clear.", "No effusion."]),
        # Numbered impressions: with and without full stops, brackets, blanks, line breaks.
        ("1. No acute process. 2. Stable nodule.", ["No acute process.", "Stable nodule."]),
        ("1. Low lung volumes 2. No edema", ["Low lung volumes", "No edema"]),
        ("1.No edema 2.Stable", ["No edema", "Stable"]),
        ("1) No edema.\n 2) Stable nodule\n in the apex.", ["No edema.", "Stable nodule in the apex."]),
        ("As follows: 1. No edema. 2. no effusion.", ["As follows:", "No edema.", "no effusion."]),
        ("Fracture of rib 2. Stable.", ["Fracture of rib 2.", "Stable."]),
        ("1. Fracture of rib 2. Stable.", ["Fracture of rib 2.", "Stable."]),
        # List dashes, but not ranges and compound words.
        (
            "- No effusion.\n - Heart is\n large.\n -Clear lungs",
            ["No effusion.", "Heart is large.", "Clear lungs"],
        ),
        ("Moderate right\n -sided effusion of 3\n - 5 cm.", ["Moderate right -sided effusion of 3 - 5 cm."]),
        # A blank is missing after the full stop.
        (
            "Lungs clear.No effusion.Heart (enlarged).No edema.",
            ["Lungs clear.", "No effusion.", "Heart (enlarged).", "No edema."],
        ),
        ("Seen on CT.No change at T5.Stable.", ["Seen on CT.", "No change at T5.", "Stable."]),
        # What looks like an end of sentence and is none.
        ("Seen by Dr. Smith and Dr.Jones vs. prior.", ["Seen by Dr. Smith and Dr.Jones vs. prior."]),
        ("Nodule of 1.5 cm at 3:45 p.m. on ___.", ["Nodule of 1.5 cm at 3:45 p.m. on ___."]),
        (
            "Compared to ___, no change. ___ tube is unchanged.",
            ["Compared to ___, no change.", "___ tube is unchanged."],
        ),
        # Abbreviations of PySBD that end sentences in radiology.
        (
            "No mass. No nodule of 5 mm. No change on PA.",
            ["No mass.", "No nodule of 5 mm.", "No change on PA."],
        ),
        # Rules and line-break tags.
        (
            "Clear lungs.\n ______________________________\n No edema<BR>Normal",
            ["Clear lungs.", "No edema", "Normal"],
        ),
        # Case, digits and marks stay.
        ("NO ACUTE Process?  Likely 2/2 CHF!", ["NO ACUTE Process?", "Likely 2/2 CHF!"]),
        ("", []),
        (" \n \n", []),
    ],
)
def test_sentences_of_report_text(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [("___.", False), ("1.", False), ("", False), ("..", False), ("No.", True), ("é", True)],
)
def test_a_sentence_without_a_letter_says_nothing(sentence: str, answer: bool) -> None:
    assert has_letter(sentence) is answer


def test_no_text_is_lost_or_changed_in_real_reports(real_data: Path) -> None:
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        texts = sorted({row["findings"] for row in csv.DictReader(stream)})[:300]
    for text in texts:
        for passage in passages(text):
            assert " ".join(split_sentences(passage)).replace(" ", "") == passage.replace(" ", "")
    found = [sentence for text in texts for sentence in sentences(text)]
    assert len(found) > 4 * len(texts)
    # Where a sentence goes on after a full stop and a capital, a boundary was missed (PySBD keeps some on purpose).
    assert sum(". The " in sentence for sentence in found) < 0.002 * len(found)
