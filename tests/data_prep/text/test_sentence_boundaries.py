"""Sentence boundaries labelled by hand, and the score that compares found ones with them.

No splitter is checked here: see sentence_boundaries/README.md.
"""

from __future__ import annotations

import pytest

from tests.data_prep.text.boundary_score import boundaries, boundary_agreement, locate


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
    assert boundary_agreement([first, second, third]).f1 == pytest.approx(4 / 6)
    assert boundary_agreement([first]).f1 == pytest.approx(2 / 3)
    assert boundary_agreement([third]).f1 == 1
    assert boundary_agreement([("A. B.", [[0, 5]], [[0, 2], [3, 5]])]).f1 == 0


def test_sentences_are_located_by_their_letters():
    text = "1. Rib\n 2 .<BR>No - 2. 2 cm.  No"
    found = locate(text, ["Rib 2 .", "No", "...", "2 cm.", "No"])
    assert [text[start:end] for start, end in found] == ["Rib\n 2", "No", "2 cm", "No"]
    assert found[-1] == (len(text) - 2, len(text))
    for changed in (["Rib 2", "no"], ["No", "Rib 2"]):
        with pytest.raises(ValueError, match="sentence 1 of 2"):
            locate(text, changed)
