"""Sentences that stand in one training report: as many as asked, with the truth of the sentences that they extend."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from data_prep.phantom import release
from data_prep.phantom.options import Options
from data_prep.phantom.studies import plan_studies
from data_prep.text import reports as texts
from data_prep.text.sentences import split_sentences
from medclip_dcl.common.errors import UserError

STUDIES = 150


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, Path]:
    """Phantoms without pictures, by the asked share."""
    found: dict[float | None, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "_write_image", lambda *_: [])
        for asked in (None, 0.35, 0.7):
            found[asked] = tmp_path_factory.mktemp("phantom") / "raw"
            release.write_phantom(found[asked], Options(STUDIES, 0, 64, singletons=asked))
    return found


def _sentences(folder: Path, splits: set[str]) -> dict[int, list[str]]:
    """Sentences of the reports of some splits, as a preparation cuts them, by study."""
    found = {}
    for study in plan_studies(STUDIES, 0):
        if study.split in splits:
            subject = f"p{study.subject_id}"
            file = folder / f"files/{subject[:3]}/{subject}/s{study.study_id}.txt"
            passages = texts.read_passages(texts.Report(1, files=(file,)), ("findings", "impression")).found
            found[study.study_id] = [one for _, passage in passages for one in split_sentences(passage)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0.35, 0.7])
def test_the_asked_share_of_anchors_stands_alone(phantoms: dict[float | None, Path], asked: float) -> None:
    reports = [{*said} for said in _sentences(phantoms[asked], {"train"}).values()]
    counts = Counter(text for report in reports for text in report)
    share = sum(count == 1 for count in counts.values()) / counts.total()
    assert share == pytest.approx(asked, abs=0.03)


@pytest.mark.slow
def test_every_sentence_keeps_its_class(phantoms: dict[float | None, Path]) -> None:
    plain, some = phantoms[None], phantoms[0.35]
    truths = [pd.read_csv(folder / "phantom_truth/sentences.csv") for folder in (plain, some)]
    of_text = truths[1].set_index("text")["class_id"]
    assert of_text.index.is_unique and truths[1].head(len(truths[0])).equals(truths[0])
    told, untold = (_sentences(folder, {"train", "validate"}) for folder in (some, plain))
    for study, said in told.items():
        assert [of_text[text] for text in said] == [of_text[text] for text in untold[study]]
    for name in ("classes.csv", "image_classes.csv"):
        assert (some / "phantom_truth" / name).read_bytes() == (plain / "phantom_truth" / name).read_bytes()
    assert _sentences(some, {"test"}) == _sentences(plain, {"test"}), "test studies are the same"


def test_fewer_than_without_asides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--singletons: expected 0\.[12]\d\d or more with these options, found 0.01"
    ):
        release.write_phantom(tmp_path / "raw", Options(STUDIES, 0, 64, singletons=0.01))
    assert not (tmp_path / "raw").exists()
