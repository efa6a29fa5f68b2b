"""Signs of findings: the phantom's whole catalogue, traps, plurals, and the gold labels of Open-i."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from data_prep.openi import read_kaggle, read_negbio
from data_prep.phantom.catalogue import catalogue
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.fields import FieldFiles, image_field, sentence_field
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.signs import signs

OPEN_I = Path(os.environ.get("MEDCLIP_DCL_REAL_DATA", "missing")) / "openi"


def test_no_sentence_of_the_catalogue_is_misread():
    """A hedged one has no sign; others have that of their class, or none: always where they have a name."""
    read = 0
    for c in catalogue().classes:
        for wording in c.wordings:
            found = dict(zip(CHEXPERT, signs([wording.text], CHEXPERT)[0].tolist(), strict=True))
            for finding, label in c.labels.items():
                expected = 0 if wording.hedged else 1 if label else -1
                assert found[finding] in (expected, 0), (wording.text, finding)
                is_named = re.search(rf"\b{finding.split()[-1]}s?\b", wording.text, re.IGNORECASE)
                is_doubted = wording.hedged or "suggesting" in wording.text or "Lung" in finding
                if is_named and not is_doubted:
                    assert found[finding] == expected, (wording.text, finding)
                    read += 1
            if wording.hedged:
                assert not any(found.values()), wording.text
    assert read > 200


@pytest.mark.parametrize(
    ("text", "effusion", "pneumothorax"),
    [
        ("Pleural effusion, not significantly changed.", 1, 0),
        ("The effusions have not changed.", 1, 0),
        ("Effusion is unchanged without significant interval change.", 1, 0),
        ("Pneumothorax cannot be excluded.", 0, 0),
        ("There may be an effusion, and a pneumothorax is possible.", 0, 0),
        ("There is an effusion, and radiographs may be repeated.", 1, 0),
        ("No effusion, edema, or pneumothorax.", -1, -1),
        ("No pneumothorax, small left effusion.", 0, -1),
        ("No pneumothorax but a small effusion.", 1, -1),
        ("No pneumothorax with a small effusion.", 0, -1),
        ("Small effusion without pneumothorax.", 1, -1),
        ("Effusion is no longer seen; pneumothoraces are present.", -1, 1),
        ("No new effusion.", 0, 0),
        ("No opacity concerning for effusion.", -1, 0),
        ("Pericardial effusion. Evaluate for pneumothorax.", 0, 0),
        ("Effusion on the right. No effusion on the left.", 0, 0),
        ("SMALL PLEURAL  FLUID.\nNo\npneumothorax", 1, -1),
        ("", 0, 0),
    ],
)  # fmt: skip
def test_traps(text, effusion, pneumothorax):
    found = signs([text], ["Pleural Effusion", "No Finding", "Pneumothorax"])
    assert found.tolist() == [[effusion, 0, pneumothorax]]


@pytest.mark.skipif(not OPEN_I.is_dir(), reason="MEDCLIP_DCL_REAL_DATA is not set")
def test_open_i_reads_as_its_gold_labels():
    """Share of sentences whose report's label is the sign: .97 of those read as present, .998 as absent."""
    gold = read_negbio(OPEN_I / "negbio_gold_14_labels.csv").set_index("study")
    findings = [str(name) for name in gold if name != "No Finding"]
    rows = [
        (report.uid, sentence)
        for report in read_kaggle(OPEN_I / "openi_reports.csv", [])
        if report.uid in gold.index
        for sentence in re.split(r"(?<=[.?!])\s+", f"{report.findings} {report.impression}")
    ]
    found = signs([sentence for _, sentence in rows], findings)
    labels = gold.loc[[uid for uid, _ in rows], findings].to_numpy()
    shares = [(labels[found == sign] == (sign > 0)).mean() for sign in (1, -1)]
    assert (found == 1).sum() > 1000 and (found == -1).sum() > 6000
    assert shares[0] > 0.965 and shares[1] > 0.997, shares


def test_fields_of_a_set(copy):
    prepared = PreparedSet(copy)
    field = sentence_field(prepared, "signs", FieldFiles())
    table = prepared.table("sentences").set_index("sentence_id").loc[field["key"]]
    np.testing.assert_array_equal(field["value"], signs(table["text"].tolist(), prepared.findings))
    images = prepared.table("images")
    states = image_field(prepared, "states", FieldFiles(), images)["value"]
    labels = prepared.table("labels").set_index("study_id").loc[images["study_id"], prepared.findings]
    np.testing.assert_array_equal(states, labels.to_numpy(np.float32))
    sentences = prepared.table("sentences")
    sentences.assign(text="Kein Nachweis.").to_parquet(copy / "sentences.parquet")
    with pytest.raises(PreparedDataError, match="no sentence names a finding of labels.parquet in English"):
        sentence_field(PreparedSet(copy), "signs", FieldFiles())
