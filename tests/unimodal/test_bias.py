"""The table of the debiased loss's bias is what its script computes, and docs/theory.md says what is in it."""

from __future__ import annotations

import pandas as pd

from tests.unimodal.bias import FILE, NEGATIVES, SPREADS, table


def test_table_of_the_bias_is_what_is_computed():
    written = pd.read_csv(FILE)
    expected = written[(written["spread"] == SPREADS[0]) & (written["negatives"] == NEGATIVES[0])]
    found = table(SPREADS[:1], NEGATIVES[:1])
    pd.testing.assert_frame_equal(found, expected.reset_index(drop=True), atol=2e-3, check_dtype=False)


def test_what_the_page_says_of_the_bias():
    written = pd.read_csv(FILE)
    bias = written.set_index(["gamma_squared", "negatives", "spread", "loss"])["bias_nats"].sort_index()
    assert len(bias) == 3 * len(SPREADS) * len(NEGATIVES) * 5
    for spread in SPREADS:
        for n in NEGATIVES:
            at = bias[2, n, spread].abs()
            assert at["64 of the class"] < 0.8 * at["own"]
    at_14 = bias[14]
    assert at_14.abs().min() > 0.9 and at_14.min() < -1 < 1 < at_14.max()
    assert written["standard_error"].max() < 0.13
    few, many = (at_14[n].abs() for n in NEGATIVES)
    assert (many > few).mean() > 0.5
