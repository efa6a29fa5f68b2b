"""Reports of the phantom and the labels that they give."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_prep.phantom import release
from data_prep.phantom.catalogue import catalogue
from data_prep.phantom.language import Wording
from data_prep.phantom.options import Options
from data_prep.phantom.reports import (
    LINE_WIDTH,
    Report,
    Statement,
    chexpert_labels,
    write_report,
)
from data_prep.phantom.studies import draw_state, plan_studies
from data_prep.text import reports as texts
from data_prep.text.sections import study_sections
from data_prep.text.sentences import passages, split_sentences

CLASSES = catalogue()


@functools.cache
def _report(k: int, unseen: bool = False) -> Report:
    state = draw_state(CLASSES, np.random.default_rng([3, k]), None)
    return write_report(
        CLASSES, state, "AP" if k % 2 else "PA", k % 5 == 0, unseen, np.random.default_rng([4, k])
    )


def _statement(name: str, hedged: bool = False) -> Statement:
    return Statement(CLASSES.by_name[name], Wording("Some sentence.", 1.0, hedged=hedged))


@pytest.mark.parametrize(
    "said, labels",
    [
        ([("edema", False)], {"Edema": 1.0}),
        ([("edema_mild", True)], {"Edema": -1.0}),
        ([("no_edema", False)], {"Edema": 0.0, "No Finding": 1.0}),
        ([("edema_mild", True), ("edema", False)], {"Edema": 1.0}),
        ([("no_effusion", False), ("effusion_left_small", True)], {"Pleural Effusion": -1.0}),
        ([("normal_heart_size", False)], {"Cardiomegaly": 0.0, "No Finding": 1.0}),
        (
            [("no_consolidation_effusion_or_pneumothorax", False)],
            {"Consolidation": 0.0, "No Finding": 1.0, "Pleural Effusion": 0.0, "Pneumothorax": 0.0},
        ),
        ([("picc_left", False)], {"No Finding": 1.0, "Support Devices": 1.0}),
        ([("technique", False)], {"No Finding": 1.0}),
        ([("cardiomegaly_with_edema", False)], {"Cardiomegaly": 1.0, "Edema": 1.0}),
    ],
)
def test_labels_of_what_is_said(said: list[tuple[str, bool]], labels: dict[str, float]) -> None:
    assert chexpert_labels(_statement(name, hedged) for name, hedged in said) == labels
    assert list(chexpert_labels(_statement(name, hedged) for name, hedged in said)) == sorted(labels)


def test_layout_is_that_of_mimic_cxr() -> None:
    layouts: Counter[str] = Counter()
    for k in range(300):
        text = _report(k).text
        lines = text.split("\n")
        assert lines[0] == " " * 33 + "FINAL REPORT" and lines[-1] == ""
        for line in lines[1:-1]:
            assert line.startswith(" ") and len(line) <= LINE_WIDTH
        # Blank lines are a single space, never two in a row.
        assert all(not (a == b == " ") for a, b in pairwise(lines))
        found = "\n FINDINGS:" in text, "\n IMPRESSION:" in text, "\n FINDINGS AND IMPRESSION:" in text
        layouts["none" if not any(found) else "+".join(map(str, found))] += 1
        layouts["numbered"] += "\n 1.  " in text or "IMPRESSION:  1.  " in text
        layouts["removed"] += "___" in text
    assert layouts["none"] > 10
    assert layouts["False+True+False"] > 20  # impression only
    assert layouts["True+True+False"] > 80
    assert layouts["False+False+True"] > 10
    assert layouts["numbered"] > 15
    assert layouts["removed"] > 250


def test_sections_hold_exactly_the_sentences_of_the_catalogue() -> None:
    class_of = dict(CLASSES.sentences())
    for k in range(150):
        report = _report(k, unseen=True)
        found = [
            sentence
            for section in study_sections(report.text)
            for passage in passages(section.text)
            for sentence in split_sentences(passage)
        ]
        assert found == [s.wording.text for s in report.statements]
        assert [class_of[text] for text in found] == [s.finding.class_id for s in report.statements]


@pytest.mark.slow
def test_phantoms_of_thirty_seeds_are_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report cut into other sentences ends a preparation: "2 of 668 sentences have no known class"."""
    monkeypatch.setattr(release, "_write_image", lambda *_: [])
    known, cut = set(dict(CLASSES.sentences())), functools.cache(split_sentences)
    for seed in range(30):
        options = Options(1400 if seed == 9 else 100, seed)
        for planned in plan_studies(options.studies, seed):
            study = release.write_study(tmp_path, options, None, 0.0, planned)
            file = (tmp_path / study.images[0].path).parent.with_suffix(".txt")
            found = texts.read_passages(texts.Report(1, files=(file,)), ("findings", "impression")).found
            assert found and {sentence for _, passage in found for sentence in cut(passage)} <= known


def test_held_out_wordings_are_not_in_training() -> None:
    seen = [any(s.wording.held_out for s in _report(k, unseen=False).statements) for k in range(300)]
    assert not any(seen)
    assert any(s.wording.held_out for k in range(300) for s in _report(k, unseen=True).statements)


def test_each_chex5_finding_is_mentioned_in_most_reports() -> None:
    labels = [chexpert_labels(_report(k).statements) for k in range(600)]
    for finding in ("Cardiomegaly", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax"):
        certain = [x[finding] for x in labels if x.get(finding) in (0.0, 1.0)]
        assert len(certain) > 0.4 * len(labels), finding
        assert 0.15 < np.mean(certain) < 0.6, finding
