"""Sentence boundaries labelled by hand, and the score that compares found ones with them.

The labels are checked here, no splitter is: see sentence_boundaries/README.md.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data_prep.text.boundary_score import Spans, boundaries, boundary_agreement, boundary_f1, locate

FOLDER = Path(__file__).parent / "sentence_boundaries"
LETTER = re.compile(r"[^\W\d_]")
# What may stand outside of labelled sentences. In Open-i: stray full stops, numbers of items.
OUTSIDE_OPENI = re.compile(r"[\s.]*(?:\d{1,2}\.)?\s*")
OUTSIDE = re.compile(
    r"""(?:
      (?:FINDINGS|IMPRESSION|Impression|CONCLUSION):   # names of whole sections
    | <br\s*/?>|<BR>                                   # line-break tags
    | \(?\#?\d{1,2}[.):-]? (?!\w)                      # numbers of items
    | [IVivabcAB]{1,3}[.)]                             # letters and Roman numerals of items
    | [-*•.\s] | _{3,}                                 # bullets, stray full stops, rules, redactions alone
    )*""",
    re.VERBOSE,
)


def labels(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def openi_rows(real_data: Path) -> dict[int, dict[str, str]]:
    """Rows of the Open-i reports by uid."""
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        return {int(row["uid"]): row for row in csv.DictReader(stream)}


def check_sentences(text: str, sentences: Spans, outside: re.Pattern[str]) -> None:
    """In order, trimmed, each with a letter, and everything else but list marks and headers within one of them."""
    at = 0
    for start, end in [*sentences, [len(text), len(text)]]:
        assert at <= start <= end <= len(text)
        assert outside.fullmatch(text, at, start), f"letters {at} to {start} stand in no sentence"
        sentence = text[start:end]
        assert sentence == sentence.strip()
        assert LETTER.search(sentence) or start == len(text), f"no letter between {start} and {end}"
        at = end


def test_a_hundred_reports_are_labelled_and_half_of_them_held_out():
    records = labels("openi.json")
    held_out = {record["uid"]: record["held_out"] for record in records}
    assert (len(held_out), sum(held_out.values())) == (100, 50)
    assert all(record["held_out"] is held_out[record["uid"]] for record in records)
    assert len({(record["uid"], record["column"]) for record in records}) == len(records) == 190
    for record in records:
        assert set(record) == {"uid", "column", "length", "held_out", "sentences"}, (
            "and no text of the report"
        )
        ends = [place for span in record["sentences"] for place in span]
        assert ends == sorted(ends) and 0 <= ends[0] < ends[-1] <= record["length"]


def test_the_reports_are_the_drawn_ones_and_whole(openi_rows):
    columns = ("findings", "impression")
    written = {
        uid: [c for c in columns if row[c].strip()]
        for uid, row in openi_rows.items()
        if any(row[c].strip() for c in columns)
    }
    drawn = np.random.default_rng(20261121).choice(sorted(written), size=100, replace=False).tolist()
    records = labels("openi.json")
    assert [(r["uid"], r["column"]) for r in records] == [(uid, c) for uid in drawn for c in written[uid]]
    assert {r["uid"] for r in records if r["held_out"]} == set(drawn[50:])


def test_every_letter_of_the_real_reports_stands_in_a_sentence(openi_rows):
    for record in labels("openi.json"):
        text = openi_rows[record["uid"]][record["column"]]
        assert len(text) == record["length"], f"uid {record['uid']}: another version of the file"
        check_sentences(text, record["sentences"], OUTSIDE_OPENI)


def test_every_letter_of_the_traps_stands_in_a_sentence():
    traps = labels("traps.json")
    assert len(traps) == len({trap["text"] for trap in traps}) == 202
    assert sum(trap["held_out"] for trap in traps) == 101
    for trap in traps:
        check_sentences(trap["text"], trap["sentences"], OUTSIDE)


def test_a_cut_within_a_sentence_is_a_label_error():
    text = "No mass. Clear."
    for wrong in (
        [[0, 8]],
        [[0, 9], [9, 15]],
        [[3, 8], [9, 15]],
        [[0, 7], [7, 8], [9, 15]],
        [[0, 9], [8, 15]],
    ):
        with pytest.raises(AssertionError):
            check_sentences(text, wrong, OUTSIDE)
    check_sentences(text, [[0, 8], [9, 15]], OUTSIDE)


def test_position_of_a_boundary_counts_letters_within_sentences():
    #       0         1         2         3
    #       0123456789012345678901234567890123
    text = "1. Rib 2.  No T4.5 cm. 2.Seen ___."
    labelled = [[3, 9], [11, 22], [25, 34]]
    # Rib2 | NoT45cm | Seen___
    assert boundaries(text, labelled, labelled) == {4, 11}
    # Numbers of items, full stops and blanks may hang on either side, or stand alone.
    kept = [[0, 2], [3, 8], [8, 10], [10, 25], [25, 33], [33, 34]]
    assert boundaries(text, kept, labelled) == {4, 11}
    # Cut before "2.", behind "4." and before "___": none of these is a place of a boundary.
    assert boundaries(text, [[0, 6], [7, 17], [17, 30], [30, 34]], labelled) == {3, 8, 15}


def test_f1_of_hand_counted_boundaries():
    first = ("A b. C d. E.", [[0, 4], [5, 12]], [[0, 4], [5, 9], [10, 12]])  # finds 1 of 2
    second = ("F g. H", [[0, 1], [2, 4], [5, 6]], [[0, 4], [5, 6]])  # finds 1 of 1, and one too many
    third = ("I", [[0, 1]], [[0, 1]])  # nothing to find
    assert boundary_agreement([first, second, third]) == (2, 3, 3)
    assert boundary_f1([first, second, third]) == pytest.approx(
        4 / 6
    )  # the mean over texts were (2/3 + 2/3 + 1) / 3
    assert boundary_f1([first]) == pytest.approx(2 / 3)
    assert boundary_agreement([first]).precision == 1 and boundary_agreement([first]).recall == 0.5
    assert boundary_f1([third]) == 1
    assert boundary_f1([("A. B.", [[0, 5]], [[0, 2], [3, 5]])]) == 0


def test_sentences_are_located_by_their_letters():
    text = "1. Rib\n 2 .<BR>No - 2. 2 cm.  No"
    found = locate(text, ["Rib 2 .", "No", "...", "2 cm.", "No"])
    assert [text[start:end] for start, end in found] == ["Rib\n 2", "No", "2 cm", "No"]
    assert found[-1] == (len(text) - 2, len(text))
    for changed in (["Rib 2", "no"], ["No", "Rib 2"]):
        with pytest.raises(ValueError, match="sentence 1 of 2"):
            locate(text, changed)
