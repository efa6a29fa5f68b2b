"""Eta dealt anew to the sentences, against a loop over training anchors."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.data.eta import anchors_of_sentences, shuffled_eta, with_eta
from medclip_dcl.data.fields import FieldFiles, check_fields, read_own_fields, sentence_field
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.objectives import KnownClassProbability, LanguageModelClassProbability
from tests.encoding.test_eta_report import write_set


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedSet:
    return PreparedSet(write_set(tmp_path_factory.mktemp("eta") / "set"))


def test_anchors_are_training_images_with_one_sentence_each(prepared):
    expected = dict.fromkeys(range(40), 0.0)
    said: dict[int, set[int]] = {}
    for row in prepared.table("reports").itertuples():
        said.setdefault(row.study_id, set()).add(row.sentence_id)
    for study in prepared.table("images").query("use == 'train'")["study_id"]:
        for sentence in said.get(study, ()):
            expected[sentence] += 1 / len(said[study])
    found = anchors_of_sentences(prepared)
    assert found.to_dict() == pytest.approx({key: value for key, value in expected.items() if value})


def test_shuffled_eta_keeps_its_distribution_over_anchors(prepared, tmp_path):
    sentences = prepared.table("sentences").merge(prepared.log_p(), on="sentence_id")
    table = with_eta(sentences, LanguageModelClassProbability(a=0.2, k=0.35))
    anchors = anchors_of_sentences(prepared).reindex(range(40), fill_value=0.0).to_numpy()
    before = table["eta"].to_numpy()
    correlations = []
    for seed in range(20):
        dealt = shuffled_eta(prepared, table, seed)
        after = dealt["eta"].to_numpy()
        assert anchors @ after == pytest.approx(anchors @ before, rel=1e-6)
        # Kolmogorov's distance is below the anchors of the commonest sentence, once at each end of a stretch.
        for level in np.linspace(before.min(), before.max(), 23):
            moved = abs(anchors[after <= level].sum() - anchors[before <= level].sum())
            assert moved <= 2 * anchors.max()
        correlations.append(np.corrcoef(before, after)[0, 1])
        assert before.min() - 1e-6 <= after.min() and after.max() <= before.max() + 1e-6
    assert abs(np.mean(correlations)) < 0.1 and max(correlations) < 0.8
    assert not np.array_equal(dealt["eta"], shuffled_eta(prepared, table, 0)["eta"])
    dealt.to_parquet(tmp_path / "shuffled.parquet")
    own = read_own_fields(tmp_path / "shuffled.parquet")
    rule = KnownClassProbability(share="eta", max_eta=0.8)
    check_fields(rule.requires, (), own)
    served = torch.tensor(sentence_field(prepared, "eta", FieldFiles(own=own))["value"])
    assert torch.equal(rule(eta=served), served)


def test_an_equal_share_of_each_sentence_is_a_permutation():
    """Where all sentences are as frequent, the same values are dealt to others."""

    class Equal:
        def rows(self, name, columns, use=()):
            images = {"dicom_id": [*"abcdef"], "path": "", "study_id": range(6), "use": "train"}
            return pd.DataFrame({**images, "sentence_id": range(6)})[columns]

    table = pd.DataFrame({"sentence_id": range(6), "eta": [0.3, 0.1, 0.02, 0.15, 0.2, 0.25]})
    dealt = shuffled_eta(Equal(), table, seed=3)["eta"]  # type: ignore[arg-type]
    assert sorted(dealt) == pytest.approx(sorted(table["eta"])) and dealt.tolist() != table["eta"].tolist()
