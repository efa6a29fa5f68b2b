"""The share of false negatives and of rare findings on request: reached, recorded, and nothing else changed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from data_prep.phantom import dial
from data_prep.phantom.catalogue import CATALOGUE_SEED, catalogue
from data_prep.phantom.dial import dialled_rates
from data_prep.phantom.findings import StudyState
from data_prep.phantom.options import Options
from data_prep.phantom.rates import RARE_FINDINGS, Rates, ordinary, other_rates, rare_classes
from data_prep.phantom.reports import Report, chexpert_labels, true_labels, write_report
from data_prep.phantom.studies import draw_state
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5, CHEXPERT
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.exchange.card_facts import data_facts
from tests.program import verb

main = verb("phantom")

CLASSES = catalogue()
DRAWN = 400
FEW = Options(20, 0, 64, false_negatives=0.2)
MANY = Options(20, 0, 64, false_negatives=0.43)


@cache
def _rates(false_negatives: float | None, rare: float | None = None) -> Rates:
    found = dialled_rates(CLASSES, Options(2600, 0, false_negatives=false_negatives, rare_findings=rare))
    assert found is not None
    return found


@pytest.fixture(autouse=True, scope="module")
def few_drawn_studies() -> Iterator[None]:
    """The expected share over few studies: the tests that write reports take the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dial, "_STUDIES", DRAWN)
        dial._drawn_studies.cache_clear()
        yield
    dial._drawn_studies.cache_clear()


def _studies(rates: Rates, number: int) -> list[tuple[StudyState, Report]]:
    """Training studies at these rates."""
    studies = []
    for k in range(number):
        state = draw_state(CLASSES, np.random.default_rng([CATALOGUE_SEED, 2, k]), None, rates)
        rng = np.random.default_rng([32, k])
        studies.append((state, write_report(CLASSES, state, "AP", False, False, rng, rates.normal)))
    return studies


def _present(column: str, state: StudyState) -> bool:
    return any(finding.labels.get(column) == 1.0 for finding in state.findings)


# ------------------------------------------------------------------------------------------------ what is reached


@pytest.mark.parametrize(
    "asked, rare",
    [(0.2, 0.01), *(pytest.param(x, None, marks=pytest.mark.slow) for x in (0.05, 0.6))],
)
def test_reports_have_the_asked_share(asked: float, rare: float | None) -> None:
    studies = _studies(_rates(asked, rare), DRAWN)
    holds: Counter[int] = Counter(c.class_id for state, _ in studies for c in CLASSES.holding(state))
    class_of = dict(CLASSES.sentences())
    anchors = [class_of[text] for _, r in studies for text in {s.wording.text for s in r.statements}]
    mean = np.mean([holds[c] / len(studies) for c in anchors])
    # What is left is the chance by which reports state what holds.
    assert abs(mean - asked) < 0.02 * asked + 0.005


@pytest.mark.parametrize(
    "asked, rare, message",
    [
        (0.01, None, r"expected 0\.03 to 0\.7\d with these --rare_findings, found 0.01"),
        (0.85, None, r"expected 0\.03 to 0\.7\d with these --rare_findings, found 0.85"),
        (float("nan"), None, ".*, found nan"),
        (0.03, 0.005, r"expected 0\.0[45] to 0\.7\d with these"),
    ],
)
def test_shares_out_of_reach_are_refused(asked: float, rare: float | None, message: str) -> None:
    with pytest.raises(UserError, match=f"--false_negatives: {message}"):
        _rates(asked, rare)


# ------------------------------------------------------------------------------------------------ findings


def test_rare_findings_are_as_rare_as_asked() -> None:
    rates, usual = _rates(None, 0.01), ordinary(CLASSES)
    rare = {c.class_id for c in rare_classes(CLASSES)}
    for c, chance, before in zip(CLASSES.tail, rates.tail, usual.tail, strict=True):
        assert c.class_id in rare or chance == pytest.approx(before)
    states = [draw_state(CLASSES, np.random.default_rng([9, k]), None, rates) for k in range(2000)]
    for column in RARE_FINDINGS:
        assert abs(np.mean([_present(column, state) for state in states]) - 0.01) < 0.006, column
    assert np.mean([_present("Cardiomegaly", state) for state in states]) > 0.2


def test_test_studies_are_alike_at_any_rates() -> None:
    settings = [_rates(0.05), _rates(0.2, 0.01)]
    number = 100
    one, other = (
        [draw_state(CLASSES, np.random.default_rng([6, k]), k, rates) for k in range(number)]
        for rates in settings
    )
    assert one == other
    labels = [true_labels(CLASSES, CLASSES.holding(state)) for state in one]
    for column in (*RARE_FINDINGS, *CHEX5):
        found = Counter(of_study.get(column) for of_study in labels)
        assert found[1.0] >= 0.1 * number and found[0.0] >= 0.3 * number, (column, found)


# ------------------------------------------------------------------------------------------------ reports and labels


def test_a_report_without_normal_sentences_still_says_something() -> None:
    studies = _studies(other_rates(CLASSES, 0.0, 0.0, 1.0, None), 200)
    normal = {c.class_id for c in CLASSES.classes if c.rule is not None and c.rule.is_normal}
    said: dict[bool, set[str]] = defaultdict(set)
    for state, report in studies:
        assert report.statements
        said[bool(state.findings)] |= {s.finding.name for s in report.statements}
        assert not state.findings or all(s.finding.class_id not in normal for s in report.statements)
    assert said[False] == {"normal_chest", "low_volumes"}


def test_true_labels_agree_with_every_report() -> None:
    for state, report in _studies(ordinary(CLASSES), 150):
        labels = true_labels(CLASSES, CLASSES.holding(state))
        assert list(labels) == [column for column in CHEXPERT if column in labels]
        assert set(labels.values()) <= {0.0, 1.0} and set(CHEX5) <= set(labels)
        for column, value in chexpert_labels(report.statements).items():
            if column != "No Finding":
                assert labels[column] == abs(value), column
        devices = [f for f in state.findings if "Support Devices" in f.labels]
        assert labels["No Finding"] == float(devices == list(state.findings))


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Options, Path]:
    found = {}
    for options in (FEW, MANY):
        found[options] = tmp_path_factory.mktemp("dial") / "raw"
        main(
            ["--output", str(found[options]), "--studies", "20", "--seed", "0", "--size", "64"]
            + ["--workers", "1", "--false_negatives", str(options.false_negatives)]
        )
    return found


@pytest.mark.slow
def test_shares_change_only_reports_and_labels(folders: dict[Options, Path]) -> None:
    few, many = (
        {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
        for folder in folders.values()
    )
    split = pd.read_csv(folders[FEW] / "mimic-cxr-2.0.0-split.csv.gz").drop_duplicates("study_id")
    reports = {
        f"files/p{str(row.subject_id)[:2]}/p{row.subject_id}/s{row.study_id}.txt": row.split
        for row in split.itertuples()
    }
    differing = {name for name in few if few[name] != many.get(name)}
    assert few.keys() == many.keys()
    assert {reports[name] for name in differing & reports.keys()} == {"train", "validate"}
    assert {Path(name).name for name in differing - reports.keys()} == {
        *("mimic-cxr-2.0.0-chexpert.csv.gz", "mimic-cxr-2.0.0-negbio.csv.gz"),
        *("classes.csv", "options.json", "phantom.json"),
    }
    labels = [pd.read_csv(f / "mimic-cxr-2.0.0-chexpert.csv.gz") for f in folders.values()]
    evaluated = labels[0].study_id.isin(split.study_id[split.split != "train"])
    assert labels[0][evaluated].equals(labels[1][evaluated]) and not labels[0].equals(labels[1])


@pytest.mark.slow
def test_phantom_and_set_name_their_share(
    folders: dict[Options, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = folders[FEW]
    marker = json.loads((raw / "phantom_truth/phantom.json").read_text())
    assert marker["false_negatives"] == 0.2 and "rare_findings" not in marker
    verb("prepare mimic-cxr")(
        ["--source", str(raw), "--output", str(tmp_path / "set"), "--size", "16", "--workers", "1"]
    )
    prepared = PreparedSet(tmp_path / "set")
    assert prepared.info["options"]["phantom"] == {"false_negatives": 0.2}
    assert data_facts(prepared.info)["options of the phantom"] == "false_negatives 0.2"

    # By the definition: sentences of training reports, each once a report; shares of frontal training images.
    images, truth = prepared.table("images"), prepared.table("image_classes")
    training = images[images.official_split == "train"]
    classes = prepared.table("classes").set_index("sentence_id").class_id
    anchors = prepared.table("reports").merge(training[["study_id"]].drop_duplicates())
    of_training = truth[truth.dicom_id.isin(training.dicom_id)]
    rho = [
        (of_training.class_id == classes[sentence]).sum() / len(training)
        for _, report in anchors.groupby("study_id")
        for sentence in set(report.sentence_id)
    ]
    capsys.readouterr()
    verb("check")([str(tmp_path / "set"), "--workers", "1"])
    page = capsys.readouterr().out
    assert 'phantom {"false_negatives": 0.2}' in page
    assert f"{len(rho):,} training sentences; share of false negatives (rho): mean {np.mean(rho):.3f}" in page
